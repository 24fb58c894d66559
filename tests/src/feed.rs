//! Records that keep coming while owners are disturbed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

use crate::servers::Kafka;
use crate::zombie::payload;

const FLUSH_MAX: Duration = Duration::from_secs(30);

/// How fast records come.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Pause between two rounds.
    pub pause: Duration,
    /// Records of each partition in one round.
    pub records: u64,
}

/// Produces the same number of records to each partition, in order and once each, until it is ended.
#[derive(Debug)]
pub struct Feed {
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Feed {
    /// Starts to produce to the partitions 0 to `partitions` - 1.
    ///
    /// # Panics
    ///
    /// When no producer can be made; its thread does when Kafka refuses a record.
    #[must_use]
    pub fn start(kafka: &Kafka, topic: &str, partitions: u32, rate: Rate) -> Self {
        let mut config = kafka.client_config();
        config.set("enable.idempotence", "true").set("linger.ms", "2");
        let producer: BaseProducer = config.create().expect("a producer is made");
        let (ending, topic) = (Arc::new(AtomicBool::new(false)), topic.to_owned());
        let told = Arc::clone(&ending);
        let thread = thread::spawn(move || {
            let mut count = 0;
            let mut due = Instant::now();
            while !told.load(Ordering::SeqCst) {
                for _ in 0..rate.records {
                    (0..partitions).for_each(|partition| send(&producer, &topic, partition, count));
                    count += 1;
                }
                producer.poll(Duration::ZERO);
                due += rate.pause;
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            producer.flush(FLUSH_MAX).expect("Kafka takes all records");
            count
        });
        Self { ending, thread: Some(thread) }
    }

    /// Ends it; answers how many records each partition has.
    ///
    /// # Panics
    ///
    /// When its thread did.
    #[must_use]
    pub fn end(mut self) -> u64 {
        self.ending.store(true, Ordering::SeqCst);
        let thread = self.thread.take().expect("taken only here");
        thread.join().expect("Kafka took all records")
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
    }
}

/// Hands a record to the client, again while its queue is full.
fn send(producer: &BaseProducer, topic: &str, partition: u32, number: u64) {
    let payload = payload(partition, number);
    let index = i32::try_from(partition).expect("fewer than 2^31 partitions");
    let mut record = BaseRecord::<(), str>::to(topic).payload(&payload).partition(index);
    while let Err((error, refused)) = producer.send(record) {
        let full = KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull);
        assert_eq!(error, full, "the client refuses a record");
        producer.poll(Duration::from_millis(20));
        record = refused;
    }
}
