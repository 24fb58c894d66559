//! One process at a time for a job.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{GroupId, Tick, TopicName};

use super::owning;
use crate::consumer::{
    BuildError, Consumer, ConsumerBuilder, ConsumerError, End, Handler, HandlerPhase, Input,
    LifecycleEvents, Owned, Readiness, Stopped, Stopper,
};
use crate::grant::Grant;
use crate::offsets::CoordinatorOffsets;
use crate::sink::BoxError;

/// How long a process whose job is done may take to leave.
const DONE_LEAVE: Duration = Duration::from_secs(5);

/// Settings of an election: of all processes that run it under the same group and name, one at a time leads.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use tenure_sdk::model::{GroupId, TopicName};
/// use tenure_sdk::resource::Singleton;
///
/// let (group, name) = (GroupId::new("jobs")?, TopicName::new("reindex")?);
/// let election = Singleton::new(group, name, vec!["127.0.0.1:7400".to_owned()]).build()?;
/// election
///     .run(|leading| async move {
///         while leading.ending().is_none() {
///             // Work; give `leading.grant().epoch` to whatever is written to.
///             tokio::time::sleep(std::time::Duration::from_secs(1)).await;
///         }
///         Ok(())
///     })
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Singleton {
    builder: ConsumerBuilder<CoordinatorOffsets>,
}

impl Singleton {
    /// Election for `name` among the processes of `group`.
    #[must_use]
    pub fn new(group: GroupId, name: TopicName, coordinators: Vec<String>) -> Self {
        Self { builder: owning(group, vec![name], coordinators) }
    }

    /// Changes settings: lease, fenced sinks beside (`also`), error policy, names.
    #[must_use]
    pub fn with(
        self,
        change: impl FnOnce(ConsumerBuilder<CoordinatorOffsets>) -> ConsumerBuilder<CoordinatorOffsets>,
    ) -> Self {
        Self { builder: change(self.builder) }
    }

    /// Checks the settings. Connects to nothing yet.
    ///
    /// # Errors
    ///
    /// As [`ConsumerBuilder::build`].
    pub fn build(self) -> Result<Election, BuildError> {
        Ok(Election { consumer: self.builder.build()? })
    }
}

/// An election that is ready to run.
#[derive(Debug)]
pub struct Election {
    consumer: Consumer<CoordinatorOffsets>,
}

impl Election {
    /// Ends the election of this process from elsewhere.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.consumer.stopper()
    }

    /// Whether this process takes part: it is in the group, and its lease is live.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        self.consumer.readiness()
    }

    /// What happens to this process in the election.
    #[must_use]
    pub fn lifecycle(&self) -> LifecycleEvents {
        self.consumer.lifecycle()
    }

    /// Waits to lead and runs `job` while this process leads; again whenever it leads again.
    ///
    /// A job that returns `Ok` while it leads is done: the process leaves, the next one leads, and `run` returns. An
    /// error or a panic is the [`ErrorPolicy`](crate::ErrorPolicy)'s: by default the lead is given back, and the
    /// coordinator gives it to some process again after a pause.
    ///
    /// Once [`Leading::ending`] says something, the job returns before the deadline in it, or is aborted.
    ///
    /// # Errors
    ///
    /// As [`Consumer::run`].
    pub async fn run<F, Fut>(self, job: F) -> Result<Stopped, ConsumerError>
    where
        F: Fn(Leading) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (consumer, handler) = self.into_parts(job);
        consumer.run(move |owned| handler(owned)).await
    }

    /// The consumer and the handler that it is run with.
    pub(crate) fn into_parts<F, Fut>(
        self,
        job: F,
    ) -> (Consumer<CoordinatorOffsets>, Handler<CoordinatorOffsets>)
    where
        F: Fn(Leading) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (stopper, job) = (self.consumer.stopper(), Arc::new(job));
        let handler = move |owned: Owned<CoordinatorOffsets>| {
            let (stopper, job) = (stopper.clone(), Arc::clone(&job));
            let leading = Leading::new(owned);
            let input = Arc::clone(&leading.input);
            let lead = async move {
                job(leading).await?;
                if input.ending().is_none() {
                    stopper.stop(DONE_LEAVE);
                    input.ended().await;
                }
                Ok(())
            };
            Box::pin(lead) as futures::future::BoxFuture<'static, _>
        };
        (self.consumer, Arc::new(handler))
    }
}

/// The lead, while it lasts. Cheap to clone.
#[derive(Clone)]
pub struct Leading {
    grant: Grant,
    input: Arc<Input>,
}

impl fmt::Debug for Leading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leading").field("grant", &self.grant).finish_non_exhaustive()
    }
}

impl Leading {
    pub(super) fn new(owned: Owned<CoordinatorOffsets>) -> Self {
        let grant = owned.grant().clone();
        let (input, _offsets) = owned.split();
        Self { grant, input: Arc::new(input) }
    }

    /// Epoch, lease, and the name under which fenced sinks keep the epoch.
    #[must_use]
    pub const fn grant(&self) -> &Grant {
        &self.grant
    }

    /// How the lead ends; nothing while it goes on.
    #[must_use]
    pub fn ending(&self) -> Option<End> {
        self.input.ending()
    }

    /// Waits until the lead ends, for a `select!` in long work.
    pub async fn ended(&self) -> End {
        self.input.ended().await
    }

    /// Waits until the lead is lost; an orderly end (asked for, shutdown) is passed over.
    pub async fn lost(&self) -> End {
        self.input.lost().await
    }

    /// Waits until the lease is at risk: two heartbeats in a row have no answer. Answers when it ends, on the lease's
    /// clock. Time to stop what cannot be fenced.
    pub async fn lease_at_risk(&self) -> Tick {
        self.input.lease_at_risk().await
    }

    /// Says what the job does, so that loading is not taken for standing still.
    pub fn report(&self, phase: HandlerPhase) {
        self.input.report(phase);
    }
}
