//! Hand-overs with random pauses, and old owners that are never told.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tenure_model::NextOffset;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::checks::{Fault, Held, Run, acquire, epoch, retrying_counted, rows, write};
use super::pauses::Pauses;
use super::report::Verdict;
use super::tally::Tally;
use super::{Row, Subject, Writer, grant};
use crate::sink::{FencedSink, FencedWriter, Resolved, SinkError, Verified};

/// Processes that the owners are spread over.
const PROCESSES: usize = 4;
/// Longest pause inside a write.
const PAUSE: Duration = Duration::from_millis(4);
/// Longest sleep of an owner that falls asleep: several hand-overs.
const SLEEP: Duration = Duration::from_millis(80);

/// A hand-over waits for so many acquisitions with a write, as long as that takes on this machine just now.
const WRITES_PER_HANDOVER: u32 = 2;
/// Longest wait that this adds.
const ADDED_MAX: Duration = Duration::from_millis(400);

/// Registrations under way at a time, two for each process: more only wait for each other on a machine that became slow.
const REGISTRATIONS_MAX: usize = 2 * PROCESSES;

/// What happened, counted by all owners.
#[derive(Debug, Default)]
struct Counts {
    writes: AtomicU64,
    refused: AtomicU64,
}

pub(super) async fn perform<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let Run { subject, options, tally } = run;
    let mut sinks = Vec::new();
    for _ in 0..PROCESSES {
        sinks.push(Arc::new(subject.connect().await?));
    }
    let counts = Arc::new(Counts::default());
    let mut random = StdRng::seed_from_u64(options.seed);
    let interval = interval(run, &sinks[0], partition + 1).await?;
    let registrations = Arc::new(Semaphore::new(REGISTRATIONS_MAX));
    let mut owners = JoinSet::new();
    for value in 1..=u64::from(options.handovers) {
        let owner = Owner {
            subject: Arc::clone(subject),
            sink: Arc::clone(&sinks[random.random_range(0..PROCESSES)]),
            partition,
            value,
            random: StdRng::seed_from_u64(options.seed ^ (value << 32)),
            counts: Arc::clone(&counts),
            tally: Arc::clone(tally),
        };
        let turn = Arc::clone(&registrations).acquire_owned().await;
        owners.spawn(owner.run(turn.expect("nobody closes it")));
        tokio::time::sleep(random.random_range(interval / 6..=interval)).await;
    }
    // The last owner fences all others, so that they end.
    let last = u64::from(options.handovers) + 1;
    let (_, end) =
        retrying_counted(&run.tally, || acquire::<S>(&sinks[0], partition, last)).await?;
    let mut waits = Vec::new();
    while let Some(owner) = owners.join_next().await {
        let waited = owner.map_err(|error| Fault(format!("an owner panicked: {error}")))??;
        waits.extend(waited);
    }
    let found = Found::count(&subject.read_back(partition).await?, end);
    let refused = counts.refused.load(Ordering::Relaxed);
    waits.sort_unstable();
    let p99 = waits.get(waits.len() * 99 / 100).or(waits.last()).copied().unwrap_or_default();
    let figures = format!(
        "{} hand-overs, {} writes, {} rows: {found}; {refused} refused; registration p99 {} ms",
        options.handovers,
        counts.writes.load(Ordering::Relaxed),
        end,
        p99.as_millis()
    );
    if found.is_clean() && refused > 0 && end > NextOffset::ZERO {
        Ok(Verdict::Passed(figures))
    } else {
        Err(Fault(figures))
    }
}

/// Longest time from one hand-over to the next: no owner gets as far as a write where that takes longer.
async fn interval<S: Subject>(
    run: &Run<S>,
    sink: &S::Sink,
    partition: u32,
) -> Result<Duration, Fault> {
    let started = Instant::now();
    let acquired = retrying_counted(&run.tally, || acquire::<S>(sink, partition, 1));
    let (mut writer, next) = acquired.await?;
    write(run, &mut writer, rows(partition, 1, next, 1)).await?;
    let needed = started.elapsed() * WRITES_PER_HANDOVER;
    let asked = run.options.handover_interval_max;
    Ok(needed.clamp(asked, asked + ADDED_MAX))
}

/// One owner, from its grant until it is refused.
struct Owner<S: Subject> {
    subject: Arc<S>,
    sink: Arc<S::Sink>,
    partition: u32,
    value: u64,
    random: StdRng,
    counts: Arc<Counts>,
    tally: Arc<Tally>,
}

impl<S: Subject> Owner<S> {
    /// Answers how long the registration took, if it got in; ends its turn then.
    async fn run(mut self, turn: OwnedSemaphorePermit) -> Result<Option<Duration>, Fault> {
        self.doze().await;
        let started = Instant::now();
        let grant = grant(&format!("owner-{}", self.value), self.partition, epoch(self.value));
        let registered = retrying_counted(&self.tally, || self.sink.register(&grant)).await;
        let mut writer = match registered {
            Ok(registered) => registered.writer,
            Err(error) => return self.end(error).map(|()| None),
        };
        let waited = started.elapsed();
        drop(turn);
        self.doze().await;
        match self.consume(&mut writer).await {
            Ok(never) => match never {},
            Err(error) => self.end(error)?,
        }
        Ok(Some(waited))
    }

    async fn consume(
        &mut self,
        writer: &mut Writer<S>,
    ) -> Result<std::convert::Infallible, SinkError> {
        let mut next = self.resume(writer).await?;
        loop {
            self.doze().await;
            let rows = rows(self.partition, self.value, next, self.random.random_range(1..=4));
            let pauses = Pauses::random(self.random.random(), PAUSE);
            let answer = self.subject.write(writer, rows, &pauses).await;
            self.tally.note(matches!(answer, Err(SinkError::Transient { .. })));
            match answer {
                Ok(()) => {
                    self.counts.writes.fetch_add(1, Ordering::Relaxed);
                    next = rows.next;
                }
                Err(SinkError::Transient { .. }) => {}
                Err(SinkError::Unknown(_)) => next = resolve(writer).await?,
                Err(error) => return Err(error),
            }
        }
    }

    async fn resume(&self, writer: &mut Writer<S>) -> Result<NextOffset, SinkError> {
        let verified = Verified::without_coordinator(false);
        loop {
            let found = match writer.resume(&verified).await {
                Ok(None) => writer.initialise(NextOffset::ZERO).await.map(Some),
                result => result,
            };
            match found {
                Ok(Some(next)) => return Ok(next),
                Ok(None) | Err(SinkError::Transient { .. } | SinkError::Unknown(_)) => {
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn end(&self, error: SinkError) -> Result<(), Fault> {
        match error {
            SinkError::Fenced { .. } => {
                self.counts.refused.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            error @ (SinkError::LeaseEnded(_)
            | SinkError::OffsetConflict { .. }
            | SinkError::Unknown(_)
            | SinkError::Transient { .. }
            | SinkError::Rejected(_)
            | SinkError::Misconfigured(_)
            | SinkError::FenceRegressed { .. }) => {
                Err(Fault(format!("owner of {} ended with: {error}", epoch(self.value))))
            }
        }
    }

    async fn doze(&mut self) {
        if self.random.random_bool(0.15) {
            tokio::time::sleep(self.random.random_range(Duration::ZERO..=SLEEP)).await;
        }
    }
}

pub(super) async fn resolve<W: FencedWriter>(writer: &mut W) -> Result<NextOffset, SinkError> {
    loop {
        match writer.resolve().await {
            Ok(Resolved::Applied(next) | Resolved::NotApplied(next)) => return Ok(next),
            Err(SinkError::Unknown(_) | SinkError::Transient { .. }) => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Damage in the rows.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    duplicates: u64,
    missing: u64,
    beyond: u64,
    epochs_down: u64,
}

impl Found {
    pub(super) fn count(rows: &[Row], end: NextOffset) -> Self {
        let mut found = Self::default();
        let mut expected = 0;
        for pair in rows.windows(2) {
            found.epochs_down += u64::from(pair[1].epoch < pair[0].epoch);
        }
        for row in rows {
            let offset = row.offset.get();
            if row.offset >= end {
                found.beyond += 1;
            } else if offset < expected {
                found.duplicates += 1;
            } else {
                found.missing += offset - expected;
                expected = offset + 1;
            }
        }
        found.missing += end.get().saturating_sub(expected);
        found
    }

    pub(super) fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { duplicates, missing, beyond, epochs_down } = self;
        write!(
            f,
            "{duplicates} duplicates, {missing} missing, {beyond} beyond the offset, {epochs_down} epochs down"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_damage_is_counted() {
        let row =
            |offset, value| Row { offset: NextOffset::new(offset).unwrap(), epoch: epoch(value) };
        let rows = [row(0, 1), row(1, 2), row(1, 1), row(3, 2), row(6, 2)];
        let found = Found::count(&rows, NextOffset::new(5).unwrap());
        let expected = Found { duplicates: 1, missing: 2, beyond: 1, epochs_down: 1 };
        assert_eq!(found, expected);
    }
}
