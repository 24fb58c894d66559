//! Dead letters that go to the home, in the step that moves its offset.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt;
use tenure_model::NextOffset;

use super::acquire::Acquired;
use super::contain::{Failures, Ready};
use super::fault::{Closing, Failure, panic_text, read_handler_error};
use super::policy::DeadLetter;
use super::serve::{Service, closing_of_end};
use crate::sink::FencedSink;

/// Longest wait for the source to close a partition before it is opened anew.
const CLOSE_MAX: Duration = Duration::from_secs(2);

impl<S: FencedSink> Service<'_, S> {
    /// Lets the home take the failing record, once it is the first that the home does not have; answers what the
    /// handler goes on with.
    pub(super) async fn put_at_home(
        &self,
        acquired: Acquired<S::Writer>,
        failure: &Failure,
        failures: &mut Failures,
        delivered: NextOffset,
    ) -> Result<Ready<S::Writer>, Closing> {
        let mut ready = Ready::from(acquired);
        let resume = ready.acquired.resume;
        let record = self.failing_record(&mut ready, failure, failures, delivered).await?;
        let is_first =
            ready.buffer.iter().next().is_some_and(|first| first.offset == record.offset);
        if !is_first {
            // The records before it come one by one now; the next failure has this one at the front.
            if failures.led_up_from.replace(resume) == Some(resume) {
                return Err(failure.closing());
            }
            return Ok(ready);
        }
        let next = record.next();
        let letter = DeadLetter {
            record,
            error: failure.error.clone(),
            attempts: failures.in_a_row,
            grant: self.grant.clone(),
        };
        let ready = self.put_until_taken(ready, &letter, next, failure).await?;
        self.running.parts.counters.add_dead_letters(1);
        failures.in_a_row = 0;
        tracing::warn!(
            group = %self.grant.group, topic = %self.grant.topic,
            partition = %self.grant.partition.index, epoch = %self.grant.epoch,
            offset = %letter.record.offset, error = letter.error, "record became a dead letter"
        );
        Ok(ready)
    }

    /// Puts a letter until the home has moved past it. Each attempt has a writer of its own: an error may have left the
    /// last one in doubt, and what the home says counts.
    async fn put_until_taken(
        &self,
        mut ready: Ready<S::Writer>,
        letter: &DeadLetter,
        next: NextOffset,
        failure: &Failure,
    ) -> Result<Ready<S::Writer>, Closing> {
        let parts = &self.running.parts;
        let put = parts.letters.as_ref().ok_or_else(|| failure.closing())?;
        let mut attempts = 0;
        loop {
            // The call itself is inside, so that its panic is contained too.
            let writing = async { put(letter.clone(), &mut ready.acquired.writer).await };
            let outcome = tokio::select! {
                biased;
                end = self.control.ended() => return Err(closing_of_end(&end)),
                outcome = AssertUnwindSafe(writing).catch_unwind() => outcome,
            };
            let error = match outcome {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(read_handler_error(&*error)?.error),
                Err(panic) => Some(panic_text(&*panic)),
            };
            drop(ready);
            self.close_source(CLOSE_MAX).await;
            ready = self.acquire_or_freeze(None).await?.into();
            if ready.acquired.resume >= next {
                return Ok(ready);
            }
            let error = error.unwrap_or_else(|| "it did not move the offset".to_owned());
            attempts += 1;
            let error = format!("dead letter {}: {error}", letter.record.offset);
            self.pause(parts.settings.on_error.backoff.pause(attempts), &error, failure).await?;
        }
    }
}
