//! Members that sleep at the wrong moment, run loops that hear nothing, and operators that move partitions.

use tenure_core::Command;
use tenure_core::command::{MovePartition, OperatorContext};
use tenure_core::state::Ownership;
use tenure_model::{MemberId, Partition, RequestId};

use super::super::member::work::Step;
use super::super::network::Host;
use super::super::node::Waiter;
use super::super::rng::nanos;
use super::super::world::{Event, LEASE, World};
use super::Fault;

/// The next member that gets to a step sleeps there.
#[derive(Clone, Copy, Debug)]
pub struct Trap {
    pub step: Step,
    pub length: u64,
    /// How long its run loop hears nothing once it is awake again, in nanoseconds. If it is not 0, the process does not
    /// look at its leases any more either.
    pub deaf_for: u64,
}

/// A member that was trapped with a grant.
#[derive(Clone, Copy, Debug)]
pub struct Sleeper {
    pub member: usize,
    pub boot: u64,
    pub partition: Partition,
}

/// Longest time for which a run loop hears nothing, in milliseconds.
const DEAF_MS_MAX: u64 = 6_000;

impl World {
    pub(super) fn trap(&mut self, length: u64) {
        const STEPS: [Step; 8] = [
            Step::Register,
            Step::Register,
            Step::Register,
            Step::Verify,
            Step::Resume,
            Step::Write,
            Step::Write,
            Step::Commit,
        ];
        let step = STEPS[self.rng.position(STEPS.len())];
        let deaf_for = if self.rng.chance(70) { self.rng.millis(50, DEAF_MS_MAX) } else { 0 };
        self.traps.push(Trap { step, length: length + nanos(LEASE.ttl_ms), deaf_for });
        if matches!(step, Step::Register | Step::Verify | Step::Resume) {
            // So that somebody gets there.
            self.move_somewhere();
        }
    }

    /// Whoever sleeps with an older grant of a partition may wake while another takes a step with a newer one.
    pub fn rouse(&mut self, partition: Partition, by: usize, is_acquiring: bool) {
        let percent = if is_acquiring { 35 } else { 5 };
        let is_other = |sleeper: &Sleeper| sleeper.partition == partition && sleeper.member != by;
        let Some(position) = self.sleepers.iter().position(is_other) else { return };
        if self.rng.chance(percent) {
            let sleeper = self.sleepers.swap_remove(position);
            if self.is_of_member(sleeper.member, sleeper.boot) {
                self.resume(Host::Member(sleeper.member));
            }
        }
    }

    pub(super) fn deafen(&mut self, member: usize, length: u64) {
        self.members[member].deaf_until = self.now + length.min(nanos(DEAF_MS_MAX));
    }

    /// A partition leaves its owner and comes back, so that its old grant and its new one are of the same member.
    pub(super) fn there_and_back(&mut self) -> bool {
        let Some((partition, owner)) = self.owned_partition() else { return false };
        let Some(place) = self.members.iter().position(|member| member.id == owner) else {
            return false;
        };
        let Some(other) = self.other_member(&owner) else { return false };
        self.lost_answers.insert(place);
        self.move_to(partition, other);
        let back = self.rng.millis(40, 700);
        for back in [back, back + self.rng.millis(200, 900)] {
            let fault = Fault::Return { partition, to: owner.clone() };
            self.after(back, Event::Mend { fault });
        }
        true
    }

    /// A partition that is held and acquired, with its owner.
    fn owned_partition(&mut self) -> Option<(Partition, MemberId)> {
        let group = self.log.state.group(&self.group).ok()?;
        let owned =
            |(partition, found): (&Partition, &tenure_core::state::PartitionState)| match &found
                .ownership
            {
                Ownership::Held { member, acquired: true } => Some((*partition, member.clone())),
                Ownership::Held { .. } | Ownership::Revoking { .. } | Ownership::Free => None,
            };
        let mut owned: Vec<_> = group.partitions.iter().filter_map(owned).collect();
        if owned.is_empty() {
            return None;
        }
        let position = self.rng.position(owned.len());
        Some(owned.swap_remove(position))
    }

    /// A member of the group that is not this one.
    fn other_member(&mut self, than: &MemberId) -> Option<MemberId> {
        let group = self.log.state.group(&self.group).ok()?;
        let mut others: Vec<_> =
            group.members.keys().filter(|member| *member != than).cloned().collect();
        if others.is_empty() {
            return None;
        }
        let position = self.rng.position(others.len());
        Some(others.swap_remove(position))
    }

    /// An operator moves a partition to any member, or to who owns it already.
    pub(super) fn move_somewhere(&mut self) -> bool {
        let Ok(group) = self.log.state.group(&self.group) else { return false };
        let mut members: Vec<_> = group.members.keys().cloned().collect();
        if members.is_empty() || self.reigning().is_none() {
            return false;
        }
        let to = members.swap_remove(self.rng.position(members.len()));
        let partition = self.partitions[self.rng.position(self.partitions.len())];
        self.move_to(partition, to);
        true
    }

    /// An operator moves a partition away from its owner.
    pub(super) fn move_away(&mut self) {
        if let Some((partition, owner)) = self.owned_partition()
            && let Some(other) = self.other_member(&owner)
        {
            self.move_to(partition, other);
        }
    }

    pub(super) fn move_to(&mut self, partition: Partition, to: MemberId) {
        let Some(node) = self.reigning() else { return };
        let request = format!("move-{}-{}", self.now, self.event_count);
        let operator = OperatorContext {
            request: RequestId::new(&request).expect("a name"),
            reason: "a test".to_owned(),
            actor: "the simulator".to_owned(),
        };
        let group = self.group.clone();
        let command = Command::MovePartition(MovePartition { operator, group, partition, to });
        self.submit(node, command, Waiter::Nobody);
    }
}
