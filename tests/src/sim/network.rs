//! The virtual network: delays, cuts and the streams of sessions.
//!
//! A stream keeps its order and loses nothing until it breaks; what goes beside it may overtake. While a way is cut,
//! what was sent over a stream waits and may arrive late, as TCP has it; a lone message is lost.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tenure_proto::v1;

use super::rng::Rng;

/// A place on the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// A coordinator.
    Node(usize),
    /// The machine of a member; it keeps its place when the process starts anew.
    Member(usize),
    /// All sinks.
    Sink,
}

/// One stream of a session.
#[derive(Debug)]
pub struct Stream {
    pub member: usize,
    pub member_boot: u64,
    pub node: usize,
    pub node_boot: u64,
    /// On their way up; nothing: the end.
    pub up: VecDeque<Option<v1::SessionUp>>,
    /// On their way down; an error: the end, with the coordinator's word if there is one.
    pub down: VecDeque<Result<v1::SessionDown, Option<v1::Error>>>,
    pub up_at: u64,
    pub down_at: u64,
    /// The member gave it up: nothing that comes down is taken any more.
    pub is_given_up: bool,
    /// The node has said its last word.
    pub is_over: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Network {
    cuts: BTreeSet<(Host, Host)>,
    /// Longest extra delay of a way, in nanoseconds.
    slow: BTreeMap<(Host, Host), u64>,
    pub streams: BTreeMap<u64, Stream>,
    next_stream: u64,
}

impl Network {
    /// Cuts the way from one place to another, or opens it again.
    pub fn cut(&mut self, from: Host, to: Host, is_cut: bool) {
        if is_cut {
            self.cuts.insert((from, to));
        } else {
            self.cuts.remove(&(from, to));
        }
    }

    /// Makes a way slow, by up to `extra` nanoseconds a message; 0 makes it fast again.
    pub fn slow(&mut self, from: Host, to: Host, extra: u64) {
        if extra > 0 {
            self.slow.insert((from, to), extra);
        } else {
            self.slow.remove(&(from, to));
        }
    }

    /// Opens every way again.
    pub fn heal(&mut self) {
        self.cuts.clear();
        self.slow.clear();
    }

    /// Whether nothing gets from one place to the other.
    #[must_use]
    pub fn is_cut(&self, from: Host, to: Host) -> bool {
        self.cuts.contains(&(from, to))
    }

    /// Whether both ways between two places are open.
    #[must_use]
    pub fn is_open(&self, one: Host, other: Host) -> bool {
        !self.is_cut(one, other) && !self.is_cut(other, one)
    }

    /// How long one message takes, in nanoseconds.
    pub fn delay(&self, from: Host, to: Host, rng: &mut Rng) -> u64 {
        let usual = rng.within(200_000, 3_000_000);
        match self.slow.get(&(from, to)) {
            Some(extra) => usual + rng.below(*extra),
            None => usual,
        }
    }

    /// Adds a stream; answers its number.
    pub fn open(&mut self, member: (usize, u64), node: (usize, u64)) -> u64 {
        self.next_stream += 1;
        let stream = Stream {
            member: member.0,
            member_boot: member.1,
            node: node.0,
            node_boot: node.1,
            up: VecDeque::new(),
            down: VecDeque::new(),
            up_at: 0,
            down_at: 0,
            is_given_up: false,
            is_over: false,
        };
        self.streams.insert(self.next_stream, stream);
        self.next_stream
    }
}
