//! Attempts at one unary call: what became of one, and whether there is another.

use std::fmt;
use std::time::Duration;

use tenure_model::{ErrorCode, RetryClass};
use tenure_proto::error_of_status;
use tokio::time::Instant;
use tonic::Status;

use super::client::{CallError, Refused, Repeat};
use super::retry::Backoff;
use super::wire;

/// Longest pause between two attempts: an election takes a second or two, and nobody should wait much longer for it.
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(400);

/// Redirects followed at once, one after the other; the next one waits like any other failure, and those after it are
/// followed at once again.
const REDIRECTS_MAX: u32 = 3;

/// One failed attempt.
pub(super) struct Failure {
    pub(super) refused: Refused,
    /// Where the raft leader is, by the node that was asked.
    pub(super) leader: Option<String>,
    /// The node whose connection is in doubt.
    pub(super) broken: Option<String>,
    /// The node that said nothing for too long, or cannot be reached.
    pub(super) silent: Option<String>,
    /// It may have happened.
    is_in_doubt: bool,
}

impl Failure {
    fn of(code: ErrorCode, message: String) -> Self {
        let refused = Refused { code, message, current_epoch: None };
        Self { refused, leader: None, broken: None, silent: None, is_in_doubt: false }
    }

    /// No connection came about, so nothing was sent: as certain as a node's own word that there is no raft leader.
    pub(super) fn unreachable(address: &str, error: impl fmt::Display) -> Self {
        let message = format!("{address} is not reachable: {error}");
        let silent = Some(address.to_owned());
        Self { broken: silent.clone(), silent, ..Self::of(ErrorCode::NoLeader, message) }
    }

    /// It was sent, and no answer came in time.
    pub(super) fn silent(address: &str) -> Self {
        let message = format!("{address} did not answer in time");
        let silent = Some(address.to_owned());
        let failure = Self::of(ErrorCode::Unknown, message);
        Self { broken: silent.clone(), silent, is_in_doubt: true, ..failure }
    }

    pub(super) fn answered(address: &str, status: &Status) -> Self {
        let error = error_of_status(status);
        let refused = wire::refused(&error);
        let leader = Some(error.leader_address).filter(|leader| !leader.is_empty());
        let is_in_doubt = refused.code.retry_class() == RetryClass::Unknown;
        let is_broken = refused.code == ErrorCode::Unknown;
        let broken = is_broken.then(|| address.to_owned());
        Self { refused, leader, broken, silent: None, is_in_doubt }
    }

    /// Another node's answer, while the one that was asked first says nothing and may do it yet; `next` is asked next.
    pub(super) fn instead_of(self, silent: &str, next: &str) -> Self {
        let silent = Some(silent.to_owned());
        let leader = Some(next.to_owned());
        Self { leader, broken: silent.clone(), silent, is_in_doubt: true, ..self }
    }
}

/// Attempts of one call.
pub(super) struct Attempts {
    started: Instant,
    deadline: Duration,
    made: u32,
    redirects: u32,
    /// Whether one of them may have happened.
    in_doubt: bool,
    backoff: Backoff,
}

impl Attempts {
    pub(super) fn new(deadline: Duration) -> Self {
        let backoff = Backoff::new(rand::random(), PAUSE_MAX);
        Self { started: Instant::now(), deadline, made: 0, redirects: 0, in_doubt: false, backoff }
    }

    pub(super) fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.started.elapsed())
    }

    /// Whether and when to try again: nothing is "at once".
    pub(super) fn next(
        &mut self,
        failure: Failure,
        repeat: Repeat,
    ) -> Result<Option<Duration>, CallError> {
        self.made += 1;
        match failure.refused.code.retry_class() {
            // An earlier attempt may have happened; this no is about the state after it.
            RetryClass::Never => return Err(failure.refused.into()),
            RetryClass::OtherNode | RetryClass::AfterBackoff | RetryClass::Unknown => {}
        }
        if failure.is_in_doubt {
            self.in_doubt = true;
            if repeat == Repeat::OnlyWhenNothingHappened {
                return Err(self.give_up(failure.refused));
            }
        }
        if failure.leader.is_some() && self.redirects < REDIRECTS_MAX && !self.left().is_zero() {
            self.redirects += 1;
            return Ok(None);
        }
        let pause = self.backoff.pause();
        if pause >= self.left() {
            return Err(self.give_up(failure.refused));
        }
        self.redirects = 0;
        Ok(Some(pause))
    }

    fn give_up(&self, last: Refused) -> CallError {
        if self.in_doubt {
            CallError::Unknown { attempts: self.made, last: last.to_string() }
        } else {
            CallError::Refused(last)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_after_a_pause_are_followed_at_once_again() {
        let mut attempts = Attempts::new(Duration::from_secs(60));
        let mut is_pause = || {
            let status = tenure_proto::status_of_error(ErrorCode::NotLeader, "not the leader", "b");
            let pause = attempts.next(Failure::answered("a", &status), Repeat::Safe);
            pause.expect("there is time left").is_some()
        };
        let pauses: Vec<bool> = (0..8).map(|_| is_pause()).collect();
        assert_eq!(pauses, [false, false, false, true, false, false, false, true]);
    }
}
