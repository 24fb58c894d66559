//! Writes of one grant.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue};
use http::{Method, Request, Response};
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{FencedWriter, Resolved, Role, SinkError, Verified, look_up};

use crate::answer::{Told, check};
use crate::headers;
use crate::sink::{Shared, transient};
use crate::stamp::{IdempotencyKey, Stamp};
use crate::transport::TransportError;

/// Writer of one grant.
///
/// | from    | event                     | to      |
/// |---------|---------------------------|---------|
/// | Unread  | resumed, initialised      | At      |
/// | At      | write sent                | InDoubt |
/// | InDoubt | answered                  | At      |
/// | InDoubt | closed off at the service | At      |
/// | any     | a newer epoch was seen    | Fenced  |
///
/// There is no edge out of `Fenced`.
pub struct HttpWriter {
    shared: Arc<Shared>,
    grant: Grant,
    stamp: Stamp,
    role: Role,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Unread,
    At { offset: Option<NextOffset>, sequence: u64 },
    InDoubt { expected: NextOffset, sequence: u64, next: NextOffset },
    Fenced { seen: Option<Epoch> },
}

impl std::fmt::Debug for HttpWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpWriter")
            .field("grant", &self.grant)
            .field("role", &self.role)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl HttpWriter {
    pub(crate) fn new(shared: Arc<Shared>, grant: &Grant, role: Role) -> Result<Self, SinkError> {
        let stamp = Stamp::of(grant)?;
        Ok(Self { shared, grant: grant.clone(), stamp, role, state: State::Unread })
    }

    /// Whether the service is the offset's home.
    #[must_use]
    pub fn is_home(&self) -> bool {
        self.role == Role::Home
    }

    /// Sends a write that moves the offset to `next`, in one step with its effect. The address is a path, such as
    /// `/orders`. Several records may be in one request.
    ///
    /// A lost answer is looked up; if the write is in, the answer is an empty one with `Ownership-Replayed: true`.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Unknown`] when a lost answer could not be looked up either;
    /// [`SinkError::Misconfigured`] beside the home; any other: nothing was written.
    pub async fn write(
        &mut self,
        mut request: Request<Bytes>,
        next: NextOffset,
    ) -> Result<Response<Bytes>, SinkError> {
        let misconfigured = |text: &str| Err(SinkError::Misconfigured(text.into()));
        self.check()?;
        let (expected, sequence) = match (self.role, self.state) {
            (Role::Home, State::At { offset: Some(offset), sequence }) => (offset, sequence),
            (Role::Home, _) => {
                return misconfigured("the home's offset was not read: resume or initialise");
            }
            (Role::Also, _) => {
                return misconfigured("beside the home a write has a key and moves no offset");
            }
        };
        if next <= expected {
            return Err(SinkError::Misconfigured(format!(
                "the write ends at {next} and the home is at {expected}: a rewind has a name"
            )));
        }
        let map = request.headers_mut();
        headers::put(map, &headers::EXPECTED_OFFSET, expected.get());
        headers::put(map, &headers::NEXT_OFFSET, next.get());
        headers::put(map, &headers::SEQUENCE, sequence);
        // In doubt from the first step: the call may be given up before there is an answer.
        let before =
            std::mem::replace(&mut self.state, State::InDoubt { expected, sequence, next });
        let failure = match self.send(request, Some(expected)).await {
            Ok(answer) => {
                self.state = State::At { offset: Some(next), sequence: sequence + 1 };
                return Ok(answer);
            }
            Err(SinkError::Unknown(failure)) => failure,
            Err(error) => {
                if matches!(self.state, State::InDoubt { .. }) {
                    self.state = before;
                }
                return Err(error);
            }
        };
        tracing::debug!(resource = %self.grant.resource, %failure, "answer lost, looking");
        look_up(self, transient(failure)).await.map(|()| lost_answer())
    }

    /// Sends a write of one record that moves no offset. Repeat it with the same key as often as needed, also under the
    /// next epoch: the service does the effect once.
    ///
    /// # Errors
    ///
    /// As [`HttpWriter::write`]; [`SinkError::Unknown`] leaves the writer as it was: repeat the call.
    pub async fn write_once(
        &mut self,
        mut request: Request<Bytes>,
        key: &IdempotencyKey,
    ) -> Result<Response<Bytes>, SinkError> {
        self.check()?;
        request.headers_mut().insert(headers::IDEMPOTENCY_KEY, key.value().clone());
        self.send(request, None).await
    }

    async fn send(
        &mut self,
        mut request: Request<Bytes>,
        expected: Option<NextOffset>,
    ) -> Result<Response<Bytes>, SinkError> {
        self.grant.lease.check()?;
        self.stamp.put_on(request.headers_mut());
        let longest = self.shared.patience(&self.grant.lease);
        let answer = match self.shared.send(request, longest).await {
            Ok(answer) => check(answer, self.grant.epoch, expected),
            Err(TransportError::NotSent(source)) => Err(transient(source)),
            Err(TransportError::NoAnswer(source)) => Err(SinkError::Unknown(source)),
        };
        self.noting(answer)
    }

    fn check(&self) -> Result<(), SinkError> {
        match self.state {
            State::Fenced { seen } => Err(SinkError::Fenced { ours: self.grant.epoch, seen }),
            State::InDoubt { next, .. } => Err(SinkError::Unknown(
                format!("the write up to {next} is not resolved: resolve it first").into(),
            )),
            State::Unread | State::At { .. } => Ok(()),
        }
    }

    /// Ends the writer for good when a newer epoch was seen.
    fn noting<T>(&mut self, result: Result<T, SinkError>) -> Result<T, SinkError> {
        if let Err(SinkError::Fenced { seen, .. }) = result {
            self.state = State::Fenced { seen };
        }
        result
    }

    /// One call about the fence, with numbers of the writer's own.
    async fn about_fence(
        &mut self,
        method: Method,
        more: HeaderMap,
        longest: Duration,
    ) -> Result<Told, SinkError> {
        let ours = self.grant.epoch;
        let told = self.shared.about_fence(method, &self.grant, more, longest).await;
        let told = told.and_then(|told| match told.epoch.cmp(&ours) {
            std::cmp::Ordering::Equal => Ok(told),
            std::cmp::Ordering::Greater => Err(SinkError::Fenced { ours, seen: Some(told.epoch) }),
            std::cmp::Ordering::Less => {
                Err(SinkError::FenceRegressed { ours, seen: Some(told.epoch) })
            }
        });
        self.noting(told)
    }
}

impl FencedWriter for HttpWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.check()?;
        let must_exist = verified.home_initialised() && self.is_home();
        let absent = || {
            SinkError::Misconfigured(
                "the home was initialised and has no offset: another or an emptied database".into(),
            )
        };
        let longest = self.shared.settings.request_timeout;
        let told = match self.about_fence(Method::GET, HeaderMap::new(), longest).await {
            Err(SinkError::FenceRegressed { seen: None, .. }) if must_exist => return Err(absent()),
            told => told?,
        };
        if told.next_offset.is_none() && must_exist {
            return Err(absent());
        }
        self.state = State::At { offset: told.next_offset, sequence: told.sequence };
        Ok(told.next_offset)
    }

    /// An answer that was lost is [`SinkError::Unknown`]; repeat it.
    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.check()?;
        self.grant.lease.check()?;
        let mut more = HeaderMap::new();
        headers::put(&mut more, &headers::NEXT_OFFSET, start.get());
        let longest = self.shared.patience(&self.grant.lease);
        let told = self.about_fence(Method::POST, more, longest).await?;
        let offset = told
            .next_offset
            .ok_or_else(|| SinkError::Misconfigured("the start was set and is not there".into()))?;
        self.state = State::At { offset: Some(offset), sequence: told.sequence };
        Ok(offset)
    }

    /// Closes the write in doubt off at the service, so that it cannot happen later either.
    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        let (expected, sequence, next) = match self.state {
            State::Fenced { .. } => return Err(self.check().expect_err("fenced is refused")),
            State::At { offset: Some(offset), .. } => return Ok(Resolved::Applied(offset)),
            State::Unread | State::At { offset: None, .. } => {
                return Err(SinkError::Misconfigured("nothing was written yet".into()));
            }
            State::InDoubt { expected, sequence, next } => (expected, sequence, next),
        };
        let mut more = HeaderMap::new();
        headers::put(&mut more, &headers::SEQUENCE, sequence);
        let longest = self.shared.settings.request_timeout;
        let told = match self.about_fence(Method::PATCH, more, longest).await {
            Err(SinkError::Transient { source, .. }) => return Err(SinkError::Unknown(source)),
            told => told?,
        };
        let found = told.next_offset.unwrap_or(NextOffset::ZERO);
        let resolved = if told.sequence == sequence + 1 && found == next {
            Resolved::Applied(next)
        } else if told.sequence == sequence + 1 && found == expected {
            Resolved::NotApplied(expected)
        } else {
            return Err(SinkError::OffsetConflict { expected: next, found });
        };
        self.state = State::At { offset: told.next_offset, sequence: told.sequence };
        Ok(resolved)
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Stands for the answer of a write that is in.
fn lost_answer() -> Response<Bytes> {
    let mut answer = Response::new(Bytes::new());
    answer.headers_mut().insert(headers::REPLAYED, HeaderValue::from_static("true"));
    answer
}
