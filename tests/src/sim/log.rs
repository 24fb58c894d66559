//! The replicated log, as raft gives it: terms, entries that are committed, and proposals that may be lost.
//!
//! Only the raft leader of the highest term commits. A proposal of a raft leader that fell may survive into the next
//! term with its own term, or be lost; its proposer hears neither.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use tenure_coordinator::stored::{decode_batch, encode_batch};
use tenure_core::command::Context;
use tenure_core::{Applied, Command, Event as CoreEvent, State};
use tenure_model::{Epoch, Index, MemberId, Partition, Timestamp};

use super::control::Protection;
use super::invariants::Fact;
use super::network::Host;
use super::node::Term;
use super::rng::nanos;
use super::world::{Event, NODE_COUNT, World};

/// How many entries pass between two comparisons of whole states.
const ENTRIES_BETWEEN_COMPARISONS: u64 = 64;

/// Pause between two attempts of what finds no quorum.
const AGAIN: u64 = 100_000_000;

/// Silence of a raft leader before an election, in milliseconds.
const ELECTION_MS: (u64, u64) = (500, 1_200);

/// A committed entry.
#[derive(Debug)]
pub struct Entry {
    pub term: u64,
    /// Nothing in the first entry of a term.
    pub payload: Option<Bytes>,
    pub outcomes: Arc<[Applied]>,
    /// The state after it, now and then.
    pub state: Option<Arc<State>>,
}

/// A proposal on its way to a quorum.
#[derive(Debug)]
pub struct Flight {
    pub node: usize,
    pub boot: u64,
    pub term: u64,
    pub commands: Vec<Command>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Log {
    /// Entry n is at position n − 1.
    pub entries: Vec<Entry>,
    pub flights: BTreeMap<u64, Flight>,
    next_flight: u64,
    pub term: u64,
    pub leader: Option<usize>,
    /// The first entry of the present term.
    pub first_entry: u64,
    /// The state after all entries.
    pub state: Arc<State>,
    /// When the raft leader was last seen to have a quorum.
    led_at: u64,
    /// How long it may be gone until the next election.
    patience: u64,
}

impl Log {
    /// Index of the last entry committed.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Takes a proposal.
    pub fn fly(&mut self, flight: Flight) -> u64 {
        self.next_flight += 1;
        self.flights.insert(self.next_flight, flight);
        self.next_flight
    }
}

impl World {
    /// Whether `node` reaches a quorum, itself included, and runs.
    #[must_use]
    pub fn has_quorum(&self, node: usize) -> bool {
        let reached = (0..NODE_COUNT).filter(|other| {
            let found = &self.nodes[*other];
            found.is_up
                && found.paused.is_none()
                && (*other == node || self.network.is_open(Host::Node(node), Host::Node(*other)))
        });
        let runs = self.nodes[node].is_up && self.nodes[node].paused.is_none();
        runs && reached.count() * 2 > NODE_COUNT
    }

    /// A proposal reaches a quorum if its proposer still leads; else it waits for its fate.
    pub fn quorum(&mut self, flight: u64) {
        let Some(found) = self.log.flights.get(&flight) else { return };
        let (node, term) = (found.node, found.term);
        if self.log.term != term {
            return;
        }
        if self.log.leader == Some(node) && self.has_quorum(node) {
            let Some(found) = self.log.flights.remove(&flight) else { return };
            let (node, boot) = (found.node, found.boot);
            let index = self.commit(found);
            let delay = self.rng.within(200_000, 2_000_000);
            self.after(delay, Event::Outcome { node, boot, flight, index: Some(index) });
        } else {
            self.after(AGAIN, Event::Quorum { flight });
        }
    }

    /// Commits the commands of a flight under its own term; answers the index.
    fn commit(&mut self, flight: Flight) -> u64 {
        let Flight { term, commands, .. } = flight;
        let proposed_at = Timestamp(1_000_000 + self.now / 1_000_000);
        let index = self.log.last() + 1;
        let applied = self.rewrite(term, &commands);
        let payload = encode_batch(proposed_at, applied.as_deref().unwrap_or(&commands));
        let batch = decode_batch(&payload).expect("what was written a moment ago");
        let context = Context { term: tenure_model::Term(term), index: Index(index), proposed_at };
        let state = Arc::make_mut(&mut self.log.state);
        let outcomes: Arc<[Applied]> = state.apply_batch(context, &batch.commands).into();
        let kept = index.is_multiple_of(ENTRIES_BETWEEN_COMPARISONS);
        let entry = Entry {
            term,
            payload: Some(payload),
            outcomes: Arc::clone(&outcomes),
            state: kept.then(|| Arc::clone(&self.log.state)),
        };
        self.log.entries.push(entry);
        for (command, outcome) in commands.iter().zip(outcomes.iter()) {
            self.say(|| format!("entry {index} of term {term}: {}", describe(command, outcome)));
        }
        self.oracle.refused(&outcomes);
        let state = Arc::clone(&self.log.state);
        self.fact(&Fact::Committed {
            index,
            commands: &commands,
            outcomes: &outcomes,
            state: &state,
        });
        index
    }

    /// The first entry of a term changes nothing.
    fn commit_first(&mut self) {
        let term = self.log.term;
        self.log.entries.push(Entry { term, payload: None, outcomes: Arc::new([]), state: None });
        self.log.first_entry = self.log.last();
    }

    /// The raft leader is heard; without one, nodes elect.
    pub fn beat(&mut self) {
        self.after(nanos(120), Event::Beat);
        match self.log.leader {
            Some(leader) if self.has_quorum(leader) => {
                self.log.led_at = self.now;
                self.log.patience = self.rng.millis(ELECTION_MS.0, ELECTION_MS.1);
                self.spread(leader);
            }
            Some(_) | None if self.now >= self.log.led_at + self.log.patience => {
                let able: Vec<usize> =
                    (0..NODE_COUNT).filter(|node| self.has_quorum(*node)).collect();
                if !able.is_empty() {
                    let leader = able[self.rng.position(able.len())];
                    self.elect(leader);
                }
            }
            Some(_) | None => {}
        }
    }

    /// Says to every node that can be reached how far the log is committed.
    fn spread(&mut self, leader: usize) {
        let term = Term { number: self.log.term, leader };
        let upto = self.log.last();
        for node in 0..NODE_COUNT {
            if !self.nodes[node].is_up || self.network.is_cut(Host::Node(leader), Host::Node(node))
            {
                continue;
            }
            let mut delay = self.network.delay(Host::Node(leader), Host::Node(node), &mut self.rng);
            if node != leader && self.rng.chance(20) {
                delay += self.rng.millis(0, 400);
            }
            let boot = self.nodes[node].boot;
            self.after(delay, Event::Advance { node, boot, upto, term });
        }
    }

    /// Makes `leader` the raft leader of a new term.
    pub fn elect(&mut self, leader: usize) {
        let fallen = self.log.term;
        for (_, flight) in std::mem::take(&mut self.log.flights) {
            // At most one of each proposer: what its followers had when it fell.
            if flight.term == fallen && self.rng.chance(60) {
                self.commit(flight);
            }
        }
        self.log.term += self.rng.within(1, 2);
        self.log.leader = Some(leader);
        self.commit_first();
        self.log.led_at = self.now;
        self.say(|| format!("node {leader} is the raft leader of term {}", self.log.term));
        self.spread(leader);
    }

    /// What control runs put into the log instead of what was proposed.
    fn rewrite(&self, term: u64, commands: &[Command]) -> Option<Vec<Command>> {
        let change: fn(&State, u64, &mut Command) = match self.plan.without? {
            Protection::CommitEpoch => current_commit,
            Protection::ExpiryTerm => current_term,
            Protection::FinalOffset => no_final_offset,
            Protection::AckEpoch => current_ack,
            Protection::SinkEpoch
            | Protection::Verify
            | Protection::ResumeAfterRegister
            | Protection::LeaseFromSend
            | Protection::SnapshotSilence
            | Protection::SnapshotCounter => return None,
        };
        let mut changed = commands.to_vec();
        for command in &mut changed {
            change(&self.log.state, term, command);
        }
        Some(changed)
    }
}

/// The current grant of a partition.
fn current(state: &State, partition: Partition) -> Option<(MemberId, Epoch, u64)> {
    let found = state.groups.values().find_map(|group| group.partitions.get(&partition))?;
    let sequence = found.committed.as_ref().map_or(0, |committed| committed.sequence.0);
    Some((found.ownership.owner()?.clone(), found.epoch?, sequence))
}

fn current_commit(state: &State, _term: u64, command: &mut Command) {
    let Command::CommitOffsets(commit) = command else { return };
    let Some(line) = commit.commits.first_mut() else { return };
    if let Some((owner, epoch, sequence)) = current(state, line.partition)
        && epoch != line.epoch
    {
        line.epoch = epoch;
        line.sequence.0 = sequence + 1;
        commit.member = owner;
    }
}

fn current_term(_state: &State, now: u64, command: &mut Command) {
    if let Command::ExpireMembers { term, .. } = command {
        term.0 = now;
    }
}

fn no_final_offset(_state: &State, _term: u64, command: &mut Command) {
    if let Command::ReleasePartitions(release) = command {
        for line in &mut release.partitions {
            line.next_offset = None;
        }
    }
}

fn current_ack(state: &State, _term: u64, command: &mut Command) {
    if let Command::ReleasePartitions(release) = command {
        for line in &mut release.partitions {
            if let Some((owner, epoch, _)) = current(state, line.partition)
                && owner == release.member
            {
                line.epoch = epoch;
            }
        }
    } else if let Command::AcknowledgeAcquired(acquired) = command
        && let Some((owner, epoch, _)) = current(state, acquired.partition)
        && owner == acquired.member
    {
        acquired.epoch = epoch;
    }
}

fn describe(command: &Command, outcome: &Applied) -> String {
    match &outcome.result {
        Ok(_) => {
            let events: Vec<&CoreEvent> = outcome.events.iter().collect();
            format!("{command:?} -> {events:?}")
        }
        Err(rejection) => format!("{command:?} -> refused: {rejection}"),
    }
}
