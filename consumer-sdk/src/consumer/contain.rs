//! A failed handler is contained: run again, parked, freed of its failing record, or ended with its grant.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt;
use tenure_model::NextOffset;
use tokio::time::Instant;

use super::acquire::Acquired;
use super::buffer::Buffer;
use super::end::End;
use super::fault::{Closing, Failure, panic_text};
use super::policy::{DeadLetter, DeadLetterSink, Then};
use super::serve::{Service, cause_of, closing_of_end};
use super::warm::ReadEarly;
use crate::grant::Grant;
use crate::session::{Phase, ReleaseReason};
use crate::sink::FencedSink;
use crate::source::Record;

/// How often the lease is looked at in a pause: its clock may run apart from the runtime's.
const LEASE_LOOK: Duration = Duration::from_millis(500);

/// How soon a partition that stands still is looked at again, at first and at last.
const FREEZE_LOOK_MIN: Duration = Duration::from_secs(1);
const FREEZE_LOOK_MAX: Duration = Duration::from_secs(30);

/// Shortest pause before a handler or a dead letter is tried again.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// How long an error is shown after a retry began.
const ERROR_SHOWN: Duration = Duration::from_secs(30);

/// What the failures of one grant have left behind.
#[derive(Debug)]
pub(super) struct Failures {
    /// Without the home's offset having moved.
    pub(super) in_a_row: u32,
    /// The home's offset at the last failure.
    at: Option<NextOffset>,
    /// Dead letters that the home's offset has not passed yet.
    pub(super) skipped: BTreeSet<NextOffset>,
    /// Records before it are handed out one at a time.
    pub(super) singly_before: NextOffset,
    /// The home's offset when records were last handed out one by one to get to a failing one.
    pub(super) led_up_from: Option<NextOffset>,
    /// The last error, and until when it is shown at least.
    error: Option<(String, Instant)>,
}

impl Failures {
    pub(super) const fn new() -> Self {
        Self {
            in_a_row: 0,
            at: None,
            skipped: BTreeSet::new(),
            singly_before: NextOffset::ZERO,
            led_up_from: None,
            error: None,
        }
    }

    /// Counts one more failure, with the home at `resume`; answers how many there are in a row.
    fn count(&mut self, resume: NextOffset) -> u32 {
        let got_further = self.at.is_some_and(|at| resume > at);
        self.in_a_row = if got_further { 1 } else { self.in_a_row.saturating_add(1) };
        self.at = Some(resume);
        self.skipped = self.skipped.split_off(&resume);
        self.in_a_row
    }

    /// The last error, until the handler has all the records that the failed run had, and a while longer.
    pub(super) fn shown(&self, position: NextOffset) -> Option<String> {
        let (error, until) = self.error.as_ref()?;
        let is_shown = position < self.singly_before || Instant::now() < *until;
        is_shown.then(|| error.clone())
    }
}

/// A partition that is ready for its handler's next run, and records that were read from its stream already.
pub(super) struct Ready<W> {
    pub(super) acquired: Acquired<W>,
    pub(super) buffer: Buffer,
}

impl<W> From<Acquired<W>> for Ready<W> {
    fn from(mut acquired: Acquired<W>) -> Self {
        let buffer = std::mem::take(&mut acquired.read_early);
        Self { acquired, buffer }
    }
}

impl<S: FencedSink> Service<'_, S> {
    /// As [`Service::acquire`]; what no other owner could acquire either stands still here, visibly, and is looked at
    /// again now and then, until the cause is gone or the partition is asked for.
    pub(super) async fn acquire_or_freeze(
        &self,
        mut ahead: Option<ReadEarly>,
    ) -> Result<Acquired<S::Writer>, Closing> {
        let mut looks = 0_u32;
        loop {
            let closing = match self.acquire_with(ahead.take()).await {
                Err(closing) if closing.freezes => closing,
                acquired => return acquired,
            };
            let Grant { partition, epoch, .. } = *self.grant;
            let error = format!("frozen: {}", closing.error);
            if looks == 0 {
                // It is registered and verified; the coordinator need not look for another owner.
                let position = self.control.position();
                self.running.link.acquired(partition, epoch, false, position);
                self.running.parts.counters.add_frozen(1);
                tracing::error!(
                    group = %self.grant.group, topic = %self.grant.topic,
                    partition = %partition.index, %epoch, error, "partition stands still"
                );
            }
            let pause = (FREEZE_LOOK_MIN * 2_u32.saturating_pow(looks)).min(FREEZE_LOOK_MAX);
            looks = (looks + 1).min(16);
            self.pause(pause, &error, &Failure::new(error.clone())).await?;
        }
    }

    /// Does about a failure what the policy says; answers what the handler's next run starts with, or how the grant ends.
    pub(super) async fn contain(
        &self,
        failure: Failure,
        failures: &mut Failures,
    ) -> Result<Ready<S::Writer>, Closing> {
        let (parts, delivered) = (&self.running.parts, self.control.position());
        let policy = &parts.settings.on_error;
        if let Some(length) = failure.pause {
            self.settle().await?;
            self.pause(length, &failure.error, &failure).await?;
            return Ok(self.acquire_or_freeze(None).await?.into());
        }
        parts.counters.add_handler_failures(1);
        match (policy.retries, &policy.then) {
            (0, Then::Fail) => return Err(failure.closing()),
            (0, Then::Park) => {
                self.settle().await?;
                return Err(self.park(&failure).await);
            }
            (_, Then::Fail | Then::Park | Then::DeadLetter(_) | Then::DeadLetterAtHome) => {
                self.settle().await?;
            }
        }
        // Only the home knows how far the handler came, and a new writer is needed anyway.
        let acquired = self.acquire_or_freeze(None).await?;
        let in_a_row = failures.count(acquired.resume);
        failures.singly_before = delivered.max(failures.singly_before);
        if in_a_row <= policy.retries {
            let error = format!("retry {in_a_row} of {}: {}", policy.retries, failure.error);
            tracing::warn!(
                group = %self.grant.group, topic = %self.grant.topic,
                partition = %self.grant.partition.index, epoch = %self.grant.epoch,
                resume = %acquired.resume, error, "handler failed, it is run again"
            );
            self.pause(policy.backoff.pause(in_a_row), &error, &failure).await?;
            parts.counters.add_handler_retries(1);
            failures.error = Some((error, Instant::now() + ERROR_SHOWN));
            return Ok(acquired.into());
        }
        match &policy.then {
            Then::Fail => Err(failure.closing()),
            Then::Park => {
                self.close_source(LEASE_LOOK).await;
                Err(self.park(&failure).await)
            }
            Then::DeadLetter(sink) => {
                let mut ready = Ready::from(acquired);
                let record = self.failing_record(&mut ready, &failure, failures, delivered).await?;
                let letter = DeadLetter {
                    record,
                    error: failure.error.clone(),
                    attempts: in_a_row,
                    grant: self.grant.clone(),
                };
                let offset = letter.record.offset;
                self.put_dead_letter(sink, letter, &failure).await?;
                failures.skipped.insert(offset);
                (failures.in_a_row, failures.error) = (0, None);
                Ok(ready)
            }
            Then::DeadLetterAtHome => {
                let ready = self.put_at_home(acquired, &failure, failures, delivered).await?;
                failures.error = None;
                Ok(ready)
            }
        }
    }

    /// Commits what the failed run has done, and stops its commits and its records.
    pub(super) async fn settle(&self) -> Result<(), Closing> {
        let settled = async {
            match self.tracker() {
                Some(tracker) => tracker.settle().await,
                None => Ok(()),
            }
        };
        tokio::select! {
            biased;
            end = self.control.ended() => return Err(closing_of_end(&end)),
            settled = settled => {
                if let Err(error) = settled {
                    return Err(closing_of_end(&End::Lost { cause: cause_of(error) }));
                }
            }
        }
        self.close_source(LEASE_LOOK * 4).await;
        Ok(())
    }

    /// Waits while the grant lasts, with `error` shown.
    pub(super) async fn pause(
        &self,
        length: Duration,
        error: &str,
        failure: &Failure,
    ) -> Result<(), Closing> {
        self.report(Phase::Running, Some(error.to_owned()));
        let until = Instant::now().checked_add(length.max(PAUSE_MIN));
        loop {
            if self.grant.lease.check().is_err() {
                return Err(Closing::new(ReleaseReason::LeaseLost, error));
            }
            let left = until.map_or(LEASE_LOOK, |until| until.duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(());
            }
            tokio::select! {
                biased;
                end = self.control.ended() => {
                    let closing = closing_of_end(&end);
                    return Err(match end.may_commit() {
                        true => Closing { error: failure.error.clone(), ..closing },
                        false => closing,
                    });
                }
                () = tokio::time::sleep(left.min(LEASE_LOOK)) => {}
            }
        }
    }

    /// Stands still until the grant ends; answers how.
    async fn park(&self, failure: &Failure) -> Closing {
        self.running.parts.counters.add_parked(1);
        let error = format!("parked: {}", failure.error);
        tracing::warn!(
            group = %self.grant.group, topic = %self.grant.topic,
            partition = %self.grant.partition.index, epoch = %self.grant.epoch,
            error, "partition is parked until it is moved"
        );
        loop {
            if let Err(closing) = self.pause(Duration::MAX, &error, failure).await {
                return closing;
            }
        }
    }

    /// Reads on until the record to blame: among those that the failed run had, and that the home does not have.
    pub(super) async fn failing_record(
        &self,
        ready: &mut Ready<S::Writer>,
        failure: &Failure,
        failures: &Failures,
        delivered: NextOffset,
    ) -> Result<Record, Closing> {
        let resume = ready.acquired.resume;
        let open = |offset: NextOffset| {
            offset >= resume && offset < delivered && !failures.skipped.contains(&offset)
        };
        let named = failure.failed_at.filter(|offset| open(*offset));
        let reading = async {
            loop {
                let is_it = |record: &&Record| match named {
                    Some(offset) => record.offset == offset,
                    None => open(record.offset),
                };
                if let Some(record) = ready.buffer.iter().find(is_it) {
                    return Some(record.clone());
                }
                let read_to = ready.buffer.end().unwrap_or(resume);
                if read_to >= delivered {
                    return None;
                }
                ready.buffer.take_in(ready.acquired.stream.recv().await?, resume).ok()?;
            }
        };
        let within = self.running.parts.settings.acquire_deadline;
        tokio::select! {
            biased;
            end = self.control.ended() => Err(closing_of_end(&end)),
            read = tokio::time::timeout(within, reading) => {
                read.ok().flatten().ok_or_else(|| failure.closing())
            }
        }
    }

    /// Hands a dead letter over, however often that takes, while the grant lasts.
    async fn put_dead_letter(
        &self,
        sink: &DeadLetterSink,
        letter: DeadLetter,
        failure: &Failure,
    ) -> Result<(), Closing> {
        let parts = &self.running.parts;
        let mut attempts = 0;
        loop {
            // The call itself is inside, so that its panic is contained too.
            let put = AssertUnwindSafe(async { sink.put(letter.clone()).await }).catch_unwind();
            let error = tokio::select! {
                biased;
                end = self.control.ended() => return Err(closing_of_end(&end)),
                put = put => match put {
                    Ok(Ok(())) => break,
                    Ok(Err(error)) => error.to_string(),
                    Err(panic) => panic_text(&*panic),
                },
            };
            attempts += 1;
            let error = format!("dead letter {}: {error}", letter.record.offset);
            self.pause(parts.settings.on_error.backoff.pause(attempts), &error, failure).await?;
        }
        parts.counters.add_dead_letters(1);
        tracing::warn!(
            group = %self.grant.group, topic = %self.grant.topic,
            partition = %self.grant.partition.index, epoch = %self.grant.epoch,
            offset = %letter.record.offset, error = letter.error, "record became a dead letter"
        );
        Ok(())
    }
}
