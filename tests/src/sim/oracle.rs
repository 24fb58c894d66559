//! Sees everything, asks every property, and counts.

use std::collections::BTreeMap;

use tenure_core::{Applied, Event, Rejection, Reply};
use tenure_model::{MemberId, Partition};

use super::Violation;
use super::faults::Kind;
use super::invariants::{self, Fact, Property, View};
use super::matrix::Matrix;

/// See the module.
pub struct Oracle {
    properties: Vec<Box<dyn Property>>,
    pub violation: Option<Violation>,
    pub trace: u64,
    pub matrix: Matrix,
    pub handoff_count: usize,
    pub prepared_count: usize,
    /// Faults at work, by the true time until which their refusals are counted.
    pub at_work: BTreeMap<Kind, u64>,
    now: u64,
    owners: BTreeMap<Partition, MemberId>,
    prints: bool,
}

impl Oracle {
    /// An oracle that has seen nothing.
    #[must_use]
    pub fn new(prints: bool) -> Self {
        Self {
            properties: invariants::all(),
            violation: None,
            trace: 0xcbf2_9ce4_8422_2325,
            matrix: Matrix::default(),
            handoff_count: 0,
            prepared_count: 0,
            at_work: BTreeMap::new(),
            now: 0,
            owners: BTreeMap::new(),
            prints,
        }
    }

    /// Takes a number into the trace.
    pub const fn note(&mut self, number: u64) {
        self.now = number;
        self.hash(number);
    }

    /// Takes a number into the hash of the trace.
    pub const fn hash(&mut self, number: u64) {
        self.trace = (self.trace ^ number).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    /// Asks every property.
    pub fn look(&mut self, fact: &Fact<'_>, view: View<'_>) {
        self.count(fact);
        if self.violation.is_some() {
            return;
        }
        for property in &mut self.properties {
            if let Err(what) = property.look(fact, view) {
                let at_ms = view.now / 1_000_000;
                let violation = Violation { property: property.name(), what, at_ms };
                self.violation = Some(violation);
                return;
            }
        }
    }

    fn count(&mut self, fact: &Fact<'_>) {
        match fact {
            Fact::Committed { index, outcomes, .. } => {
                self.hash(*index);
                for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
                    if let Event::PartitionAcquired { partition, member, epoch, .. } = event {
                        self.hash(epoch.get());
                        let before = self.owners.insert(*partition, member.clone());
                        if before.is_some_and(|before| before != *member) {
                            self.handoff_count += 1;
                        }
                    }
                    self.prepared_count +=
                        usize::from(matches!(event, Event::PreparationReady { .. }));
                }
            }
            Fact::Written { epoch, to, .. } => {
                self.hash(epoch.get());
                self.hash(*to);
            }
            _ => {}
        }
    }

    /// Counts what the state refused.
    pub fn refused(&mut self, outcomes: &[Applied]) {
        for outcome in outcomes {
            match &outcome.result {
                Err(rejection) => self.count_rejection(rejection),
                Ok(Reply::Verdicts(verdicts)) => {
                    for rejection in verdicts.iter().filter_map(|verdict| verdict.as_ref().err()) {
                        self.count_rejection(rejection);
                    }
                }
                Ok(Reply::Joined { .. } | Reply::Done | Reply::Operated { .. }) => {}
            }
        }
    }

    fn count_rejection(&mut self, rejection: &Rejection) {
        self.count_refusal(rejection.code().as_str());
    }

    /// Counts a refusal for every fault at work.
    pub fn count_refusal(&mut self, refusal: &'static str) {
        let now = self.now;
        self.at_work.retain(|_, until| *until >= now);
        for kind in self.at_work.keys() {
            self.matrix.count(*kind, refusal);
        }
    }

    /// Prints a line of the trace, where that is wanted.
    #[allow(clippy::print_stdout, reason = "the trace of a replay is what was asked for")]
    pub fn say(&self, now: u64, line: impl FnOnce() -> String) {
        if self.prints {
            println!("{:>9.3} ms  {}", now as f64 / 1_000_000.0, line());
        }
    }
}
