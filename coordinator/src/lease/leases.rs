//! Leases by the ids that the table gives them, and by their members.

use std::collections::BTreeMap;

use tenure_core::command::MemberRef;
use tenure_model::{GroupId, MemberEpoch, MemberId};

use super::Lease;

/// Names a lease for as long as it is in its table, and nothing afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(u64);

/// See the module. A heartbeat finds its lease by the id: names of members are compared far slower.
#[derive(Debug)]
pub(super) struct Leases {
    ids: BTreeMap<MemberRef, LeaseId>,
    leases: BTreeMap<LeaseId, Lease>,
    newest: LeaseId,
}

impl Leases {
    pub(super) const fn new() -> Self {
        Self { ids: BTreeMap::new(), leases: BTreeMap::new(), newest: LeaseId(0) }
    }

    pub(super) fn len(&self) -> usize {
        self.leases.len()
    }

    pub(super) fn id(&self, member: &MemberRef) -> Option<LeaseId> {
        self.ids.get(member).copied()
    }

    pub(super) fn by_id(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.get(&id)
    }

    pub(super) fn by_id_mut(&mut self, id: LeaseId) -> Option<&mut Lease> {
        self.leases.get_mut(&id)
    }

    pub(super) fn get(&self, member: &MemberRef) -> Option<&Lease> {
        self.leases.get(self.ids.get(member)?)
    }

    pub(super) fn get_mut(&mut self, member: &MemberRef) -> Option<&mut Lease> {
        self.leases.get_mut(self.ids.get(member)?)
    }

    /// Puts in the lease of a member that has none.
    pub(super) fn insert(&mut self, member: MemberRef, lease: Lease) {
        self.newest.0 += 1;
        self.leases.insert(self.newest, lease);
        self.ids.insert(member, self.newest);
    }

    pub(super) fn remove(&mut self, member: &MemberRef) -> Option<Lease> {
        self.leases.remove(&self.ids.remove(member)?)
    }

    pub(super) fn members(&self) -> impl Iterator<Item = &MemberRef> {
        self.ids.keys()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&MemberRef, &mut Lease)> {
        let leases = &mut self.leases;
        let members: BTreeMap<LeaseId, &MemberRef> =
            self.ids.iter().map(|(member, id)| (*id, member)).collect();
        leases.iter_mut().filter_map(move |(id, lease)| Some((*members.get(id)?, lease)))
    }

    /// The membership of `member` in `group`, if it has a lease.
    pub(super) fn find(&self, group: &GroupId, member: &MemberId) -> Option<&MemberRef> {
        let (group, member) = (group.clone(), member.clone());
        let first = MemberRef { group, member, member_epoch: MemberEpoch(0) };
        let (found, _) = self.ids.range(&first..).next()?;
        (found.group == first.group && found.member == first.member).then_some(found)
    }
}
