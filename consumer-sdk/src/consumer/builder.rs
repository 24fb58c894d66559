//! Settings of a consumer.

use std::any::TypeId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use regex::Regex;
use tenure_model::limits::{LABELS_MAX, NAME_BYTES_MAX, RETURNING_WITHIN_MS_MAX, WEIGHT_MAX};
use tenure_model::{
    Clock, GroupId, GroupSettings, Home, InstanceId, LabelName, LeaseSettings, MemberId,
    SettingsError, SinkSetting, Takeover, TopicName,
};

use super::policy::LettersAtHome;
use super::{Consumer, Counters, DeadLetter, ErrorPolicy, Parts, Settings, Then, Warm};
use crate::grant::Grant;
use crate::lease::LeaseCheck;
use crate::offsets::{COMMIT_INTERVAL, CoordinatorOffsets, OffsetMirror};
use crate::session::SessionConfig;
use crate::sink::{BoxError, Enforcement, FencedSink, RegisterOnly};
use crate::source::{ReadAhead, RecordSource, ResetPolicy};

/// Step of an acquire, before which the hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AcquireStep {
    /// Before the epoch is registered at the first sink.
    Register,
    /// Registered at every sink; before the grant is verified.
    Verify,
    /// Verified; before the resume point is read.
    Resume,
    /// Before the first record is read.
    Open,
}

/// Runs before each step of each acquire. The acquire waits for it, within its deadline.
pub(crate) type AcquireHook =
    Arc<dyn Fn(AcquireStep, Grant) -> BoxFuture<'static, ()> + Send + Sync>;

/// Settings that contradict each other, or one out of range.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No coordinator is named.
    #[error("coordinators is empty: name at least one as host:port")]
    NoCoordinators,
    /// No topic is named.
    #[error("topics is empty: name at least one")]
    NoTopics,
    /// The pattern of topics is no regular expression.
    #[error("topics_matching is no regular expression: {0}")]
    Pattern(String),
    /// A topic is named twice.
    #[error("topic {0} is named twice")]
    TopicTwice(TopicName),
    /// A length or count is zero.
    #[error("{0} is 0: give it a value above 0")]
    Zero(&'static str),
    /// The weight is too large.
    #[error("weight is {0}: use 1 to {WEIGHT_MAX}")]
    Weight(u32),
    /// Too many labels, or one that is too long.
    #[error("{0}: use at most {LABELS_MAX} labels of at most {NAME_BYTES_MAX} bytes")]
    Labels(String),
    /// Dead letters are to go to the home, and nothing says how.
    #[error(
        "on_error is DeadLetterAtHome, but nothing writes them: set dead_letters_at_home after home"
    )]
    NoLetters,
    /// Dead letters are to go to the home, which is the coordinator.
    #[error(
        "on_error is DeadLetterAtHome, but the offsets are at the coordinator: use dead_letter, or a sink as home"
    )]
    LettersWithoutSink,
    /// A return is promised, by nothing that would tell who returns.
    #[error("returning_within needs an instance id to return by: give one")]
    ReturnWithoutInstance,
    /// A return is promised too late.
    #[error("returning_within is {given_ms} ms: use 1 to {RETURNING_WITHIN_MS_MAX}")]
    ReturnOutOfRange {
        /// What was given, in milliseconds.
        given_ms: u128,
    },
    /// Lease or group settings contradict each other.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The sink given as home holds no offset.
    #[error("sink {0:?} is given as home, but holds no offset: give it to also()")]
    NotAHome(String),
    /// A mirror would overwrite the offsets that the home keeps in Kafka's own store.
    #[error(
        "mirror is set, but the home keeps its offsets in Kafka transactions: leave the mirror out"
    )]
    MirrorOfTransactions,
}

/// Settings of a consumer; each has a default.
pub struct ConsumerBuilder<S: FencedSink> {
    home: S,
    offsets: CoordinatorOffsets,
    counters: Arc<Counters>,
    also: Vec<Arc<dyn RegisterOnly>>,
    source: Arc<dyn RecordSource>,
    session: SessionConfig,
    takeover: Takeover,
    settings: Settings,
    hook: Option<AcquireHook>,
    mirror: Option<Arc<dyn OffsetMirror>>,
    pattern: Option<String>,
    letters: Option<LettersAtHome<S::Writer>>,
}

impl<S: FencedSink> fmt::Debug for ConsumerBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsumerBuilder")
            .field("session", &self.session)
            .field("takeover", &self.takeover)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl ConsumerBuilder<CoordinatorOffsets> {
    pub(super) fn new(
        group: GroupId,
        topics: Vec<TopicName>,
        source: Arc<dyn RecordSource>,
        coordinators: Vec<String>,
    ) -> Self {
        let counters = Arc::new(Counters::default());
        let offsets = CoordinatorOffsets::new(Arc::clone(&counters), COMMIT_INTERVAL);
        Self {
            home: offsets.clone(),
            offsets,
            counters,
            also: Vec::new(),
            source,
            session: SessionConfig::new(coordinators, group, topics),
            takeover: Takeover::default(),
            settings: Settings::default(),
            hook: None,
            mirror: None,
            pattern: None,
            letters: None,
        }
    }

    /// Shortest time between two background commits of one partition. Default [`COMMIT_INTERVAL`]; what is done and
    /// not committed is done again by the next owner after a crash.
    #[must_use]
    pub fn commit_interval(mut self, length: Duration) -> Self {
        self.offsets = CoordinatorOffsets::new(Arc::clone(&self.counters), length);
        self.home = self.offsets.clone();
        self
    }
}

impl<S: FencedSink> ConsumerBuilder<S> {
    /// Makes `sink` the one home of the offsets, moved by the same step as its data. Default: the coordinator.
    #[must_use]
    pub fn home<T: FencedSink>(self, sink: T) -> ConsumerBuilder<T> {
        let Self {
            home: _,
            offsets,
            counters,
            also,
            source,
            session,
            takeover,
            settings,
            hook,
            mirror,
            pattern,
            letters: _,
        } = self;
        ConsumerBuilder {
            home: sink,
            offsets,
            counters,
            also,
            source,
            session,
            takeover,
            settings,
            hook,
            mirror,
            pattern,
            letters: None,
        }
    }

    /// Where failing records go with [`Then::DeadLetterAtHome`]: `put` gets the record and a writer of the home, writes
    /// the letter, and moves the offset to `letter.record.next()`, both in one step of the sink. A crash in between then
    /// does neither, and the letter is there once.
    ///
    /// It is called when the failing record is the first that the home does not have; records before it are handed out
    /// one by one first. An error of it is tried again, with the policy's pauses and a new writer. To be set after
    /// [`ConsumerBuilder::home`].
    ///
    /// ```
    /// # use std::sync::Arc;
    /// use futures::FutureExt;
    /// use tenure_sdk::consumer::{Backoff, Consumer, ErrorPolicy, Then};
    /// use tenure_sdk::testing::{MemorySink, MemorySource};
    /// # use tenure_sdk::model::{GroupId, TopicName};
    /// # let (group, topics) = (GroupId::new("g").unwrap(), vec![TopicName::new("t").unwrap()]);
    ///
    /// let consumer = Consumer::builder(group, topics, Arc::new(MemorySource::new()), vec!["a:1".into()])
    ///     .home(MemorySink::new("rows"))
    ///     .on_error(ErrorPolicy::retry(2, Backoff::default()).then(Then::DeadLetterAtHome))
    ///     .dead_letters_at_home(|letter, writer| {
    ///         async move {
    ///             let record = letter.record;
    ///             let (at, next) = (record.offset, record.next());
    ///             Ok(writer.write(&[record], at, next)?)
    ///         }
    ///         .boxed()
    ///     })
    ///     .build();
    /// assert!(consumer.is_ok());
    /// ```
    #[must_use]
    pub fn dead_letters_at_home<F>(mut self, put: F) -> Self
    where
        F: for<'a> Fn(DeadLetter, &'a mut S::Writer) -> BoxFuture<'a, Result<(), BoxError>>
            + Send
            + Sync
            + 'static,
    {
        self.letters = Some(Arc::new(put));
        self
    }

    /// Adds a sink beside the home: fenced by epoch, holds no offset. They are registered in this order, the home last.
    #[must_use]
    pub fn also(mut self, sink: Arc<dyn RegisterOnly>) -> Self {
        self.also.push(sink);
        self
    }

    /// Makes the member static. Default: none.
    #[must_use]
    pub fn instance_id(mut self, instance: InstanceId) -> Self {
        self.session.instance = Some(instance);
        self
    }

    /// On a shutdown, the member's partitions are kept for the next process with its instance id, for so long at most
    /// (1 ms to one hour), instead of going to others. Needs [`ConsumerBuilder::instance_id`]. Default: they go.
    #[must_use]
    pub fn returning_within(mut self, length: Duration) -> Self {
        self.session.returning_within = Some(length);
        self
    }

    /// Id of this member; never one that was used before. Default: picked at random.
    #[must_use]
    pub fn member(mut self, member: MemberId) -> Self {
        self.session.member = Some(member);
        self
    }

    /// Wanted lengths of the lease; the coordinator answers with what counts. Default: ttl 10 s, heartbeat 3 s.
    #[must_use]
    pub fn lease(mut self, lease: LeaseSettings) -> Self {
        self.session.lease = lease;
        self
    }

    /// When a partition may be taken from a member that does not answer. Default [`Takeover::Lease`].
    #[must_use]
    pub fn takeover(mut self, takeover: Takeover) -> Self {
        self.takeover = takeover;
        self
    }

    /// Where to start a partition whose home has no offset. Default [`ResetPolicy::Earliest`].
    #[must_use]
    pub fn reset_policy(mut self, policy: ResetPolicy) -> Self {
        self.settings.reset = policy;
        self
    }

    /// How far the source reads ahead, per partition. Default: 1000 records, 8 MiB.
    #[must_use]
    pub fn read_ahead(mut self, read_ahead: ReadAhead) -> Self {
        self.settings.read_ahead = read_ahead;
        self
    }

    /// Largest number of partitions that this member takes. Default: no cap.
    #[must_use]
    pub fn partitions_max(mut self, count: u32) -> Self {
        self.session.partitions_max = Some(count);
        self
    }

    /// Name of this process for people. Default: host name and process id.
    #[must_use]
    pub fn client(mut self, client: impl Into<String>) -> Self {
        self.session.client = client.into();
        self
    }

    /// Whether writes consult the local lease. [`LeaseCheck::Off`] is for tests that prove that the resource itself
    /// refuses a stale owner. Default [`LeaseCheck::On`].
    #[must_use]
    pub fn lease_check(mut self, check: LeaseCheck) -> Self {
        self.session.lease_check = check;
        self
    }

    /// Whether an expired membership is followed by a new one, under a new member id. Default true.
    #[must_use]
    pub fn rejoin(mut self, rejoin: bool) -> Self {
        self.session.rejoin = rejoin;
        self
    }

    /// Clock that leases are counted on. Default: the machine's, which goes on counting while it is suspended.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.session.clock = clock;
        self
    }

    /// How long an acquire may take before the partition is given back. Default 30 s.
    #[must_use]
    pub fn acquire_deadline(mut self, length: Duration) -> Self {
        self.settings.acquire_deadline = length;
        self
    }

    /// How long a handler may go on after its partition was lost, before it is aborted. Default 1 s.
    #[must_use]
    pub fn lost_grace(mut self, length: Duration) -> Self {
        self.settings.lost_grace = length;
        self
    }

    /// What is done when a handler fails. Default: the partition is given back.
    #[must_use]
    pub fn on_error(mut self, policy: ErrorPolicy) -> Self {
        self.settings.on_error = policy;
        self
    }

    /// How often topics are looked up and reported. Default 30 s.
    #[must_use]
    pub fn topics_interval(mut self, length: Duration) -> Self {
        self.settings.topics_interval = length;
        self
    }

    /// Share of partitions relative to other members, 1 to 20: one of weight 2 gets twice as many as one of weight 1, as
    /// near as whole partitions can. Default 1.
    #[must_use]
    pub fn weight(mut self, weight: u32) -> Self {
        self.session.weight = weight;
        self
    }

    /// Adds a label, such as `rack`, that `tenure members` shows; at most 16, of at most 249 bytes each. The same name
    /// again replaces its value. Nothing is decided by it. Default: none.
    #[must_use]
    pub fn label(mut self, name: LabelName, value: impl Into<String>) -> Self {
        self.session.labels.insert(name, value.into());
        self
    }

    /// Reads all topics whose whole name matches the regular expression `pattern`, beside those that are named; also
    /// those that appear later, which are read from their first record whatever the reset policy says. New topics are
    /// looked for every [`topics_interval`](Self::topics_interval). At most 1000 topics in all.
    ///
    /// The consumer joins its group once there is a topic to read.
    #[must_use]
    pub fn topics_matching(mut self, pattern: impl Into<String>) -> Self {
        self.pattern = Some(pattern.into());
        self
    }

    /// Copies committed offsets to `mirror`, for lag tools. Default: none.
    #[must_use]
    pub fn mirror(mut self, mirror: Arc<dyn OffsetMirror>) -> Self {
        self.mirror = Some(mirror);
        self
    }

    /// Hook that runs before each step of each acquire; the acquire waits for it. For tests and observation.
    #[must_use]
    pub fn on_acquire_step<F, Fut>(mut self, hook: F) -> Self
    where
        F: Fn(AcquireStep, Grant) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        self.hook = Some(Arc::new(move |step, grant| Box::pin(hook(step, grant))));
        self
    }

    /// Checks the settings against each other and makes the consumer. Connects to nothing yet.
    ///
    /// # Errors
    ///
    /// The first contradiction found, by name.
    pub fn build(self) -> Result<Consumer<S>, BuildError> {
        let Self {
            home,
            offsets,
            counters,
            also,
            source,
            mut session,
            takeover,
            settings,
            hook,
            mirror,
            pattern,
            letters,
        } = self;
        if matches!(settings.on_error.then, Then::DeadLetterAtHome) {
            if FencedSink::capabilities(&home).home == Home::Coordinator {
                return Err(BuildError::LettersWithoutSink);
            }
            if letters.is_none() {
                return Err(BuildError::NoLetters);
            }
        }
        if session.coordinators.is_empty() {
            return Err(BuildError::NoCoordinators);
        }
        if session.topics.is_empty() && pattern.is_none() {
            return Err(BuildError::NoTopics);
        }
        // Anchored: a pattern is meant for whole names.
        let pattern = pattern.map(|text| Regex::new(&format!("^(?:{text})$"))).transpose();
        let pattern = pattern.map_err(|error| BuildError::Pattern(error.to_string()))?;
        let mut topics = session.topics.clone();
        topics.sort();
        if let Some(pair) = topics.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(BuildError::TopicTwice(pair[0].clone()));
        }
        settings.check_nothing_is_zero()?;
        if session.partitions_max == Some(0) {
            return Err(BuildError::Zero("partitions_max"));
        }
        if session.weight == 0 {
            return Err(BuildError::Zero("weight"));
        }
        if session.weight > WEIGHT_MAX {
            return Err(BuildError::Weight(session.weight));
        }
        check_labels(&session)?;
        check_return(&session)?;
        session.lease = session.lease.validate()?;
        session.settings = group_settings(&home, &also, takeover)?;
        let told = Arc::default();
        let warm = Warm::default();
        if mirror.is_some() && session.settings.home == Home::KafkaTransaction {
            return Err(BuildError::MirrorOfTransactions);
        }
        offsets.set_mirror(mirror.clone());
        let grants = Arc::default();
        let parts = Parts {
            home,
            offsets,
            counters,
            also,
            source,
            settings,
            hook,
            told,
            grants,
            doubts: Arc::default(),
            warm,
            mirror,
            letters,
        };
        Ok(Consumer::new(parts, session, pattern))
    }
}

fn check_labels(session: &SessionConfig) -> Result<(), BuildError> {
    let labels = &session.labels;
    if labels.len() > LABELS_MAX {
        return Err(BuildError::Labels(format!("there are {} labels", labels.len())));
    }
    match labels.iter().find(|(_, value)| value.len() > NAME_BYTES_MAX) {
        Some((name, value)) => {
            Err(BuildError::Labels(format!("label {name} has {} bytes", value.len())))
        }
        None => Ok(()),
    }
}

fn check_return(session: &SessionConfig) -> Result<(), BuildError> {
    let Some(length) = session.returning_within else { return Ok(()) };
    if session.instance.is_none() {
        return Err(BuildError::ReturnWithoutInstance);
    }
    let given_ms = length.as_millis();
    if (1..=u128::from(RETURNING_WITHIN_MS_MAX)).contains(&given_ms) {
        Ok(())
    } else {
        Err(BuildError::ReturnOutOfRange { given_ms })
    }
}

/// What the group is told of its home and sinks.
fn group_settings<S: FencedSink>(
    home: &S,
    also: &[Arc<dyn RegisterOnly>],
    takeover: Takeover,
) -> Result<GroupSettings, BuildError> {
    let setting = |name: &str, enforcement: Enforcement| SinkSetting {
        name: name.to_owned(),
        enforces_epoch: enforcement == Enforcement::Resource,
    };
    let mut sinks: Vec<_> =
        also.iter().map(|sink| setting(sink.name(), sink.capabilities().enforcement)).collect();
    let capabilities = FencedSink::capabilities(home);
    if TypeId::of::<S>() != TypeId::of::<CoordinatorOffsets>() {
        let name = FencedSink::name(home);
        if capabilities.home == Home::Coordinator {
            return Err(BuildError::NotAHome(name.to_owned()));
        }
        sinks.push(setting(name, capabilities.enforcement));
    }
    let settings = GroupSettings { home: capabilities.home, takeover, sinks };
    Ok(settings.validate()?)
}
