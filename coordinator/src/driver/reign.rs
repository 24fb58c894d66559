//! What a raft leader keeps in memory during one term. Built from the state, dropped with the leadership.

mod answers;
mod seats;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tenure_core::command::MemberRef;
use tenure_core::event::MemberJoined;
use tenure_core::{Event, State};
use tenure_model::{Epoch, ErrorCode, GroupId, Index, MemberId, Partition, Term, Tick};
use tenure_proto::v1::session_down::Down;

pub use self::answers::WaitingMembers;
use self::answers::{Asked, Waiting, merge};
use self::seats::{Seat, Seats};
use super::deadlines::Timers;
use super::leading::Lanes;
use super::places::Places;
use super::serving::Unserved;
use super::session::{Heartbeat, Named, Session, SessionId};
use super::settle::Settling;
use super::standing::Standing;
use crate::lease::{Answer, LeaseTable, Lengths, Rules};
use crate::lost;
use crate::machine::GroupMachine;
use crate::settings::NodeSettings;
use crate::soft::{Beat, Beats, SharedBeat};

/// Grants of one entry that are logged one by one; a whole group's are said as a count.
const GRANTS_LOGGED_MAX: usize = 32;

/// See the module.
pub struct Reign {
    pub term: Term,
    /// Index of the state that this was last built from as a whole.
    built_at: Index,
    pub table: LeaseTable,
    pub timers: Timers,
    pub settling: Settling,
    sessions: Seats,
    /// Received, not yet part of a confirmation under way.
    waiting: WaitingMembers,
    /// Confirmed, but an entry decides first.
    parked: WaitingMembers,
    /// Members whose assignment changed since the last flush.
    touched: BTreeSet<(GroupId, MemberId)>,
    /// Partitions that timers have not followed yet.
    changed: BTreeSet<(GroupId, Partition)>,
    /// Timers have to follow the state as a whole.
    is_rebuilt: bool,
    /// Who is a member, or what plans are made from, changed.
    has_new_plans: bool,
    pub(super) lanes: Lanes,
    /// A confirmation of leadership is under way.
    pub(super) is_confirming: bool,
    pub(super) places: Places,
    has_said_exhausted: bool,
    /// The highest epoch above the counter that was said in the log.
    said_seen: Option<Epoch>,
    pub(super) unserved: Unserved,
    standing: Standing,
    pub(super) settings: Arc<NodeSettings>,
    node_address: String,
    beats: Arc<Beats>,
}

impl Reign {
    /// Builds everything from the state, right after the first entry of `term` was applied.
    pub fn begin(
        term: Term,
        machine: &GroupMachine,
        settings: Arc<NodeSettings>,
        node_address: String,
        beats: Arc<Beats>,
        now: Tick,
    ) -> Self {
        beats.clear();
        let deadlines = &settings.deadlines;
        let mut reign = Self {
            term,
            built_at: Index::default(),
            table: LeaseTable::new(Rules::from(deadlines)),
            timers: Timers::new(settings.as_ref().into()),
            settling: Settling::new(
                Duration::from_millis(deadlines.settle_ms),
                Duration::from_millis(deadlines.settle_max_ms),
            ),
            sessions: Seats::default(),
            waiting: BTreeMap::new(),
            parked: BTreeMap::new(),
            touched: BTreeSet::new(),
            changed: BTreeSet::new(),
            is_rebuilt: true,
            has_new_plans: true,
            lanes: Lanes::default(),
            is_confirming: false,
            places: Places::default(),
            has_said_exhausted: false,
            said_seen: None,
            unserved: Unserved::default(),
            standing: Standing::new(deadlines.not_advancing_ms),
            settings,
            node_address,
            beats,
        };
        reign.rebuild(machine, now);
        reign
    }

    /// Takes over the state as a whole: at the start, and when changes were missed.
    pub fn rebuild(&mut self, machine: &GroupMachine, now: Tick) {
        let state = machine.state();
        let mut live = BTreeSet::new();
        for (member, ttl_ms, interval_ms, silence) in state.members() {
            let lengths = lengths(ttl_ms, interval_ms);
            let is_new = self.table.answer(&member) == Answer::Gone;
            match silence {
                Some(silence) if is_new => {
                    let known_at = machine.silent_since(&member, silence.index).unwrap_or(now);
                    let silent_for = Duration::from_millis(silence.silent_for_ms);
                    self.table.admit_silent(&member, lengths, known_at, silent_for);
                }
                Some(_) => {
                    self.table.admit(&member, lengths, now);
                    self.table.silence_applied(&member);
                }
                None => {
                    self.table.admit(&member, lengths, now);
                }
            }
            live.insert(member);
        }
        self.table.retain(|member| live.contains(member));
        let gone: Vec<MemberRef> =
            self.sessions.members().filter(|member| !live.contains(member)).cloned().collect();
        for member in gone {
            self.end_membership(&member);
        }
        self.touched.extend(
            self.sessions.members().map(|named| (named.group.clone(), named.member.clone())),
        );
        self.built_at = state.applied;
        self.is_rebuilt = true;
        self.has_new_plans = true;
    }

    /// Takes over what one entry changed.
    pub fn follow<'a>(&mut self, index: Index, events: impl Iterator<Item = &'a Event>, now: Tick) {
        if index <= self.built_at {
            return;
        }
        let mut granted = 0_usize;
        for event in events {
            if let Event::PartitionGranted { group, partition, member, epoch } = event {
                granted += 1;
                if granted <= GRANTS_LOGGED_MAX {
                    tracing::info!(
                        %group, %partition, %member, %epoch, handoff = %index, "partition granted"
                    );
                }
            }
            self.follow_event(event, now);
        }
        if granted > GRANTS_LOGGED_MAX {
            tracing::info!(count = granted, handoff = %index, "partitions granted, not all named");
        }
    }

    fn follow_event(&mut self, event: &Event, now: Tick) {
        match event {
            Event::MemberJoined(joined) | Event::MemberUpdated(joined) => {
                let lengths = lengths(joined.ttl_ms, joined.heartbeat_interval_ms);
                self.table.admit(&reference(joined), lengths, now);
                self.has_new_plans = true;
            }
            // Its lease ran out, and a successor waits for its place.
            Event::MemberAway { group, member, .. } if self.is_expiring(group, member) => {
                self.expired(group, member);
            }
            Event::MemberLeft { group, member, .. } | Event::MemberAway { group, member, .. } => {
                if let Some(member) = self.table.find(group, member) {
                    // Its session says so itself, after the answer to the leave.
                    drop(self.forget(&member));
                }
                self.has_new_plans = true;
            }
            Event::MemberExpired { group, member } => self.expired(group, member),
            Event::MemberSilenced { group, member, .. } => {
                if let Some(member) = self.table.find(group, member) {
                    self.table.silence_applied(&member);
                }
            }
            Event::MemberHeard { group, member } => {
                if let Some(member) = self.table.find(group, member) {
                    self.heard_again(&member);
                }
            }
            Event::PreparationBegun { group, partition, member }
            | Event::PreparationReady { group, partition, member }
            | Event::PreparationCalledOff { group, partition, member }
            | Event::PartitionGranted { group, partition, member, .. }
            | Event::PartitionRevoked { group, partition, member, .. }
            | Event::PartitionReleased { group, partition, member, .. } => {
                self.touched.insert((group.clone(), member.clone()));
                self.changed.insert((group.clone(), *partition));
            }
            Event::PartitionAcquired { group, partition, .. }
            | Event::PartitionHeldBack { group, partition, .. }
            | Event::HoldLifted { group, partition } => {
                self.changed.insert((group.clone(), *partition));
            }
            Event::GroupEpochRaised { .. }
            | Event::TargetInstalled { .. }
            | Event::TargetConfirmed { .. } => self.has_new_plans = true,
            Event::GroupCreated { .. }
            | Event::PlaceTaken { .. }
            | Event::MemberDrained { .. }
            | Event::TopicGrown { .. }
            | Event::PartitionPinned { .. }
            | Event::PinsLifted { .. }
            | Event::OffsetCommitted { .. }
            | Event::EpochFloorRaised { .. }
            | Event::FeatureLevelRaised { .. }
            | Event::OperatorActed { .. } => {}
        }
    }

    fn is_expiring(&self, group: &GroupId, member: &MemberId) -> bool {
        self.table.find(group, member).is_some_and(|member| self.table.is_expiring(&member))
    }

    fn expired(&mut self, group: &GroupId, member: &MemberId) {
        if let Some(member) = self.table.find(group, member) {
            self.end_membership(&member);
        }
        self.has_new_plans = true;
    }

    /// Says that history is lost: once, and again for a higher epoch.
    fn say_lost(&mut self, state: &State, group: &GroupId, partition: Partition, seen: Epoch) {
        if self.said_seen < Some(seen) {
            self.said_seen = Some(seen);
            let advice = lost::advice(state, seen);
            tracing::error!(%group, %partition, %seen, counter = state.epoch_counter, "{advice}");
        }
    }

    /// Brings timers and plans up to the state, and tells members of their new assignments.
    pub fn flush(&mut self, state: &State, now: Tick) {
        let changed = std::mem::take(&mut self.changed);
        if state.epochs_exhausted() && !std::mem::replace(&mut self.has_said_exhausted, true) {
            tracing::error!(
                epoch = state.epoch_counter,
                "EPOCH_EXHAUSTED: every epoch is used up, nothing can be granted any more"
            );
        }
        if std::mem::take(&mut self.is_rebuilt) {
            self.timers.follow(state, now);
            if let Some((group, partition, seen)) = lost::highest(state) {
                self.say_lost(state, group, partition, seen);
            }
        } else {
            for (group, partition) in &changed {
                self.timers.follow_partition(state, group, *partition, now);
                let found = state.partition(group, *partition).ok();
                if let Some(seen) = found.and_then(|found| lost::seen_above(state, found)) {
                    self.say_lost(state, group, *partition, seen);
                }
            }
        }
        if std::mem::take(&mut self.has_new_plans) {
            self.timers.follow_places(state, now);
            self.settling.follow(state.groups_to_plan(), now);
        }
        for (group, member) in std::mem::take(&mut self.touched) {
            let Some(named) = self.table.find(&group, &member) else { continue };
            if self.sessions.get(&named).is_some_and(|session| session.is_joined)
                && let Some(assignment) = self.assignment(state, &named, now)
            {
                let assignment = self.list(&named, assignment);
                self.send(&named, Down::Assignment(assignment));
            }
        }
    }

    /// Whether [`Reign::flush`] has something to do.
    pub fn needs_flush(&self) -> bool {
        self.is_rebuilt
            || self.has_new_plans
            || !self.changed.is_empty()
            || !self.touched.is_empty()
    }

    /// A session is new. An earlier one of the same member ends.
    pub fn open(&mut self, member: MemberRef, receipt: Tick, session: Session) {
        let lease = self.table.id(&member);
        let renewed = lease.and_then(|id| Some((id, self.table.renew_by_id(id, receipt)?)));
        let Some((lease, renewed)) = renewed else {
            session.end(ErrorCode::MemberGone, gone_message(&member));
            return;
        };
        drop(self.end_session(&member));
        self.places.reopened(&member);
        let beat = SharedBeat::from(Beat {
            deadline: renewed.deadline,
            awaited_by: self.places.awaited_by(&member, renewed.heard_at),
            labels: Arc::clone(&session.labels),
            ..Beat::default()
        });
        self.beats.insert((member.group.clone(), member.member.clone()), beat.clone());
        self.waiting.insert(session.id, Waiting { is_join: true, asked: None, receipt });
        self.sessions.insert(Seat { member, lease, beat, session });
    }

    /// The stream of a session is gone.
    pub fn close(&mut self, member: &MemberRef, id: SessionId) {
        if self.has_session(member, Some(id)) {
            drop(self.end_session(member));
        }
    }

    /// Nobody is answered down the session of `member` any more.
    fn end_session(&mut self, member: &MemberRef) -> Option<Session> {
        let session = self.sessions.remove(member)?;
        self.waiting.remove(&session.id);
        self.parked.remove(&session.id);
        Some(session)
    }

    /// A heartbeat was received: renews the lease; the answer waits for a confirmation.
    pub fn heartbeat(&mut self, beat: Heartbeat) {
        let Heartbeat { session, receipt, sequence, said, takes_as_held } = beat;
        let Some(seat) = self.sessions.by_id(session) else { return };
        let Some(renewed) = self.table.renew_by_id(seat.lease, receipt) else {
            let member = seat.member.clone();
            self.end_membership(&member);
            return;
        };
        let mut beat = seat.beat.lock();
        beat.deadline = renewed.deadline;
        beat.awaited_by = self.places.awaited_by(&seat.member, renewed.heard_at);
        let named = seat.session.read(said, takes_as_held, &mut beat.held);
        if named != Named::Unknown {
            self.standing.follow(&seat.member, &beat.held);
        }
        drop(beat);
        let asked = Some(Asked { sequence, named });
        merge(&mut self.waiting, session, Waiting { is_join: false, asked, receipt });
    }

    /// Shows who waits for the place of `member`.
    pub(super) fn show_waiter(&self, member: &MemberRef, now: Tick) {
        if let Some(beat) = self.beats.get(&(member.group.clone(), member.member.clone())) {
            beat.lock().awaited_by = self.places.awaited_by(member, now);
        }
    }

    /// Whether a session of `member` is open; with an id, whether it is that one.
    pub(super) fn has_session(&self, member: &MemberRef, id: Option<SessionId>) -> bool {
        let open = self.sessions.id(member);
        open.is_some_and(|open| id.is_none_or(|id| open == id))
    }

    /// Grants that the last heartbeat of `member` names.
    pub(super) fn named(&self, member: &MemberRef) -> BTreeSet<(Partition, Epoch)> {
        let beat = self.beats.get(&(member.group.clone(), member.member.clone()));
        let Some(beat) = beat else { return BTreeSet::new() };
        beat.lock().held.iter().map(|held| (held.partition, held.epoch)).collect()
    }

    /// The log says that `member` was heard, or never said that it was silent: it may be answered.
    pub fn heard_again(&mut self, member: &MemberRef) {
        self.table.heard_applied(member);
        if let Some(session) = self.sessions.id(member)
            && let Some(parked) = self.parked.remove(&session)
        {
            merge(&mut self.waiting, session, parked);
        }
    }

    /// The membership has ended: tells its session.
    pub fn end_membership(&mut self, member: &MemberRef) {
        if let Some(session) = self.forget(member) {
            session.end(ErrorCode::MemberGone, gone_message(member));
        }
    }

    /// Lets go of all that is known of a member; gives its session back.
    fn forget(&mut self, member: &MemberRef) -> Option<Session> {
        self.table.remove(member);
        self.places.forget(member);
        self.unserved.forget(member);
        self.standing.forget(member);
        self.beats.remove(&(member.group.clone(), member.member.clone()));
        self.end_session(member)
    }

    fn send(&mut self, member: &MemberRef, down: Down) {
        let Some(session) = self.sessions.get(member) else { return };
        if !session.send(down) {
            self.does_not_read(member);
        }
    }

    fn does_not_read(&mut self, member: &MemberRef) {
        tracing::warn!(
            group = %member.group, member = %member.member,
            "member does not read its session, the session ends"
        );
        drop(self.end_session(member));
    }

    /// This node leads no more: every session is told where to go.
    pub fn end(self, status: &tonic::Status) {
        for session in self.sessions.into_sessions() {
            session.refuse(status.clone());
        }
        self.beats.clear();
    }
}

fn gone_message(member: &MemberRef) -> String {
    format!(
        "membership of {} in group {} has ended: join under a new member id",
        member.member, member.group
    )
}

fn reference(joined: &MemberJoined) -> MemberRef {
    MemberRef {
        group: joined.group.clone(),
        member: joined.member.clone(),
        member_epoch: joined.member_epoch,
    }
}

const fn lengths(ttl_ms: u64, interval_ms: u64) -> Lengths {
    Lengths { ttl: Duration::from_millis(ttl_ms), interval: Duration::from_millis(interval_ms) }
}

#[cfg(test)]
mod tests;
