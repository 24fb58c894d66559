//! Records that keep coming while owners are stopped and woken.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use tenure_tests::servers::Kafka;
use tenure_tests::zombie::payload;

/// Pause between two records of one partition.
const PAUSE: Duration = Duration::from_millis(50);

const FLUSH_MAX: Duration = Duration::from_secs(30);

/// Produces the same number of records to each partition, in order and once each, until it is ended.
pub(crate) struct Feed {
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Feed {
    pub(crate) fn start(kafka: &Kafka, topic: &str, partitions: u32) -> Self {
        let mut config = kafka.client_config();
        config.set("enable.idempotence", "true").set("linger.ms", "0");
        let producer: BaseProducer = config.create().unwrap();
        let (ending, topic) = (Arc::new(AtomicBool::new(false)), topic.to_owned());
        let told = Arc::clone(&ending);
        let thread = thread::spawn(move || {
            let mut count = 0;
            while !told.load(Ordering::SeqCst) {
                for partition in 0..partitions {
                    let payload = payload(partition, count);
                    let record = BaseRecord::<(), str>::to(&topic).payload(&payload);
                    let index = i32::try_from(partition).unwrap();
                    producer.send(record.partition(index)).map_err(|(error, _)| error).unwrap();
                }
                count += 1;
                producer.poll(Duration::ZERO);
                thread::sleep(PAUSE);
            }
            producer.flush(FLUSH_MAX).unwrap();
            count
        });
        Self { ending, thread: Some(thread) }
    }

    /// Ends it; answers how many records each partition has.
    pub(crate) fn end(mut self) -> u64 {
        self.ending.store(true, Ordering::SeqCst);
        self.thread.take().expect("taken only here").join().unwrap()
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
    }
}
