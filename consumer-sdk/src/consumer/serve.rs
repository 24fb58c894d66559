//! One grant from its acquire to its release.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tenure_model::{NextOffset, Tick};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use super::acquire::{Acquired, acquire};
use super::contain::{Failures, Ready};
use super::end::{Control, End};
use super::fault::{Closing, Failure, panic_text, read_handler_error};
use super::input::Input;
use super::lifecycle::Lifecycle;
use super::owned::Owned;
use super::run::Running;
use super::warm::{Early, Loaded, Preparation, ReadEarly, Task, load};
use crate::grant::Grant;
use crate::metrics::DRAIN_SECONDS;
use crate::offsets::{CommitError, MirroredOffset, Tracker};
use crate::session::{LostCause, Phase, Progress, ReleaseReason};
use crate::sink::{BoxError, FencedSink};

/// Longest wait for the source to close a partition; the input delivers nothing more already.
const CLOSE_MAX: Duration = Duration::from_secs(2);
/// How long an aborted handler is waited for; then it is stuck in code without an `.await`.
const ABORT_GRACE: Duration = Duration::from_millis(200);
/// How often the position goes to the session.
const POSITION_INTERVAL: Duration = Duration::from_millis(500);

type HandlerResult = Result<Result<(), BoxError>, JoinError>;

/// Handler's task; ends with its owner.
struct HandlerTask(JoinHandle<Result<(), BoxError>>);

impl Drop for HandlerTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Acquires a grant, runs its handler, drains and releases.
pub(super) async fn serve<S: FencedSink>(
    running: Arc<Running<S>>,
    grant: Grant,
    control: Arc<Control>,
) {
    let closing = Mutex::new(Close::Open);
    let service = Service { running: &running, grant: &grant, control: &control, closing };
    let (state, ahead) = match running.parts.warm.take(grant.partition) {
        Some(Early { state, ahead, .. }) => (Some(state), Some(ahead)),
        None => (None, None),
    };
    let closing = match service.acquire_or_freeze(ahead).await {
        Ok(acquired) => service.run(acquired, state).await,
        Err(closing) => closing,
    };
    service.release(closing).await;
}

/// How a run of the handler ended.
enum Ran {
    /// With the grant.
    Ended(Closing),
    /// With a failure, the grant goes on.
    Failed(Failure),
}

pub(super) struct Service<'a, S: FencedSink> {
    pub(super) running: &'a Arc<Running<S>>,
    pub(super) grant: &'a Grant,
    pub(super) control: &'a Arc<Control>,
    closing: Mutex<Close>,
}

/// How far the source is with the partition.
enum Close {
    /// It may read it.
    Open,
    /// It was asked to stop.
    Asked(JoinHandle<()>),
    /// It was asked, and somebody waits or has waited for it.
    Awaited,
}

impl<S: FencedSink> Service<'_, S> {
    /// Takes the grant through all steps, for the first time or again: a sink takes the same registration twice.
    pub(super) async fn acquire_with(
        &self,
        ahead: Option<ReadEarly>,
    ) -> Result<Acquired<S::Writer>, Closing> {
        *self.closing.lock().unwrap_or_else(PoisonError::into_inner) = Close::Open;
        tokio::select! {
            biased;
            end = self.control.ended() => Err(closing_of_end(&end)),
            acquired = acquire(self.running, self.grant, self.control, ahead) => acquired,
        }
    }

    /// Runs the handler, and again after a failure as the policy says, until the grant ends.
    async fn run(
        &self,
        acquired: Acquired<S::Writer>,
        mut state: Option<Task<Result<Loaded, String>>>,
    ) -> Closing {
        let Grant { partition, epoch, .. } = *self.grant;
        let resume = acquired.resume;
        self.running.link.acquired(partition, epoch, true, resume);
        self.running.parts.counters.add_acquired(1);
        tracing::info!(
            group = %self.grant.group, topic = %self.grant.topic, partition = %partition.index, %epoch,
            handoff = %self.grant.handoff, resume = %resume, "partition acquired"
        );
        self.running.parts.told.tell(Lifecycle::Acquired {
            topic: self.grant.topic.clone(),
            partition,
            epoch,
            resume,
        });
        let (mut failures, mut ready) = (Failures::new(), Ready::from(acquired));
        loop {
            let ran = match self.load(state.take(), ready.acquired.resume).await {
                Ok(loaded) => self.run_handler(ready, &failures, loaded).await,
                Err(ran) => ran,
            };
            let failure = match ran {
                Ran::Ended(closing) => return closing,
                Ran::Failed(failure) => failure,
            };
            ready = match self.contain(failure, &mut failures).await {
                Ok(ready) => ready,
                Err(closing) => return closing,
            };
        }
    }

    /// What the handler is to get beside the partition: loaded early, or now.
    async fn load(
        &self,
        early: Option<Task<Result<Loaded, String>>>,
        resume: NextOffset,
    ) -> Result<Option<Loaded>, Ran> {
        let Some(preparer) = self.running.parts.warm.preparer() else { return Ok(None) };
        // Loading is not standing still.
        self.report(Phase::Resuming, None);
        let load = async {
            if let Some(early) = early {
                match early.loaded().await {
                    Ok(loaded) => return Ok(loaded),
                    Err(error) => tracing::warn!(
                        partition = %self.grant.partition, epoch = %self.grant.epoch, error,
                        "early preparation failed, preparing now"
                    ),
                }
            }
            let Grant { topic, partition, .. } = self.grant.clone();
            load(preparer, Preparation::late(topic, partition, resume)).await
        };
        tokio::select! {
            biased;
            end = self.control.ended() => Err(Ran::Ended(closing_of_end(&end))),
            loaded = load => match loaded {
                Ok(loaded) => Ok(Some(loaded)),
                Err(error) => Err(Ran::Failed(Failure::new(format!("prepare: {error}")))),
            },
        }
    }

    pub(super) fn tracker(&self) -> Option<Arc<Tracker>> {
        self.running.parts.offsets.tracker(self.grant.partition, self.grant.epoch)
    }

    pub(super) fn report(&self, phase: Phase, error: Option<String>) {
        let Grant { partition, epoch, .. } = *self.grant;
        self.running.parts.grants.note(self.grant, phase, error.as_ref());
        self.running.link.phase(partition, epoch, phase, self.control.position(), error);
    }

    /// Tells how far the handler is, and whether it has anything to do.
    fn report_progress(&self, error: Option<String>) {
        let Grant { partition, epoch, .. } = *self.grant;
        let end_offset = self.running.parts.source.end_offset(partition);
        if self.control.is_loading() {
            self.running.parts.grants.note_progress(self.grant, true, end_offset);
            return self.report(Phase::Resuming, error);
        }
        self.report(Phase::Running, error);
        let position = self.control.position();
        let is_idle = !self.control.holds_records() && end_offset.is_none_or(|end| end <= position);
        let goes_on = self.control.take_moved() || is_idle;
        self.running.parts.grants.note_progress(self.grant, goes_on, end_offset);
        self.running.link.progress(partition, epoch, Progress { position, end_offset, is_idle });
    }

    fn start_handler(
        &self,
        ready: Ready<S::Writer>,
        failures: &Failures,
        loaded: Option<Loaded>,
    ) -> HandlerTask {
        let Ready { acquired, buffer } = ready;
        let Acquired { writer, stream, resume, read_early: _ } = acquired;
        let Grant { partition, epoch, .. } = *self.grant;
        let parts = &self.running.parts;
        self.report(Phase::Running, failures.shown(resume));
        let input = Input {
            stream,
            first_at: (!buffer.is_empty()).then(Instant::now),
            waits: false,
            buffer,
            skipped: failures.skipped.clone(),
            singly_before: failures.singly_before,
            control: Arc::clone(self.control),
            tracker: self.tracker(),
            link: Arc::clone(&self.running.link),
            counters: Arc::clone(&parts.counters),
            told: Arc::clone(&parts.told),
            source: Arc::clone(&parts.source),
            doubts: Arc::clone(&parts.doubts),
            lease: self.grant.lease.clone(),
            partition,
            epoch,
            resume,
            done_before: parts.offsets.done_before(partition),
            room: 0,
            uncounted: 0,
        };
        let owned = Owned { grant: self.grant.clone(), resume, input, writer, loaded };
        let handler = Arc::clone(&self.running.handler);
        // The call itself is inside the task, so that its panic is contained too.
        HandlerTask(tokio::spawn(async move { handler(owned).await }))
    }

    async fn run_handler(
        &self,
        ready: Ready<S::Writer>,
        failures: &Failures,
        loaded: Option<Loaded>,
    ) -> Ran {
        let mut handler = self.start_handler(ready, failures, loaded);
        let tracker = self.tracker();
        let mut position = tokio::time::interval(POSITION_INTERVAL);
        let end = loop {
            tokio::select! {
                biased;
                result = &mut handler.0 => return self.read_result(result),
                end = self.control.ended() => break end,
                error = failed(tracker.as_deref()) => {
                    self.control.end(End::Lost { cause: cause_of(error) });
                }
                _tick = position.tick() => {
                    self.report_progress(failures.shown(self.control.position()));
                    if tracker.is_none() {
                        self.mirror_position();
                    }
                }
            }
        };
        if end.may_commit() {
            self.report(Phase::Draining, None);
        }
        let begun = Instant::now();
        self.begin_close();
        let result = self.drain(&mut handler, &end).await;
        if let End::Revoked { .. } = end {
            metrics::histogram!(DRAIN_SECONDS).record(begun.elapsed());
        }
        match result {
            Some(result) => self.read_result(result),
            None => {
                self.running.parts.counters.add_handlers_aborted(1);
                let closing = closing_of_end(&self.control.ending().unwrap_or(end));
                let error = format!("handler did not return in time, aborted; {}", closing.error);
                Ran::Ended(Closing { error, ..closing })
            }
        }
    }

    /// With a sink as home, what the handler has taken is all that is known here of what it has committed.
    fn mirror_position(&self) {
        if let Some(mirror) = &self.running.parts.mirror {
            mirror.note(MirroredOffset {
                topic: self.grant.topic.clone(),
                partition: self.grant.partition,
                epoch: self.grant.epoch,
                next_offset: self.control.position(),
            });
        }
    }

    /// Waits for the handler as long as the end allows; nothing when it was aborted.
    async fn drain(&self, handler: &mut HandlerTask, end: &End) -> Option<HandlerResult> {
        if let Some(deadline) = end.deadline() {
            tokio::select! {
                biased;
                result = &mut handler.0 => return Some(result),
                _lost = self.control.lost() => {}
                () = self.passed(deadline) => return self.abort(handler).await,
            }
        }
        self.grant.lease.stop();
        let grace = self.running.parts.settings.lost_grace;
        match tokio::time::timeout(grace, &mut handler.0).await {
            Ok(result) => Some(result),
            Err(_elapsed) => self.abort(handler).await,
        }
    }

    async fn abort(&self, handler: &mut HandlerTask) -> Option<HandlerResult> {
        self.grant.lease.stop();
        handler.0.abort();
        match tokio::time::timeout(ABORT_GRACE, &mut handler.0).await {
            Ok(Err(error)) if error.is_cancelled() => {}
            Ok(result) => return Some(result),
            Err(_elapsed) => tracing::warn!(
                partition = %self.grant.partition, epoch = %self.grant.epoch,
                "handler is stuck in code without an await: it is left behind, its writes are refused"
            ),
        }
        None
    }

    fn until(&self, deadline: Tick) -> Duration {
        deadline.since(self.running.clock.now())
    }

    /// Waits until a moment of the lease's clock, which may run apart from the runtime's.
    async fn passed(&self, deadline: Tick) {
        loop {
            let left = self.until(deadline);
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(Duration::from_millis(500))).await;
        }
    }

    /// Reads a handler's result in the light of how the grant ended.
    fn read_result(&self, result: HandlerResult) -> Ran {
        let counters = &self.running.parts.counters;
        let failure = match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => match read_handler_error(&*error) {
                Ok(failure) => Some(failure),
                Err(closing) => return Ran::Ended(closing),
            },
            Err(error) => Some(failure_of_join_error(error)),
        };
        match (self.control.ending(), failure) {
            (Some(end), None) => Ran::Ended(closing_of_end(&end)),
            (Some(end), Some(failure)) => {
                if failure.pause.is_none() {
                    counters.add_handler_failures(1);
                }
                Ran::Ended(Closing { error: failure.error, ..closing_of_end(&end) })
            }
            (None, Some(failure)) => Ran::Failed(failure),
            (None, None) => {
                counters.add_handler_failures(1);
                let error = "handler returned early: its input had not ended";
                Ran::Ended(Closing::new(ReleaseReason::HandlerFailed, error))
            }
        }
    }

    /// Gives the grant back at its final offset. After this, nothing of it is written by this process.
    async fn release(&self, closing: Closing) {
        let Grant { partition, epoch, .. } = *self.grant;
        let parts = &self.running.parts;
        // Tasks that the handler left behind get no more records.
        self.control.end(End::Lost { cause: LostCause::Handler(closing.error.clone()) });
        self.begin_close();
        let tracker = self.tracker();
        if may_commit(closing.reason)
            && let Some(tracker) = &tracker
        {
            self.flush_metadata(tracker).await;
        }
        self.grant.lease.stop();
        // From here on nothing more becomes done: the release carries the last word.
        parts.offsets.forget(partition, epoch);
        let next_offset =
            tracker.filter(|_| may_commit(closing.reason)).and_then(|tracker| tracker.low_water());
        if closing.by_sink {
            parts.counters.add_refused_by_sink(1);
        }
        if closing.reason == ReleaseReason::Revoked {
            parts.counters.add_handoffs(1);
        }
        let Closing { reason, error, by_sink: _, freezes: _ } = closing;
        tracing::info!(
            group = %self.grant.group, topic = %self.grant.topic, partition = %partition.index, %epoch,
            handoff = %self.grant.handoff, ?reason, error, "partition given back"
        );
        parts.told.tell(Lifecycle::Released { partition, epoch, reason, error: error.clone() });
        self.running.link.release(partition, epoch, next_offset, reason, error);
        // Nothing waits for this but the next grant of the partition here: the input has delivered its last.
        self.close_source(CLOSE_MAX).await;
    }

    /// Has the last offset committed where metadata goes with it.
    async fn flush_metadata(&self, tracker: &Tracker) {
        let flushed = tokio::time::timeout(self.close_bound(), tracker.flush_metadata()).await;
        if !matches!(flushed, Ok(Ok(()))) {
            let Grant { partition, epoch, .. } = *self.grant;
            tracing::warn!(
                %partition, %epoch, "last metadata is not committed: the partition is given back without it"
            );
        }
    }

    fn close_bound(&self) -> Duration {
        match self.control.ending().and_then(|end| end.deadline()) {
            Some(deadline) => self.until(deadline).min(CLOSE_MAX),
            None => CLOSE_MAX,
        }
    }

    /// Asks the source to close the partition, once, and does not wait for it.
    fn begin_close(&self) {
        let mut closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*closing, Close::Open) {
            let (source, partition) =
                (Arc::clone(&self.running.parts.source), self.grant.partition);
            *closing = Close::Asked(tokio::spawn(async move { source.close(partition).await }));
        }
    }

    pub(super) async fn close_source(&self, bound: Duration) {
        self.begin_close();
        let asked = {
            let mut closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *closing, Close::Awaited)
        };
        let Close::Asked(close) = asked else { return };
        if tokio::time::timeout(bound.min(CLOSE_MAX), close).await.is_err() {
            let Grant { partition, epoch, .. } = *self.grant;
            tracing::warn!(%partition, %epoch, "source did not close the partition in time");
        }
    }
}

/// Whether a release for this reason carries an offset.
///
/// It moves the offset in the entry that frees the partition: a commit of its own before it would cost the next owner a
/// round of the raft log.
const fn may_commit(reason: ReleaseReason) -> bool {
    match reason {
        ReleaseReason::Revoked | ReleaseReason::Shutdown | ReleaseReason::HandlerFailed => true,
        ReleaseReason::LeaseLost | ReleaseReason::Fenced | ReleaseReason::AcquireFailed => false,
    }
}

async fn failed(tracker: Option<&Tracker>) -> CommitError {
    match tracker {
        Some(tracker) => tracker.failed().await,
        None => std::future::pending().await,
    }
}

pub(super) fn cause_of(error: CommitError) -> LostCause {
    match error {
        CommitError::Fenced { current, .. } => LostCause::Fenced { current },
        CommitError::LeaseEnded(_) | CommitError::Released => LostCause::LeaseEnded,
        CommitError::Refused { .. } | CommitError::Unknown { .. } => {
            LostCause::Sink(error.to_string())
        }
    }
}

pub(super) fn closing_of_end(end: &End) -> Closing {
    match end {
        End::Revoked { .. } => Closing::new(ReleaseReason::Revoked, ""),
        End::Shutdown { .. } => Closing::new(ReleaseReason::Shutdown, ""),
        End::Lost { cause } => match cause {
            LostCause::LeaseEnded => Closing::new(ReleaseReason::LeaseLost, "the lease ended"),
            LostCause::Fenced { current } => Closing::new(
                ReleaseReason::Fenced,
                current.map_or_else(String::new, |epoch| format!("current epoch is {epoch}")),
            ),
            LostCause::Gone => Closing::new(ReleaseReason::LeaseLost, "not in the assignment"),
            LostCause::MembershipEnded(error) => Closing::new(ReleaseReason::LeaseLost, error),
            LostCause::Source(error) | LostCause::Handler(error) | LostCause::Sink(error) => {
                Closing::new(ReleaseReason::HandlerFailed, error)
            }
        },
    }
}

fn failure_of_join_error(error: JoinError) -> Failure {
    Failure::new(match error.try_into_panic() {
        Ok(panic) => format!("handler {}", panic_text(&*panic)),
        Err(_cancelled) => "handler was cancelled".to_owned(),
    })
}
