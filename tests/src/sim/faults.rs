//! What goes wrong, and for how long.
//!
//! Times and places are random, and leaning towards those that hurt: who sleeps wakes while another takes its place,
//! who was heard late is then not heard at all, a raft leader that could not propose comes back with what it wanted.
//! The leaning is part of every run, whether a protection is missing or not.

mod leaders;
mod members;
mod ways;

use tenure_model::{MemberId, Partition};
use tenure_sdk::session::machine::Act;

use super::network::Host;
use super::rng::nanos;
use super::world::{Event, LEASE, NODE_COUNT, World};

pub use self::members::{Sleeper, Trap};

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    MemberCrash,
    MemberPause,
    /// A member sleeps right before it sends something.
    MemberTrap,
    MemberLeave,
    /// The run loop of a member hears nothing of its session, while its tasks go on.
    Deaf,
    NodeCrash,
    NodePause,
    Election,
    /// The raft leader restarts again and again, while a member is dead.
    Restarts,
    /// Proposals of the raft leader wait, while another may be elected.
    Stall,
    /// One way between a member and a node is cut, or all ways of one of them.
    Cut,
    /// A node is cut off from the other nodes.
    Partition,
    StreamBreak,
    Slow,
    SinkDown,
    Move,
    /// An operator moves a partition there and back, and the old owner does not hear the answer to its release.
    Return,
}

impl Kind {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::MemberCrash,
        Self::MemberPause,
        Self::MemberTrap,
        Self::MemberLeave,
        Self::Deaf,
        Self::NodeCrash,
        Self::NodePause,
        Self::Election,
        Self::Restarts,
        Self::Stall,
        Self::Cut,
        Self::Partition,
        Self::StreamBreak,
        Self::Slow,
        Self::SinkDown,
        Self::Move,
        Self::Return,
    ];

    /// Its name, for tables.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MemberCrash => "member crash",
            Self::MemberPause => "member pause",
            Self::MemberTrap => "member trap",
            Self::MemberLeave => "member leave",
            Self::Deaf => "deaf",
            Self::NodeCrash => "node crash",
            Self::NodePause => "node pause",
            Self::Election => "election",
            Self::Restarts => "restarts",
            Self::Stall => "stall",
            Self::Cut => "cut",
            Self::Partition => "partition",
            Self::StreamBreak => "stream break",
            Self::Slow => "slow",
            Self::SinkDown => "sink down",
            Self::Move => "move",
            Self::Return => "return",
        }
    }

    /// How often it is drawn, as against the others.
    const fn weight(self) -> usize {
        match self {
            Self::MemberTrap => 5,
            Self::Slow => 4,
            Self::Return => 3,
            Self::NodeCrash | Self::Restarts | Self::Stall | Self::Cut => 2,
            Self::MemberCrash
            | Self::MemberPause
            | Self::MemberLeave
            | Self::Deaf
            | Self::NodePause
            | Self::Election
            | Self::Partition
            | Self::StreamBreak
            | Self::SinkDown
            | Self::Move => 1,
        }
    }
}

/// The end of a fault, or its next step.
#[derive(Clone, Debug)]
pub enum Fault {
    Cut(Host, Host),
    Slow(Host, Host),
    /// A member that was slow is not heard any more.
    Unheard {
        member: usize,
        length: u64,
    },
    /// Another node is elected.
    ElectAway {
        node: usize,
    },
    /// This node is elected.
    Elect {
        node: usize,
    },
    RestartLeader,
    /// An operator moves a partition back to its former owner.
    Return {
        partition: Partition,
        to: MemberId,
    },
    /// An operator moves something, until there was a handoff.
    Insist,
}

/// How long refusals are counted for a fault after it struck, in milliseconds.
const AT_WORK_MS: u64 = 6_000;

/// Draws of a fault, while those drawn find nothing to strike.
const DRAWS: usize = 8;

/// Pause between two attempts at a handoff, in milliseconds.
const INSIST_MS: u64 = 2_000;

impl World {
    /// One fault strikes.
    pub fn strike(&mut self) {
        if self.healed_at.is_some() {
            return;
        }
        for _ in 0..DRAWS {
            let kind = self.draw_kind();
            let before = self.oracle.at_work.insert(kind, self.now + nanos(AT_WORK_MS));
            self.say(|| format!("fault: {}", kind.as_str()));
            if self.strike_with(kind) {
                self.fault_count += 1;
                return;
            }
            match before {
                Some(until) => self.oracle.at_work.insert(kind, until),
                None => self.oracle.at_work.remove(&kind),
            };
        }
    }

    fn draw_kind(&mut self) -> Kind {
        let all: usize = Kind::ALL.iter().map(|kind| kind.weight()).sum();
        let mut left = self.rng.position(all);
        for kind in Kind::ALL {
            match left.checked_sub(kind.weight()) {
                Some(rest) => left = rest,
                None => return *kind,
            }
        }
        unreachable!("the weights add up")
    }

    /// False: there is nothing to strike.
    fn strike_with(&mut self, kind: Kind) -> bool {
        let member = self.rng.position(self.members.len());
        let node = match self.log.leader {
            Some(leader) if self.rng.chance(60) => leader,
            Some(_) | None => self.rng.position(NODE_COUNT),
        };
        let length = self.rng.millis(300, LEASE.ttl_ms * 3);
        let (member_runs, node_runs) = (self.members[member].is_up, self.nodes[node].is_up);
        match kind {
            Kind::MemberCrash | Kind::MemberPause | Kind::MemberLeave | Kind::Deaf
                if !member_runs =>
            {
                return false;
            }
            Kind::NodeCrash | Kind::NodePause if !node_runs => return false,
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
                self.act_of(member, Act::Leave { reason: "shutdown".to_owned() });
            }
            Kind::Deaf => self.deafen(member, length),
            Kind::NodeCrash => {
                if self.rng.chance(50) {
                    self.take_snapshot(node);
                }
                self.crash_node(node);
                self.after(length, Event::StartNode { node });
            }
            Kind::NodePause => self.pause(Host::Node(node), length),
            Kind::Election => return self.elect_another(),
            Kind::Restarts => return self.restart_again_and_again(member),
            Kind::Stall => return self.stall(length),
            Kind::Cut => return self.cut_member(member, node, length),
            Kind::Partition => return self.cut_node(node, length),
            Kind::StreamBreak => {
                let streams: Vec<u64> = self.network.streams.keys().copied().collect();
                if streams.is_empty() {
                    return false;
                }
                let stream = streams[self.rng.position(streams.len())];
                self.break_stream(stream);
            }
            Kind::Slow => self.slow_ways(member, length),
            Kind::SinkDown => self.sinks_down_until = self.now + length,
            Kind::Move => return self.move_somewhere(),
            Kind::Return => return self.there_and_back(),
        }
        true
    }

    /// A fault is over, or takes its next step.
    pub fn mend(&mut self, fault: Fault) {
        match fault {
            Fault::Cut(from, to) => self.network.cut(from, to, false),
            Fault::Slow(from, to) => self.network.slow(from, to, 0),
            Fault::Insist => self.insist(),
            _ if self.healed_at.is_some() => {}
            Fault::Unheard { member, length } => self.silence(member, length),
            Fault::ElectAway { node } => self.elect_away(node),
            Fault::Elect { node } => {
                if self.has_quorum(node) && self.log.leader != Some(node) {
                    self.elect(node);
                }
            }
            Fault::RestartLeader => self.restart_leader(),
            Fault::Return { partition, to } => self.move_to(partition, to),
        }
    }

    /// Every run has a handoff: an operator moves something until there was one.
    fn insist(&mut self) {
        if self.oracle.handoff_count == 0 {
            self.move_away();
            self.after(nanos(INSIST_MS), Event::Mend { fault: Fault::Insist });
        }
    }

    /// Ends every fault for good.
    pub fn heal(&mut self) {
        self.say(|| "everything is healed".to_owned());
        self.healed_at = Some(self.now);
        self.network.heal();
        self.traps.clear();
        self.sleepers.clear();
        self.lost_answers.clear();
        self.sinks_down_until = 0;
        for node in 0..NODE_COUNT {
            self.nodes[node].stalled_until = 0;
            self.resume(Host::Node(node));
            self.start_node(node);
        }
        for member in 0..self.members.len() {
            self.resume(Host::Member(member));
            self.members[member].deaf_until = 0;
            self.start_member(member);
        }
    }
}
