//! Consumer SDK of Tenure.
//!
//! A service links this crate, names its group and topics, and gets partitions one by one, each with an epoch.
//! Every committed offset and every sink write carries the epoch, so that an owner that was rebalanced away is refused
//! by the resource itself, however long it slept.

#![warn(missing_docs)]

pub mod consumer;
pub mod grant;
pub mod lease;
mod memory;
pub mod metrics;
pub mod offsets;
pub mod resource;
pub mod session;
pub mod sink;
pub mod source;
pub mod testing;

pub use tenure_model as model;

pub use consumer::{
    Batch, Consumer, ConsumerBuilder, End, ErrorPolicy, HandlerError, Input, Limits, Owned, Stopper,
};
pub use offsets::{CommitError, OffsetWriter};
