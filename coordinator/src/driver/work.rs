//! What the driver has under way: confirmations, proposals, plans. Each result names the term it was begun in.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Duration;

use tenure_core::command::{InstallTarget, MemberRef};
use tenure_core::{Command, Rejection, Reply};
use tenure_model::limits::ENTRY_COMMANDS_MAX;
use tenure_model::{ErrorCode, GroupId, Index, Term, Tick};

use super::Driver;
use super::deadlines::Due;
use super::proposer::{Proposer, Verdict};
use super::reign::{Reign, WaitingMembers};
use crate::lease::Notice;
use crate::machine::GroupMachine;
use crate::planning;
use crate::raft::{LinearizeError, ProposeError, RaftNode};

/// Pause before something that was refused or lost is proposed again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Members or grants in one command.
const LINES_MAX: usize = ENTRY_COMMANDS_MAX;

/// Something under way.
pub(crate) type Work = Pin<Box<dyn Future<Output = Done> + Send>>;

/// Its result.
pub(crate) enum Done {
    /// Leadership was confirmed, or not.
    Confirmed { term: Term, waiting: WaitingMembers, result: Result<Index, LinearizeError> },
    /// A proposal of one lane.
    Proposed {
        term: Term,
        lane: Lane,
        /// Whom or what the command named, where the verdicts matter.
        members: Vec<MemberRef>,
        outcome: Result<Verdict, ProposeError>,
    },
    /// A target was computed and proposed.
    Planned { term: Term, group: GroupId, outcome: Result<Verdict, ProposeError> },
}

/// Kinds of proposals; one of each is under way at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    Expire,
    Silence,
    Hear,
    TakeBackDrained,
    TakeBackUnacquired,
    LiftHolds,
}

/// Which lanes are free.
#[derive(Debug, Default)]
pub(crate) struct Lanes(BTreeMap<Lane, Busy>);

#[derive(Clone, Copy, Debug)]
enum Busy {
    UnderWay,
    Until(Tick),
}

impl Lanes {
    fn is_free(&self, lane: Lane, now: Tick) -> bool {
        match self.0.get(&lane) {
            None => true,
            Some(Busy::UnderWay) => false,
            Some(Busy::Until(at)) => *at <= now,
        }
    }
}

impl Driver {
    /// Marks what is due and proposes it; begins plans and the confirmation that waiting heartbeats need.
    pub(super) fn work_off(&mut self, now: Tick) {
        let Some(reign) = &mut self.reign else { return };
        let term = reign.term;
        tell(reign.table.check(now));
        for Proposal { lane, members, command } in due(reign, now) {
            if self.lanes.is_free(lane, now) {
                self.propose(term, lane, members, command);
            }
        }
        self.plan(term, now);
        self.confirm(term);
    }

    fn propose(&mut self, term: Term, lane: Lane, members: Vec<MemberRef>, command: Command) {
        self.lanes.0.insert(lane, Busy::UnderWay);
        // Queued here and now, so that proposals of one lane are never reordered.
        let submitted = self.parts.proposer.submit(command);
        self.work.push(Box::pin(async move {
            let outcome = match submitted {
                Ok(submitted) => submitted.outcome().await,
                Err(error) => Err(error),
            };
            Done::Proposed { term, lane, members, outcome }
        }));
    }

    fn plan(&mut self, term: Term, now: Tick) {
        let Some(reign) = &mut self.reign else { return };
        for group in reign.settling.take_due(now) {
            let line_by_line = reign.settling.is_line_by_line(&group);
            let (raft, proposer) = (self.parts.raft.clone(), self.parts.proposer.clone());
            self.work.push(Box::pin(async move {
                let outcome = plan_group(&raft, &proposer, &group, line_by_line).await;
                Done::Planned { term, group, outcome }
            }));
        }
    }

    /// One confirmation covers every heartbeat received before it begins.
    fn confirm(&mut self, term: Term) {
        let Some(reign) = &mut self.reign else { return };
        if self.is_confirming {
            return;
        }
        let waiting = reign.take_waiting();
        if waiting.is_empty() {
            return;
        }
        self.is_confirming = true;
        let raft = self.parts.raft.clone();
        let limit = Duration::from_millis(self.parts.settings.raft.propose_timeout_ms);
        self.work.push(Box::pin(async move {
            let result = raft.linearize(limit).await;
            Done::Confirmed { term, waiting, result }
        }));
    }

    pub(super) fn take_done(&mut self, done: Done) {
        let now = self.parts.clock.now();
        let Some(reign) = &mut self.reign else { return };
        match done {
            Done::Confirmed { term, waiting, result } => {
                if term != reign.term {
                    return;
                }
                self.is_confirming = false;
                match result {
                    Ok(_) => self
                        .parts
                        .raft
                        .with_machine(|machine| reign.answer(waiting, machine.state())),
                    Err(error) => {
                        tracing::debug!(%error, "leadership was not confirmed");
                        reign.give_back(waiting);
                    }
                }
            }
            Done::Proposed { term, lane, members, outcome } => {
                if term == reign.term {
                    self.take_proposed(lane, &members, &outcome, now);
                }
            }
            Done::Planned { term, group, outcome } => {
                if term == reign.term {
                    self.take_planned(&group, &outcome, now);
                }
            }
        }
    }

    fn take_proposed(
        &mut self,
        lane: Lane,
        members: &[MemberRef],
        outcome: &Result<Verdict, ProposeError>,
        now: Tick,
    ) {
        let Some(reign) = &mut self.reign else { return };
        let verdicts = match outcome {
            Ok(verdict) => verdict.result(),
            Err(error) => {
                tracing::debug!(?lane, %error, "proposal was lost, it is proposed again");
                self.lanes.0.insert(lane, Busy::Until(now.after(RETRY_PAUSE)));
                return;
            }
        };
        let Ok(Reply::Verdicts(verdicts)) = verdicts else {
            // Refused as a whole: the term has moved on, and this one ends as soon as the node hears of it.
            self.lanes.0.insert(lane, Busy::Until(now.after(RETRY_PAUSE)));
            return;
        };
        self.lanes.0.remove(&lane);
        for (member, verdict) in members.iter().zip(verdicts) {
            match (lane, verdict) {
                (Lane::Expire, Ok(())) => {
                    tracing::info!(group = %member.group, member = %member.member, "member expired");
                    reign.end_membership(member);
                }
                (Lane::Silence, Ok(())) => reign.table.silence_applied(member),
                (Lane::Hear, Ok(())) => reign.heard_again(member),
                (lane, Err(rejection)) => {
                    if is_gone(rejection) {
                        reign.end_membership(member);
                    } else if lane == Lane::Hear {
                        reign.heard_again(member);
                    } else if lane == Lane::Silence {
                        reign.table.silence_applied(member);
                    }
                }
                (Lane::TakeBackDrained | Lane::TakeBackUnacquired | Lane::LiftHolds, Ok(())) => {}
            }
        }
    }

    fn take_planned(
        &mut self,
        group: &GroupId,
        outcome: &Result<Verdict, ProposeError>,
        now: Tick,
    ) {
        let Some(reign) = &mut self.reign else { return };
        match outcome.as_ref().map(Verdict::result) {
            Ok(Ok(_)) => reign.settling.installed(group),
            Ok(Err(Rejection::StaleTarget { .. })) => reign.settling.refused(group),
            Ok(Err(rejection)) => {
                tracing::warn!(%group, %rejection, "target was refused, the group is planned again");
                reign.settling.failed(group, now.after(RETRY_PAUSE * 10));
            }
            Err(error) => {
                tracing::debug!(%group, %error, "target was lost, the group is planned again");
                reign.settling.failed(group, now.after(RETRY_PAUSE));
            }
        }
    }
}

/// A command that is due.
struct Proposal {
    lane: Lane,
    /// The members that it names, where the verdicts matter.
    members: Vec<MemberRef>,
    command: Command,
}

/// Everything that is due, whether it is under way or not.
fn due(reign: &Reign, now: Tick) -> Vec<Proposal> {
    let term = reign.term;
    let mut proposals = Vec::new();
    let mut add = |lane, members, command| proposals.push(Proposal { lane, members, command });
    let members: Vec<MemberRef> = reign.table.expiring().take(LINES_MAX).cloned().collect();
    if !members.is_empty() {
        add(Lane::Expire, members.clone(), Command::ExpireMembers { term, members });
    }
    let mut silent = reign.table.silence_to_log(now);
    silent.truncate(LINES_MAX);
    if !silent.is_empty() {
        let members = silent.iter().map(|silent| silent.member.clone()).collect();
        add(Lane::Silence, members, Command::MarkMembersSilent { term, members: silent });
    }
    let mut members = reign.table.heard_to_log();
    members.truncate(LINES_MAX);
    if !members.is_empty() {
        add(Lane::Hear, members.clone(), Command::MarkMembersHeard { term, members });
    }
    let Due { mut drains, mut acquires, mut holds } = reign.timers.due(now);
    drains.truncate(LINES_MAX);
    if !drains.is_empty() {
        add(Lane::TakeBackDrained, vec![], Command::ExpireRevocations { term, grants: drains });
    }
    acquires.truncate(LINES_MAX);
    if !acquires.is_empty() {
        let command = Command::ExpireAcquisitions { term, grants: acquires };
        add(Lane::TakeBackUnacquired, vec![], command);
    }
    holds.truncate(LINES_MAX);
    if !holds.is_empty() {
        add(Lane::LiftHolds, vec![], Command::LiftHolds { term, partitions: holds });
    }
    proposals
}

async fn plan_group(
    raft: &RaftNode<GroupMachine>,
    proposer: &Proposer,
    group: &GroupId,
    line_by_line: bool,
) -> Result<Verdict, ProposeError> {
    let question = raft.with_machine(|machine| {
        let found = machine.state().group(group).ok()?;
        Some((found.epoch, planning::input(found)))
    });
    // A group does not go away; if it did, there is nothing to install.
    let Some((group_epoch, input)) = question else { return Err(ProposeError::Unknown) };
    let target = tokio::task::spawn_blocking(move || tenure_planner::plan(&input))
        .await
        .map_err(|_panic| ProposeError::Unknown)?;
    let install = InstallTarget {
        group: group.clone(),
        group_epoch,
        target: target.into_iter().collect(),
        line_by_line,
    };
    proposer.propose(Command::InstallTarget(install)).await
}

fn is_gone(rejection: &Rejection) -> bool {
    matches!(
        rejection.code(),
        ErrorCode::UnknownGroup
            | ErrorCode::UnknownMember
            | ErrorCode::MemberGone
            | ErrorCode::StaleMember
    )
}

fn tell(notice: Option<Notice>) {
    match notice {
        None => {}
        Some(Notice::ExpiryPaused { vanished_count, member_count }) => tracing::warn!(
            vanished_count,
            member_count,
            "too many members vanished at once, expiry pauses"
        ),
        Some(Notice::ExpiryResumed) => tracing::warn!("expiry goes on after the pause"),
    }
}
