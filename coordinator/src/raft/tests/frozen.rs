//! Bytes on disk that later versions must still read.

use std::fs;

use codeq::{Decode as _, Encode as _};
use openraft::EntryPayload;

use super::*;
use crate::raft::identity::{Identity, IdentityFile, Stage};
use crate::raft::snapshot::SnapshotStore;
use crate::raft::stored::{EntryRecord, LogIdRecord, VoteRecord};
use crate::raft::types::{Entry, LogId, Membership, SnapshotMeta, StoredMembership, Vote};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn log_id(term: u64, index: u64) -> LogId {
    LogIdRecord { term, index }.into()
}

fn membership() -> Membership {
    let addresses =
        NodeAddresses { raft_address: "a:1".to_owned(), client_address: "a:2".to_owned() };
    let voters = vec![[NodeId(1)].into()];
    Membership::new(voters, BTreeMap::from([(NodeId(1), addresses)])).unwrap()
}

#[test]
fn entries_on_disk_are_frozen() {
    let cases = [
        (EntryPayload::Blank, "00000005512e2b930102ac0200"),
        (EntryPayload::Normal(Payload(bytes("abc"))), "00000009589867b80102ac020103616263"),
        (
            EntryPayload::Membership(membership()),
            "00000012d2fdae540102ac0202010101010103613a3103613a32",
        ),
    ];
    for (payload, wanted) in cases {
        let entry = Entry { log_id: log_id(2, 300), payload };
        let mut encoded = Vec::new();
        EntryRecord(entry.clone()).encode(&mut encoded).unwrap();
        assert_eq!(hex(&encoded), wanted, "{entry:?}");
        assert_eq!(EntryRecord::decode(&encoded[..]).unwrap().0, entry);
    }
}

#[test]
fn log_ids_and_votes_on_disk_are_frozen() {
    let mut encoded = Vec::new();
    LogIdRecord { term: 2, index: 300 }.encode(&mut encoded).unwrap();
    VoteRecord(Vote::new(3, NodeId(5))).encode(&mut encoded).unwrap();
    VoteRecord(Vote::new_committed(3, NodeId(5))).encode(&mut encoded).unwrap();
    assert_eq!(
        hex(&encoded),
        concat!(
            "0000000000000002000000000000012c",
            "0000000000000003000000000000000a",
            "0000000000000003000000000000000b",
        )
    );
    let vote = VoteRecord::decode(&encoded[32..]).unwrap().0;
    assert_eq!(vote, Vote::new_committed(3, NodeId(5)));
}

#[test]
fn snapshots_on_disk_are_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let store = SnapshotStore::open(folder.path()).unwrap();
    let meta = SnapshotMeta {
        last_log_id: Some(log_id(2, 300)),
        last_membership: StoredMembership::new(Some(log_id(0, 0)), membership()),
    };
    store.write(&meta, b"body").unwrap();
    let file = folder.path().join("00000000000000000300-00000000000000000002.snapshot");
    assert_eq!(
        hex(&fs::read(file).unwrap()),
        concat!(
            "54454e555245534e",
            "01000000",
            "14000000",
            "0400000000000000",
            "0102ac02010000010101010103613a3103613a32",
            "626f6479",
            "c757a99f",
        )
    );
    let read = store.newest().unwrap().unwrap();
    assert_eq!((read.meta, &read.snapshot[..]), (meta, &b"body"[..]));
}

#[test]
fn the_identity_file_is_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let file = IdentityFile::new(folder.path());
    let mut identity = Identity::fresh("toys", NodeId(2), Stage::Founded);
    identity.incarnation = "000102030405060708090a0b0c0d0e0f".to_owned();
    identity.founders.insert("1".to_owned(), "ff".to_owned());
    file.write(&identity).unwrap();
    let text = fs::read_to_string(folder.path().join("identity.toml")).unwrap();
    assert_eq!(
        text,
        concat!(
            "format = 1\n",
            "cluster = \"toys\"\n",
            "node = 2\n",
            "incarnation = \"000102030405060708090a0b0c0d0e0f\"\n",
            "stage = \"founded\"\n",
            "\n",
            "[founders]\n",
            "1 = \"ff\"\n",
        )
    );
    assert_eq!(file.read("toys", NodeId(2)).unwrap(), Some(identity));
}
