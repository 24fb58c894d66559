//! Raft leaders that change, restart and cannot propose.

use super::super::network::Host;
use super::super::rng::nanos;
use super::super::world::{Event, LEASE, NODE_COUNT, SILENCE_SLACK_MS, World};
use super::Fault;

/// The shortest reign in which a dead member is certainly logged as silent, in milliseconds.
const REIGN_MS: u64 = LEASE.heartbeat_interval_ms + 2 * SILENCE_SLACK_MS;

impl World {
    pub(super) fn elect_another(&mut self) -> bool {
        let able: Vec<usize> = (0..NODE_COUNT).filter(|node| self.has_quorum(*node)).collect();
        if able.is_empty() {
            return false;
        }
        let leader = able[self.rng.position(able.len())];
        self.elect(leader);
        true
    }

    /// Elects any node but this one.
    pub(super) fn elect_away(&mut self, node: usize) {
        let is_able = |other: &usize| *other != node && self.has_quorum(*other);
        let able: Vec<usize> = (0..NODE_COUNT).filter(is_able).collect();
        if !able.is_empty() {
            let leader = able[self.rng.position(able.len())];
            self.elect(leader);
        }
    }

    /// Proposals wait at the raft leader while the leadership goes away and, with luck, comes back. Sometimes one
    /// member is out of its reach for so long that it wants the member to expire, and is heard elsewhere meanwhile.
    pub(super) fn stall(&mut self, length: u64) -> bool {
        let Some(leader) = self.log.leader else { return false };
        let (away, back, length) = if self.rng.chance(60) {
            let member = self.rng.position(self.members.len());
            let away = self.rng.millis(LEASE.ttl_ms + 150, LEASE.ttl_ms + 600);
            let back = away + self.rng.millis(900, 2_300);
            let (place, node) = (Host::Member(member), Host::Node(leader));
            self.cut_all(&[(place, node), (node, place)], back);
            (away, back, back + self.rng.millis(20, 500))
        } else {
            let away = self.rng.within(length / 4, length / 2);
            let back = self.rng.within(length / 2, length - length / 8);
            (away, back, length)
        };
        self.nodes[leader].stalled_until = self.now + length;
        self.after(away, Event::Mend { fault: Fault::ElectAway { node: leader } });
        self.after(back, Event::Mend { fault: Fault::Elect { node: leader } });
        true
    }

    /// A member dies, and each raft leader in turn restarts once it had time enough to log the silence.
    pub(super) fn restart_again_and_again(&mut self, member: usize) -> bool {
        if !self.members[member].is_up {
            return false;
        }
        let length = self.rng.millis(LEASE.ttl_ms * 2, LEASE.ttl_ms * 4);
        match self.rng.below(3) {
            0 => {
                self.crash_member(member);
                self.after(length, Event::StartMember { member });
            }
            1 => self.pause(Host::Member(member), length),
            _ => {
                self.cut_off(member, length);
            }
        }
        let mut at = self.rng.millis(100, REIGN_MS);
        for _ in 0..self.rng.within(3, 5) {
            self.after(at, Event::Mend { fault: Fault::RestartLeader });
            at += nanos(REIGN_MS) + self.rng.millis(600, 1_600);
        }
        true
    }

    /// The raft leader restarts, from a snapshot as a rule, and may be elected again.
    pub(super) fn restart_leader(&mut self) {
        let Some(leader) = self.log.leader else { return };
        for node in 0..NODE_COUNT {
            if self.rng.chance(70) {
                self.take_snapshot(node);
            }
        }
        self.crash_node(leader);
        let down = self.rng.millis(20, 600);
        self.after(down, Event::StartNode { node: leader });
        if self.rng.chance(40) {
            let again = down + self.rng.millis(50, 300);
            self.after(again, Event::Mend { fault: Fault::Elect { node: leader } });
        }
    }
}
