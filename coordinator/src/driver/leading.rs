//! What a raft leader has under way during one term, without IO: time and outcomes are arguments.
//!
//! The task in `work` submits what [`Reign::proposals`], [`Reign::plans`] and [`Reign::confirmation`] hand out, and
//! brings the outcomes back.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_core::command::{InstallTarget, MemberRef};
use tenure_core::{Command, Rejection, Reply, State};
use tenure_model::limits::ENTRY_COMMANDS_MAX;
use tenure_model::{ErrorCode, GroupEpoch, GroupId, Tick};

use super::deadlines::Due;
use super::places::SUCCESSOR_MS;
use super::reign::{Reign, WaitingMembers};
use crate::lease::Notice;
use crate::planning;

/// Pause before something that was refused or lost is proposed again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Members or grants in one command.
const LINES_MAX: usize = ENTRY_COMMANDS_MAX;

/// What became of a proposal; nothing when that is not known.
pub type Outcome<'a> = Option<Result<&'a Reply, &'a Rejection>>;

/// Kinds of proposals; one of each is under way at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Expire,
    Reserve,
    EndPlaces,
    Silence,
    Hear,
    TakeBackDrained,
    TakeBackUnacquired,
    EndPreparations,
    TakeBackUnserved,
    LiftHolds,
}

/// Which lanes are free.
#[derive(Debug, Default)]
pub struct Lanes(BTreeMap<Lane, Busy>);

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

impl Reign {
    /// Marks what is due, and hands out what to propose for it. One of each lane is under way at a time.
    pub fn proposals(&mut self, now: Tick) -> Vec<Proposal> {
        tell(self.table.check(now));
        let mut free = due(self, now);
        free.retain(|proposal| self.lanes.is_free(proposal.lane, now));
        for proposal in &free {
            self.lanes.0.insert(proposal.lane, Busy::UnderWay);
        }
        free
    }

    /// Groups to plan now, each with whether its target is taken line by line.
    pub fn plans(&mut self, now: Tick) -> Vec<(GroupId, bool)> {
        let due = self.settling.take_due(now).into_iter();
        due.map(|group| (group.clone(), self.settling.is_line_by_line(&group))).collect()
    }

    /// Whether [`Reign::confirmation`] has someone to begin for.
    pub fn wants_confirmation(&self) -> bool {
        !self.is_confirming && self.has_waiting()
    }

    /// Members whose answers wait for a confirmation of leadership that begins now; nothing while one is under way.
    pub fn confirmation(&mut self) -> Option<WaitingMembers> {
        if self.is_confirming {
            return None;
        }
        let waiting = self.take_waiting();
        self.is_confirming = !waiting.is_empty();
        self.is_confirming.then_some(waiting)
    }

    /// The confirmation has ended. `state` has everything committed before it began; nothing: it failed.
    pub fn confirmed(&mut self, waiting: WaitingMembers, state: Option<&State>) {
        self.is_confirming = false;
        match state {
            Some(state) => self.answer(waiting, state),
            None => self.give_back(waiting),
        }
    }

    /// A proposal has an outcome, or was lost: then it is proposed again after a pause. `state` has the outcome's entry,
    /// and this reign has followed that entry.
    pub fn proposed(
        &mut self,
        lane: Lane,
        members: &[MemberRef],
        outcome: Outcome<'_>,
        state: &State,
        now: Tick,
    ) {
        let Some(Ok(Reply::Verdicts(verdicts))) = outcome else {
            // Lost, or refused as a whole: then the term has moved on, and this one ends once the node hears of it.
            self.lanes.0.insert(lane, Busy::Until(now.after(RETRY_PAUSE)));
            return;
        };
        self.lanes.0.remove(&lane);
        if lane == Lane::TakeBackUnserved {
            self.unserved.settle(now);
        }
        for (member, verdict) in members.iter().zip(verdicts) {
            match (lane, verdict) {
                (Lane::Expire, Ok(())) => {
                    tracing::info!(group = %member.group, member = %member.member, "member expired");
                    self.end_membership(member);
                }
                (Lane::Reserve, Ok(())) => {
                    tracing::info!(
                        group = %member.group, member = %member.member,
                        "member expired, its place is kept for the process that waits"
                    );
                    self.end_membership(member);
                }
                (Lane::EndPlaces, Ok(())) => tracing::info!(
                    group = %member.group, member = %member.member,
                    "static member did not return in time, its place is given up"
                ),
                (Lane::Silence | Lane::Hear, Ok(())) => self.take_silence_over(member, state),
                (lane, Err(rejection)) => {
                    if is_gone(rejection) {
                        self.end_membership(member);
                    } else if matches!(lane, Lane::Silence | Lane::Hear) {
                        self.take_silence_over(member, state);
                    } else if lane == Lane::Reserve {
                        // It expires like any other then.
                        self.places.turn_away(member);
                    }
                }
                (
                    Lane::TakeBackDrained
                    | Lane::TakeBackUnacquired
                    | Lane::EndPreparations
                    | Lane::TakeBackUnserved
                    | Lane::LiftHolds,
                    Ok(()),
                ) => {}
            }
        }
    }

    /// Whether the log calls a member silent is read from the state, not from a verdict: later entries may have said
    /// otherwise before the verdict was heard of.
    fn take_silence_over(&mut self, member: &MemberRef, state: &State) {
        match state.member(&member.group, &member.member) {
            Ok((_, record)) if record.epoch == member.member_epoch => match record.silent {
                Some(_) => self.table.silence_applied(member),
                None => self.heard_again(member),
            },
            Ok(_) | Err(_) => self.end_membership(member),
        }
    }

    /// A target has a verdict, or was lost: then the group is planned again.
    pub fn planned(&mut self, group: &GroupId, outcome: Outcome<'_>, now: Tick) {
        match outcome {
            Some(Ok(_)) => self.settling.installed(group),
            Some(Err(Rejection::StaleTarget { .. })) => self.settling.refused(group),
            Some(Err(rejection)) => {
                tracing::warn!(%group, %rejection, "target was refused, the group is planned again");
                self.settling.failed(group, now.after(RETRY_PAUSE * 10));
            }
            None => self.settling.failed(group, now.after(RETRY_PAUSE)),
        }
    }
}

/// A command that is due.
pub struct Proposal {
    pub lane: Lane,
    /// The members that it names, where the verdicts matter.
    pub members: Vec<MemberRef>,
    pub command: Command,
}

/// Everything that is due, whether it is under way or not.
fn due(reign: &Reign, now: Tick) -> Vec<Proposal> {
    let term = reign.term;
    let mut proposals = Vec::new();
    let mut add = |lane, members, command| proposals.push(Proposal { lane, members, command });
    let expiring = reign.table.expiring().take(LINES_MAX).cloned();
    let (awaited, members): (Vec<MemberRef>, Vec<MemberRef>) =
        expiring.partition(|member| reign.places.is_awaited(member, now));
    if !awaited.is_empty() {
        let command = Command::ReserveMembers {
            term,
            members: awaited.clone(),
            returning_within_ms: SUCCESSOR_MS,
        };
        add(Lane::Reserve, awaited, command);
    }
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
    let Due { mut drains, mut acquires, mut preparations, mut holds, returns: mut members } =
        reign.timers.due(now);
    members.truncate(LINES_MAX);
    if !members.is_empty() {
        add(Lane::EndPlaces, members.clone(), Command::ExpireMembers { term, members });
    }
    drains.truncate(LINES_MAX);
    if !drains.is_empty() {
        add(Lane::TakeBackDrained, vec![], Command::ExpireRevocations { term, grants: drains });
    }
    acquires.truncate(LINES_MAX);
    if !acquires.is_empty() {
        let command = Command::ExpireAcquisitions { term, grants: acquires };
        add(Lane::TakeBackUnacquired, vec![], command);
    }
    preparations.truncate(LINES_MAX);
    if !preparations.is_empty() {
        let command = Command::ExpirePreparations { term, preparations };
        add(Lane::EndPreparations, vec![], command);
    }
    let mut unserved = reign.unserved.due(now);
    unserved.truncate(LINES_MAX);
    if !unserved.is_empty() {
        let command = Command::TakeBackUnserved { term, grants: unserved };
        add(Lane::TakeBackUnserved, vec![], command);
    }
    holds.truncate(LINES_MAX);
    if !holds.is_empty() {
        add(Lane::LiftHolds, vec![], Command::LiftHolds { term, partitions: holds });
    }
    proposals
}

/// What a plan of `group` is made from, and its group epoch; nothing when there is no such group.
pub fn question(state: &State, group: &GroupId) -> Option<(GroupEpoch, tenure_planner::Input)> {
    let found = state.group(group).ok()?;
    Some((found.epoch, planning::input(found)))
}

/// The command that installs the planner's answer to `input`.
pub fn install(
    group: &GroupId,
    group_epoch: GroupEpoch,
    input: &tenure_planner::Input,
    line_by_line: bool,
) -> Command {
    Command::InstallTarget(InstallTarget {
        group: group.clone(),
        group_epoch,
        target: tenure_planner::plan(input).into_iter().collect(),
        line_by_line,
    })
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
