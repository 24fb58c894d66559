//! What goes wrong, and for how long.

use tenure_core::Command;
use tenure_core::command::{MovePartition, OperatorContext};
use tenure_model::RequestId;
use tenure_sdk::session::machine::Act;

use super::member::work::Step;
use super::network::Host;
use super::node::Waiter;
use super::rng::nanos;
use super::world::{Event, LEASE, NODE_COUNT, World};

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    MemberCrash,
    MemberPause,
    /// A member sleeps right before it sends something.
    MemberTrap,
    MemberLeave,
    NodeCrash,
    NodePause,
    Election,
    /// One way between a member and a node is cut, or all ways of one of them.
    Cut,
    /// A node is cut off from the other nodes.
    Partition,
    StreamBreak,
    Slow,
    SinkDown,
    /// Proposals of the raft leader wait, while another may be elected.
    Stall,
    Move,
}

impl Kind {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::MemberCrash,
        Self::MemberPause,
        Self::MemberTrap,
        Self::MemberLeave,
        Self::NodeCrash,
        Self::NodePause,
        Self::Election,
        Self::Cut,
        Self::Partition,
        Self::StreamBreak,
        Self::Slow,
        Self::SinkDown,
        Self::Stall,
        Self::Move,
    ];

    /// Its name, for tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MemberCrash => "member crash",
            Self::MemberPause => "member pause",
            Self::MemberTrap => "member trap",
            Self::MemberLeave => "member leave",
            Self::NodeCrash => "node crash",
            Self::NodePause => "node pause",
            Self::Election => "election",
            Self::Cut => "cut",
            Self::Partition => "partition",
            Self::StreamBreak => "stream break",
            Self::Slow => "slow",
            Self::SinkDown => "sink down",
            Self::Stall => "stall",
            Self::Move => "move",
        }
    }
}

/// A fault that ends by itself.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Cut(Host, Host),
    Slow(Host, Host),
    Elect,
    StallBack {
        node: usize,
    },
    /// An operator moves something.
    Move,
}

/// How long refusals are counted for a fault after it struck, in milliseconds.
const AT_WORK_MS: u64 = 6_000;

impl World {
    /// One fault strikes.
    pub fn strike(&mut self) {
        if self.healed_at.is_some() {
            return;
        }
        let kind = Kind::ALL[self.rng.position(Kind::ALL.len())];
        self.fault_count += 1;
        self.oracle.at_work.insert(kind, self.now + nanos(AT_WORK_MS));
        self.say(|| format!("fault: {}", kind.as_str()));
        let member = self.rng.position(self.members.len());
        let node = match self.log.leader {
            Some(leader) if self.rng.chance(60) => leader,
            Some(_) | None => self.rng.position(NODE_COUNT),
        };
        let length = self.rng.millis(300, LEASE.ttl_ms * 3);
        match kind {
            Kind::MemberCrash => {
                self.crash_member(member);
                self.after(length, Event::StartMember { member });
            }
            Kind::MemberPause => {
                let acquiring = self.members.iter().position(super::member::Member::is_acquiring);
                self.pause(Host::Member(acquiring.unwrap_or(member)), length);
            }
            Kind::MemberTrap => self.trap(length),
            Kind::MemberLeave => {
                if self.members[member].is_up {
                    self.act_of(member, Act::Leave { reason: "shutdown".to_owned() });
                }
            }
            Kind::NodeCrash => {
                if self.rng.chance(50) {
                    self.take_snapshot(node);
                }
                self.crash_node(node);
                self.after(length, Event::StartNode { node });
            }
            Kind::NodePause => self.pause(Host::Node(node), length),
            Kind::Election => self.elect_another(),
            Kind::Cut => self.cut_member(member, node, length),
            Kind::Partition => self.cut_node(node, length),
            Kind::StreamBreak => {
                let streams: Vec<u64> = self.network.streams.keys().copied().collect();
                if !streams.is_empty() {
                    let stream = streams[self.rng.position(streams.len())];
                    self.break_stream(stream);
                }
            }
            Kind::Slow => self.slow_ways(member, length),
            Kind::SinkDown => self.sinks_down_until = self.now + length,
            Kind::Stall => self.stall(length),
            Kind::Move => self.move_somewhere(),
        }
    }

    fn trap(&mut self, length: u64) {
        const STEPS: [Step; 5] =
            [Step::Register, Step::Verify, Step::Resume, Step::Write, Step::Commit];
        let step = STEPS[self.rng.position(STEPS.len())];
        self.traps.push((step, length + nanos(LEASE.ttl_ms)));
        if matches!(step, Step::Register | Step::Verify | Step::Resume) {
            // So that somebody gets there.
            self.move_somewhere();
        }
    }

    fn elect_another(&mut self) {
        let able: Vec<usize> = (0..NODE_COUNT).filter(|node| self.has_quorum(*node)).collect();
        if !able.is_empty() {
            let leader = able[self.rng.position(able.len())];
            self.elect(leader);
        }
    }

    fn cut_member(&mut self, member: usize, node: usize, length: u64) {
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
        self.cut_all(&cuts, length);
    }

    fn cut_node(&mut self, node: usize, length: u64) {
        let mut cuts = Vec::new();
        let one_way = self.rng.chance(30);
        for other in (0..NODE_COUNT).filter(|other| *other != node) {
            cuts.push((Host::Node(node), Host::Node(other)));
            if !one_way {
                cuts.push((Host::Node(other), Host::Node(node)));
            }
        }
        self.cut_all(&cuts, length);
    }

    fn cut_all(&mut self, cuts: &[(Host, Host)], length: u64) {
        for (from, to) in cuts {
            self.say(|| format!("cut {from:?} to {to:?} for {} ms", length / 1_000_000));
            self.network.cut(*from, *to, true);
            self.after(length, Event::Mend { fault: Fault::Cut(*from, *to) });
        }
    }

    fn slow_ways(&mut self, member: usize, length: u64) {
        let place = Host::Member(member);
        let extra = self.rng.millis(100, 1_500);
        for node in 0..NODE_COUNT {
            self.slow(place, Host::Node(node), extra, length);
            self.slow(Host::Node(node), place, extra, length);
        }
        let late = self.rng.millis(100, 6_000);
        self.slow(place, Host::Sink, late, length);
    }

    fn slow(&mut self, from: Host, to: Host, extra: u64, length: u64) {
        self.network.slow(from, to, extra);
        self.after(length, Event::Mend { fault: Fault::Slow(from, to) });
    }

    /// Proposals wait at the raft leader while the leadership goes away and, with luck, comes back.
    fn stall(&mut self, length: u64) {
        let Some(leader) = self.log.leader else { return };
        self.nodes[leader].stalled_until = self.now + length;
        let away = self.rng.within(length / 4, length / 2);
        self.after(away, Event::Mend { fault: Fault::Elect });
        let back = self.rng.within(length / 2, length - length / 8);
        self.after(back, Event::Mend { fault: Fault::StallBack { node: leader } });
    }

    /// An operator moves a partition to a member.
    fn move_somewhere(&mut self) {
        let Some(node) = self.reigning() else { return };
        let Ok(group) = self.log.state.group(&self.group) else { return };
        let members: Vec<_> = group.members.keys().cloned().collect();
        if members.is_empty() {
            return;
        }
        let to = members[self.rng.position(members.len())].clone();
        let partition = self.partitions[self.rng.position(self.partitions.len())];
        let request = format!("move-{}", self.now);
        let operator = OperatorContext {
            request: RequestId::new(&request).expect("a name"),
            reason: "a test".to_owned(),
            actor: "the simulator".to_owned(),
        };
        let group = self.group.clone();
        let command = Command::MovePartition(MovePartition { operator, group, partition, to });
        self.submit(node, command, Waiter::Nobody);
    }

    /// A fault is over.
    pub fn mend(&mut self, fault: Fault) {
        match fault {
            Fault::Cut(from, to) => self.network.cut(from, to, false),
            Fault::Slow(from, to) => self.network.slow(from, to, 0),
            Fault::Elect => self.elect_another(),
            Fault::Move => self.move_somewhere(),
            Fault::StallBack { node } => {
                if self.has_quorum(node) && self.log.leader != Some(node) {
                    self.elect(node);
                }
            }
        }
    }

    /// Ends every fault for good.
    pub fn heal(&mut self) {
        self.say(|| "everything is healed".to_owned());
        self.healed_at = Some(self.now);
        self.network.heal();
        self.traps.clear();
        self.sinks_down_until = 0;
        for node in 0..NODE_COUNT {
            self.nodes[node].stalled_until = 0;
            self.resume(Host::Node(node));
            self.start_node(node);
        }
        for member in 0..self.members.len() {
            self.resume(Host::Member(member));
            self.start_member(member);
        }
    }
}
