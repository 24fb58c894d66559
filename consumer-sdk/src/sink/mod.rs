//! Fenced sinks: where a stale owner is refused by the resource itself.
//!
//! The order of an acquire (DESIGN.md, section 8) is built into the types: a [`FencedSink`] only registers; the resume
//! point is read with a [`Verified`] in hand, which only the SDK makes, after the coordinator confirmed the grant.

pub mod conformance;
mod doubt;
mod fence;

pub use doubt::look_up;
pub use fence::{FenceRow, Fencing, Role, Standing, epoch_from_column, epoch_to_column};

use std::fmt;
use std::future::Future;
use std::time::Duration;

use futures::future::BoxFuture;
use tenure_model::{Epoch, Home, NextOffset};

use crate::grant::Grant;
use crate::lease::LeaseEnded;

/// Any error of a driver or of the service's code.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// What a stale writer cannot damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Nothing of the partition.
    Partition,
    /// No key that a newer owner has written.
    Key,
    /// Nothing that was appended before; it may append itself.
    Append,
}

/// Who refuses a stale writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// The resource, in the same atomic step as the write.
    Resource,
    /// The resource, as long as every writer goes through the SDK.
    Cooperative,
    /// Nobody for certain; the text says when it fails.
    BestEffort(&'static str),
}

/// How long a paused holder can delay the next owner's registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takeover {
    /// At most this long.
    Bounded(Duration),
    /// Until the holder wakes or dies (a frozen SQLite writer keeps the file's lock).
    Unbounded,
}

/// What a sink promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// What a stale writer cannot damage.
    pub scope: Scope,
    /// Where the offset lives when this sink is the home.
    pub home: Home,
    /// Who refuses a stale writer.
    pub enforcement: Enforcement,
    /// How long a paused holder can delay the next owner.
    pub takeover: Takeover,
}

/// Proof that the coordinator confirmed the grant *after* it was registered at every sink. Only the SDK makes one.
#[derive(Clone, Copy, Debug)]
pub struct Verified {
    next_offset: Option<NextOffset>,
    home_initialised: bool,
    starts_at_earliest: bool,
}

impl Verified {
    pub(crate) const fn new(next_offset: Option<NextOffset>, home_initialised: bool) -> Self {
        Self { next_offset, home_initialised, starts_at_earliest: false }
    }

    pub(crate) const fn starting_at_earliest(self, starts_at_earliest: bool) -> Self {
        Self { starts_at_earliest, ..self }
    }

    /// Proof for driving a sink without a coordinator: in its tests, or with a token that something else hands out.
    #[must_use]
    pub const fn without_coordinator(home_initialised: bool) -> Self {
        Self::new(None, home_initialised)
    }

    /// The coordinator's committed offset; nothing when it is not the home or never had one.
    #[must_use]
    pub const fn next_offset(&self) -> Option<NextOffset> {
        self.next_offset
    }

    /// Whether the partition appeared after the group knew its topic: without an offset it starts at its earliest
    /// record, whatever the reset policy says.
    #[must_use]
    pub const fn starts_at_earliest(&self) -> bool {
        self.starts_at_earliest
    }

    /// Whether the home certainly has an offset. If so, an absent one is [`SinkError::Misconfigured`].
    #[must_use]
    pub const fn home_initialised(&self) -> bool {
        self.home_initialised
    }
}

/// Destination that keeps the highest epoch it has seen for each resource and refuses older ones.
///
/// An implementation compares and stores the epoch in the same atomic step as the data; a check before the write is not
/// fencing.
pub trait FencedSink: Send + Sync + 'static {
    /// Writes of one grant.
    type Writer: FencedWriter;

    /// Name in the group's settings, in errors and metrics; a name as of `tenure_model`.
    fn name(&self) -> &str;

    /// What the sink promises.
    fn capabilities(&self) -> Capabilities;

    /// Makes ready what a registration will need, such as a connection. Called when a partition is announced, before there
    /// is a grant: it registers nothing. What fails here is done at the registration. By default nothing.
    fn make_ready(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Shuts out earlier owners: raises the fence of `grant.resource` to `grant.epoch`.
    ///
    /// Called once per grant, before it is verified and before the resume point is read. Repeating it with the same
    /// grant does nothing. Never lowers the fence.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`] when a newer owner was here first; any other [`SinkError`].
    fn register(
        &self,
        grant: &Grant,
    ) -> impl Future<Output = Result<Registered<Self::Writer>, SinkError>> + Send;
}

/// A registration that is in.
#[derive(Debug)]
pub struct Registered<W> {
    /// Writes under the registered epoch.
    pub writer: W,
    /// Epoch that the fence had before, if it was an older one.
    pub displaced: Option<Epoch>,
}

/// Writes of one grant. How data is written is each sink's own; this is what the acquire needs.
pub trait FencedWriter: Send + 'static {
    /// Reads the resume point in a step of its own, after the fence is in and the grant is verified.
    ///
    /// Nothing: the home has no offset yet, and `verified.home_initialised()` is false.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] when the home was initialised and the offset is absent;
    /// [`SinkError::FenceRegressed`] when the fence is below the registered epoch; any other [`SinkError`].
    fn resume(
        &mut self,
        verified: &Verified,
    ) -> impl Future<Output = Result<Option<NextOffset>, SinkError>> + Send;

    /// Sets the first offset, once, under the epoch; answers the offset that counts.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`], or any other [`SinkError`].
    fn initialise(
        &mut self,
        start: NextOffset,
    ) -> impl Future<Output = Result<NextOffset, SinkError>> + Send;

    /// Finds out what became of a write whose outcome is unknown. The only legal call after [`SinkError::Unknown`].
    ///
    /// # Errors
    ///
    /// Any [`SinkError`]; after another `Unknown`, resolve again.
    fn resolve(&mut self) -> impl Future<Output = Result<Resolved, SinkError>> + Send;

    /// Ends the use of the grant and gives resources back. Never lowers the fence.
    ///
    /// # Errors
    ///
    /// Any [`SinkError`]; the grant is over all the same.
    fn retire(self) -> impl Future<Output = Result<(), SinkError>> + Send;
}

/// What became of a write whose outcome was unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// It is in; go on from this offset.
    Applied(NextOffset),
    /// It certainly did not happen and cannot happen any more; the home is at this offset.
    NotApplied(NextOffset),
}

/// Sink beside the home: fenced by epoch, idempotent by (topic id, partition, offset), holds no offset of the group.
pub trait RegisterOnly: Send + Sync + 'static {
    /// As [`FencedSink::name`].
    fn name(&self) -> &str;

    /// As [`FencedSink::capabilities`].
    fn capabilities(&self) -> Capabilities;

    /// As [`FencedSink::make_ready`].
    fn make_ready_only(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// As [`FencedSink::register`]; answers the displaced epoch.
    fn register_only<'a>(
        &'a self,
        grant: &'a Grant,
    ) -> BoxFuture<'a, Result<Option<Epoch>, SinkError>>;
}

impl<S: FencedSink> RegisterOnly for S {
    fn name(&self) -> &str {
        FencedSink::name(self)
    }

    fn capabilities(&self) -> Capabilities {
        FencedSink::capabilities(self)
    }

    fn make_ready_only(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.make_ready())
    }

    fn register_only<'a>(
        &'a self,
        grant: &'a Grant,
    ) -> BoxFuture<'a, Result<Option<Epoch>, SinkError>> {
        Box::pin(async move { Ok(self.register(grant).await?.displaced) })
    }
}

/// Why a sink did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// A newer epoch is registered. Ends the grant; nothing was written.
    #[error("fenced: given {ours}, current is {}: stop writing", Seen(*seen))]
    Fenced {
        /// Epoch of the writer.
        ours: Epoch,
        /// Epoch at the resource, if it said so.
        seen: Option<Epoch>,
    },
    /// The lease has ended locally; nothing was sent.
    #[error(transparent)]
    LeaseEnded(#[from] LeaseEnded),
    /// The offset at the home is not the expected one, under the same epoch: an own write whose answer was lost, or a
    /// bug. Nothing was written.
    #[error("offset conflict: expected {expected}, found {found}")]
    OffsetConflict {
        /// What the writer expected.
        expected: NextOffset,
        /// What is there.
        found: NextOffset,
    },
    /// It may or may not have happened: resolve before anything else.
    #[error("outcome unknown: {0}")]
    Unknown(#[source] BoxError),
    /// It certainly did not happen; may be tried again.
    #[error("failed for now, nothing was written: {source}")]
    Transient {
        /// Pause that the resource asked for.
        retry_after: Option<Duration>,
        /// Cause.
        #[source]
        source: BoxError,
    },
    /// The data was refused (a constraint, a type): for the error policy.
    #[error("data refused: {0}")]
    Rejected(#[source] BoxError),
    /// The sink is not what it must be: no fence row, wrong isolation, a missing table. Freezes the partition.
    #[error("misconfigured: {0}")]
    Misconfigured(String),
    /// The fence at the resource is below ours: it was restored or failed over. Stop; never raised silently.
    #[error("fence regressed: ours is {ours}, the resource has {}: it lost history, stop", Seen(*seen))]
    FenceRegressed {
        /// Epoch of the writer.
        ours: Epoch,
        /// Epoch at the resource; nothing when the fence is gone.
        seen: Option<Epoch>,
    },
}

struct Seen(Option<Epoch>);

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(epoch) => fmt::Display::fmt(&epoch, f),
            None => f.write_str("not known"),
        }
    }
}
