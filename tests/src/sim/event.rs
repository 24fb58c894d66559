//! What happens, and when.

use std::cmp::Ordering;

use tenure_model::{Epoch, Partition};

use super::faults::Fault;
use super::member::work::Ask;
use super::network::{Host, Network};
use super::node::Term;
use super::node::calls::{Answer, Call};
use super::sink::{SinkRefusal, Writer};

/// Something that happens at a place or in the world.
#[derive(Debug)]
pub enum Event {
    /// The raft leader's loop looks at deadlines.
    Tick { node: usize, boot: u64 },
    /// A node hears how far the log is committed and who leads.
    Advance { node: usize, boot: u64, upto: u64, term: Term },
    /// The raft leader is heard, and snapshots go to those far behind.
    Beat,
    /// A node proposes what waits.
    Propose { node: usize, boot: u64 },
    /// A proposal reaches a quorum, or tries again.
    Quorum { flight: u64 },
    /// The proposer hears what became of its proposal; nothing: that is not known.
    Outcome { node: usize, boot: u64, flight: u64, index: Option<u64> },
    /// A confirmation of leadership reaches a quorum, or tries again.
    Confirm { node: usize, boot: u64, read: u64 },
    /// The confirmation is back.
    Confirmed { node: usize, boot: u64, read: u64, is_confirmed: bool },
    /// The next message of a stream arrives at the node.
    Up { stream: u64 },
    /// The next message of a stream arrives at the member.
    Down { stream: u64 },
    /// The attempt at a connection has ended.
    Connected { member: usize, boot: u64, stream: u64 },
    /// The session machine wants the time.
    Wake { member: usize, boot: u64, wake: u64 },
    /// In a control run, a release that was held back leaves.
    SendLate { member: usize, boot: u64, stream: u64, up: tenure_proto::v1::SessionUp },
    /// A preparation of the run loop has ended.
    Prepared { member: usize, boot: u64, partition: Partition, fails: bool },
    /// The run loop takes what the session says.
    Told { member: usize, boot: u64 },
    /// The run loop sends a question of one grant.
    Send { member: usize, boot: u64, grant: (Partition, Epoch), id: u64, ask: Ask },
    /// A timer of one grant; `id` names the question that it waits for, 0 the pace.
    Timer { member: usize, boot: u64, grant: (Partition, Epoch), id: u64 },
    /// A question arrives at a sink.
    Sink { member: usize, boot: u64, grant: (Partition, Epoch), id: u64, ask: Ask },
    /// Its answer arrives.
    SinkAnswer { member: usize, boot: u64, grant: (Partition, Epoch), id: u64, answer: SinkAnswer },
    /// A call arrives at a coordinator.
    Call { node: usize, call: Call },
    /// Its answer arrives.
    CallAnswer { call: Call, answer: Answer },
    /// A fault strikes.
    Strike,
    /// A fault is over.
    Mend { fault: Fault },
    /// A process goes on.
    Resume { host: Host },
    /// A member's process starts anew.
    StartMember { member: usize },
    /// A coordinator starts anew.
    StartNode { node: usize },
    /// All faults end.
    Heal,
    /// The run is over.
    End,
}

/// What a sink answers.
#[derive(Clone, Copy, Debug)]
pub enum SinkAnswer {
    Registered(Writer),
    Written,
    Resumed(u64),
    Refused(SinkRefusal),
}

impl Event {
    /// The process that it happens in: while that is paused, it waits.
    pub(super) fn host(&self, network: &Network) -> Option<Host> {
        match self {
            Self::Tick { node, .. }
            | Self::Advance { node, .. }
            | Self::Propose { node, .. }
            | Self::Outcome { node, .. }
            | Self::Confirmed { node, .. }
            | Self::Call { node, .. } => Some(Host::Node(*node)),
            Self::Up { stream } => {
                network.streams.get(stream).map(|stream| Host::Node(stream.node))
            }
            Self::Down { stream } => {
                network.streams.get(stream).map(|stream| Host::Member(stream.member))
            }
            Self::Connected { member, .. }
            | Self::Wake { member, .. }
            | Self::Prepared { member, .. }
            | Self::Told { member, .. }
            | Self::SendLate { member, .. }
            | Self::Send { member, .. }
            | Self::Timer { member, .. }
            | Self::SinkAnswer { member, .. }
            | Self::CallAnswer { call: Call { member, .. }, .. } => Some(Host::Member(*member)),
            Self::Beat
            | Self::Quorum { .. }
            | Self::Confirm { .. }
            | Self::Sink { .. }
            | Self::Strike
            | Self::Mend { .. }
            | Self::Resume { .. }
            | Self::StartMember { .. }
            | Self::StartNode { .. }
            | Self::Heal
            | Self::End => None,
        }
    }

    /// Whether it belongs to the session's thread of a member, which its run loop may overtake.
    pub(super) const fn is_of_session(&self) -> bool {
        matches!(self, Self::Down { .. } | Self::Connected { .. } | Self::Wake { .. })
    }
}

/// An event with its time. Those of one time happen in the order of their numbers.
pub struct Scheduled {
    pub at: u64,
    pub number: u64,
    pub event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}
