//! One number for a whole state, the same on every replica that has the same state.

use bytes::BytesMut;
use prost::Message as _;
use tenure_core::State;
use tenure_model::StateDigest;
use tenure_proto::stored as form;
use tenure_proto::stored::snapshot_record::Record as Form;

use super::snapshot::{Records, write_level, write_records};

/// Digest of `state` by its stored form: the header without what only says how it is written, then every record.
///
/// The stored form and not the memory of this build, so that two versions at one feature level come to the same.
/// Costs about as much as writing a snapshot, without its disk.
#[must_use]
pub fn digest_of(state: &State) -> StateDigest {
    let mut sum = Sum::default();
    sum.put(Form::Header(form::Header {
        format: 0,
        epoch_counter: state.epoch_counter,
        applied: state.applied.0,
        now_unix_ms: state.now.0,
        records: 0,
        changes_compacted: Some(state.changes.compacted.0),
        feature_level: write_level(state.level),
    }));
    write_records(&mut sum, state);
    StateDigest(sum.hash)
}

/// FNV-1a over all records, each with its length. Spelled out here because the standard library promises the same
/// hash only within one of its versions.
struct Sum {
    hash: u64,
    buffer: BytesMut,
}

const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

impl Default for Sum {
    fn default() -> Self {
        Self { hash: OFFSET_BASIS, buffer: BytesMut::new() }
    }
}

impl Records for Sum {
    fn put(&mut self, record: Form) {
        self.buffer.clear();
        form::SnapshotRecord { record: Some(record) }
            .encode_length_delimited(&mut self.buffer)
            .expect("a BytesMut grows as needed");
        for byte in &self.buffer {
            self.hash = (self.hash ^ u64::from(*byte)).wrapping_mul(PRIME);
        }
    }
}
