//! Named resources: ownership with an epoch and a lease, without records and without Kafka.
//!
//! [`owning`] makes a consumer of names instead of topics; [`Singleton`] elects one process for a job;
//! [`ScheduledJob`] fires each tick of a schedule once, on whichever process owns the job.

mod schedule;
mod scheduled;
mod singleton;
mod source;

use std::sync::Arc;

use tenure_model::{GroupId, TopicName};

pub use self::schedule::{Every, Schedule};
pub use self::scheduled::{JobRunner, JobTick, Missed, ScheduledJob};
pub use self::singleton::{Election, Leading, Singleton};
pub use self::source::ResourceSource;
use crate::consumer::{Consumer, ConsumerBuilder};
use crate::offsets::CoordinatorOffsets;

/// Starts to describe a consumer that owns `names` in `group` and reads nothing.
///
/// Each name is one resource, owned by one member at a time; its handler runs while it is owned, and its input only
/// ever ends. The members of a group share its names evenly, as they would share partitions.
#[must_use]
pub fn owning(
    group: GroupId,
    names: Vec<TopicName>,
    coordinators: Vec<String>,
) -> ConsumerBuilder<CoordinatorOffsets> {
    Consumer::builder(group, names, Arc::new(ResourceSource::new()), coordinators)
}

#[cfg(test)]
mod tests;
