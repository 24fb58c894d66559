//! What must be true of every run, one property a file.

pub mod acknowledged_offset_kept;
pub mod acquired_after_resume;
pub mod effects_in_order;
pub mod epochs_rise;
pub mod freed_in_time;
pub mod grant_to_live_subscriber;
pub mod heartbeat_of_the_living;
pub mod member_stops_first;
pub mod no_early_end;
pub mod offset_fenced;
pub mod one_owner;
pub mod owned_again;
pub mod replicas_equal;
pub mod sink_fenced;

use tenure_coordinator::NodeSettings;
use tenure_core::{Applied, Command, State};
use tenure_model::{Epoch, Home, MemberId, Partition, Takeover};

use super::member::Member;

/// Something that happened, seen by nobody but the oracle.
#[derive(Debug)]
pub enum Fact<'a> {
    /// An entry was committed. The commands are those that were proposed.
    Committed { index: u64, commands: &'a [Command], outcomes: &'a [Applied], state: &'a State },
    /// A replica applied an entry.
    Replicated { node: usize, index: u64, outcomes: &'a [Applied], expected: &'a [Applied] },
    /// A replica stands at an index.
    Replica { node: usize, index: u64, state: &'a State, expected: &'a State },
    /// A node started anew, with nothing in memory.
    NodeStarted { node: usize },
    /// A raft leader heard a member.
    Heard { member: &'a MemberId },
    /// The raft leader looked at its deadlines; nothing has disturbed it since `since`, and its loop stood still for
    /// `gaps` before, within its reign.
    Ruled { node: usize, since: u64, gaps: u64 },
    /// A member got the answer to a heartbeat or a join that it sent at `sent_at`.
    HeartbeatAnswered { member: &'a MemberId, sent_at: u64 },
    /// A sink took a registration.
    Registered { partition: Partition, epoch: Epoch },
    /// A sink took a write of the records `from` to below `to`.
    Written { partition: Partition, epoch: Epoch, from: u64, to: u64 },
    /// A member registered, verified and read where to resume.
    Resumed { partition: Partition, epoch: Epoch, member: &'a MemberId, next: u64 },
    /// A member was told that its offset is committed.
    Acknowledged { partition: Partition, epoch: Epoch, next: u64 },
    /// The run is over, long enough after everything was healed.
    Ended { state: &'a State, healed_at: u64, progress: &'a [(Partition, u64)] },
}

/// What is true around a fact.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// True time, in nanoseconds since the start.
    pub now: u64,
    pub members: &'a [Member],
    pub home: Home,
    pub takeover: Takeover,
    pub settings: &'a NodeSettings,
}

impl View<'_> {
    /// Whether a member may go by an answer that a newer owner has overtaken: its partition was given away during its
    /// lease, or its local check is off. It is refused by the resource.
    #[must_use]
    pub fn may_be_overtaken(&self, member: &MemberId) -> bool {
        let is_unchecked =
            self.members.iter().any(|found| found.id == *member && !found.checks_lease);
        self.takeover == Takeover::Fence || is_unchecked
    }
}

/// One property.
pub trait Property {
    /// Its name, as in the file's.
    fn name(&self) -> &'static str;

    /// Looks at a fact.
    ///
    /// # Errors
    ///
    /// What is broken, in words.
    fn look(&mut self, fact: &Fact<'_>, view: View<'_>) -> Result<(), String>;
}

/// All properties, fresh.
#[must_use]
pub fn all() -> Vec<Box<dyn Property>> {
    vec![
        Box::new(one_owner::OneOwner::default()),
        Box::new(epochs_rise::EpochsRise::default()),
        Box::new(no_early_end::NoEarlyEnd),
        Box::new(member_stops_first::MemberStopsFirst),
        Box::new(heartbeat_of_the_living::HeartbeatOfTheLiving::default()),
        Box::new(sink_fenced::SinkFenced::default()),
        Box::new(offset_fenced::OffsetFenced::default()),
        Box::new(acknowledged_offset_kept::AcknowledgedOffsetKept::default()),
        Box::new(acquired_after_resume::AcquiredAfterResume::default()),
        Box::new(grant_to_live_subscriber::GrantToLiveSubscriber::default()),
        Box::new(effects_in_order::EffectsInOrder::default()),
        Box::new(replicas_equal::ReplicasEqual),
        Box::new(freed_in_time::FreedInTime::default()),
        Box::new(owned_again::OwnedAgain),
    ]
}
