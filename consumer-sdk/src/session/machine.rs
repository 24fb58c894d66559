//! The member's half of the protocol, without IO, clock or randomness of its own.
//!
//! [`Machine::handle`] takes one input with the moment at which it is handled and answers what to do;
//! [`Machine::next_wake`] says when it wants an [`Input::Tick`] at the latest. Inputs of a connection that was given up
//! (an [`Output::Disconnect`], a later [`Output::Connect`]) must not be handed in any more.
//!
//! | link       | input                          | link       | what goes out                                    |
//! |------------|--------------------------------|------------|--------------------------------------------------|
//! | Waiting    | pause over                     | Connecting | `Connect`                                        |
//! | Connecting | connected                      | Joining    | `Join`                                           |
//! | Joining    | `Joined`                       | Live       | new grants, acts without an answer               |
//! | Live       | interval over                  | Live       | `Heartbeat`                                      |
//! | Live       | no answer for 1.5 intervals    | Waiting    | `Disconnect`                                     |
//! | any        | stream broken, retryable error | Waiting    | nothing: grants live on until their leases end   |
//! | any        | raft leader told               | Waiting    | nothing: its node is next, at once               |
//! | any        | refused for good               | Closed     | every grant lost, `Ended`                        |
//! | any        | membership gone, `rejoin`      | Waiting    | every grant lost; a new member id joins          |
//! | any        | answer to `Leave`              | Closed     | `Ended`                                          |

mod acts;
mod grants;
mod link;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{
    Epoch, ErrorCode, GroupId, GroupSettings, Index, InstanceId, LabelName, LeaseSettings,
    MemberEpoch, MemberId, NextOffset, Partition, Tick, TopicName,
};
use tenure_proto::v1;

use self::acts::Acts;
use self::grants::Grants;
use self::link::{Addresses, Link};
use super::client::Refused;
use super::event::{EndCause, LostCause, Phase, Preparing, Progress, ReleaseReason};
use super::retry::Backoff;
use super::wire;
use crate::source::TopicInfo;

/// Settings of a [`Machine`].
#[derive(Clone, Debug)]
pub struct Settings {
    /// `host:port` of any coordinator nodes.
    pub coordinators: Vec<String>,
    /// Group to join.
    pub group: GroupId,
    /// Id of the first membership; those after it append `.1`, `.2` and so on.
    pub member: MemberId,
    /// Makes the member static.
    pub instance: Option<InstanceId>,
    /// Static members only: how long the place is to be kept for a return after the leave.
    pub returning_within: Option<Duration>,
    /// Topics to read.
    pub topics: Vec<TopicName>,
    /// What all members of the group agree on.
    pub settings: GroupSettings,
    /// Wanted lengths of the lease; those of the answer count.
    pub lease: LeaseSettings,
    /// Largest number of partitions that this member takes.
    pub partitions_max: Option<u32>,
    /// For people: host and process.
    pub client: String,
    /// Whether a membership that expired is followed by a new one.
    pub rejoin: bool,
    /// Whether the member prepares for partitions before it gets them.
    pub prepares: bool,
    /// Share of partitions relative to others.
    pub weight: u32,
    /// What people and tools tell members by.
    pub labels: BTreeMap<LabelName, String>,
    /// Seed of the pauses between attempts.
    pub seed: u64,
}

/// What the machine is told.
#[derive(Clone, Debug)]
pub enum Input {
    /// Nothing but the time.
    Tick,
    /// The connection asked for is open.
    Connected,
    /// The connection asked for could not be opened.
    ConnectFailed {
        /// For people.
        error: String,
    },
    /// The stream has ended.
    Disconnected {
        /// What the coordinator said at the end, if it said anything.
        error: Option<v1::Error>,
    },
    /// A message came down.
    Received(v1::SessionDown),
    /// The run loop acts.
    Act(Act),
}

/// What the run loop tells the session.
#[derive(Clone, Debug)]
pub enum Act {
    /// What is known of the topics.
    ReportTopics {
        /// All topics that were found.
        topics: Vec<TopicInfo>,
    },
    /// The topics to read from now on. A change is said by joining anew, as the same membership.
    Subscribe {
        /// All of them.
        topics: Vec<TopicName>,
    },
    /// A grant is registered, verified and resumed.
    Acquired {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// The home now certainly has an offset.
        home_initialised: bool,
        /// Where it resumed.
        resume: NextOffset,
    },
    /// The member has prepared for a partition, or cannot.
    Prepared {
        /// The partition.
        partition: Partition,
        /// Why it could not.
        error: Option<String>,
    },
    /// How far a grant has come.
    Phase {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Phase it is in.
        phase: Phase,
        /// Next offset to deliver.
        position: NextOffset,
        /// Last error of this phase.
        error: Option<String>,
    },
    /// How a running grant gets on.
    Progress {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Since the last time.
        progress: Progress,
    },
    /// A grant is given back for good.
    Release {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Final next offset; nothing: the committed one counts.
        next_offset: Option<NextOffset>,
        /// Why.
        reason: ReleaseReason,
        /// For people; may be empty.
        error: String,
    },
    /// The membership is to end; nothing is granted any more.
    Leave {
        /// For people.
        reason: String,
    },
}

/// What the machine wants done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Open a connection to this node.
    Connect {
        /// `host:port`.
        address: String,
    },
    /// Give the present connection, or the attempt at one, up.
    Disconnect,
    /// Send this on the present connection.
    Send(v1::SessionUp),
    /// A new membership has begun.
    Joined {
        /// Its member id.
        member: MemberId,
        /// Its identity.
        member_epoch: MemberEpoch,
    },
    /// The node that answers is the raft leader.
    LeaderFound {
        /// Where clients reach it.
        address: String,
    },
    /// The member's own lease ends then; nothing: it is in no group.
    LeaseEnds {
        /// End of the lease.
        at: Option<Tick>,
    },
    /// Two heartbeats in a row are without an answer, and the member's own lease ends at this moment if none comes.
    LeaseAtRisk {
        /// End of the lease.
        ends_at: Tick,
    },
    /// The lease that was at risk was renewed.
    LeaseRenewed,
    /// A partition that is to come; nothing of it is owned.
    Prepare(Preparing),
    /// It does not come.
    PreparationEnded {
        /// The partition.
        partition: Partition,
    },
    /// A partition under a new epoch. What was prepared for it counts from here on.
    Granted(Granted),
    /// The lease of a grant moves.
    Lease {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// How.
        change: LeaseChange,
    },
    /// Drain until the deadline.
    Revoked {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// When the coordinator may take the partition without a release.
        deadline: Tick,
    },
    /// A grant has ended without a release by the run loop. Its lease was stopped by the output before.
    Lost {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Why.
        cause: LostCause,
    },
    /// The membership is over, for good.
    Ended {
        /// Why.
        cause: EndCause,
    },
}

/// A new grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Holder.
    pub member: MemberId,
    /// The partition.
    pub partition: Partition,
    /// Name of its topic.
    pub topic: TopicName,
    /// Fencing token.
    pub epoch: Epoch,
    /// Names the handoff in the logs of both sides.
    pub handoff: Index,
    /// Whether the home certainly has an offset.
    pub home_initialised: bool,
    /// The grant, signed by the coordinator, if it signs.
    pub token: Option<Arc<str>>,
    /// End of the lease, as far as it is known now.
    pub ends_at: Tick,
}

/// How the lease of one grant moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseChange {
    /// Later.
    Extended(Tick),
    /// Nearer: a drain deadline comes first.
    Shortened(Tick),
    /// Over for good.
    Stopped,
}

/// The member's half of the protocol.
#[derive(Debug)]
pub struct Machine {
    settings: Settings,
    member: MemberId,
    /// How many memberships ended before this one.
    memberships: u64,
    /// Of the present membership; nothing before it is joined.
    member_epoch: Option<MemberEpoch>,
    /// Whether a `Join` of the present membership may have arrived.
    join_sent: bool,
    leaving: bool,
    lengths: LeaseSettings,
    link: Link,
    addresses: Addresses,
    backoff: Backoff,
    grants: Grants,
    acts: Acts,
    /// What the topics looked like last; goes with every `Join`.
    topics: Vec<TopicInfo>,
}

impl Machine {
    /// A machine that has done nothing yet; the first [`Input::Tick`] makes it connect.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            member: settings.member.clone(),
            memberships: 0,
            member_epoch: None,
            join_sent: false,
            leaving: false,
            lengths: settings.lease,
            link: Link::Waiting { until: Tick(0) },
            addresses: Addresses::new(settings.coordinators.clone()),
            backoff: Backoff::for_ttl(settings.seed, settings.lease.ttl()),
            grants: Grants::default(),
            acts: Acts::new(settings.seed, settings.lease.ttl()),
            topics: Vec::new(),
            settings,
        }
    }

    /// Handles one input at `now`, which never runs backwards.
    pub fn handle(&mut self, input: Input, now: Tick) -> Vec<Output> {
        let mut out = Vec::new();
        if self.link == Link::Closed {
            return out;
        }
        // Before the input: an answer that comes after the end of a lease must not find it live.
        self.expire_leases(now, &mut out);
        match input {
            Input::Tick => {}
            Input::Connected => self.connected(now, &mut out),
            Input::ConnectFailed { error } => {
                self.log_broken(&error);
                if self.link.is_connecting() {
                    self.addresses.unreachable();
                    self.pause(now);
                }
            }
            Input::Disconnected { error } => self.disconnected(error.as_ref(), now, &mut out),
            Input::Received(down) => self.received(down, now, &mut out),
            Input::Act(act) => self.act(act, now, &mut out),
        }
        // After it: a drain that is over already ends the grant now.
        self.expire_leases(now, &mut out);
        self.look_for_risk(now, &mut out);
        self.advance(now, &mut out);
        out
    }

    /// When the machine wants an [`Input::Tick`] at the latest; nothing once it has ended.
    #[must_use]
    pub fn next_wake(&self) -> Option<Tick> {
        let link = self.link.next_wake(&self.lengths);
        let retry = if self.link.is_live() { self.acts.next_retry() } else { None };
        let risk = self.grants.risk_at(&self.lengths);
        [link, retry, self.grants.next_end(), risk].into_iter().flatten().min()
    }

    /// Id of the present membership.
    #[must_use]
    pub fn member(&self) -> &MemberId {
        &self.member
    }

    /// Whether nothing more will come of this machine.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.link == Link::Closed
    }

    /// Says once that an earlier process holds this one up.
    fn log_waiting(&self, why: &str) {
        if self.backoff.is_fresh() {
            let (group, member) = (&self.settings.group, &self.member);
            tracing::warn!(%group, %member, why, "waiting for the place of the earlier process");
        }
    }

    /// Says once that the session is broken; the attempts after the first are for those who look closer.
    fn log_broken(&self, error: &str) {
        let (group, member) = (&self.settings.group, &self.member);
        if self.backoff.is_fresh() {
            tracing::warn!(%group, %member, error, "session broken, connecting anew");
        } else {
            tracing::debug!(%group, %member, error, "session still broken");
        }
    }

    fn received(&mut self, down: v1::SessionDown, now: Tick, out: &mut Vec<Output>) {
        use v1::session_down::Down;
        let taken = match down.down {
            Some(Down::Joined(joined)) => self.joined(joined, now, out),
            Some(Down::HeartbeatAnswer(answer)) => self.heartbeat_answered(answer, now, out),
            Some(Down::Assignment(assignment)) if self.link.is_live() => {
                wire::assignment(assignment)
                    .map(|assignment| self.assigned(assignment, None, now, out))
            }
            Some(Down::ActAnswer(answer)) => {
                self.act_answered(&answer, now, out);
                Ok(())
            }
            Some(Down::Ended(ended)) => {
                self.membership_ended(ended.error.as_ref(), now, out);
                Ok(())
            }
            // A message of a later version, or one that came before its time.
            Some(Down::Assignment(_)) | None => Ok(()),
        };
        if let Err(problem) = taken {
            tracing::warn!(group = %self.settings.group, member = %self.member, %problem, "malformed message from the coordinator");
            out.push(Output::Disconnect);
            self.pause(now);
        }
    }

    /// The coordinator's last word on a stream that stays open for it.
    fn membership_ended(&mut self, error: Option<&v1::Error>, now: Tick, out: &mut Vec<Output>) {
        let gone = Refused {
            code: ErrorCode::MemberGone,
            message: "the coordinator ended the membership".to_owned(),
            current_epoch: None,
        };
        let Some(error) = error else { return self.end_membership(gone, now, out) };
        out.push(Output::Disconnect);
        self.disconnected(Some(error), now, out);
    }

    /// Ends the present membership: every grant is lost. A membership that expired is followed by a new one.
    fn end_membership(&mut self, refused: Refused, now: Tick, out: &mut Vec<Output>) {
        self.lose_all(&refused.to_string(), out);
        self.acts.clear();
        out.push(Output::LeaseEnds { at: None });
        if self.leaving {
            return self.close(EndCause::Left, out);
        }
        if !self.settings.rejoin || !is_of_membership(refused.code) {
            let Refused { code, message, .. } = refused;
            return self.close(EndCause::Refused { code, message }, out);
        }
        tracing::warn!(group = %self.settings.group, member = %self.member, error = %refused, "membership ended, joining as a new member");
        self.memberships += 1;
        self.member = next_member(&self.settings.member, self.memberships);
        self.member_epoch = None;
        self.join_sent = false;
        self.grants.begin_membership();
        if self.link.is_open() {
            out.push(Output::Disconnect);
        }
        self.pause(now);
    }

    fn close(&mut self, cause: EndCause, out: &mut Vec<Output>) {
        if self.link.is_open() {
            out.push(Output::Disconnect);
        }
        self.link = Link::Closed;
        out.push(Output::Ended { cause });
    }
}

/// Whether the code says that this membership is over, and not that the member is unwelcome.
const fn is_of_membership(code: ErrorCode) -> bool {
    match code {
        ErrorCode::MemberGone | ErrorCode::StaleMember | ErrorCode::UnknownMember => true,
        ErrorCode::Fenced
        | ErrorCode::NotOwned
        | ErrorCode::UnknownGroup
        | ErrorCode::InstanceInUse
        | ErrorCode::InstanceWaits
        | ErrorCode::UnknownPartition
        | ErrorCode::SettingsConflict
        | ErrorCode::OffsetRegressed
        | ErrorCode::StaleCommit
        | ErrorCode::WrongHome
        | ErrorCode::HomeInitialised
        | ErrorCode::StaleTarget
        | ErrorCode::StaleTerm
        | ErrorCode::NothingToDo
        | ErrorCode::LimitReached
        | ErrorCode::EpochExhausted
        | ErrorCode::Compacted
        | ErrorCode::SlowWatcher
        | ErrorCode::InvalidArgument
        | ErrorCode::TooLarge
        | ErrorCode::Unsupported
        | ErrorCode::NotLeader
        | ErrorCode::NoLeader
        | ErrorCode::Overloaded
        | ErrorCode::ShuttingDown
        | ErrorCode::Unknown
        | ErrorCode::Internal => false,
    }
}

/// `base.count`; a base that leaves no room for it is cut.
fn next_member(base: &MemberId, count: u64) -> MemberId {
    let suffix = format!(".{count}");
    let room = tenure_model::limits::NAME_BYTES_MAX - suffix.len();
    let text = base.as_str();
    let text = format!("{}{suffix}", &text[..text.len().min(room)]);
    MemberId::new(&text).expect("names are ASCII, and the suffix is made of allowed characters")
}

#[cfg(test)]
mod tests;
