//! The blocking side: one transactional producer, and the reader of its private group's offset.
//!
//! | step       | does                                                        | stops when          |
//! |------------|-------------------------------------------------------------|---------------------|
//! | Peek       | reads the stamp, so that a late owner disturbs nobody       | newer epoch         |
//! | Initialise | shuts out every earlier producer, ends its open transaction | the brokers refuse  |
//! | Read       | reads the stamp again, which nobody else can move any more  | newer epoch         |
//!
//! The last initialiser wins, whatever its epoch. That is safe because it looks at the stamp *after* it: a late one
//! finds the newer epoch and writes nothing, and what it shut out initialises again.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerGroupMetadata};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::producer::{DeliveryResult, Producer, ProducerContext, ThreadedProducer};
use rdkafka::{Offset, TopicPartitionList};
use tenure_model::Epoch;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{FenceRow, SinkError};

use crate::error::{classify, classify_code, transient};
use crate::settings::KafkaSinkSettings;
use crate::stamp;

/// Longest look before an initialisation; without an answer it goes on.
const PEEK_MAX: Duration = Duration::from_secs(1);
/// Longest wait for the abort of a transaction that is given up.
const ABORT_MAX: Duration = Duration::from_secs(5);

/// Moments of a registration or recovery, for tests that stop an owner between two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// About to initialise the producer.
    Initialise,
    /// Initialised; about to read the stamp.
    Read,
}

/// Called on a thread that may block.
pub(crate) type Hook = Arc<dyn Fn(Step, &Grant) + Send + Sync>;

/// What all grants of a sink share.
pub(crate) struct Shared {
    pub(crate) settings: KafkaSinkSettings,
    pub(crate) hook: Option<Hook>,
}

/// Notes why a record was not delivered; the transaction's own error does not say.
#[derive(Default)]
pub(crate) struct Deliveries(Mutex<Option<RDKafkaErrorCode>>);

impl Deliveries {
    fn reset(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn failure(&self) -> Option<SinkError> {
        let code = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        code.map(|code| classify_code(code, format!("a record was not delivered: {code}")))
    }
}

impl ClientContext for Deliveries {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "kafka client reports");
    }
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        let Err((error, _)) = result else { return };
        let purged = [RDKafkaErrorCode::PurgeQueue, RDKafkaErrorCode::PurgeInflight];
        let code = error.rdkafka_error_code();
        if let Some(code) = code.filter(|code| !purged.contains(code)) {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(code);
        }
    }
}

/// Why a transaction was not committed, as far as this side knows.
pub(crate) enum Uncommitted {
    /// The commit was never asked for.
    NotSent(SinkError),
    /// It was, and the answer is lost or proves nothing.
    InDoubt(SinkError),
}

/// What opening found.
pub(crate) enum Opened {
    /// The producer is the newest, and this was the stamp after that.
    Newest(Box<Session>, Option<FenceRow>),
    /// A newer epoch is registered.
    Newer(FenceRow),
}

/// What a last look at the stamp found.
pub(crate) enum Look {
    /// It was taken before; since then only this producer moves the stamp.
    Done,
    /// The stamp.
    Found(FenceRow),
    /// Nothing is committed.
    Absent,
}

/// An initialised producer. Every call may block.
pub(crate) struct Session {
    pub(crate) producer: ThreadedProducer<Deliveries>,
    reader: Option<BaseConsumer>,
    group: ConsumerGroupMetadata,
    /// Where the offset is kept.
    topic: String,
    partition: i32,
    id: String,
    call_timeout: Duration,
    in_transaction: bool,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Transactional id, and id of the private group, of a grant's resource.
pub(crate) fn id_of(settings: &KafkaSinkSettings, grant: &Grant) -> String {
    format!("{}/{}", settings.prefix, grant.resource)
}

impl Session {
    /// Shuts out every earlier producer of the resource, unless an epoch above `ours` is registered.
    pub(crate) fn open(
        shared: &Shared,
        grant: &Grant,
        ours: Option<Epoch>,
    ) -> Result<Opened, SinkError> {
        let settings = &shared.settings;
        let is_newer = |row: &FenceRow| ours.is_some_and(|ours| row.epoch > ours);
        let id = id_of(settings, grant);
        let (topic, partition) = match &settings.anchor {
            Some(anchor) => (anchor.clone(), 0),
            None => (grant.topic.to_string(), index_of(grant)?),
        };
        let reader: BaseConsumer = settings.reader(&id).create().map_err(classify)?;
        let group = reader.group_metadata().ok_or_else(|| {
            SinkError::Misconfigured("librdkafka gives no metadata of the private group".into())
        })?;
        let peeked = committed(&reader, &topic, partition, PEEK_MAX.min(settings.call_timeout));
        match peeked {
            Ok(Some(row)) if is_newer(&row) => return Ok(Opened::Newer(row)),
            Err(error @ SinkError::Misconfigured(_)) => return Err(error),
            // No answer is no reason to wait: an open transaction that hides it is ended by the initialisation.
            Ok(_) | Err(_) => {}
        }
        shared.at(Step::Initialise, grant);
        let producer: ThreadedProducer<Deliveries> =
            settings.producer(&id).create_with_context(Deliveries::default()).map_err(classify)?;
        initialise(&producer, settings.call_timeout)?;
        shared.at(Step::Read, grant);
        let row = committed(&reader, &topic, partition, settings.call_timeout)?;
        if let Some(row) = row.as_ref().filter(|row| is_newer(row)) {
            return Ok(Opened::Newer(row.clone()));
        }
        let call_timeout = settings.call_timeout;
        let session = Self {
            producer,
            reader: Some(reader),
            group,
            topic,
            partition,
            id,
            call_timeout,
            in_transaction: false,
        };
        Ok(Opened::Newest(Box::new(session), row))
    }

    /// Reads the stamp once more and closes the reader, which is not needed any longer.
    pub(crate) fn last_look(&mut self) -> Result<Look, SinkError> {
        let Some(reader) = self.reader.take() else { return Ok(Look::Done) };
        let row = committed(&reader, &self.topic, self.partition, self.call_timeout)?;
        Ok(row.map_or(Look::Absent, Look::Found))
    }

    /// Begins a transaction; one that was given up is aborted first.
    pub(crate) fn begin(&mut self) -> Result<(), SinkError> {
        if self.in_transaction {
            self.producer.abort_transaction(self.call_timeout).map_err(classify)?;
            self.in_transaction = false;
        }
        self.producer.context().reset();
        self.producer.begin_transaction().map_err(classify)?;
        self.in_transaction = true;
        Ok(())
    }

    /// Commits the transaction with the offset and stamp of `row`.
    pub(crate) fn commit(&mut self, row: &FenceRow, within: Duration) -> Result<(), Uncommitted> {
        let deadline = Instant::now() + within.min(self.call_timeout);
        let left = || deadline.saturating_duration_since(Instant::now());
        let offsets = self.offsets(row).map_err(Uncommitted::NotSent)?;
        self.producer
            .send_offsets_to_transaction(&offsets, &self.group, left())
            .map_err(|error| Uncommitted::NotSent(self.cause(error)))?;
        // From here on it is not this producer's to abort.
        self.in_transaction = false;
        self.producer
            .commit_transaction(left().max(Duration::from_millis(100)))
            .map_err(|error| Uncommitted::InDoubt(self.cause(error)))
    }

    /// Commits a transaction of nothing but the offset and stamp of `row`. May be repeated after any error.
    pub(crate) fn stamp(&mut self, row: &FenceRow) -> Result<(), SinkError> {
        self.begin()?;
        self.commit(row, self.call_timeout).map_err(|uncommitted| match uncommitted {
            Uncommitted::NotSent(error) | Uncommitted::InDoubt(error) => error,
        })
    }

    /// The first record that was not delivered says more than the transaction that failed for it.
    fn cause(&self, error: KafkaError) -> SinkError {
        self.producer.context().failure().unwrap_or_else(|| classify(error))
    }

    fn offsets(&self, row: &FenceRow) -> Result<TopicPartitionList, SinkError> {
        let mut list = TopicPartitionList::with_capacity(1);
        let mut element = list.add_partition(&self.topic, self.partition);
        element.set_offset(Offset::Offset(stamp::offset(row))).map_err(classify)?;
        element.set_metadata(stamp::write(row));
        Ok(list)
    }

    /// Gives the client back on a thread of its own: its end may take half a second or more.
    pub(crate) fn close(self: Box<Self>) {
        let ended = std::thread::Builder::new().name("tenure-kafka-close".into()).spawn(move || {
            if self.in_transaction {
                // Readers of committed records would wait for the time-out of the transaction.
                if let Err(error) = self.producer.abort_transaction(ABORT_MAX) {
                    tracing::debug!(id = self.id, %error, "open transaction is left to its time-out");
                }
            }
        });
        if let Err(error) = ended {
            tracing::warn!(%error, "no thread to close a Kafka client on");
        }
    }
}

impl Shared {
    fn at(&self, step: Step, grant: &Grant) {
        if let Some(hook) = &self.hook {
            hook(step, grant);
        }
    }
}

fn index_of(grant: &Grant) -> Result<i32, SinkError> {
    i32::try_from(grant.partition.index.get())
        .map_err(|error| SinkError::Misconfigured(format!("partition index: {error}")))
}

/// Initialises, again while a transaction of an earlier producer is being ended.
fn initialise(
    producer: &ThreadedProducer<Deliveries>,
    call_timeout: Duration,
) -> Result<(), SinkError> {
    const PAUSE: Duration = Duration::from_millis(20);
    let deadline = Instant::now() + call_timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match producer.init_transactions(left) {
            Ok(()) => return Ok(()),
            Err(KafkaError::Transaction(error)) if error.is_retriable() && left > PAUSE => {
                std::thread::sleep(PAUSE);
            }
            Err(error) => return Err(classify(error)),
        }
    }
}

fn committed(
    reader: &BaseConsumer,
    topic: &str,
    partition: i32,
    within: Duration,
) -> Result<Option<FenceRow>, SinkError> {
    let list = fetch(reader, topic, partition, within).map_err(classify)?;
    let element = list
        .find_partition(topic, partition)
        .ok_or_else(|| transient("the brokers' answer leaves the partition out"))?;
    element.error().map_err(classify)?;
    match element.offset() {
        Offset::Offset(offset) => stamp::read(offset, element.metadata()).map(Some),
        // The brokers' word for no commit.
        Offset::Invalid => Ok(None),
        other @ (Offset::Beginning | Offset::End | Offset::Stored | Offset::OffsetTail(_)) => {
            Err(SinkError::Misconfigured(format!("the committed offset is {other:?}")))
        }
    }
}

/// Asks for the committed offset, again while the group's coordinator moves or loads.
fn fetch(
    reader: &BaseConsumer,
    topic: &str,
    partition: i32,
    within: Duration,
) -> KafkaResult<TopicPartitionList> {
    const PAUSE: Duration = Duration::from_millis(50);
    const PASSING: [RDKafkaErrorCode; 3] = [
        RDKafkaErrorCode::NotCoordinator,
        RDKafkaErrorCode::CoordinatorNotAvailable,
        RDKafkaErrorCode::CoordinatorLoadInProgress,
    ];
    let deadline = Instant::now() + within;
    loop {
        let mut list = TopicPartitionList::with_capacity(1);
        list.add_partition(topic, partition);
        let left = deadline.saturating_duration_since(Instant::now());
        match reader.committed_offsets(list, left) {
            Err(error)
                if left > PAUSE
                    && error.rdkafka_error_code().is_some_and(|code| PASSING.contains(&code)) =>
            {
                std::thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
}
