//! A coordinator: the real machine and the real reign, in a process that crashes, sleeps and falls.

pub mod calls;
pub mod sessions;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tenure_coordinator::machine::{Change, GroupMachine};
use tenure_coordinator::parts::leading::{self, Lane, Proposal};
use tenure_coordinator::parts::refusal::Refusal;
use tenure_coordinator::parts::reign::{Reign, WaitingMembers};
use tenure_coordinator::raft::{EntryContext, Machine as _, ProposeError};
use tenure_coordinator::soft::Beats;
use tenure_coordinator::stored::{decode_snapshot, encode_snapshot};
use tenure_core::command::MemberRef;
use tenure_core::{Applied, Command, State};
use tenure_model::{GroupId, Index, Tick};
use tokio::sync::broadcast;

use self::calls::Call;
use self::sessions::Session;
use super::clock::{DriftingClock, SetClock};
use super::control::Protection;
use super::invariants::Fact;
use super::log::Flight;
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
        self.follow(node);
        let found = &mut self.nodes[node];
        let Some(reign) = &mut found.reign else { return };
        if gap.as_nanos() >= GAP_LEAST.into() {
            reign.table.add_gap(gap);
            reign.timers.add_gap(gap);
        }
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

    fn snapshot_now_and_then(&mut self, node: usize) {
        if self.rng.below(200) == 0 {
            self.take_snapshot(node);
        }
    }

    /// Writes a snapshot of a node to its disk.
    pub fn take_snapshot(&mut self, node: usize) {
        let found = &mut self.nodes[node];
        if !found.is_up || found.applied == 0 {
            return;
        }
        let mut bytes = found.machine.snapshot()();
        if let Some(gone) = self.plan.without {
            bytes = forget(gone, bytes);
        }
        let state = found.machine.state_now();
        found.snapshot = Some(Snapshot { index: found.applied, bytes: Arc::new(bytes), state });
    }

    /// Gives a node the newest snapshot of another, if it is ahead.
    fn install_snapshot(&mut self, node: usize) {
        let others = self.nodes.iter().filter_map(|other| other.snapshot.as_ref());
        let Some(newest) = others.max_by_key(|snapshot| snapshot.index) else { return };
        if newest.index <= self.nodes[node].applied {
            return;
        }
        let (index, bytes) = (newest.index, Arc::clone(&newest.bytes));
        let expected = Arc::clone(&newest.state);
        self.say(|| format!("node {node} installs a snapshot of entry {index}"));
        self.restore(node, index, bytes, expected);
    }

    fn restore(&mut self, node: usize, index: u64, bytes: Arc<Vec<u8>>, expected: Arc<State>) {
        self.node_clock(node);
        let found = &mut self.nodes[node];
        found.machine.restore(&bytes).expect("snapshots of this build");
        found.applied = index;
        found.known = found.known.max(index);
        let state = found.machine.state_now();
        found.snapshot = Some(Snapshot { index, bytes, state: Arc::clone(&expected) });
        self.fact(&Fact::Replica { node, index, state: &state, expected: &expected });
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

    /// Queues a command; commands of one entry are proposed together.
    pub fn submit(&mut self, node: usize, command: Command, waiter: Waiter) {
        self.nodes[node].queue.push_back((command, waiter));
        self.propose_soon(node);
    }

    fn propose_soon(&mut self, node: usize) {
        let found = &self.nodes[node];
        if found.flight.is_none() && !found.queue.is_empty() {
            let boot = found.boot;
            let delay = self.rng.within(20_000, 200_000);
            self.after(delay, Event::Propose { node, boot });
        }
    }

    /// Proposes everything that waits as one entry, in the term that the node is in now.
    pub fn propose(&mut self, node: usize, boot: u64) {
        if !self.is_now(node, boot) || self.nodes[node].flight.is_some() {
            return;
        }
        if self.nodes[node].stalled_until > self.now {
            self.at(self.nodes[node].stalled_until, Event::Propose { node, boot });
            return;
        }
        let (commands, waiters): (Vec<_>, Vec<_>) = self.nodes[node].queue.drain(..).unzip();
        if commands.is_empty() {
            return;
        }
        let found = &self.nodes[node];
        if !found.believes_to_lead(node) {
            let leader = found.term.map(|term| address(term.leader));
            let error = match leader {
                Some(leader) => ProposeError::NotLeader { leader: Some(leader) },
                None => ProposeError::NoLeader,
            };
            for waiter in waiters {
                self.answer(node, waiter, Err(error.clone()));
            }
            return;
        }
        let term = found.term.map_or(0, |term| term.number);
        let flight = self.log.fly(Flight { node, boot, term, commands });
        self.nodes[node].flight = Some((flight, waiters));
        let delay = self.rng.within(300_000, 4_000_000);
        self.after(delay, Event::Quorum { flight });
        self.after(PATIENCE, Event::Outcome { node, boot, flight, index: None });
    }

    /// The proposer hears what became of its entry.
    pub fn outcome(&mut self, node: usize, boot: u64, flight: u64, index: Option<u64>) {
        if !self.is_now(node, boot) {
            return;
        }
        if self.nodes[node].flight.as_ref().is_none_or(|(under_way, _)| *under_way != flight) {
            return;
        }
        let Some((_, waiters)) = self.nodes[node].flight.take() else { return };
        if let Some(index) = index {
            self.apply(node, index);
            self.follow(node);
        }
        let outcomes = index.map(|index| {
            let position = usize::try_from(index - 1).expect("a run is short");
            Arc::clone(&self.log.entries[position].outcomes)
        });
        for (position, waiter) in waiters.into_iter().enumerate() {
            let verdict = match &outcomes {
                Some(outcomes) => Ok((Arc::clone(outcomes), position)),
                None => Err(ProposeError::Unknown),
            };
            self.answer(node, waiter, verdict);
        }
        self.propose_soon(node);
    }

    /// Gives one command's verdict to whoever waits for it.
    fn answer(&mut self, node: usize, waiter: Waiter, verdict: Verdict) {
        let now = self.node_clock(node);
        let known =
            verdict.as_ref().ok().map(|(outcomes, position)| outcomes[*position].result.as_ref());
        match waiter {
            Waiter::Lane { term, lane, members } => {
                if let Some(reign) = &mut self.nodes[node].reign
                    && reign.term.0 == term
                {
                    reign.proposed(lane, &members, known, now);
                }
                self.follow(node);
            }
            Waiter::Plan { term, group } => {
                if let Some(reign) = &mut self.nodes[node].reign
                    && reign.term.0 == term
                {
                    reign.planned(&group, known, now);
                }
            }
            Waiter::Join { stream } => self.join_decided(node, stream, &verdict),
            Waiter::Act { stream, request } => self.act_decided(node, stream, request, &verdict),
            Waiter::Call(call) => self.commit_decided(node, call, &verdict),
            Waiter::Nobody => {}
        }
    }

    /// Begins to confirm that this node still leads.
    fn read(&mut self, node: usize, purpose: Purpose) {
        let found = &mut self.nodes[node];
        let term = found.term.map_or(0, |term| term.number);
        let first = if term == self.log.term { self.log.first_entry } else { 0 };
        found.next_read += 1;
        let (read, boot) = (found.next_read, found.boot);
        let index = found.known.max(first);
        found.reads.insert(read, Read { purpose, term, index, give_up_at: self.now + PATIENCE });
        let delay = self.rng.within(200_000, 2_500_000);
        self.after(delay, Event::Confirm { node, boot, read });
    }

    /// A quorum confirms the raft leader, or does not.
    pub fn confirm(&mut self, node: usize, boot: u64, read: u64) {
        if !self.is_now(node, boot) {
            return;
        }
        let Some(found) = self.nodes[node].reads.get(&read) else { return };
        let leads = self.log.leader == Some(node) && self.log.term == found.term;
        let is_confirmed = leads && self.has_quorum(node);
        if is_confirmed || self.now >= found.give_up_at {
            let delay = self.rng.within(100_000, 2_000_000);
            self.after(delay, Event::Confirmed { node, boot, read, is_confirmed });
        } else {
            self.after(AGAIN, Event::Confirm { node, boot, read });
        }
    }

    /// The confirmation is back: what waits is answered once the state has everything that was committed before.
    pub fn confirmed(&mut self, node: usize, boot: u64, read: u64, is_confirmed: bool) {
        if !self.is_now(node, boot) {
            return;
        }
        let Some(found) = self.nodes[node].reads.get(&read) else { return };
        if is_confirmed && self.nodes[node].applied < found.index {
            self.after(5_000_000, Event::Confirmed { node, boot, read, is_confirmed });
            return;
        }
        let Some(Read { purpose, term, .. }) = self.nodes[node].reads.remove(&read) else { return };
        self.follow(node);
        match purpose {
            Purpose::Heartbeats(waiting) => {
                self.node_clock(node);
                let found = &mut self.nodes[node];
                if let Some(reign) = &mut found.reign
                    && reign.term.0 == term
                {
                    let state = is_confirmed.then(|| found.machine.state());
                    reign.confirmed(waiting, state);
                }
                self.pump_sessions(node);
            }
            Purpose::Call(call) => self.read_decided(node, call, is_confirmed),
        }
    }

    /// Ends the process of a node.
    pub fn crash_node(&mut self, node: usize) {
        if self.log.leader == Some(node) {
            self.log.leader = None;
        }
        let found = &mut self.nodes[node];
        found.is_up = false;
        found.boot += 1;
        found.paused = None;
        found.reign = None;
        found.sessions.clear();
        found.queue.clear();
        found.flight = None;
        found.reads.clear();
        let streams: Vec<u64> = self
            .network
            .streams
            .iter()
            .filter(|(_, stream)| stream.node == node)
            .map(|(number, _)| *number)
            .collect();
        for stream in streams {
            self.break_stream(stream);
        }
    }

    /// Starts a node from its disk: its snapshot, and the log after it.
    pub fn start_node(&mut self, node: usize) {
        if self.nodes[node].is_up {
            return;
        }
        let mut fresh = Self::node_from(&mut self.rng, self.now);
        let before = &mut self.nodes[node];
        fresh.boot = before.boot;
        fresh.snapshot = before.snapshot.take();
        let applied = before.applied;
        self.nodes[node] = fresh;
        if let Some(snapshot) = self.nodes[node].snapshot.take() {
            self.restore(node, snapshot.index, snapshot.bytes, snapshot.state);
        }
        let from = self.nodes[node].applied;
        let upto = if applied > from { self.rng.within(from, applied) } else { from };
        self.apply(node, upto);
        self.say(|| format!("node {node} has started, with entries up to {upto}"));
        let boot = self.nodes[node].boot;
        self.after(0, Event::Tick { node, boot });
    }

    fn node_from(rng: &mut Rng, now: u64) -> Node {
        let mut node = Node::new(rng);
        node.clock = new_clock(now, rng);
        node
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

/// What a control run leaves out of a snapshot.
fn forget(gone: Protection, bytes: Vec<u8>) -> Vec<u8> {
    let mut state = decode_snapshot(&bytes).expect("what was written a moment ago");
    match gone {
        Protection::SnapshotSilence => {
            for member in state.groups.values_mut().flat_map(|group| group.members.values_mut()) {
                member.silent = None;
            }
        }
        Protection::SnapshotCounter => state.epoch_counter = 0,
        Protection::SinkEpoch
        | Protection::CommitEpoch
        | Protection::Verify
        | Protection::ResumeAfterRegister
        | Protection::LeaseFromSend
        | Protection::ExpiryTerm
        | Protection::FinalOffset
        | Protection::AckEpoch => return bytes,
    }
    encode_snapshot(&state)
}
