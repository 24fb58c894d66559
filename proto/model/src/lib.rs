//! Words of the Tenure protocol.
//!
//! Every crate speaks in these types: names of groups, members and partitions, epochs, offsets, time,
//! stable error codes and the limits of what may come from outside.
//! The crate has no IO, no clock and no dependency but `thiserror`.

#![warn(missing_docs)]

mod code;
mod epoch;
mod id;
pub mod limits;
mod offset;
mod settings;
mod time;
mod topic;
mod version;

pub use code::{ErrorCode, RetryClass, SEEN_EPOCH_MARK, SINK_ERROR_PREFIX, seen_epoch};
pub use epoch::{Epoch, EpochError, GroupEpoch, Index, MemberEpoch, Term};
pub use id::{GroupId, InstanceId, LabelName, MemberId, NameError, RequestId};
pub use offset::{CommitSequence, NextOffset, OffsetError};
pub use settings::{GroupSettings, Home, LeaseSettings, SettingsError, SinkSetting, Takeover};
pub use time::{Clock, ManualClock, Tick, Timestamp};
pub use topic::{Partition, PartitionIndex, TopicId, TopicIdError, TopicName};
pub use version::{FeatureLevel, StateDigest};
