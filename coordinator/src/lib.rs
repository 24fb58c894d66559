//! Coordinator of Tenure: raft, storage, the raft leader's driver, gRPC.

mod clock;
mod connection;
pub mod digests;
mod driver;
mod grpc;
mod in_place;
#[doc(hidden)]
pub mod lease;
mod lost;
pub mod machine;
mod node;
mod past;
#[doc(hidden)]
pub mod planning;
pub mod raft;
pub mod settings;
mod silences;
#[doc(hidden)]
pub mod soft;
pub mod stored;
mod versions;
mod view;

/// The parts without IO, for the simulator. Not an interface: they change with the code around them.
#[doc(hidden)]
pub mod parts {
    pub use crate::driver::{deadlines, leading, places, reign, serving, session, settle};
    pub use crate::grpc::{edge, judge, refusal, verify};
    pub use crate::in_place::block_in_place;
    pub use crate::node::{Door, Ground};
    pub use crate::raft::Dial;
}

pub use node::{Node, StartError};
pub use settings::{NodeSettings, NodeSettingsError};
