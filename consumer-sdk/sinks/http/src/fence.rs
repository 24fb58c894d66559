//! A receiving service's fences: what a store does, and what the registration calls mean.

use bytes::Bytes;
use futures::future::BoxFuture;
use tenure_model::{Epoch, NextOffset};

use crate::refusal::Refusal;

/// One fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Highest epoch that was registered.
    pub epoch: Epoch,
    /// Who registered it.
    pub holder: String,
    /// The offset, where the service is its home. Nothing before the first.
    pub next_offset: Option<NextOffset>,
    /// Writes that moved the offset, and writes that were closed off. A write names the one that it follows.
    pub sequence: u64,
    /// Epoch that the last registration replaced.
    pub displaced: Option<Epoch>,
}

/// What became of an attempt to raise a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    /// It has the new epoch.
    Done {
        /// Epoch that it had before.
        displaced: Option<Epoch>,
    },
    /// It has the epoch or a higher one already; nothing was changed.
    AlreadyAsHigh,
}

/// Answer to a request, kept under its idempotency key and given again to a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status; without meaning in gRPC. Default 204.
    pub status: u16,
    /// Body, or the encoded message. Default empty.
    pub body: Bytes,
}

impl Default for Answer {
    fn default() -> Self {
        Self { status: 204, body: Bytes::new() }
    }
}

/// Where a service keeps its fences: in the same database as the effects, and in **the handler's own transaction**.
///
/// No method but [`FenceStore::alone`] opens or ends a transaction, so that the comparison cannot be separated from the
/// effect that it guards. Errors are [`Refusal::Unavailable`], or [`Refusal::InDoubt`] where something may be in.
pub trait FenceStore: Clone + Send + Sync + 'static {
    /// Open transaction of a handler.
    type Transaction<'t>: Send;

    /// Reads a fence and locks it until the transaction ends: nobody raises or moves it meanwhile.
    fn lock<'a>(
        &'a self,
        transaction: &'a mut Self::Transaction<'_>,
        resource: &'a str,
    ) -> BoxFuture<'a, Result<Option<Fence>, Refusal>>;

    /// Makes a fence of `epoch`, or raises a lower one to it, in one atomic step; keeps offset and sequence.
    fn raise<'a>(
        &'a self,
        transaction: &'a mut Self::Transaction<'_>,
        resource: &'a str,
        epoch: Epoch,
        holder: &'a str,
    ) -> BoxFuture<'a, Result<Raised, Refusal>>;

    /// Stores offset and sequence of a fence that this transaction has locked.
    fn store<'a>(
        &'a self,
        transaction: &'a mut Self::Transaction<'_>,
        resource: &'a str,
        fence: &'a Fence,
    ) -> BoxFuture<'a, Result<(), Refusal>>;

    /// The answer that was kept under a key of the resource.
    fn recall<'a>(
        &'a self,
        transaction: &'a mut Self::Transaction<'_>,
        resource: &'a str,
        key: &'a str,
    ) -> BoxFuture<'a, Result<Option<Answer>, Refusal>>;

    /// Keeps an answer under a key of the resource; replaces an earlier one.
    fn keep<'a>(
        &'a self,
        transaction: &'a mut Self::Transaction<'_>,
        resource: &'a str,
        key: &'a str,
        answer: &'a Answer,
    ) -> BoxFuture<'a, Result<(), Refusal>>;

    /// Opens a transaction, calls [`Change::apply`] in it and commits: the registration calls have no handler.
    fn alone(&self, change: Change) -> BoxFuture<'static, Result<Found, Refusal>>;
}

/// A call about a fence itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Name of the fence.
    pub resource: String,
    /// What to do.
    pub kind: ChangeKind,
}

/// See [`Change`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// `GET`: reads it.
    Read,
    /// `PUT`: raises it. Repeating it does nothing.
    Register {
        /// New epoch.
        epoch: Epoch,
        /// Who registers.
        holder: String,
    },
    /// `POST`: sets the first offset, once, under the epoch.
    Initialise {
        /// Epoch of the writer.
        epoch: Epoch,
        /// The offset.
        start: NextOffset,
    },
    /// `PATCH`: closes the write of this sequence off, if it is not in: it cannot happen any more.
    Close {
        /// Epoch of the writer.
        epoch: Epoch,
        /// Sequence that the write in doubt named.
        sequence: u64,
    },
}

/// The fence after a call about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// As it is now.
    pub fence: Fence,
}

impl Change {
    /// Does it, in a transaction that the caller commits if this succeeds.
    ///
    /// # Errors
    ///
    /// [`Refusal`]; the caller rolls back.
    pub async fn apply<S: FenceStore>(
        &self,
        store: &S,
        transaction: &mut S::Transaction<'_>,
    ) -> Result<Found, Refusal> {
        let resource = self.resource.as_str();
        match &self.kind {
            ChangeKind::Read => {
                let fence = store.lock(transaction, resource).await?.ok_or(Refusal::Absent)?;
                Ok(Found { fence })
            }
            ChangeKind::Register { epoch, holder } => {
                let raised = store.raise(transaction, resource, *epoch, holder).await?;
                let fence = locked(store, transaction, resource).await?;
                match raised {
                    Raised::Done { .. } => Ok(Found { fence }),
                    // An own registration that is repeated. No coordinator gives one epoch to two members.
                    Raised::AlreadyAsHigh if fence.epoch == *epoch && fence.holder == *holder => {
                        Ok(Found { fence })
                    }
                    Raised::AlreadyAsHigh => {
                        Err(Refusal::Stale { given: *epoch, current: fence.epoch })
                    }
                }
            }
            ChangeKind::Initialise { epoch, start } => {
                let row = store.lock(transaction, resource).await?;
                let mut fence = compare(row, *epoch)?;
                if fence.next_offset.is_none() {
                    fence.next_offset = Some(*start);
                    store.store(transaction, resource, &fence).await?;
                }
                Ok(Found { fence })
            }
            ChangeKind::Close { epoch, sequence } => {
                let row = store.lock(transaction, resource).await?;
                let mut fence = compare(row, *epoch)?;
                if fence.sequence == *sequence {
                    fence.sequence += 1;
                    store.store(transaction, resource, &fence).await?;
                }
                Ok(Found { fence })
            }
        }
    }
}

async fn locked<S: FenceStore>(
    store: &S,
    transaction: &mut S::Transaction<'_>,
    resource: &str,
) -> Result<Fence, Refusal> {
    let gone = || Refusal::unavailable("the fence was deleted while it was raised");
    store.lock(transaction, resource).await?.ok_or_else(gone)
}

/// The fence, if its epoch is exactly the given one.
pub(crate) fn compare(fence: Option<Fence>, given: Epoch) -> Result<Fence, Refusal> {
    let Some(fence) = fence else {
        return Err(Refusal::Unregistered { given, current: None });
    };
    match fence.epoch.cmp(&given) {
        std::cmp::Ordering::Equal => Ok(fence),
        std::cmp::Ordering::Greater => Err(Refusal::Stale { given, current: fence.epoch }),
        std::cmp::Ordering::Less => {
            Err(Refusal::Unregistered { given, current: Some(fence.epoch) })
        }
    }
}
