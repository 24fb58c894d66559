//! Coordinator of Tenure: raft, storage, the raft leader's driver, gRPC.

mod clock;
mod driver;
mod grpc;
mod lease;
pub mod machine;
mod node;
mod planning;
pub mod raft;
pub mod settings;
mod soft;
pub mod stored;
mod view;

pub use node::{Node, StartError};
pub use settings::{NodeSettings, NodeSettingsError};
