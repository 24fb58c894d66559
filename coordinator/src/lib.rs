//! Coordinator of Tenure: raft, storage, the raft leader's driver, gRPC.

pub mod raft;
pub mod stored;
