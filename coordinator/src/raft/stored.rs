//! How entries, log ids, votes and memberships look on disk.
//!
//! Our own records, so that a new version of the raft library cannot change what old folders contain. A log id
//! and a vote have a fixed size and an entry's length has a checksum of its own: a flipped bit is then never
//! taken for an incomplete tail, which the log cuts without asking.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};

use bytes::Bytes;
use openraft::EntryPayload;
use openraft::entry::RaftEntry as _;
use serde::{Deserialize, Serialize};

use super::types::{
    CommittedLeader, Entry, LogId, Membership, NodeAddresses, NodeId, Payload, SnapshotMeta,
    StoredMembership, Vote,
};

/// Version of the body of an entry.
const ENTRY_FORMAT: u8 = 1;

/// Most bytes that the body of one stored entry may take.
const ENTRY_BYTES_MAX: usize = 64 * 1024 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct LogIdRecord {
    pub(crate) term: u64,
    pub(crate) index: u64,
}

impl From<LogId> for LogIdRecord {
    fn from(id: LogId) -> Self {
        Self { term: id.leader_id.term, index: id.index }
    }
}

impl From<LogIdRecord> for LogId {
    fn from(record: LogIdRecord) -> Self {
        Self { leader_id: CommittedLeader::new(record.term), index: record.index }
    }
}

impl codeq::Encode for LogIdRecord {
    fn encode<W: Write>(&self, mut writer: W) -> io::Result<usize> {
        writer.write_all(&pair(self.term, self.index))?;
        Ok(16)
    }
}

impl codeq::Decode for LogIdRecord {
    fn decode<R: Read>(reader: R) -> io::Result<Self> {
        let (term, index) = read_pair(reader)?;
        Ok(Self { term, index })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd)]
pub(crate) struct VoteRecord(pub(crate) Vote);

impl codeq::Encode for VoteRecord {
    fn encode<W: Write>(&self, mut writer: W) -> io::Result<usize> {
        let Vote { leader_id, committed } = &self.0;
        let node = (leader_id.voted_for.0 << 1) | u64::from(*committed);
        writer.write_all(&pair(leader_id.term, node))?;
        Ok(16)
    }
}

impl codeq::Decode for VoteRecord {
    fn decode<R: Read>(reader: R) -> io::Result<Self> {
        let (term, node) = read_pair(reader)?;
        let voted_for = NodeId(node >> 1);
        Ok(Self(if node & 1 == 1 {
            Vote::new_committed(term, voted_for)
        } else {
            Vote::new(term, voted_for)
        }))
    }
}

/// One entry as the log keeps it; the raft library's form is made once, when it is read.
#[derive(Clone, Debug)]
pub(crate) struct EntryRecord(pub(crate) Entry);

impl EntryRecord {
    /// Bytes that the entry takes in memory, nearly.
    pub(crate) fn size_bytes(entry: &Entry) -> u64 {
        let payload = match &entry.payload {
            EntryPayload::Normal(payload) => payload.0.len(),
            EntryPayload::Blank | EntryPayload::Membership(_) => 0,
        };
        payload as u64 + 256
    }
}

impl codeq::Encode for EntryRecord {
    fn encode<W: Write>(&self, mut writer: W) -> io::Result<usize> {
        let record = EntryBody::from(&self.0);
        let body = postcard::to_extend(&record, vec![ENTRY_FORMAT]).map_err(io::Error::other)?;
        if body.len() > ENTRY_BYTES_MAX {
            return Err(invalid(format!(
                "entry has {} bytes, at most {ENTRY_BYTES_MAX} fit",
                body.len()
            )));
        }
        let length = (body.len() as u32).to_be_bytes();
        writer.write_all(&length)?;
        writer.write_all(&crc32fast::hash(&length).to_be_bytes())?;
        writer.write_all(&body)?;
        Ok(8 + body.len())
    }
}

impl codeq::Decode for EntryRecord {
    fn decode<R: Read>(mut reader: R) -> io::Result<Self> {
        let mut length = [0; 4];
        reader.read_exact(&mut length)?;
        let mut checksum = [0; 4];
        reader.read_exact(&mut checksum)?;
        let size_bytes = u32::from_be_bytes(length) as usize;
        if crc32fast::hash(&length) != u32::from_be_bytes(checksum) || size_bytes > ENTRY_BYTES_MAX
        {
            return Err(invalid("an entry's length does not match its checksum"));
        }
        let mut body = vec![0; size_bytes];
        reader.read_exact(&mut body)?;
        let (format, record) = body.split_first().ok_or_else(|| invalid("an entry is empty"))?;
        if *format != ENTRY_FORMAT {
            return Err(invalid(format!(
                "entry has format {format}, this version knows {ENTRY_FORMAT}"
            )));
        }
        let record: EntryBody = postcard::from_bytes(record).map_err(invalid)?;
        Ok(Self(record.into_entry()?))
    }
}

#[derive(Serialize, Deserialize)]
struct EntryBody {
    at: LogIdRecord,
    content: Content,
}

#[derive(Serialize, Deserialize)]
enum Content {
    Blank,
    Payload(Payload),
    Membership(MembershipRecord),
}

impl From<&Entry> for EntryBody {
    fn from(entry: &Entry) -> Self {
        let content = match &entry.payload {
            EntryPayload::Blank => Content::Blank,
            EntryPayload::Normal(payload) => Content::Payload(payload.clone()),
            EntryPayload::Membership(membership) => Content::Membership(membership.into()),
        };
        Self { at: entry.log_id().into(), content }
    }
}

impl EntryBody {
    fn into_entry(self) -> io::Result<Entry> {
        let payload = match self.content {
            Content::Blank => EntryPayload::Blank,
            Content::Payload(payload) => EntryPayload::Normal(payload),
            Content::Membership(membership) => {
                EntryPayload::Membership(membership.into_membership()?)
            }
        };
        Ok(Entry { log_id: self.at.into(), payload })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MembershipRecord {
    /// One set of voters; two while they change.
    voters: Vec<BTreeSet<NodeId>>,
    /// All nodes, learners too.
    nodes: BTreeMap<NodeId, NodeAddresses>,
}

impl From<&Membership> for MembershipRecord {
    fn from(membership: &Membership) -> Self {
        Self {
            voters: membership.get_joint_config().clone(),
            nodes: membership.nodes().map(|(id, node)| (*id, node.clone())).collect(),
        }
    }
}

impl MembershipRecord {
    fn into_membership(self) -> io::Result<Membership> {
        if self.voters.is_empty() && self.nodes.is_empty() {
            return Ok(Membership::default());
        }
        Membership::new(self.voters, self.nodes).map_err(invalid)
    }
}

/// What a snapshot is of: its last entry and the membership then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotMetaRecord {
    last: Option<LogIdRecord>,
    membership_at: Option<LogIdRecord>,
    membership: MembershipRecord,
}

impl From<&SnapshotMeta> for SnapshotMetaRecord {
    fn from(meta: &SnapshotMeta) -> Self {
        Self {
            last: meta.last_log_id.map(Into::into),
            membership_at: meta.last_membership.log_id().map(Into::into),
            membership: meta.last_membership.membership().into(),
        }
    }
}

impl SnapshotMetaRecord {
    pub(crate) fn into_meta(self) -> io::Result<SnapshotMeta> {
        let membership = self.membership.into_membership()?;
        Ok(SnapshotMeta {
            last_log_id: self.last.map(Into::into),
            last_membership: StoredMembership::new(self.membership_at.map(Into::into), membership),
        })
    }
}

/// Wire form of a snapshot's announcement: whose vote, of what, and how much follows.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotAnnouncement {
    pub(crate) vote: Vote,
    pub(crate) meta: SnapshotMetaRecord,
    pub(crate) size_bytes: u64,
    pub(crate) checksum: u32,
}

impl SnapshotAnnouncement {
    pub(crate) fn new(vote: Vote, meta: &SnapshotMeta, body: &Bytes) -> Self {
        Self {
            vote,
            meta: meta.into(),
            size_bytes: body.len() as u64,
            checksum: crc32fast::hash(body),
        }
    }
}

pub(crate) fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn pair(first: u64, second: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&first.to_be_bytes());
    bytes[8..].copy_from_slice(&second.to_be_bytes());
    bytes
}

fn read_pair<R: Read>(mut reader: R) -> io::Result<(u64, u64)> {
    let mut first = [0; 8];
    reader.read_exact(&mut first)?;
    let mut second = [0; 8];
    reader.read_exact(&mut second)?;
    Ok((u64::from_be_bytes(first), u64::from_be_bytes(second)))
}
