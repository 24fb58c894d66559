//! A coordinator: the real machine and the real reign, in a process that crashes, sleeps and falls.

pub mod calls;
mod life;
mod propose;
mod reads;
pub mod sessions;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tenure_coordinator::machine::{Change, GroupMachine};
use tenure_coordinator::parts::leading::{self, Lane, Proposal};
use tenure_coordinator::parts::refusal::Refusal;
use tenure_coordinator::parts::reign::{Reign, WaitingMembers};
use tenure_coordinator::raft::{EntryContext, Machine as _, ProposeError};
use tenure_coordinator::soft::Beats;
use tenure_core::command::MemberRef;
use tenure_core::{Applied, Command, State};
use tenure_model::{GroupId, Index, Tick};
use tokio::sync::broadcast;

use self::calls::Call;
use self::sessions::Session;
use super::clock::{DriftingClock, SetClock};
use super::invariants::Fact;
use super::network::Host;
use super::rng::{Rng, nanos};
use super::world::{DRIFT_PPM, Event, World};

/// Pause between two looks of the raft leader's loop.
const TICK: u64 = 40_000_000;

/// A loop that stood still for longer than this moves all deadlines.
const GAP_LEAST: u64 = 200_000_000;

/// How long a proposal or a confirmation may take.
const PATIENCE: u64 = 3_000_000_000;

/// Pause between two attempts of what finds no quorum.
const AGAIN: u64 = 100_000_000;

/// A raft term and its leader, as a node hears of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Term {
    pub number: u64,
    pub leader: usize,
}

/// A raft leader that rules: it has a quorum, proposes, and looks at its deadlines without a gap.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    node: usize,
    term: u64,
    since: u64,
    seen_at: u64,
}

/// What waits for a proposal.
#[derive(Debug)]
pub enum Waiter {
    Join {
        stream: u64,
    },
    Act {
        stream: u64,
        request: u64,
    },
    Lane {
        term: u64,
        lane: Lane,
        members: Vec<MemberRef>,
    },
    Plan {
        term: u64,
        group: GroupId,
    },
    Call(Call),
    /// An operator that does not wait.
    Nobody,
}

/// What became of one command.
pub type Verdict = Result<(Arc<[Applied]>, usize), ProposeError>;

/// A confirmation of leadership, and what waits for it.
struct Read {
    purpose: Purpose,
    term: u64,
    /// The state must have this entry.
    index: u64,
    give_up_at: u64,
}

enum Purpose {
    Heartbeats(WaitingMembers),
    Call(Call),
}

/// A snapshot on the node's disk.
struct Snapshot {
    index: u64,
    bytes: Arc<Vec<u8>>,
    /// What it was taken from.
    state: Arc<State>,
}

/// See the module.
pub struct Node {
    /// Rises with every start of the process.
    pub boot: u64,
    pub is_up: bool,
    /// What waits while the process is paused.
    pub paused: Option<Vec<Event>>,
    clock: DriftingClock,
    machine_clock: SetClock,
    machine: GroupMachine,
    changes: broadcast::Receiver<Change>,
    /// Index of the last entry applied.
    pub applied: u64,
    /// Index up to which it knows the log to be committed.
    known: u64,
    pub term: Option<Term>,
    reign: Option<Reign>,
    beats: Arc<Beats>,
    last_tick: Tick,
    pub(super) sessions: BTreeMap<u64, Session>,
    queue: VecDeque<(Command, Waiter)>,
    flight: Option<(u64, Vec<Waiter>)>,
    /// The task that proposes stands still until then.
    pub stalled_until: u64,
    /// How long the loop stood still in this reign, in nanoseconds: deadlines have moved by it.
    pub gaps: u64,
    reads: BTreeMap<u64, Read>,
    next_read: u64,
    snapshot: Option<Snapshot>,
}

impl Node {
    /// A node that has just started for the first time.
    #[must_use]
    pub fn new(rng: &mut Rng) -> Self {
        let machine_clock = SetClock::default();
        let machine = GroupMachine::new(Arc::new(machine_clock.clone()));
        let changes = machine.subscribe();
        Self {
            boot: 0,
            is_up: true,
            paused: None,
            clock: new_clock(0, rng),
            machine_clock,
            machine,
            changes,
            applied: 0,
            known: 0,
            term: None,
            reign: None,
            beats: Arc::new(Beats::new()),
            last_tick: Tick::default(),
            sessions: BTreeMap::new(),
            queue: VecDeque::new(),
            flight: None,
            stalled_until: 0,
            gaps: 0,
            reads: BTreeMap::new(),
            next_read: 0,
            snapshot: None,
        }
    }

    /// Whether it believes to be the raft leader, first entry applied or not.
    fn believes_to_lead(&self, me: usize) -> bool {
        self.term.is_some_and(|term| term.leader == me)
    }

    /// Where a client is sent.
    fn not_leader(&self, me: usize) -> Refusal {
        let leader = self.term.filter(|term| term.leader != me).map(|term| address(term.leader));
        Refusal::not_leader(leader.as_deref())
    }
}

/// A clock as processes have it: any origin, and a rate within the declared drift.
pub fn new_clock(now: u64, rng: &mut Rng) -> DriftingClock {
    let drift = i64::try_from(rng.within(0, 2 * DRIFT_PPM.unsigned_abs())).unwrap_or(0) - DRIFT_PPM;
    DriftingClock::new(now, rng.within(nanos(1_000), nanos(1_000_000)), drift)
}

/// Where members reach a node.
#[must_use]
pub fn address(node: usize) -> String {
    format!("node-{node}:7400")
}

/// The node at an address.
#[must_use]
pub fn node_at(address: &str) -> Option<usize> {
    address.strip_prefix("node-")?.strip_suffix(":7400")?.parse().ok()
}

impl World {
    /// Whether an event is of the process that runs now.
    fn is_now(&self, node: usize, boot: u64) -> bool {
        self.nodes[node].is_up && self.nodes[node].boot == boot
    }

    fn node_clock(&self, node: usize) -> Tick {
        let now = self.nodes[node].clock.show(self.now);
        self.nodes[node].machine_clock.set(now);
        now
    }

    /// One look of the raft leader's loop.
    pub fn tick(&mut self, node: usize, boot: u64) {
        if !self.is_now(node, boot) {
            return;
        }
        self.after(TICK, Event::Tick { node, boot });
        let now = self.node_clock(node);
        let found = &mut self.nodes[node];
        let gap = now.since(found.last_tick).saturating_sub(std::time::Duration::from_nanos(TICK));
        found.last_tick = now;
        if gap.as_nanos() >= GAP_LEAST.into()
            && let Some(reign) = &mut found.reign
        {
            reign.table.add_gap(gap, now);
            reign.timers.add_gap(gap);
            found.gaps += u64::try_from(gap.as_nanos()).unwrap_or(u64::MAX);
        }
        self.follow(node);
        self.see_rule(node);
        let found = &mut self.nodes[node];
        let Some(reign) = &mut found.reign else { return };
        let term = reign.term.0;
        let (proposals, plans) = (reign.proposals(now), reign.plans(now));
        let waiting = reign.confirmation();
        for Proposal { lane, members, command } in proposals {
            self.submit(node, command, Waiter::Lane { term, lane, members });
        }
        for (group, line_by_line) in plans {
            let question = leading::question(self.nodes[node].machine.state(), &group);
            if let Some((group_epoch, input)) = question {
                let command = leading::install(&group, group_epoch, &input, line_by_line);
                self.submit(node, command, Waiter::Plan { term, group });
            }
        }
        if let Some(waiting) = waiting {
            self.read(node, Purpose::Heartbeats(waiting));
        }
    }

    /// Notes whether the node rules, and since when.
    fn see_rule(&mut self, node: usize) {
        let found = &self.nodes[node];
        let gaps = found.gaps;
        let Some(term) = found.reign.as_ref().map(|reign| reign.term.0) else { return };
        if self.log.leader != Some(node) || self.log.term != term {
            return;
        }
        if found.stalled_until > self.now || !self.has_quorum(node) {
            self.rule = None;
            return;
        }
        let now = self.now;
        let is_same = |rule: &Rule| {
            (rule.node, rule.term) == (node, term) && now < rule.seen_at + 2 * TICK + GAP_LEAST / 4
        };
        let since = self.rule.filter(is_same).map_or(now, |rule| rule.since);
        self.rule = Some(Rule { node, term, since, seen_at: now });
        self.fact(&Fact::Ruled { node, since, gaps });
    }

    /// A node hears how far the log is committed, and of the term.
    pub fn advance(&mut self, node: usize, boot: u64, upto: u64, term: Term) {
        if !self.is_now(node, boot) {
            return;
        }
        if self.nodes[node].term.is_some_and(|known| known.number > term.number) {
            return;
        }
        if self.nodes[node].term != Some(term) {
            self.nodes[node].term = Some(term);
            self.lose_flight(node);
        }
        self.apply(node, upto);
        self.follow(node);
        self.snapshot_now_and_then(node);
    }

    /// What an earlier term had under way is lost, as far as its proposer can know.
    fn lose_flight(&mut self, node: usize) {
        if let Some((_, waiters)) = self.nodes[node].flight.take() {
            for waiter in waiters {
                self.answer(node, waiter, Err(ProposeError::Unknown));
            }
            self.propose_soon(node);
        }
    }

    /// Applies the log up to an index; a node that is far behind may get a snapshot instead.
    fn apply(&mut self, node: usize, upto: u64) {
        self.node_clock(node);
        if self.nodes[node].applied + 30 < upto && self.rng.chance(30) {
            self.install_snapshot(node);
        }
        let upto = upto.min(self.log.last());
        self.nodes[node].known = self.nodes[node].known.max(upto);
        while self.nodes[node].applied < upto {
            let index = self.nodes[node].applied + 1;
            let position = usize::try_from(index - 1).expect("a run is short");
            let entry = &self.log.entries[position];
            let found = &mut self.nodes[node];
            found.applied = index;
            let Some(payload) = &entry.payload else { continue };
            let at = EntryContext { term: tenure_model::Term(entry.term), index: Index(index) };
            let outcomes = found.machine.apply(at, payload).expect("entries of this build");
            let (expected, state) = (Arc::clone(&entry.outcomes), entry.state.clone());
            let fact = Fact::Replicated { node, index, outcomes: &outcomes, expected: &expected };
            self.fact(&fact);
            if let Some(expected) = state {
                let state = self.nodes[node].machine.state_now();
                self.fact(&Fact::Replica { node, index, state: &state, expected: &expected });
            }
        }
    }

    /// Takes over what was applied and who leads, as the driver does, and says what follows from it.
    pub fn follow(&mut self, node: usize) {
        let now = self.node_clock(node);
        let found = &mut self.nodes[node];
        let me = found.term.filter(|term| term.leader == node);
        // The first entry of this very term is applied.
        let leads = me.filter(|term| {
            term.number == self.log.term && found.applied >= self.log.first_entry
                || found.reign.as_ref().is_some_and(|reign| reign.term.0 == term.number)
        });
        if let Some(reign) = &found.reign
            && leads.is_none_or(|term| term.number != reign.term.0)
        {
            let status = found.not_leader(node).into();
            if let Some(reign) = found.reign.take() {
                reign.end(&status);
            }
        }
        if let Some(term) = leads
            && found.reign.is_none()
        {
            found.last_tick = now;
            let reign = Reign::begin(
                tenure_model::Term(term.number),
                &found.machine,
                Arc::clone(&self.settings),
                address(node),
                Arc::clone(&found.beats),
                now,
            );
            found.gaps = 0;
            found.reign = Some(reign);
        }
        loop {
            match found.changes.try_recv() {
                Ok(Change::Applied { index, outcomes }) => {
                    if let Some(reign) = &mut found.reign {
                        let events = outcomes.iter().flat_map(|outcome| &outcome.events);
                        reign.follow(index, events, now);
                    }
                }
                Ok(Change::Restored { .. }) | Err(broadcast::error::TryRecvError::Lagged(_)) => {
                    if let Some(reign) = &mut found.reign {
                        reign.rebuild(&found.machine, now);
                    }
                }
                Err(
                    broadcast::error::TryRecvError::Empty | broadcast::error::TryRecvError::Closed,
                ) => break,
            }
        }
        if let Some(reign) = &mut found.reign
            && reign.needs_flush()
        {
            reign.flush(found.machine.state(), now);
        }
        self.pump_sessions(node);
    }

    /// Where the raft leader is, if it runs and knows it.
    #[must_use]
    pub fn reigning(&self) -> Option<usize> {
        let leader = self.log.leader?;
        self.nodes[leader].reign.is_some().then_some(leader)
    }

    /// Whether both ways between a member and a node are open, and the node runs.
    #[must_use]
    pub fn reaches(&self, member: usize, node: usize) -> bool {
        let found = &self.nodes[node];
        found.is_up
            && found.paused.is_none()
            && self.network.is_open(Host::Member(member), Host::Node(node))
    }
}
