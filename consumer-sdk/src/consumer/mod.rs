//! The consumer: joins a group, owns partitions one by one, and runs a handler for each.
//!
//! Each grant has a task of its own: acquire, handler, drain, release. Grants share nothing that one of them could
//! hold up for the others.

mod acquire;
mod batcher;
mod buffer;
mod builder;
mod contain;
mod counters;
mod doubts;
mod end;
mod fault;
mod input;
mod inspect;
mod letters;
mod lifecycle;
mod link;
mod owned;
mod policy;
mod probe;
mod run;
mod serve;
mod stream;
mod topics;
mod warm;

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use regex::Regex;
use tenure_model::{Clock, GroupId, TopicName};
use tokio::sync::watch;

pub(crate) use self::builder::AcquireHook;
pub use self::builder::{AcquireStep, BuildError, ConsumerBuilder};
pub use self::counters::Counters;
pub use self::end::End;
pub use self::input::{Batch, HandlerPhase, Input, Limits};
pub(crate) use self::inspect::Grants;
pub use self::inspect::Inspector;
pub(crate) use self::lifecycle::Told;
pub use self::lifecycle::{LIFECYCLE_EVENTS_MAX, Lifecycle, LifecycleEvents};
pub(crate) use self::link::{Link, OffsetMark};
pub use self::owned::Owned;
pub use self::policy::{Backoff, DeadLetter, DeadLetterSink, ErrorPolicy, HandlerError, Then};
pub use self::probe::Probe;
pub use self::stream::{Finish, Ownership, OwnershipStream, Work};
use self::topics::Subscription;
pub use self::warm::Preparation;
pub(crate) use self::warm::Warm;
use crate::offsets::{CoordinatorOffsets, OffsetMirror};
use crate::session::{EndCause, Session, SessionConfig};
use crate::sink::{BoxError, FencedSink, RegisterOnly};
use crate::source::{ReadAhead, RecordSource, ResetPolicy};

/// Lengths and policies of the run loop.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) reset: ResetPolicy,
    pub(crate) read_ahead: ReadAhead,
    pub(crate) acquire_deadline: Duration,
    pub(crate) lost_grace: Duration,
    pub(crate) topics_interval: Duration,
    pub(crate) on_error: ErrorPolicy,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            reset: ResetPolicy::default(),
            read_ahead: ReadAhead::default(),
            acquire_deadline: Duration::from_secs(30),
            lost_grace: Duration::from_secs(1),
            topics_interval: Duration::from_secs(30),
            on_error: ErrorPolicy::default(),
        }
    }
}

impl Settings {
    fn check_nothing_is_zero(&self) -> Result<(), BuildError> {
        let values = [
            ("read_ahead.records", self.read_ahead.records == 0),
            ("read_ahead.bytes", self.read_ahead.bytes == 0),
            ("acquire_deadline", self.acquire_deadline.is_zero()),
            ("topics_interval", self.topics_interval.is_zero()),
        ];
        values
            .into_iter()
            .find(|(_, zero)| *zero)
            .map_or(Ok(()), |(name, _)| Err(BuildError::Zero(name)))
    }
}

/// What a consumer is made of.
pub(crate) struct Parts<S: FencedSink> {
    pub(crate) home: S,
    pub(crate) offsets: CoordinatorOffsets,
    pub(crate) counters: Arc<Counters>,
    pub(crate) also: Vec<Arc<dyn RegisterOnly>>,
    pub(crate) source: Arc<dyn RecordSource>,
    pub(crate) settings: Settings,
    pub(crate) hook: Option<AcquireHook>,
    pub(crate) told: Arc<Told>,
    pub(crate) grants: Arc<Grants>,
    pub(crate) doubts: Arc<doubts::Doubts>,
    pub(crate) warm: Warm,
    pub(crate) mirror: Option<Arc<dyn OffsetMirror>>,
    pub(crate) letters: Option<policy::LettersAtHome<S::Writer>>,
}

/// Runs once for each owned partition.
pub(crate) type Handler<S> =
    Arc<dyn Fn(Owned<S>) -> BoxFuture<'static, Result<(), BoxError>> + Send + Sync>;

/// A member of a group that is ready to run.
pub struct Consumer<S: FencedSink = CoordinatorOffsets> {
    parts: Parts<S>,
    session: SessionConfig,
    pattern: Option<Regex>,
    stop: watch::Sender<Option<Duration>>,
    link: watch::Sender<Option<Weak<dyn Link>>>,
}

impl<S: FencedSink> fmt::Debug for Consumer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("session", &self.session)
            .field("settings", &self.parts.settings)
            .finish_non_exhaustive()
    }
}

impl Consumer<CoordinatorOffsets> {
    /// Starts to describe a consumer of `topics` in `group`, which reads from `source` and finds its raft leader from
    /// `coordinators` (`host:port` of any nodes).
    #[must_use]
    pub fn builder(
        group: GroupId,
        topics: Vec<TopicName>,
        source: Arc<dyn RecordSource>,
        coordinators: Vec<String>,
    ) -> ConsumerBuilder<CoordinatorOffsets> {
        ConsumerBuilder::new(group, topics, source, coordinators)
    }
}

impl<S: FencedSink> Consumer<S> {
    fn new(parts: Parts<S>, session: SessionConfig, pattern: Option<Regex>) -> Self {
        let (stop, link) = (watch::Sender::new(None), watch::Sender::new(None));
        Self { parts, session, pattern, stop, link }
    }

    /// What this consumer did so far; readable while it runs.
    #[must_use]
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.parts.counters)
    }

    /// Starts a shutdown from elsewhere.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        Stopper { stop: self.stop.clone() }
    }

    /// Whether the consumer is in the group, from elsewhere.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        Readiness { link: self.link.subscribe() }
    }

    /// Looks into this consumer while it runs.
    #[must_use]
    pub fn inspector(&self) -> Inspector {
        Inspector {
            readiness: self.readiness(),
            grants: Arc::clone(&self.parts.grants),
            counters: self.counters(),
        }
    }

    /// What happens to this consumer from now on, for frameworks that show it or act on it.
    #[must_use]
    pub fn lifecycle(&self) -> LifecycleEvents {
        self.parts.told.listen()
    }

    /// Joins the group and runs `handler` once for each owned partition, until it is stopped.
    ///
    /// The handler runs as a task of its own. It returns `Ok` once its input has ended; an early return gives the
    /// partition back, and the coordinator grants it again, later. What an error or a panic does is the
    /// [`ErrorPolicy`]'s; by default it gives the partition back too. An error that has `Fenced` in its chain is a
    /// quiet end: a newer owner exists.
    ///
    /// A handler that does not return by its deadline is aborted, which takes effect at its next `.await`. One that is
    /// stuck in code without any is not stopped by this process: its lease is, so that its writes are refused locally,
    /// and the resource refuses them by epoch. The partition is given back meanwhile.
    ///
    /// # Errors
    ///
    /// [`ConsumerError`] when the membership ended and is not to be taken up again.
    pub async fn run<F, Fut>(mut self, handler: F) -> Result<Stopped, ConsumerError>
    where
        F: Fn(Owned<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let subscription = self.subscription();
        let mut stop = self.stop.subscribe();
        let interval = self.parts.settings.topics_interval;
        tokio::select! {
            biased;
            // Before there is a topic to read, there is no group to leave.
            Ok(_) = stop.wait_for(Option::is_some) => {
                return Ok(Stopped { clean: true, handlers_aborted: 0 });
            }
            () = subscription.first(&*self.parts.source, interval), if self.pattern.is_some() => {}
            () = std::future::ready(()), if self.pattern.is_none() => {}
        }
        self.session.topics = subscription.names();
        let (session, events) = Session::start(self.session.clone());
        let link = Arc::new(link::SessionLink::new(session));
        self.run_on(link, events, handler, subscription).await
    }

    fn subscription(&self) -> Arc<Subscription> {
        Arc::new(Subscription::new(self.session.topics.clone(), self.pattern.clone()))
    }

    /// As [`Consumer::run`], with `prepare` run ahead of each partition that is to come, while its present owner still
    /// works: to load state, open connections, fill caches. `own` gets what it made.
    ///
    /// The coordinator waits for `prepare` before it asks the present owner, at most for its prepare deadline (30 s by
    /// default), and then the move costs as little as the last drain. What is loaded early is a hint: between then and
    /// the cut-over the owner has gone on. Catch it up to [`Owned::resume`], which is read after the fence is in.
    /// Records are read ahead meanwhile too, and used only if they continue from the resume point.
    ///
    /// A partition that comes without a preparation (its owner died, a start of the group) and one whose preparation
    /// failed are prepared once they are acquired; there an error counts as the handler's. So is one whose handler is
    /// run again.
    ///
    /// # Errors
    ///
    /// As [`Consumer::run`].
    pub async fn run_warm<W, P, PFut, F, Fut>(
        self,
        prepare: P,
        own: F,
    ) -> Result<Stopped, ConsumerError>
    where
        W: Send + 'static,
        P: Fn(Preparation) -> PFut + Send + Sync + 'static,
        PFut: Future<Output = Result<W, BoxError>> + Send + 'static,
        F: Fn(Owned<S>, W) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (consumer, handler) = self.into_warm(prepare, own);
        consumer.run(handler).await
    }

    /// The consumer and the handler that [`Consumer::run_warm`] runs.
    pub(crate) fn into_warm<W, P, PFut, F, Fut>(
        mut self,
        prepare: P,
        own: F,
    ) -> (Self, impl Fn(Owned<S>) -> BoxFuture<'static, Result<(), BoxError>> + Send + Sync + 'static)
    where
        W: Send + 'static,
        P: Fn(Preparation) -> PFut + Send + Sync + 'static,
        PFut: Future<Output = Result<W, BoxError>> + Send + 'static,
        F: Fn(Owned<S>, W) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        self.session.prepares = true;
        self.parts.warm = Warm::new(Arc::new(move |preparation| {
            let load = prepare(preparation);
            Box::pin(async move { Ok(Box::new(load.await?) as Box<dyn Any + Send>) })
        }));
        let own = Arc::new(own);
        let handler = move |mut owned: Owned<S>| {
            let (own, loaded) = (Arc::clone(&own), owned.loaded.take());
            let run = async move {
                let loaded = loaded.and_then(|loaded| loaded.downcast::<W>().ok());
                let loaded = loaded.ok_or("nothing was loaded: this is a bug")?;
                own(owned, *loaded).await
            };
            Box::pin(run) as BoxFuture<'static, _>
        };
        (self, handler)
    }

    /// As [`Consumer::run`], on a session that something else has started.
    pub(crate) async fn run_with<F, Fut>(
        self,
        link: Arc<dyn Link>,
        events: tokio::sync::mpsc::UnboundedReceiver<crate::session::SessionEvent>,
        handler: F,
    ) -> Result<Stopped, ConsumerError>
    where
        F: Fn(Owned<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let subscription = self.subscription();
        self.run_on(link, events, handler, subscription).await
    }

    async fn run_on<F, Fut>(
        self,
        link: Arc<dyn Link>,
        events: tokio::sync::mpsc::UnboundedReceiver<crate::session::SessionEvent>,
        handler: F,
        topics: Arc<Subscription>,
    ) -> Result<Stopped, ConsumerError>
    where
        F: Fn(Owned<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let Self { parts, session, pattern: _, stop, link: shown } = self;
        shown.send_replace(Some(Arc::downgrade(&link)));
        let handler: Handler<S> = Arc::new(move |owned| Box::pin(handler(owned)));
        let clock = Arc::clone(&session.clock);
        run::Running { parts, link, handler, clock, topics }.run(events, stop.subscribe()).await
    }
}

/// Starts a clean shutdown. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stopper {
    stop: watch::Sender<Option<Duration>>,
}

impl Stopper {
    /// Asks the consumer to drain, release its partitions at their final offsets and leave. [`Consumer::run`] returns
    /// within `deadline`, whatever handlers, source and coordinator do. Only the first call counts.
    pub fn stop(&self, deadline: Duration) {
        self.stop.send_if_modified(|stop| {
            let first = stop.is_none();
            stop.get_or_insert(deadline);
            first
        });
    }
}

/// Whether a consumer is in its group. Cheap to clone.
#[derive(Clone)]
pub struct Readiness {
    link: watch::Receiver<Option<Weak<dyn Link>>>,
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness").field("is_ready", &self.is_ready()).finish()
    }
}

impl Readiness {
    /// Whether the consumer has joined and its lease is live.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.link.borrow().as_ref().and_then(Weak::upgrade).is_some_and(|link| link.is_ready())
    }
}

/// How a consumer that was asked to stop has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Whether every handler returned, every partition was released and the source ended within the deadline.
    pub clean: bool,
    /// Handlers that had to be aborted.
    pub handlers_aborted: usize,
}

/// Why a consumer ended without being asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConsumerError {
    /// The membership is over.
    #[error("the membership has ended: {0:?}")]
    MembershipEnded(EndCause),
    /// The session's thread has ended without a word.
    #[error("the session has ended by itself: this is a bug")]
    SessionGone,
}

pub(crate) type SharedClock = Arc<dyn Clock>;

#[cfg(test)]
mod tests;
