//! Open sessions by their ids, and by their members.

use std::collections::BTreeMap;

use tenure_core::command::MemberRef;

use super::super::session::{Session, SessionId};
use crate::lease::LeaseId;
use crate::soft::SharedBeat;

/// An open session, with all that a heartbeat needs.
pub(super) struct Seat {
    pub(super) member: MemberRef,
    pub(super) lease: LeaseId,
    pub(super) beat: SharedBeat,
    pub(super) session: Session,
}

/// See the module. A heartbeat finds its session by the id: names of members are compared far slower.
#[derive(Default)]
pub(super) struct Seats {
    ids: BTreeMap<MemberRef, SessionId>,
    seats: BTreeMap<SessionId, Seat>,
}

impl Seats {
    pub(super) fn members(&self) -> impl Iterator<Item = &MemberRef> {
        self.ids.keys()
    }

    pub(super) fn id(&self, member: &MemberRef) -> Option<SessionId> {
        self.ids.get(member).copied()
    }

    pub(super) fn by_id(&self, id: SessionId) -> Option<&Seat> {
        self.seats.get(&id)
    }

    pub(super) fn get(&self, member: &MemberRef) -> Option<&Session> {
        Some(&self.seats.get(self.ids.get(member)?)?.session)
    }

    pub(super) fn get_mut(&mut self, member: &MemberRef) -> Option<&mut Session> {
        Some(&mut self.seats.get_mut(self.ids.get(member)?)?.session)
    }

    /// Puts in the session of a member that has none.
    pub(super) fn insert(&mut self, seat: Seat) {
        let id = seat.session.id;
        self.ids.insert(seat.member.clone(), id);
        self.seats.insert(id, seat);
    }

    pub(super) fn remove(&mut self, member: &MemberRef) -> Option<Session> {
        Some(self.seats.remove(&self.ids.remove(member)?)?.session)
    }

    pub(super) fn into_sessions(self) -> impl Iterator<Item = Session> {
        self.seats.into_values().map(|seat| seat.session)
    }
}
