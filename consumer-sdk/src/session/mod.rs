//! The member's half of the protocol: one session with the coordinator.
//!
//! [`machine`] decides and does no IO; the driver runs it on a thread of its own, so that no handler, sink or Kafka
//! client can delay a heartbeat; [`CoordinatorClient`] makes the unary calls.

mod attempts;
mod client;
mod config;
mod connect;
mod driver;
mod event;
mod handle;
pub mod machine;
mod nodes;
mod retry;
mod wire;

pub use client::{
    CallError, CommitRefused, CommittedOffset, CoordinatorClient, OffsetCommit, Refused, Repeat,
    VerifyOk,
};
pub use config::SessionConfig;
#[doc(hidden)]
pub use connect::Dial;
pub use driver::Session;
pub use event::{EndCause, LostCause, Phase, Preparing, Progress, ReleaseReason, SessionEvent};
pub use handle::SessionHandle;
