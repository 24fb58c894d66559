//! From a command to events, or to a refusal. Reads only.

mod membership;
mod offsets;
mod operator;
mod ownership;
mod prepare;
mod target;

use std::collections::BTreeSet;

use tenure_model::{GroupEpoch, GroupId, Term};

use crate::{Command, Context, Event, Rejection, Reply, State};

/// What a command comes to.
pub(crate) type Decided = Result<(Reply, Vec<Event>), Rejection>;

/// Verdict on one part of a command.
pub(crate) type Verdict = Result<(), Rejection>;

impl State {
    /// Decides `command` without changing anything.
    pub(crate) fn decide(&self, context: Context, command: &Command) -> Decided {
        match command {
            Command::JoinGroup(join) => self.join_group(context, join),
            Command::LeaveGroup(leave) => self.leave_group(leave),
            Command::ReportTopics(report) => self.report_topics(report),
            Command::ExpireMembers { term, members } => {
                check_term(context, *term)?;
                Ok(self.expire_members(members))
            }
            Command::MarkMembersSilent { term, members } => {
                check_term(context, *term)?;
                Ok(self.mark_members_silent(members))
            }
            Command::MarkMembersHeard { term, members } => {
                check_term(context, *term)?;
                Ok(self.mark_members_heard(members))
            }
            Command::ReserveMembers { term, members, returning_within_ms } => {
                check_term(context, *term)?;
                Ok(self.reserve_members(members, *returning_within_ms))
            }
            Command::InstallTarget(install) => self.install_target(install),
            Command::ReleasePartitions(release) => self.release_partitions(release),
            Command::AcknowledgeAcquired(acquired) => self.acknowledge_acquired(acquired),
            Command::CommitOffsets(commit) => self.commit_offsets(commit),
            Command::RewindOffset(rewind) => self.rewind_offset(rewind),
            Command::ExpireRevocations { term, grants } => {
                check_term(context, *term)?;
                Ok(self.expire_revocations(grants))
            }
            Command::ExpireAcquisitions { term, grants } => {
                check_term(context, *term)?;
                Ok(self.expire_acquisitions(grants))
            }
            Command::AcknowledgePrepared(prepared) => self.acknowledge_prepared(prepared),
            Command::ExpirePreparations { term, preparations } => {
                check_term(context, *term)?;
                Ok(self.expire_preparations(preparations))
            }
            Command::TakeBackUnserved { term, grants } => {
                check_term(context, *term)?;
                Ok(self.take_back_unserved(grants))
            }
            Command::LiftHolds { term, partitions } => {
                check_term(context, *term)?;
                Ok(self.lift_holds(partitions))
            }
            Command::MovePartition(wish) => self.move_partition(wish),
            Command::RebalanceGroup(rebalance) => self.rebalance_group(rebalance),
            Command::DrainMember(drain) => self.drain_member(drain),
            Command::RaiseEpochFloor { operator, floor } => {
                self.raise_epoch_floor(operator, *floor)
            }
            Command::RaiseFeatureLevel { level } => self.raise_feature_level(*level),
            // What they are about is outside of the state: the replica's driver of this machine looks at them.
            Command::MarkDigest | Command::CompareDigest { .. } => Ok((Reply::Done, Vec::new())),
        }
    }
}

/// Refuses what was proposed in an earlier term: its timers belonged to another raft leader.
fn check_term(context: Context, given: Term) -> Verdict {
    if context.term == given {
        Ok(())
    } else {
        Err(Rejection::StaleTerm { given, current: context.term })
    }
}

/// Refuses more of something than the state may take.
fn check_limit(what: &str, count: usize, limit: usize) -> Verdict {
    if count <= limit {
        Ok(())
    } else {
        Err(Rejection::LimitReached { what: format!("{what}: {count}"), limit: limit as u64 })
    }
}

/// Events so far, and the groups that need a new plan because of them.
#[derive(Default)]
struct Draft {
    events: Vec<Event>,
    replan: BTreeSet<GroupId>,
}

impl Draft {
    fn push(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Notes that what plans are made from has changed in `group`.
    fn replan(&mut self, group: &GroupId) {
        if !self.replan.contains(group) {
            self.replan.insert(group.clone());
        }
    }

    /// The events, with each group epoch raised at most once.
    fn finish(mut self, state: &State) -> Vec<Event> {
        for group in self.replan {
            let current = state.groups.get(&group).map_or(GroupEpoch(0), |group| group.epoch);
            self.events
                .push(Event::GroupEpochRaised { group, group_epoch: GroupEpoch(current.0 + 1) });
        }
        self.events
    }
}
