//! Ways that are cut and ways that are slow.

use tenure_proto::v1::SessionDown;
use tenure_proto::v1::session_down::Down;

use super::super::network::Host;
use super::super::rng::nanos;
use super::super::world::{Event, LEASE, NODE_COUNT, World};
use super::Fault;

/// How long the ways of a member are slow before it is not heard any more, in milliseconds.
const SLOW_BEFORE_MS: (u64, u64) = (1_000, 3_500);

impl World {
    pub(super) fn cut_member(&mut self, member: usize, node: usize, length: u64) -> bool {
        let place = Host::Member(member);
        let mut cuts = Vec::new();
        let (ups, downs) = match self.rng.below(3) {
            0 => (true, false),
            1 => (false, true),
            _ => (true, true),
        };
        let others: Vec<Host> = match self.rng.below(3) {
            0 => vec![Host::Node(node)],
            1 => (0..NODE_COUNT).map(Host::Node).collect(),
            _ => vec![Host::Sink],
        };
        for other in others {
            if ups {
                cuts.push((place, other));
            }
            if downs {
                cuts.push((other, place));
            }
        }
        self.cut_all(&cuts, length)
    }

    pub(super) fn cut_node(&mut self, node: usize, length: u64) -> bool {
        let mut cuts = Vec::new();
        let one_way = self.rng.chance(30);
        for other in (0..NODE_COUNT).filter(|other| *other != node) {
            cuts.push((Host::Node(node), Host::Node(other)));
            if !one_way {
                cuts.push((Host::Node(other), Host::Node(node)));
            }
        }
        self.cut_all(&cuts, length)
    }

    /// Nothing gets from a member to any node, or back.
    pub(super) fn cut_off(&mut self, member: usize, length: u64) -> bool {
        let place = Host::Member(member);
        let both = |node| [(place, Host::Node(node)), (Host::Node(node), place)];
        let cuts: Vec<_> = (0..NODE_COUNT).flat_map(both).collect();
        self.cut_all(&cuts, length)
    }

    /// Cuts ways that are still open, for `length`. False: there was none.
    pub(super) fn cut_all(&mut self, cuts: &[(Host, Host)], length: u64) -> bool {
        let mut any = false;
        for (from, to) in cuts {
            if self.network.is_cut(*from, *to) {
                continue;
            }
            self.say(|| format!("cut {from:?} to {to:?} for {} ms", length / 1_000_000));
            self.network.cut(*from, *to, true);
            self.after(length, Event::Mend { fault: Fault::Cut(*from, *to) });
            any = true;
        }
        any
    }

    /// The ways of a member get slow, and sometimes it is then not heard any more: the last answer that it got is an
    /// old one.
    pub(super) fn slow_ways(&mut self, member: usize, length: u64) {
        let place = Host::Member(member);
        let extra = self.rng.millis(100, 1_500);
        let gets_unheard = self.rng.chance(70);
        let length = if gets_unheard { length.max(nanos(SLOW_BEFORE_MS.1)) } else { length };
        for node in 0..NODE_COUNT {
            self.slow(place, Host::Node(node), extra, length);
            self.slow(Host::Node(node), place, extra, length);
        }
        let late = self.rng.millis(100, 6_000);
        self.slow(place, Host::Sink, late, length);
        if gets_unheard {
            let begin = self.rng.millis(SLOW_BEFORE_MS.0, SLOW_BEFORE_MS.1);
            let length = self.rng.millis(LEASE.ttl_ms + 500, LEASE.ttl_ms * 2);
            self.after(begin, Event::Mend { fault: Fault::Unheard { member, length } });
        }
    }

    fn slow(&mut self, from: Host, to: Host, extra: u64, length: u64) {
        self.network.slow(from, to, extra);
        self.after(length, Event::Mend { fault: Fault::Slow(from, to) });
    }

    /// A member hears the nodes, and is not heard.
    pub(super) fn silence(&mut self, member: usize, length: u64) {
        let way = |node| (Host::Member(member), Host::Node(node));
        let cuts: Vec<_> = (0..NODE_COUNT).map(way).collect();
        self.cut_all(&cuts, length);
    }

    /// Whether the answer to an act is lost on its way down, with the connection; then the member is cut off for a
    /// while.
    pub fn loses_answer(&mut self, member: usize, down: &SessionDown) -> bool {
        if !matches!(down.down, Some(Down::ActAnswer(_))) || !self.lost_answers.remove(&member) {
            return false;
        }
        self.say(|| format!("member {member} does not hear what became of an act"));
        let length = self.rng.millis(150, 1_400);
        self.cut_off(member, length);
        true
    }
}
