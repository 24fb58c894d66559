//! What one request claims, and its comparison with the fence.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use http::header::HeaderMap;
use tenure_model::{Epoch, NextOffset};
use tenure_token::{Claims, KeyRing};

use crate::fence::{Answer, FenceStore, Raised, compare};
use crate::headers;
use crate::refusal::Refusal;

/// What a service asks of grant tokens.
#[derive(Clone, Debug, Default)]
pub enum Tokens {
    /// Nothing; tokens are not looked at. Whoever may call the service may raise a fence, so its own authentication must
    /// cover the headers. Default.
    #[default]
    Ignored,
    /// Raising a fence takes a token of these keys; a write under the registered epoch does not.
    ToRaise(KeyRing),
    /// Every request takes a token of these keys.
    Always(KeyRing),
}

/// Rules of a receiving service.
#[derive(Clone, Debug, Default)]
pub struct Receiver {
    /// What it asks of tokens.
    pub tokens: Tokens,
    /// Whether a write under a higher epoch raises the fence by itself, for writers that do not register. They keep no
    /// offset here. Default false: such a write is refused as `unregistered`.
    pub writes_raise: bool,
}

/// What a request claims: in its extensions once [`FenceLayer`](crate::FenceLayer) let it through.
///
/// The layer has compared nothing: only [`Claim::admit`] does, in the handler's transaction. An answer of success without
/// it is turned into an error by the layer.
#[derive(Clone, Debug)]
pub struct Claim(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    resource: String,
    epoch: Epoch,
    key: Option<String>,
    shift: Option<Shift>,
    token: Option<Claims>,
    writes_raise: bool,
    raising_takes_token: bool,
    asked: AtomicU8,
}

/// How far a claim has come; values of `Inner::asked`.
const UNASKED: u8 = 0;
const ADMITTED: u8 = 1;
const REPLAYED: u8 = 2;

/// Move of an offset whose home is the service.
#[derive(Clone, Copy, Debug)]
struct Shift {
    expected: NextOffset,
    next: NextOffset,
    sequence: u64,
}

/// Answer of [`Claim::admit`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Admitted {
    /// Do the effect, in the same transaction, and commit.
    Fresh,
    /// The effect is there already: roll back and give this answer.
    Replay(Answer),
}

impl Claim {
    /// Reads the headers of a request.
    ///
    /// # Errors
    ///
    /// [`Refusal::Missing`], [`Refusal::Malformed`], [`Refusal::Token`].
    pub fn read(map: &HeaderMap, receiver: &Receiver) -> Result<Self, Refusal> {
        let resource = headers::text(map, &headers::RESOURCE)?;
        let resource = resource.ok_or(Refusal::Missing { header: headers::RESOURCE })?;
        if !headers::is_resource(resource) {
            return Err(Refusal::Malformed { header: headers::RESOURCE });
        }
        let epoch = headers::epoch(map, &headers::EPOCH)?;
        let epoch = epoch.ok_or(Refusal::Missing { header: headers::EPOCH })?;
        let token = token(map, receiver, resource, epoch)?;
        if token.is_none() && matches!(receiver.tokens, Tokens::Always(_)) {
            return Err(no_token());
        }
        Ok(Self(Arc::new(Inner {
            resource: resource.to_owned(),
            epoch,
            key: headers::text(map, &headers::IDEMPOTENCY_KEY)?.map(str::to_owned),
            shift: shift(map)?,
            token,
            writes_raise: receiver.writes_raise,
            raising_takes_token: !matches!(receiver.tokens, Tokens::Ignored),
            asked: AtomicU8::new(UNASKED),
        })))
    }

    /// Name of the fence.
    #[must_use]
    pub fn resource(&self) -> &str {
        &self.0.resource
    }

    /// Epoch of the writer.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.0.epoch
    }

    /// Idempotency key of the record, if the request is for one.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// What the verified token says, if there was one and the service looks at tokens.
    #[must_use]
    pub fn token(&self) -> Option<&Claims> {
        self.0.token.as_ref()
    }

    /// Locks the fence, compares epoch and offset, and notes the idempotency key, all in the handler's transaction.
    ///
    /// Call it before the effect and commit both together. After a refusal, roll back.
    ///
    /// # Errors
    ///
    /// [`Refusal::Stale`], [`Refusal::Unregistered`], [`Refusal::OffsetConflict`], [`Refusal::Token`],
    /// [`Refusal::Unavailable`].
    pub async fn admit<S: FenceStore>(
        &self,
        store: &S,
        transaction: &mut S::Transaction<'_>,
    ) -> Result<Admitted, Refusal> {
        let Inner { resource, epoch, key, shift, .. } = &*self.0;
        let row = store.lock(transaction, resource).await?;
        let mut fence = match compare(row, *epoch) {
            Ok(fence) => fence,
            Err(Refusal::Unregistered { .. }) if self.0.writes_raise => {
                self.raise(store, transaction).await?
            }
            Err(refusal) => return Err(refusal),
        };
        if let Some(key) = key
            && let Some(answer) = store.recall(transaction, resource, key).await?
        {
            self.0.asked.store(REPLAYED, Ordering::Release);
            return Ok(Admitted::Replay(answer));
        }
        if let Some(Shift { expected, next, sequence }) = *shift {
            if fence.next_offset != Some(expected) || fence.sequence != sequence {
                let (found, sequence) = (fence.next_offset, fence.sequence);
                return Err(Refusal::OffsetConflict { found, sequence });
            }
            fence.next_offset = Some(next);
            fence.sequence += 1;
            store.store(transaction, resource, &fence).await?;
        }
        if let Some(key) = key {
            store.keep(transaction, resource, key, &Answer::default()).await?;
        }
        self.0.asked.store(ADMITTED, Ordering::Release);
        Ok(Admitted::Fresh)
    }

    /// Keeps the answer that a replay of this request gets, in the same transaction; without it the replay gets an empty
    /// one. Does nothing without an idempotency key.
    ///
    /// # Errors
    ///
    /// [`Refusal::Unavailable`].
    pub async fn keep<S: FenceStore>(
        &self,
        store: &S,
        transaction: &mut S::Transaction<'_>,
        answer: &Answer,
    ) -> Result<(), Refusal> {
        match &self.0.key {
            Some(key) => store.keep(transaction, &self.0.resource, key, answer).await,
            None => Ok(()),
        }
    }

    async fn raise<S: FenceStore>(
        &self,
        store: &S,
        transaction: &mut S::Transaction<'_>,
    ) -> Result<crate::Fence, Refusal> {
        let Inner { resource, epoch, token, raising_takes_token, .. } = &*self.0;
        if *raising_takes_token && token.is_none() {
            return Err(no_token());
        }
        let holder = token.as_ref().map_or("", |token| token.member.as_str());
        match store.raise(transaction, resource, *epoch, holder).await? {
            Raised::Done { .. } | Raised::AlreadyAsHigh => {
                compare(store.lock(transaction, resource).await?, *epoch)
            }
        }
    }

    pub(crate) fn was_admitted(&self) -> bool {
        self.0.asked.load(Ordering::Acquire) != UNASKED
    }

    pub(crate) fn was_replayed(&self) -> bool {
        self.0.asked.load(Ordering::Acquire) == REPLAYED
    }

    /// Refuses to raise a fence without a token where one is demanded.
    pub(crate) fn may_raise(&self) -> Result<(), Refusal> {
        if self.0.raising_takes_token && self.0.token.is_none() { Err(no_token()) } else { Ok(()) }
    }
}

fn no_token() -> Refusal {
    Refusal::Token { why: "there is none, and this service takes none without it".into() }
}

fn token(
    map: &HeaderMap,
    receiver: &Receiver,
    resource: &str,
    epoch: Epoch,
) -> Result<Option<Claims>, Refusal> {
    let ring = match &receiver.tokens {
        Tokens::Ignored => return Ok(None),
        Tokens::ToRaise(ring) | Tokens::Always(ring) => ring,
    };
    let mut values = map.get_all(headers::TOKEN).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let text = value.to_str().ok().filter(|_| values.next().is_none());
    let text = text.ok_or(Refusal::Malformed { header: headers::TOKEN })?;
    let claims = ring.verify(text, resource, epoch);
    claims.map(Some).map_err(|error| Refusal::Token { why: error.to_string() })
}

fn shift(map: &HeaderMap) -> Result<Option<Shift>, Refusal> {
    let expected = headers::offset(map, &headers::EXPECTED_OFFSET)?;
    let next = headers::offset(map, &headers::NEXT_OFFSET)?;
    let sequence = headers::number(map, &headers::SEQUENCE)?;
    match (expected, next, sequence) {
        (None, None, None) => Ok(None),
        (Some(expected), Some(next), Some(sequence)) if expected < next => {
            Ok(Some(Shift { expected, next, sequence }))
        }
        (Some(_), Some(_), Some(_)) => Err(Refusal::Malformed { header: headers::NEXT_OFFSET }),
        (None, _, _) => Err(Refusal::Missing { header: headers::EXPECTED_OFFSET }),
        (_, None, _) => Err(Refusal::Missing { header: headers::NEXT_OFFSET }),
        (_, _, None) => Err(Refusal::Missing { header: headers::SEQUENCE }),
    }
}
