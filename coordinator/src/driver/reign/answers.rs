//! Who waits for a confirmation of leadership, and what it is told then.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_core::State;
use tenure_core::command::{AcknowledgePrepared, GrantRef, MemberRef};
use tenure_core::queries::Preparing;
use tenure_model::{Index, NextOffset, Tick};
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down;

use super::super::session::{Listed, Named, SessionId, assignment_to_wire};
use super::Reign;
use crate::lease::Answer;
use crate::soft::Phase;

/// What a member waits to hear, once leadership was confirmed after `receipt`.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The session is new: `Joined`.
    pub(super) is_join: bool,
    /// The newest heartbeat: its answer.
    pub(super) asked: Option<Asked>,
    pub(super) receipt: Tick,
}

/// A heartbeat that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) sequence: u64,
    pub(super) named: Named,
}

/// Sessions whose members wait, each with the newest of what it waits for.
pub type WaitingMembers = BTreeMap<SessionId, Waiting>;

impl Reign {
    /// Whether anyone waits for a confirmation which has not begun yet.
    pub(in crate::driver) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Everything that waits for a confirmation which has not begun yet.
    pub fn take_waiting(&mut self) -> WaitingMembers {
        std::mem::take(&mut self.waiting)
    }

    /// The confirmation failed: they wait for the next one.
    pub fn give_back(&mut self, waiting: WaitingMembers) {
        let newer = std::mem::replace(&mut self.waiting, waiting);
        for (session, new) in newer {
            merge(&mut self.waiting, session, new);
        }
    }

    /// Leadership was confirmed, and `state` has everything committed before that: answers who may be answered.
    pub fn answer(&mut self, confirmed: WaitingMembers, state: &State) {
        for (session, waiting) in confirmed {
            // Where it has ended, nobody reads an answer.
            let Some(seat) = self.sessions.by_id(session) else { continue };
            match self.table.answer_by_id(seat.lease) {
                Answer::Now => self.answer_one(session, waiting, state),
                Answer::Later => merge(&mut self.parked, session, waiting),
                Answer::Gone => {
                    let member = seat.member.clone();
                    self.end_membership(&member);
                }
            }
        }
    }

    fn answer_one(&mut self, session: SessionId, waiting: Waiting, state: &State) {
        let Some(seat) = self.sessions.by_id(session) else { return };
        let asked = waiting.asked;
        if !waiting.is_join
            && let Some(Asked { sequence, named: Named::AsListed(version) }) = asked
            && is_newest(state, &seat.member, version)
        {
            self.unserved.forget(&seat.member);
            let answer = v1::HeartbeatAnswer { sequence, assignment: None, as_held: version.0 };
            if !seat.session.send(Down::HeartbeatAnswer(answer)) {
                let member = seat.member.clone();
                self.does_not_read(&member);
            }
            return;
        }
        let member = &seat.member.clone();
        let Some(assignment) = self.assignment(state, member, waiting.receipt) else {
            self.end_membership(member);
            return;
        };
        let assignment = self.list(member, assignment);
        if waiting.is_join {
            let joined = self.joined(state, member, assignment.clone());
            self.send(member, Down::Joined(joined));
            if let Some(session) = self.sessions.get_mut(member) {
                session.is_joined = true;
            }
        }
        if let Some(Asked { sequence, named }) = asked {
            match named {
                Named::AsListed(_) | Named::Something => {
                    self.compare_held(member, state, waiting.receipt);
                }
                Named::Unknown => {}
            }
            let assignment = Some(assignment);
            let answer = v1::HeartbeatAnswer { sequence, assignment, as_held: 0 };
            self.send(member, Down::HeartbeatAnswer(answer));
        }
    }

    /// Notes that an assignment goes down the stream of `member` as a whole list.
    pub(super) fn list(
        &mut self,
        member: &MemberRef,
        (assignment, listed): (v1::Assignment, Option<Listed>),
    ) -> v1::Assignment {
        if let Some(session) = self.sessions.get_mut(member) {
            session.list(listed);
        }
        assignment
    }

    fn joined(&self, state: &State, named: &MemberRef, assignment: v1::Assignment) -> v1::Joined {
        let record = state.member(&named.group, &named.member).ok().map(|(_, record)| record);
        v1::Joined {
            member_epoch: named.member_epoch.0,
            ttl_ms: record.map_or(0, |record| record.ttl_ms),
            heartbeat_interval_ms: record.map_or(0, |record| record.heartbeat_interval_ms),
            clock_drift_max_ms: self.settings.lease.clock_drift_max_ms,
            assignment: Some(assignment),
            node_address: self.node_address.clone(),
        }
    }

    /// What a member owns, with what remains of drains as of `from`, and what a later heartbeat is compared with;
    /// nothing when that membership has ended.
    pub(super) fn assignment(
        &self,
        state: &State,
        named: &MemberRef,
        from: Tick,
    ) -> Option<(v1::Assignment, Option<Listed>)> {
        let (_, record) = state.member(&named.group, &named.member).ok()?;
        if record.epoch != named.member_epoch {
            return None;
        }
        let assignment = state.assignment(&named.group, &named.member).ok()?;
        let mut wire = assignment_to_wire(&assignment, |assigned| {
            let grant = GrantRef {
                group: named.group.clone(),
                partition: assigned.partition,
                epoch: assigned.epoch,
            };
            // A revocation that the timers have not seen yet gets at least the full length.
            let full = Duration::from_millis(self.settings.deadlines.drain_deadline_ms);
            let remaining = self.timers.drain_remaining(&grant, from).unwrap_or(full);
            u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX)
        });
        let preparing = assignment.preparing.iter();
        wire.preparing =
            preparing.map(|preparing| self.preparing(named, preparing, from)).collect();
        Some((wire, Listed::of(&assignment)))
    }

    /// What a member is to prepare for, with what is known of it at this moment.
    fn preparing(&self, named: &MemberRef, preparing: &Preparing, from: Tick) -> v1::Preparing {
        let preparation = AcknowledgePrepared {
            group: named.group.clone(),
            member: named.member.clone(),
            partition: preparing.partition,
        };
        // Without a timer the move does not wait for it any more.
        let remaining = self.timers.prepare_remaining(&preparation, from).unwrap_or_default();
        let owner = preparing.owner.clone();
        let beat = owner.and_then(|owner| self.beats.get(&(named.group.clone(), owner)));
        let position = beat.and_then(|beat| {
            let beat = beat.lock();
            let held = beat.held.iter().find(|held| held.partition == preparing.partition)?;
            (held.phase == Phase::Running).then_some(held.position)
        });
        let committed = preparing.committed.map(NextOffset::get);
        v1::Preparing {
            partition: Some(tenure_proto::convert::partition_to_wire(preparing.partition)),
            topic: preparing.topic.to_string(),
            home_initialised: preparing.home_initialised,
            next_offset: position.max(committed),
            remaining_ms: u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

pub(super) fn merge(all: &mut WaitingMembers, session: SessionId, new: Waiting) {
    let slot = all.entry(session).or_insert(new);
    let newest = [slot.asked, new.asked].into_iter().flatten();
    *slot = Waiting {
        is_join: slot.is_join || new.is_join,
        asked: newest.max_by_key(|asked| asked.sequence),
        receipt: slot.receipt.max(new.receipt),
    };
}

/// Whether `version` is the newest of what `named` owns, and it has nothing to prepare for: that is told in every
/// answer, with what remains of the deadline.
fn is_newest(state: &State, named: &MemberRef, version: Index) -> bool {
    let Ok((group, record)) = state.member(&named.group, &named.member) else { return false };
    record.epoch == named.member_epoch
        && record.assignment_version == version
        && !group.derived.preparing.contains_key(&named.member)
}
