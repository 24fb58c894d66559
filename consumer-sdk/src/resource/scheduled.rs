//! A job whose ticks fire once each, whichever process owns it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::BoxFuture;
use tenure_model::{GroupId, NextOffset, TopicName};

use super::schedule::Schedule;
use super::source::ResourceSource;
use crate::consumer::{
    BuildError, Consumer, ConsumerBuilder, ConsumerError, End, Handler, Input, LifecycleEvents,
    Owned, Readiness, Stopped, Stopper,
};
use crate::grant::Grant;
use crate::offsets::{CoordinatorOffsets, OffsetWriter};
use crate::sink::BoxError;

/// Longest sleep before the wall clock is looked at again: it may be set meanwhile.
const LOOK: Duration = Duration::from_secs(1);

/// What becomes of ticks that nobody could fire in time: no owner, or a tick before took too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missed {
    /// Each is fired, late and in order.
    #[default]
    All,
    /// Only the newest is fired. A tick that was begun is always fired again, until it is done.
    Latest,
}

type WallClock = dyn Fn() -> u64 + Send + Sync;

/// A job in a group: each tick of its schedule fires once, on the process that owns the job at that moment.
///
/// A tick counts as done once its function has returned `Ok` and the coordinator has noted it. When the owner dies in
/// between, the next owner fires the same tick again under the same [`JobTick::key`]: keep the key with the effect, and
/// the effect happens once.
///
/// Ticks are read off the owner's wall clock. A clock that is behind fires late, one that is ahead fires early; none
/// fires a tick that is done again, and none skips one.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tenure_sdk::model::{GroupId, TopicName};
/// use tenure_sdk::resource::{Every, ScheduledJob};
///
/// let (group, name) = (GroupId::new("jobs")?, TopicName::new("invoices")?);
/// let every_hour = Every::new(Duration::from_secs(3600));
/// ScheduledJob::new(group, name, vec!["127.0.0.1:7400".to_owned()], every_hour)
///     .build()?
///     .run(|tick| async move {
///         println!("{} under {}", tick.key(), tick.grant().epoch);
///         Ok(())
///     })
///     .await?;
/// # Ok(())
/// # }
/// ```
pub struct ScheduledJob {
    builder: ConsumerBuilder<CoordinatorOffsets>,
    plan: Plan,
}

#[derive(Clone)]
struct Plan {
    name: TopicName,
    schedule: Arc<dyn Schedule>,
    missed: Missed,
    wall_clock: Arc<WallClock>,
}

impl fmt::Debug for ScheduledJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScheduledJob")
            .field("name", &self.plan.name)
            .field("missed", &self.plan.missed)
            .finish_non_exhaustive()
    }
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl ScheduledJob {
    /// Job `name` of `group`. Its first tick is the first one after it was owned for the first time.
    #[must_use]
    pub fn new(
        group: GroupId,
        name: TopicName,
        coordinators: Vec<String>,
        schedule: impl Schedule,
    ) -> Self {
        Self::on_clock(group, name, coordinators, schedule, Arc::new(unix_ms))
    }

    /// As [`ScheduledJob::new`], with another wall clock (milliseconds since 1970).
    #[must_use]
    pub fn on_clock(
        group: GroupId,
        name: TopicName,
        coordinators: Vec<String>,
        schedule: impl Schedule,
        wall_clock: Arc<WallClock>,
    ) -> Self {
        let now = Arc::clone(&wall_clock);
        let start = move || NextOffset::new(now()).unwrap_or(NextOffset::ZERO);
        let source = Arc::new(ResourceSource::starting_at(start));
        Self {
            builder: Consumer::builder(group, vec![name.clone()], source, coordinators),
            plan: Plan {
                name,
                schedule: Arc::new(schedule),
                missed: Missed::default(),
                wall_clock,
            },
        }
    }

    /// What becomes of ticks that nobody could fire in time. Default [`Missed::All`].
    #[must_use]
    pub fn missed(mut self, missed: Missed) -> Self {
        self.plan.missed = missed;
        self
    }

    /// Changes settings: lease, fenced sinks beside (`also`), error policy, names.
    #[must_use]
    pub fn with(
        self,
        change: impl FnOnce(ConsumerBuilder<CoordinatorOffsets>) -> ConsumerBuilder<CoordinatorOffsets>,
    ) -> Self {
        Self { builder: change(self.builder), plan: self.plan }
    }

    /// Checks the settings. Connects to nothing yet.
    ///
    /// # Errors
    ///
    /// As [`ConsumerBuilder::build`].
    pub fn build(self) -> Result<JobRunner, BuildError> {
        Ok(JobRunner { consumer: self.builder.build()?, plan: self.plan })
    }
}

/// A scheduled job that is ready to run.
pub struct JobRunner {
    consumer: Consumer<CoordinatorOffsets>,
    plan: Plan,
}

impl fmt::Debug for JobRunner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobRunner").field("name", &self.plan.name).finish_non_exhaustive()
    }
}

impl JobRunner {
    /// Ends it from elsewhere; a tick under way is finished within the deadline, or fired again by the next owner.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.consumer.stopper()
    }

    /// Whether this process is in the group, and its lease is live.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        self.consumer.readiness()
    }

    /// What happens to this process in the group.
    #[must_use]
    pub fn lifecycle(&self) -> LifecycleEvents {
        self.consumer.lifecycle()
    }

    /// Fires ticks while this process owns the job, until it is stopped.
    ///
    /// An error or a panic of `fire` is the [`ErrorPolicy`](crate::ErrorPolicy)'s; the same tick is fired until it
    /// succeeds, and none after it before that.
    ///
    /// # Errors
    ///
    /// As [`Consumer::run`].
    pub async fn run<F, Fut>(self, fire: F) -> Result<Stopped, ConsumerError>
    where
        F: Fn(JobTick) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (consumer, handler) = self.into_parts(fire);
        consumer.run(move |owned| handler(owned)).await
    }

    /// The consumer and the handler that it is run with.
    pub(crate) fn into_parts<F, Fut>(
        self,
        fire: F,
    ) -> (Consumer<CoordinatorOffsets>, Handler<CoordinatorOffsets>)
    where
        F: Fn(JobTick) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (plan, fire) = (self.plan, Arc::new(fire));
        let handler = move |owned: Owned<CoordinatorOffsets>| {
            let fire = Arc::clone(&fire);
            let fire = move |tick| fire(tick);
            Box::pin(plan.clone().fire_all(owned, fire)) as BoxFuture<'static, _>
        };
        (self.consumer, Arc::new(handler))
    }
}

impl Plan {
    /// Fires one tick after the other while the job is owned.
    ///
    /// The committed position is one past the last tick that is done; with [`Missed::Latest`] it is a tick's own time
    /// while that tick is under way, which is what tells it from one that may be passed over.
    async fn fire_all<F, Fut>(
        self,
        owned: Owned<CoordinatorOffsets>,
        fire: F,
    ) -> Result<(), BoxError>
    where
        F: Fn(JobTick) -> Fut,
        Fut: Future<Output = Result<(), BoxError>>,
    {
        let (grant, mut from) = (owned.grant().clone(), owned.resume());
        let (input, mut offsets) = owned.split();
        let input = Arc::new(input);
        loop {
            let Some(mut at_ms) = self.schedule.next(from.get()) else {
                input.ended().await;
                return Ok(());
            };
            if !self.reached(at_ms, &input).await {
                return Ok(());
            }
            let was_begun = at_ms == from.get();
            if self.missed == Missed::Latest && !was_begun {
                at_ms = self.schedule.latest(at_ms, (self.wall_clock)()).unwrap_or(at_ms);
                mark(&mut offsets, at_ms).await?;
            }
            let tick = JobTick {
                job: self.name.clone(),
                at_ms,
                grant: grant.clone(),
                input: Arc::clone(&input),
            };
            fire(tick).await?;
            from = mark(&mut offsets, at_ms.saturating_add(1)).await?;
        }
    }

    /// Waits for a moment of the wall clock; false when the ownership ends first.
    async fn reached(&self, at_ms: u64, input: &Input) -> bool {
        loop {
            let left = at_ms.saturating_sub((self.wall_clock)());
            if input.ending().is_some() {
                return false;
            }
            if left == 0 {
                return true;
            }
            tokio::select! {
                biased;
                _end = input.ended() => return false,
                () = tokio::time::sleep(Duration::from_millis(left).min(LOOK)) => {}
            }
        }
    }
}

async fn mark(offsets: &mut OffsetWriter, to_ms: u64) -> Result<NextOffset, BoxError> {
    let next = NextOffset::new(to_ms)?;
    offsets.move_to(next);
    Ok(offsets.flush().await?)
}

/// One tick of a job.
#[derive(Clone)]
pub struct JobTick {
    job: TopicName,
    at_ms: u64,
    grant: Grant,
    input: Arc<Input>,
}

impl fmt::Debug for JobTick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobTick")
            .field("key", &self.key())
            .field("epoch", &self.grant.epoch)
            .finish_non_exhaustive()
    }
}

impl JobTick {
    /// Its moment on the schedule, in milliseconds since 1970; it fires then or later.
    #[must_use]
    pub const fn at_ms(&self) -> u64 {
        self.at_ms
    }

    /// Name of the tick's effect: `job@milliseconds`. The same for every process that fires it.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}@{}", self.job, self.at_ms)
    }

    /// The grant that it fires under, for fenced sinks.
    #[must_use]
    pub const fn grant(&self) -> &Grant {
        &self.grant
    }

    /// How the ownership of the job ends; nothing while it goes on.
    #[must_use]
    pub fn ending(&self) -> Option<End> {
        self.input.ending()
    }

    /// Waits until the ownership of the job ends, for a `select!` in long work.
    pub async fn ended(&self) -> End {
        self.input.ended().await
    }
}
