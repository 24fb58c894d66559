//! What a consumer does at this moment, for people who look into it.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_model::{Epoch, NextOffset, Partition};
use tokio::time::Instant;

use super::end::{Control, End};
use super::{Counters, Readiness};
use crate::grant::Grant;
use crate::session::Phase;

/// From how long on a dump shows that a grant stands still.
const STILL_SHOWN: Duration = Duration::from_secs(5);

/// Grants at work; written by their tasks, read by whoever dumps them.
#[derive(Default)]
pub(crate) struct Grants {
    seen: Mutex<BTreeMap<(Partition, Epoch), Seen>>,
    /// The source has told the end of a partition.
    tells_ends: AtomicBool,
}

struct Seen {
    grant: Grant,
    control: Arc<Control>,
    phase: Phase,
    error: Option<String>,
    /// When its position last moved, or its handler had nothing to do.
    went_on_at: Instant,
    /// End of its partition, as the source last heard it.
    end_offset: Option<NextOffset>,
}

impl Seen {
    /// Records between its position and the end of its partition.
    fn lag(&self) -> Option<u64> {
        Some(self.end_offset?.get().saturating_sub(self.control.position().get()))
    }

    /// How long it has stood still.
    fn still(&self) -> Duration {
        match self.phase {
            Phase::Running => self.went_on_at.elapsed(),
            Phase::Registering | Phase::Verifying | Phase::Resuming | Phase::Draining => {
                Duration::ZERO
            }
        }
    }
}

impl Grants {
    fn seen(&self) -> MutexGuard<'_, BTreeMap<(Partition, Epoch), Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, grant: &Grant, control: &Arc<Control>) {
        let seen = Seen {
            grant: grant.clone(),
            control: Arc::clone(control),
            phase: Phase::Registering,
            error: None,
            went_on_at: Instant::now(),
            end_offset: None,
        };
        self.seen().insert((grant.partition, grant.epoch), seen);
    }

    pub(super) fn note(&self, grant: &Grant, phase: Phase, error: Option<&String>) {
        if let Some(seen) = self.seen().get_mut(&(grant.partition, grant.epoch)) {
            if seen.phase != phase {
                seen.went_on_at = Instant::now();
            }
            seen.phase = phase;
            seen.error = error.cloned();
        }
    }

    /// Notes whether a running grant goes on, and where its partition ends.
    pub(super) fn note_progress(
        &self,
        grant: &Grant,
        goes_on: bool,
        end_offset: Option<NextOffset>,
    ) {
        if let Some(seen) = self.seen().get_mut(&(grant.partition, grant.epoch)) {
            seen.end_offset = end_offset;
            self.tells_ends.fetch_or(end_offset.is_some(), Ordering::Relaxed);
            if goes_on {
                seen.went_on_at = Instant::now();
            }
        }
    }

    /// The largest lag of a grant, and that of all together; nothing from a source that tells no ends.
    pub(crate) fn lags(&self) -> Option<(u64, u64)> {
        let seen = self.seen();
        let lags = seen.values().filter_map(Seen::lag);
        let both = lags.fold((0, 0_u64), |(max, sum), lag| (lag.max(max), sum.saturating_add(lag)));
        self.tells_ends.load(Ordering::Relaxed).then_some(both)
    }

    /// The longest time for which a running grant has stood still.
    pub(crate) fn still_max(&self) -> Duration {
        self.seen().values().map(Seen::still).max().unwrap_or_default()
    }

    pub(super) fn end(&self, partition: Partition, epoch: Epoch) {
        self.seen().remove(&(partition, epoch));
    }

    pub(super) fn count(&self) -> usize {
        self.seen().len()
    }
}

/// Looks into a consumer, also while it runs. Cheap to clone.
#[derive(Clone)]
pub struct Inspector {
    pub(super) readiness: Readiness,
    pub(super) grants: Arc<Grants>,
    pub(super) counters: Arc<Counters>,
}

impl fmt::Debug for Inspector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspector").field("grants", &self.grants.count()).finish_non_exhaustive()
    }
}

impl Inspector {
    /// What the consumer does now, as text for people: its form may change.
    #[must_use]
    pub fn dump(&self) -> String {
        let mut text = String::new();
        let ready = if self.readiness.is_ready() { "ready" } else { "not ready" };
        // Writing to a String cannot fail.
        let _written = writeln!(text, "consumer: {ready}, {} partitions", self.grants.count());
        for seen in self.grants.seen().values() {
            let Seen { grant, control, phase, error, went_on_at: _, end_offset: _ } = seen;
            let lag = seen.lag().map_or_else(String::new, |lag| format!(", lag {lag}"));
            let still = match seen.still() {
                length if length >= STILL_SHOWN => format!(", still for {length:?}"),
                _ => String::new(),
            };
            let end = match control.ending() {
                None => "",
                Some(End::Revoked { .. }) => ", revoked",
                Some(End::Shutdown { .. }) => ", shutting down",
                Some(End::Lost { .. }) => ", lost",
            };
            let _written = writeln!(
                text,
                "  {}/{} {} handoff {}: {phase:?}{end}, position {}{still}{lag}, lease {:?}{}",
                grant.topic,
                grant.partition.index,
                grant.epoch,
                grant.handoff,
                control.position(),
                grant.lease.remaining(),
                error.as_ref().map_or_else(String::new, |error| format!(", error: {error}")),
            );
        }
        for (name, value) in Counters::METRICS.iter().zip(self.counters.values()) {
            let _written = writeln!(text, "  {name} {value}");
        }
        text
    }
}
