//! Wire and stored forms of Tenure, and their conversions to and from the model.
//!
//! [`v1`] is the public protocol, [`raft`] goes between coordinator nodes, [`stored`] is what a node writes to
//! disk. [`convert`] is the edge: everything from outside passes it once, and what is malformed is refused there
//! with the name of the field.

pub mod convert;
mod status;

pub use status::{CODE_METADATA_KEY, LEADER_METADATA_KEY, error_of_status, status_of_error};

/// Public protocol: membership, offsets, ownership, operator.
#[allow(missing_docs, clippy::all, clippy::wildcard_enum_match_arm, reason = "generated code")]
pub mod v1 {
    tonic::include_proto!("tenure.v1");
}

/// Between coordinator nodes.
#[allow(missing_docs, clippy::all, clippy::wildcard_enum_match_arm, reason = "generated code")]
pub mod raft {
    tonic::include_proto!("tenure.raft.v1");
}

/// What a node writes to disk: log entries and snapshots.
#[allow(missing_docs, clippy::all, clippy::wildcard_enum_match_arm, reason = "generated code")]
pub mod stored {
    tonic::include_proto!("tenure.stored.v1");
}

/// Encoded descriptor set of all services, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
