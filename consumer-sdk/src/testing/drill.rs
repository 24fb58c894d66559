//! A handler under faults: it is stopped at each of its awaits in turn.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::task::AtomicWaker;
use tenure_model::{Epoch, GroupId, MemberId, NextOffset, Partition, TopicName};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{MemoryCoordinator, MemoryRow, MemorySink, MemorySource, RuntimeClock};
use crate::consumer::{Consumer, Counters, Owned};
use crate::grant::Resource;
use crate::lease::LeaseCheck;
use crate::session::LostCause;
use crate::sink::BoxError;

/// Stops of one drill, at most: a handler that awaits more often is stopped at the first of them only.
pub const STOPS_MAX: usize = 1_000;

/// How long one step of a drill may take, on the runtime's clock.
const STEP_MAX: Duration = Duration::from_secs(30);

/// What befalls the owner where it is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It stands still, another owner takes over and finishes, and then it goes on without noticing: as after a long
    /// pause of the process, with the local lease check off.
    Paused,
    /// The coordinator asks for the partition; the next owner gets it after the release.
    Revoked,
    /// It never goes on, and another owner takes over.
    Killed,
}

/// Runs a handler again and again over the same records, and lets a fault befall it at its first await, then at its
/// second, and so on, until it gets through before the fault.
///
/// Each round has a sink and a coordinator of its own, in memory. Run it on a paused clock
/// (`#[tokio::test(start_paused = true)]`), so that its waits cost nothing.
///
/// ```
/// use tenure_sdk::testing::{Drill, Fault, MemorySink};
/// use tenure_sdk::{Limits, Owned};
///
/// async fn copy(owned: Owned<MemorySink>) -> Result<(), tenure_sdk::sink::BoxError> {
///     let mut position = owned.resume();
///     let (mut input, mut out) = owned.split();
///     while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
///         out.write(batch.records(), position, batch.next())?;
///         position = batch.next();
///     }
///     Ok(())
/// }
///
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
/// # runtime.block_on(async {
/// let report = Drill::new(["a", "b", "c"]).run(Fault::Paused, copy).await;
/// assert!(report.is_clean(), "{report:?}");
/// # });
/// ```
#[derive(Clone, Debug)]
pub struct Drill {
    values: Vec<Bytes>,
    is_fenced: bool,
}

/// What a drill has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrillReport {
    /// Stops, each in a round of its own.
    pub stops: usize,
    /// Rounds in which the sink refused the owner that was stopped.
    pub refused: usize,
    /// Records that are in no row although a later one or the end of the round came, each with its round.
    pub lost: Vec<(usize, NextOffset)>,
    /// Records in more than one row, each with its round.
    pub doubled: Vec<(usize, NextOffset)>,
    /// Rows behind one of a higher offset, or of a higher epoch, each with its round.
    pub out_of_order: Vec<(usize, NextOffset)>,
    /// Rounds in which a handler did not come to an end: the records were not finished, or it went on after it had
    /// been refused.
    pub stuck: Vec<usize>,
}

impl DrillReport {
    /// Whether every record was written once and in order, and every handler came to its end.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.lost.is_empty()
            && self.doubled.is_empty()
            && self.out_of_order.is_empty()
            && self.stuck.is_empty()
    }

    fn note(&mut self, round: usize, rows: &[MemoryRow], count: usize) {
        let mut times: BTreeMap<NextOffset, usize> = BTreeMap::new();
        let mut newest: Option<(Epoch, NextOffset)> = None;
        for row in rows {
            *times.entry(row.offset).or_default() += 1;
            if newest.is_some_and(|(epoch, offset)| epoch > row.epoch || offset > row.offset) {
                self.out_of_order.push((round, row.offset));
            }
            newest = newest.max(Some((row.epoch, row.offset)));
        }
        let all = (0..count as u64).filter_map(|offset| NextOffset::new(offset).ok());
        for offset in all {
            match times.get(&offset).copied().unwrap_or(0) {
                0 => self.lost.push((round, offset)),
                1 => {}
                _ => self.doubled.push((round, offset)),
            }
        }
    }
}

impl Drill {
    /// Drill over one partition with these values, from offset 0.
    #[must_use]
    pub fn new(values: impl IntoIterator<Item = impl Into<Bytes>>) -> Self {
        Self { values: values.into_iter().map(Into::into).collect(), is_fenced: true }
    }

    /// The sink takes every write, whatever its epoch and offset: shows what the fence is good for.
    #[must_use]
    pub const fn without_fence(mut self) -> Self {
        self.is_fenced = false;
        self
    }

    /// Runs the drill.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub async fn run<F, Fut>(&self, fault: Fault, handler: F) -> DrillReport
    where
        F: Fn(Owned<MemorySink>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let handler = Arc::new(handler);
        let mut report = DrillReport::default();
        while report.stops < STOPS_MAX {
            let round = Round::begin(self, report.stops + 1, &handler).await;
            if !round.is_stopped().await {
                round.finish(&mut report).await;
                return report;
            }
            report.stops += 1;
            round.befall(fault, &handler, &mut report).await;
        }
        report
    }
}

/// Lets a future through until its `stop_at`-th poll, and then no further until it is opened.
#[derive(Debug)]
struct Gate {
    stop_at: usize,
    polls: AtomicUsize,
    is_open: AtomicBool,
    stopped: Notify,
    waker: AtomicWaker,
}

impl Gate {
    fn new(stop_at: usize) -> Self {
        Self {
            stop_at,
            polls: AtomicUsize::new(0),
            is_open: AtomicBool::new(false),
            stopped: Notify::new(),
            waker: AtomicWaker::new(),
        }
    }

    fn open(&self) {
        self.is_open.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    fn has_stopped(&self) -> bool {
        self.polls.load(Ordering::SeqCst) >= self.stop_at
    }
}

/// A future behind a [`Gate`].
struct Gated<F> {
    gate: Arc<Gate>,
    inner: Pin<Box<F>>,
}

impl<F: Future> Future for Gated<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.gate.waker.register(context.waker());
        if !self.gate.is_open.load(Ordering::SeqCst) {
            let polls = self.gate.polls.fetch_add(1, Ordering::SeqCst) + 1;
            if polls >= self.gate.stop_at {
                self.gate.stopped.notify_one();
                return Poll::Pending;
            }
        }
        self.inner.as_mut().poll(context)
    }
}

/// One round: an owner with a gate, and all that it needs.
struct Round {
    number: usize,
    record_count: usize,
    coordinator: MemoryCoordinator,
    source: MemorySource,
    sink: MemorySink,
    topic: TopicName,
    partition: Partition,
    clock: Arc<RuntimeClock>,
    gate: Arc<Gate>,
    first: Worker,
    epoch: Epoch,
}

struct Worker {
    member: MemberId,
    run: JoinHandle<()>,
    counters: Arc<Counters>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.run.abort();
    }
}

fn group() -> GroupId {
    GroupId::new("drill").expect("a name")
}

impl Round {
    async fn begin<F, Fut>(drill: &Drill, stop_at: usize, handler: &Arc<F>) -> Self
    where
        F: Fn(Owned<MemorySink>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let clock = Arc::new(RuntimeClock::new());
        let coordinator = MemoryCoordinator::new(group(), clock.clone(), LeaseCheck::Off);
        let (source, topic) = (MemorySource::new(), TopicName::new("records").expect("a name"));
        let partition = source.create_topic(&topic, 1)[0];
        for value in &drill.values {
            source.append(&topic, 0, value.clone());
        }
        let sink = if drill.is_fenced {
            MemorySink::new("rows")
        } else {
            MemorySink::without_fence("rows")
        };
        let gate = Arc::new(Gate::new(stop_at));
        let (gated, handler) = (Arc::clone(&gate), Arc::clone(handler));
        let handler = move |owned| Gated { gate: gated.clone(), inner: Box::pin(handler(owned)) };
        let first = work("first", &coordinator, &source, &sink, &topic, &clock, handler).await;
        let (epoch, _lease) = coordinator.grant(&topic, partition, &first.member);
        Self {
            number: stop_at,
            record_count: drill.values.len(),
            coordinator,
            source,
            sink,
            topic,
            partition,
            clock,
            gate,
            first,
            epoch,
        }
    }

    /// Waits until the handler is stopped, or through without a stop.
    async fn is_stopped(&self) -> bool {
        let through = async {
            while !self.is_through() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            biased;
            () = self.gate.stopped.notified() => true,
            _through = timeout(STEP_MAX, through) => self.gate.has_stopped(),
        }
    }

    fn resource(&self) -> Resource {
        Resource::of_partition(&group(), self.partition)
    }

    fn is_through(&self) -> bool {
        let stands_at = self.sink.next_offset(&self.resource()).map_or(0, NextOffset::get);
        stands_at >= self.record_count as u64
    }

    async fn befall<F, Fut>(self, fault: Fault, handler: &Arc<F>, report: &mut DrillReport)
    where
        F: Fn(Owned<MemorySink>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let Self { coordinator, topic, partition, .. } = &self;
        if fault == Fault::Revoked {
            coordinator.revoke(&self.first.member, *partition, self.epoch, STEP_MAX / 3);
            self.gate.open();
            if !self.is_released().await {
                report.stuck.push(self.number);
            }
        }
        let next = Arc::clone(handler);
        let next = move |owned| next(owned);
        let second =
            work("second", coordinator, &self.source, &self.sink, topic, &self.clock, next).await;
        coordinator.grant(topic, *partition, &second.member);
        if fault == Fault::Paused {
            // The end alone does not say that it began: a pause at the very end leaves nothing to do.
            self.is_at_work(&second).await;
            self.is_finished().await;
            self.gate.open();
            self.settles().await;
            coordinator.lose(&self.first.member, *partition, self.epoch, LostCause::Gone);
            if !self.is_released().await {
                report.stuck.push(self.number);
            }
        }
        self.finish(report).await;
    }

    async fn is_at_work(&self, worker: &Worker) {
        let at_work = async {
            while worker.counters.acquired() == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // One that does not begin shows as stuck at the end.
        drop(timeout(STEP_MAX, at_work).await);
    }

    /// Gives the owner that goes on the time to do what it had begun.
    async fn settles(&self) {
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn is_released(&self) -> bool {
        let released = format!("release {} {}", self.partition.index, self.epoch);
        timeout(STEP_MAX, self.coordinator.logged(&released)).await.is_ok()
    }

    async fn is_finished(&self) -> bool {
        let finished = async {
            while !self.is_through() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(STEP_MAX, finished).await.is_ok()
    }

    async fn finish(self, report: &mut DrillReport) {
        if !self.is_finished().await && !report.stuck.contains(&self.number) {
            report.stuck.push(self.number);
        }
        if self.first.counters.refused_by_sink() > 0 {
            report.refused += 1;
        }
        report.note(self.number, &self.sink.rows(&self.resource()), self.record_count);
    }
}

/// Starts a consumer with an in-memory link, and waits until it has joined.
async fn work<F, Fut>(
    name: &str,
    coordinator: &MemoryCoordinator,
    source: &MemorySource,
    sink: &MemorySink,
    topic: &TopicName,
    clock: &Arc<RuntimeClock>,
    handler: F,
) -> Worker
where
    F: Fn(Owned<MemorySink>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
{
    let member = MemberId::new(name).expect("a name");
    let nowhere = vec!["nowhere:1".to_owned()];
    let reader = Arc::new(source.reader());
    let consumer = Consumer::builder(group(), vec![topic.clone()], reader, nowhere)
        .clock(clock.clone())
        .home(sink.clone())
        .build()
        .expect("these settings do not contradict each other");
    let counters = consumer.counters();
    let (link, joining) = (coordinator.clone(), member.clone());
    let run = tokio::spawn(async move {
        // How it ends is in the coordinator's log.
        drop(link.run(&joining, consumer, handler).await);
    });
    coordinator.logged(&format!("{member} joined")).await;
    Worker { member, run, counters }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consumer::Limits;

    const VALUES: [&str; 5] = ["a", "b", "c", "d", "e"];
    const ONE: Limits = Limits { records: 1, ..Limits::DEFAULT };

    /// Effect and offset in one step, one record each, with an await between reading and writing.
    async fn careful(owned: Owned<MemorySink>) -> Result<(), BoxError> {
        let mut position = owned.resume();
        let (mut input, mut out) = owned.split();
        while let Some(batch) = input.next_batch(&ONE).await {
            tokio::task::yield_now().await;
            out.write(batch.records(), position, batch.next())?;
            position = batch.next();
        }
        Ok(())
    }

    /// Moves the offset first and writes the row later.
    async fn hasty(owned: Owned<MemorySink>) -> Result<(), BoxError> {
        let mut position = owned.resume();
        let (mut input, mut out) = owned.split();
        while let Some(batch) = input.next_batch(&ONE).await {
            out.write(&[], position, batch.next())?;
            tokio::task::yield_now().await;
            out.write(batch.records(), batch.next(), batch.next())?;
            position = batch.next();
        }
        Ok(())
    }

    /// Takes a refusal for a hiccup.
    async fn stubborn(owned: Owned<MemorySink>) -> Result<(), BoxError> {
        let mut position = owned.resume();
        let (mut input, mut out) = owned.split();
        while let Some(batch) = input.next_batch(&ONE).await {
            tokio::task::yield_now().await;
            while out.write(batch.records(), position, batch.next()).is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            position = batch.next();
        }
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn careful_handler_is_stopped_at_every_await_and_stays_clean() {
        for fault in [Fault::Paused, Fault::Revoked, Fault::Killed] {
            let report = Drill::new(VALUES).run(fault, careful).await;
            assert!(report.is_clean(), "{fault:?}: {report:?}");
            assert!(report.stops > VALUES.len(), "{fault:?}: {report:?}");
            assert_eq!(report.refused > 0, fault == Fault::Paused, "{fault:?}: {report:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_the_fence_a_paused_owner_doubles_rows() {
        let report = Drill::new(VALUES).without_fence().run(Fault::Paused, careful).await;
        assert_eq!(report.refused, 0);
        assert!(!report.doubled.is_empty() && !report.out_of_order.is_empty(), "{report:?}");
        assert!(!report.is_clean());
    }

    #[tokio::test(start_paused = true)]
    async fn offset_ahead_of_its_row_shows_as_a_lost_record() {
        let report = Drill::new(VALUES).run(Fault::Killed, hasty).await;
        assert!(!report.lost.is_empty() && report.doubled.is_empty(), "{report:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn handler_that_repeats_a_refused_write_is_ended_and_the_rows_stay_whole() {
        let report = Drill::new(VALUES).run(Fault::Paused, stubborn).await;
        assert!(report.is_clean() && report.stops > VALUES.len(), "{report:?}");
    }
}
