//! Writes records to explicit partitions, for tests and demonstrations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer as _, ProducerContext};
use tenure_model::{PartitionIndex, TopicName};

/// Longest wait for the delivery of one call's records.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(30);

/// A record to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRecord {
    /// Where to.
    pub partition: PartitionIndex,
    /// Key.
    pub key: Option<Vec<u8>>,
    /// Value; absent for a tombstone.
    pub value: Option<Vec<u8>>,
    /// Headers, in order.
    pub headers: Vec<(String, Option<Vec<u8>>)>,
    /// Milliseconds since 1970; now when absent.
    pub timestamp_ms: Option<i64>,
}

impl NewRecord {
    /// A record with a key and a value.
    #[must_use]
    pub fn new(partition: PartitionIndex, key: &str, value: &str) -> Self {
        Self {
            partition,
            key: Some(key.into()),
            value: Some(value.into()),
            headers: Vec::new(),
            timestamp_ms: None,
        }
    }
}

/// Why records were not written, or not known to be.
#[derive(Debug, thiserror::Error)]
pub enum ProduceError {
    /// The client refused or failed.
    #[error("kafka producer: {0}")]
    Client(#[from] KafkaError),
    /// Some were not delivered in time; they may still arrive.
    #[error("{missing} of {given} records were not delivered")]
    Undelivered {
        /// How many are missing.
        missing: u64,
        /// How many were given.
        given: u64,
    },
}

#[derive(Default)]
struct Deliveries(AtomicU64);

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = ();

    fn delivery(&self, delivery: &DeliveryResult<'_>, (): ()) {
        match delivery {
            Ok(_) => {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
            Err((error, _)) => tracing::warn!(%error, "record not delivered"),
        }
    }
}

/// Writes records and waits for their delivery. Blocks: call it from a thread that may.
pub struct Producer {
    client: BaseProducer<Deliveries>,
}

impl Producer {
    /// Makes a producer for the brokers `bootstrap`.
    ///
    /// # Errors
    ///
    /// [`ProduceError::Client`] when librdkafka refuses.
    pub fn new(bootstrap: &str) -> Result<Self, ProduceError> {
        let client = ClientConfig::new()
            .set("bootstrap.servers", bootstrap)
            .set("linger.ms", "5")
            .set("message.timeout.ms", DELIVERY_TIMEOUT.as_millis().to_string())
            .create_with_context(Deliveries::default())?;
        Ok(Self { client })
    }

    /// Writes `records` in order within each partition, and returns how many once all are delivered.
    ///
    /// # Errors
    ///
    /// [`ProduceError`]; some of the records may have been written. One call at a time: deliveries are counted.
    pub fn produce(
        &mut self,
        topic: &TopicName,
        records: impl IntoIterator<Item = NewRecord>,
    ) -> Result<u64, ProduceError> {
        let before = self.client.context().0.load(Ordering::Relaxed);
        let mut given = 0;
        for record in records {
            self.send(topic, &record)?;
            given += 1;
        }
        self.client.flush(DELIVERY_TIMEOUT)?;
        let missing = given - (self.client.context().0.load(Ordering::Relaxed) - before);
        if missing > 0 { Err(ProduceError::Undelivered { missing, given }) } else { Ok(given) }
    }

    fn send(&self, topic: &TopicName, record: &NewRecord) -> Result<(), ProduceError> {
        let index = i32::try_from(record.partition.get()).unwrap_or(i32::MAX);
        let mut message =
            BaseRecord::<[u8], [u8], ()>::with_opaque_to(topic.as_str(), ()).partition(index);
        message.key = record.key.as_deref();
        message.payload = record.value.as_deref();
        message.timestamp = record.timestamp_ms;
        if !record.headers.is_empty() {
            let mut headers = OwnedHeaders::new_with_capacity(record.headers.len());
            for (key, value) in &record.headers {
                headers = headers.insert(Header { key, value: value.as_deref() });
            }
            message.headers = Some(headers);
        }
        let give_up_at = Instant::now() + DELIVERY_TIMEOUT;
        loop {
            match self.client.send(message) {
                Ok(()) => break,
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back))
                    if Instant::now() < give_up_at =>
                {
                    message = back;
                    self.client.poll(Duration::from_millis(10));
                }
                Err((error, _)) => return Err(error.into()),
            }
        }
        self.client.poll(Duration::ZERO);
        Ok(())
    }
}
