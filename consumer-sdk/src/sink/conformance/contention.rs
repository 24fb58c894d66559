//! Checks in which an old owner is still at it while the new one comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tenure_model::NextOffset;

use super::checks::{
    Fault, Held, Run, SLACK, acquire, ensure, epoch, retrying, retrying_counted, rows, write,
};
use super::pauses::{Pauses, Relay};
use super::report::Verdict;
use super::{Subject, grant};
use crate::sink::{FencedSink, SinkError, Takeover};

pub(super) async fn read_order<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    /// The old owner's write goes on this long after the registration has started.
    const OVERLAP: Duration = Duration::from_millis(60);
    const ROUNDS: u32 = 10;

    let subject = &*run.subject;
    let (old_process, new_process) = (subject.connect().await?, subject.connect().await?);
    let mut landed = 0;
    for partition in (partition..).take(ROUNDS as usize) {
        let (mut old, start) = acquire::<S>(&old_process, partition, 1).await?;
        let (pauses, mut gate) = Pauses::gate();
        let write_late = subject.write(&mut old, rows(partition, 1, start, 1), &pauses);
        let take_over = async {
            ensure!(gate.reached().await, "the write never reached a pause");
            let open_late = async {
                tokio::time::sleep(OVERLAP).await;
                gate.open();
            };
            let (taken, ()) = tokio::join!(
                retrying_counted(&run.tally, || acquire::<S>(&new_process, partition, 2)),
                open_late
            );
            Ok(taken?)
        };
        let (written, taken) = tokio::join!(write_late, take_over);
        let (mut new, resumed) = taken?;
        landed += u32::from(written.is_ok());
        let expected = u64::from(written.is_ok());
        ensure!(
            resumed.get() == expected,
            "the new owner resumes at {resumed}, the old owner's last write ended at {expected}"
        );
        write(run, &mut new, rows(partition, 2, resumed, 1)).await?;
        let found = subject.read_back(partition).await?.len() as u64;
        ensure!(found == expected + 1, "{found} rows, not {}", expected + 1);
    }
    Ok(Verdict::Passed(format!("{landed} of {ROUNDS} late writes got in before the fence")))
}

pub(super) async fn paused_holder<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let (old_process, new_process) = (subject.connect().await?, subject.connect().await?);
    let declared = new_process.capabilities().takeover;
    let (mut old, start) = acquire::<S>(&old_process, partition, 1).await?;
    let (pauses, mut gate) = Pauses::gate();
    let paused = subject.write(&mut old, rows(partition, 1, start, 1), &pauses);
    let take_over = async {
        ensure!(gate.reached().await, "the write never reached a pause");
        let started = Instant::now();
        let patience = match declared {
            Takeover::Bounded(longest) => longest + SLACK,
            Takeover::Unbounded => SLACK,
        };
        let attempt = retrying(|| acquire::<S>(&new_process, partition, 2));
        let taken = tokio::time::timeout(patience, attempt).await;
        let waited = started.elapsed();
        gate.open();
        Ok((taken, waited))
    };
    let (written, taken) = tokio::join!(paused, take_over);
    let (taken, waited) = taken?;
    let figures = format!("waited {} ms, declared {declared:?}", waited.as_millis());
    let (mut new, resumed) = match (taken, declared) {
        (Ok(taken), _) => {
            ensure!(written.is_err(), "the paused holder's write went through after it was fenced");
            taken?
        }
        (Err(_), Takeover::Bounded(longest)) => {
            return Err(Fault(format!("no registration within the declared {longest:?}")));
        }
        (Err(_), Takeover::Unbounded) => {
            retrying(|| acquire::<S>(&new_process, partition, 2)).await?
        }
    };
    let before = u64::from(written.is_ok());
    ensure!(resumed.get() == before, "the new owner resumes at {resumed}, not {before}");
    write(run, &mut new, rows(partition, 2, resumed, 1)).await?;
    let found = subject.read_back(partition).await?.len() as u64;
    ensure!(found == before + 1, "{found} rows, not {}", before + 1);
    Ok(Verdict::Passed(figures))
}

pub(super) async fn starvation<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    const ROUNDS: u64 = 5;

    let sink = run.subject.connect().await?;
    let (mut worst, mut overtaken_worst, mut have_met) = (Duration::ZERO, 0, false);
    for round in 1..=ROUNDS {
        acquire::<S>(&sink, partition, round).await?;
        let Some(mut old) = OldWriters::start(run, partition, round).await? else {
            return Ok(Verdict::Skipped("a writer comes from a registration only"));
        };
        let (started, before) = (Instant::now(), old.written());
        let next = grant(&format!("owner-{}", round + 1), partition, epoch(round + 1));
        let registered = tokio::select! {
            registered = retrying(|| sink.register(&next)) => Some(registered),
            () = old.starve(run.options.registration_max, before) => None,
        };
        let (waited, overtaken) = (started.elapsed(), old.written() - before);
        have_met |= old.relay.have_met();
        old.tasks.shutdown().await;
        let Some(registered) = registered else {
            let waited = waited.as_millis();
            return Err(Fault(format!(
                "no registration in {waited} ms, while {overtaken} writes of the old epoch got in"
            )));
        };
        drop(registered?);
        (worst, overtaken_worst) = (worst.max(waited), overtaken_worst.max(overtaken));
    }
    let side_by_side = if have_met { "side by side" } else { "one at a time" };
    Ok(Verdict::Passed(format!(
        "longest of {ROUNDS} registrations under {WRITERS} writers {side_by_side}: {} ms, at most {overtaken_worst} writes before it",
        worst.as_millis()
    )))
}

/// Writers of the old epoch in [`starvation`].
const WRITERS: u32 = 8;

/// Writes of the old epoch that a registration may let pass: so often that none has its turn by fairness, but by luck.
const OVERTAKEN_MAX: u64 = 8 * WRITERS as u64;

/// Registrations that wait this many times the longest have failed, whether writes got in or not.
const STUCK_FACTOR: u32 = 10;

/// Eight writers of one epoch that write again and again until they are refused.
struct OldWriters {
    tasks: tokio::task::JoinSet<()>,
    relay: Arc<Relay>,
    written: Arc<AtomicU64>,
}

impl OldWriters {
    fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Returns once a registration that started with `before` writes has starved. A slow machine lets it wait for longer
    /// than `longest` too; but then the writers have not had many turns either.
    async fn starve(&self, longest: Duration, before: u64) {
        const LOOK_EVERY: Duration = Duration::from_millis(5);

        let stuck = Instant::now() + longest * STUCK_FACTOR;
        tokio::time::sleep(longest).await;
        while self.written() - before <= OVERTAKEN_MAX && Instant::now() < stuck {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// All of them are at it; none if writers come from registrations only.
    async fn start<S: Subject>(
        run: &Run<S>,
        partition: u32,
        value: u64,
    ) -> Result<Option<Self>, Fault> {
        const HOLD: Duration = Duration::from_millis(3);
        const ALONE_MAX: Duration = Duration::from_millis(5);

        let old = grant(&format!("owner-{value}"), partition, epoch(value));
        let relay = Relay::new(HOLD, ALONE_MAX);
        let written = Arc::new(AtomicU64::new(0));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..WRITERS {
            let process = run.subject.connect().await?;
            let Some(mut writer) = run.subject.beside(&process, &old) else { return Ok(None) };
            let (subject, pauses) = (Arc::clone(&run.subject), Pauses::relay(Arc::clone(&relay)));
            let written = Arc::clone(&written);
            tasks.spawn(async move {
                let _process = process;
                let row = rows(partition, value, NextOffset::ZERO, 1);
                loop {
                    match subject.write(&mut writer, row, &pauses).await {
                        Ok(()) => drop(written.fetch_add(1, Ordering::Relaxed)),
                        Err(SinkError::Transient { .. }) => {}
                        Err(_) => return,
                    }
                }
            });
        }
        // All of them are at it once each has had its turn.
        tokio::time::sleep((HOLD + ALONE_MAX) * WRITERS * 2).await;
        Ok(Some(Self { tasks, relay, written }))
    }
}
