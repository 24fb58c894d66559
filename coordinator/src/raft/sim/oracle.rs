//! What must hold whatever happens: checked at every entry that any replica applies.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use openraft::Instant as _;
use openraft_rt_sim::SimInstant;
use tenure_core::Applied;
use tenure_model::{GroupId, ManualClock, NextOffset, Partition};

use super::super::machine as production;
use super::super::machine::Machine as _;
use super::machine::{Capture, EntryContext, Fatal, Machine};
use super::types::NodeId;
use crate::machine::GroupMachine;
use crate::stored::encode_snapshot;

/// The whole state of replicas is compared at every index that this divides.
const STATE_EVERY: u64 = 16;

/// Lines of the story that a failure shows.
const STORY_MAX: usize = 60;

/// See the module. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Oracle(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    /// What the first replica to apply an index found: the entry, and what came of it.
    entries: BTreeMap<u64, (u64, u64, u64)>,
    states: BTreeMap<u64, u64>,
    leaders: BTreeMap<u64, NodeId>,
    /// Committed memberships, by the index of their entries.
    memberships: BTreeMap<u64, String>,
    acknowledged: BTreeMap<Partition, u64>,
    violation: Option<String>,
    story: std::collections::VecDeque<String>,
    trace: Trace,
    counts: Counts,
}

/// How much happened in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) acknowledged: u64,
    pub(super) unknown: u64,
    pub(super) falls: u64,
    pub(super) bytes_lost: u64,
    pub(super) cuts: u64,
    pub(super) leaders: u64,
    pub(super) restores: u64,
    pub(super) reads: u64,
    /// Votes that were given or taken.
    pub(super) changes: u64,
}

impl Counts {
    /// Adds those of another run.
    pub(super) fn add(&mut self, other: Self) {
        self.acknowledged += other.acknowledged;
        self.unknown += other.unknown;
        self.falls += other.falls;
        self.bytes_lost += other.bytes_lost;
        self.cuts += other.cuts;
        self.leaders += other.leaders;
        self.restores += other.restores;
        self.reads += other.reads;
        self.changes += other.changes;
    }
}

/// FNV-1a over everything that happens, with its moment.
#[derive(Clone, Copy)]
struct Trace(u64);

impl Default for Trace {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Trace {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let mut trace = Trace::default();
    trace.add(bytes);
    trace.0
}

impl Oracle {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells what happens.
    pub(super) fn say(&self, what: &str) {
        self.known().say(what);
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.known().counts);
    }

    pub(super) fn counts(&self) -> Counts {
        self.known().counts
    }

    pub(super) fn trace(&self) -> u64 {
        self.known().trace.0
    }

    /// The first thing that must not have happened, with what came before it.
    pub(super) fn violation(&self) -> Option<String> {
        let known = self.known();
        let mut text = known.violation.clone()?;
        for line in &known.story {
            text.push_str("\n  ");
            text.push_str(line);
        }
        Some(text)
    }

    /// A node believes to lead.
    pub(super) fn leads(&self, node: NodeId, term: u64) {
        let mut known = self.known();
        match known.leaders.get(&term).copied() {
            None => {
                known.leaders.insert(term, node);
                known.counts.leaders += 1;
                known.say(&format!("node {node} leads term {term}"));
            }
            Some(other) if other == node => {}
            Some(other) => known.fail(&format!("term {term} is led by node {other} and {node}")),
        }
    }

    /// A node takes the membership in the entry `index` for committed.
    pub(super) fn membership(&self, node: NodeId, index: u64, membership: &str) {
        let mut known = self.known();
        let first = known.memberships.entry(index).or_insert_with(|| membership.to_owned());
        if first != membership {
            let text = format!("node {node} has {membership} at {index}, another has {first}");
            known.fail(&text);
        }
    }

    /// A client was told that its offset is committed.
    pub(super) fn acknowledged(&self, partition: Partition, next_offset: u64) {
        let mut known = self.known();
        let newest = known.acknowledged.entry(partition).or_default();
        *newest = next_offset.max(*newest);
        known.counts.acknowledged += 1;
        known.say(&format!("{} = {next_offset} acknowledged", partition.index));
    }

    /// What clients were told so far.
    pub(super) fn promises(&self) -> BTreeMap<Partition, u64> {
        self.known().acknowledged.clone()
    }

    /// Whether a state has everything that was promised.
    pub(super) fn check_kept(
        &self,
        who: &str,
        promises: &BTreeMap<Partition, u64>,
        machine: &GroupMachine,
        group: &GroupId,
    ) {
        for (partition, promised) in promises {
            let found = machine.state().committed(group, *partition).ok().flatten();
            let found = found.map_or(0, |committed| NextOffset::get(committed.next_offset));
            if found < *promised {
                self.fail(&format!(
                    "{who} has offset {found} of {}, {promised} was acknowledged",
                    partition.index
                ));
            }
        }
    }

    pub(super) fn fail(&self, what: &str) {
        self.known().fail(what);
    }
}

impl Known {
    fn say(&mut self, what: &str) {
        let at = SimInstant::now().elapsed_since_start().as_micros();
        let mut line = String::new();
        write!(line, "{:>10}.{:03} {what}", at / 1_000, at % 1_000).expect("a string grows");
        self.trace.add(line.as_bytes());
        if self.violation.is_none() {
            if self.story.len() == STORY_MAX {
                self.story.pop_front();
            }
            self.story.push_back(line);
        }
    }

    fn fail(&mut self, what: &str) {
        self.say(&format!("VIOLATION: {what}"));
        self.violation.get_or_insert_with(|| what.to_owned());
    }

    fn applied(&mut self, node: NodeId, at: EntryContext, payload: &Bytes, outcomes: &[Applied]) {
        let (term, index) = (at.term.0, at.index.0);
        let found = (term, hash(payload), hash(format!("{outcomes:?}").as_bytes()));
        match self.entries.get(&index).copied() {
            None => {
                self.entries.insert(index, found);
                self.say(&format!("node {node} applies {index} of term {term} first"));
            }
            Some(first) if first == found => {}
            Some(first) => self.fail(&format!(
                "node {node} applies another entry {index} than the first node did: {found:x?}, not {first:x?}"
            )),
        }
    }

    fn state(&mut self, node: NodeId, index: u64, digest: u64) {
        let known = *self.states.entry(index).or_insert(digest);
        if known != digest {
            self.fail(&format!("state of node {node} at {index} differs from that of another"));
        }
    }
}

/// The real group machine, watched.
pub(super) struct Watched {
    pub(super) inner: GroupMachine,
    node: NodeId,
    oracle: Oracle,
}

impl Watched {
    pub(super) fn new(node: NodeId, oracle: Oracle) -> Self {
        let inner = GroupMachine::new(Arc::new(ManualClock::default()));
        Self { inner, node, oracle }
    }
}

impl Machine for Watched {
    type Reply = Arc<[Applied]>;

    fn apply(&mut self, at: EntryContext, payload: &Bytes) -> Result<Self::Reply, Fatal> {
        let entry = production::EntryContext { term: at.term, index: at.index };
        let outcomes = self.inner.apply(entry, payload).map_err(|fatal| Fatal(fatal.0))?;
        let mut known = self.oracle.known();
        known.applied(self.node, at, payload, &outcomes);
        if at.index.0.is_multiple_of(STATE_EVERY) {
            let digest = hash(&encode_snapshot(self.inner.state()));
            known.state(self.node, at.index.0, digest);
        }
        Ok(outcomes)
    }

    fn snapshot(&self) -> Capture {
        self.inner.snapshot()
    }

    fn restore(&mut self, bytes: &[u8]) -> Result<(), Fatal> {
        self.inner.restore(bytes).map_err(|fatal| Fatal(fatal.0))?;
        let mut known = self.oracle.known();
        let index = self.inner.state().applied.0;
        known.counts.restores += 1;
        known.say(&format!("node {} restores a snapshot of {index}", self.node));
        // The applied index of the state is that of its last command, which may lie before blank entries.
        if index.is_multiple_of(STATE_EVERY) {
            known.state(self.node, index, hash(bytes));
        }
        Ok(())
    }
}
