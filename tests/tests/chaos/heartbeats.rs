//! Heartbeats leave on time whatever handlers, Kafka clients and other programs do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::LeaseSettings;
use tenure_proto::v1;
use tenure_sdk::source::RecordSource as _;
use tenure_tests::cluster::{Cluster, SHORT_LENGTHS};
use tenure_tests::figures::tell;
use tenure_tests::proxy::Proxy;
use tenure_tests::servers::{Kafka, require, unique_name, wait_until};

use crate::member::{Member, THREADS};

const TTL_MS: u64 = 5_000;
/// After two ttls a partition that stands still is said to.
const NOT_ADVANCING_MS: u64 = 2 * TTL_MS;
/// As many as threads.
const PARTITIONS: u16 = THREADS;
const STEP_MAX: Duration = Duration::from_secs(60);
/// Head of an HTTP/2 frame: length of what follows in three bytes, type, flags, stream (RFC 9113, section 4.1).
const FRAME_HEAD_BYTES: usize = 9;
/// Head of a gRPC message, within a frame of type 0.
const MESSAGE_HEAD_BYTES: usize = 5;

/// Whether a message is among these frames, which begin with one: not what keeps a connection alive.
fn has_message(mut frames: &[u8]) -> bool {
    while let [high, middle, low, kind, ..] = *frames {
        let length = u32::from_be_bytes([0, high, middle, low]) as usize;
        if kind == 0 && length > MESSAGE_HEAD_BYTES {
            return true;
        }
        frames = frames.get(FRAME_HEAD_BYTES + length..).unwrap_or_default();
    }
    false
}

fn interval() -> Duration {
    Duration::from_millis(LeaseSettings::for_ttl(TTL_MS).heartbeat_interval_ms)
}

/// A member that owns all partitions and has nothing to do; its heartbeats pass through a proxy that notes them.
struct Rig {
    cluster: Cluster,
    proxy: Proxy,
    topic: String,
    group: String,
    member: Member,
}

impl Rig {
    fn new(kafka: &Kafka, each: impl Fn() + Send + Sync + 'static) -> Self {
        // Continues the table of deadlines.
        let lengths = format!("{SHORT_LENGTHS}not_advancing_ms = {NOT_ADVANCING_MS}\n");
        let cluster = Cluster::start_with(1, &lengths);
        let proxy = Proxy::start(cluster.addresses()[0].parse().unwrap());
        let topic = kafka.new_topic("beats", PARTITIONS);
        let group = unique_name("beats");
        let address = proxy.address().to_string();
        let member = Member::join(kafka.bootstrap(), &address, &group, &topic, TTL_MS, each);
        let rig = Self { cluster, proxy, topic, group, member };
        let owned = wait_until(STEP_MAX, || {
            rig.partitions().iter().filter(|found| found.acquired).count()
                == usize::from(PARTITIONS)
        });
        assert!(owned, "{}", rig.cluster.output());
        rig
    }

    fn partitions(&self) -> Vec<v1::PartitionInfo> {
        self.cluster.describe(&self.group).map(|group| group.partitions).unwrap_or_default()
    }

    fn epochs(&self) -> Vec<u64> {
        let held = v1::OwnershipState::Held;
        let partitions = self.partitions();
        assert!(partitions.iter().all(|found| found.state() == held), "{partitions:?}");
        partitions.iter().map(|found| found.epoch).collect()
    }

    /// Whether from `since` on heartbeats came each interval, late by less than a tenth of it.
    fn judge(&self, what: &str, since: Instant) -> Result<(), String> {
        let beats: Vec<Instant> = self
            .proxy
            .uploads()
            .into_iter()
            .filter(|(at, bytes)| *at >= since && has_message(bytes))
            .map(|(at, _)| at)
            .collect();
        let longest =
            beats.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(since.elapsed());
        let late = longest.saturating_sub(interval());
        tell(format_args!(
            "{what}: {} heartbeats, the latest by {late:?} of {:?}",
            beats.len(),
            interval()
        ));
        let expected = since.elapsed().as_millis() / interval().as_millis();
        if beats.len() as u128 + 2 < expected || late >= interval() / 10 {
            return Err(format!("{what}: {} of {expected}, late by {late:?}", beats.len()));
        }
        Ok(())
    }
}

#[test]
fn handler_that_blocks_every_thread_of_the_runtime_for_five_ttls_delays_no_heartbeat_and_keeps_its_partition()
 {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let threads = usize::from(THREADS);
    let blocked = Arc::new(AtomicUsize::new(0));
    let told = Arc::clone(&blocked);
    let judged = Duration::from_millis(TTL_MS * 5);
    // The handlers do not begin at the same moment: all of them are blocked while it is judged.
    let length = judged + Duration::from_secs(3);
    // As many partitions as threads: each handler blocks one of them with its first record.
    let rig = Rig::new(kafka, move || {
        if told.fetch_add(1, Ordering::SeqCst) < threads {
            thread::sleep(length);
        }
    });
    let epochs = rig.epochs();
    assert!(rig.partitions().iter().all(|found| !found.not_advancing), "an idle one advances");
    (0..PARTITIONS).for_each(|partition| kafka.produce(&rig.topic, partition, &["first"]));
    let all_blocked = wait_until(STEP_MAX, || blocked.load(Ordering::SeqCst) == threads);
    assert!(all_blocked, "a handler got no record");
    let since = Instant::now();
    kafka.produce(&rig.topic, 0, &["second"]);
    thread::sleep(judged);
    // Owned and not advancing, all of them; not expired.
    assert_eq!(rig.epochs(), epochs);
    for found in rig.partitions() {
        assert!(found.not_advancing, "{found:?}");
        assert!(found.still_ms.unwrap_or(0) >= NOT_ADVANCING_MS, "{found:?}");
        assert!(found.position.unwrap_or(0) < 2, "a blocked handler goes on: {found:?}");
    }
    assert!(
        rig.cluster.output().contains("partition does not advance"),
        "{}",
        rig.cluster.output()
    );
    assert_eq!(rig.member.count(), threads, "a record was delivered by a blocked runtime");
    rig.judge("every thread of the runtime blocked", since).unwrap();
    // It goes on as if nothing had been.
    let goes_on = wait_until(STEP_MAX, || rig.member.count() == threads + 1);
    assert!(goes_on, "the partition did not go on");
    let advance =
        wait_until(STEP_MAX, || rig.partitions().iter().all(|found| !found.not_advancing));
    assert!(advance, "{:?}", rig.partitions());
    assert_eq!(rig.epochs(), epochs);
}

#[test]
fn kafka_client_that_is_dropped_while_its_broker_hangs_delays_no_heartbeat() {
    let Some(kafka) = require(Kafka::start()) else { return };
    let rig = Rig::new(&kafka, || {});
    let epochs = rig.epochs();
    let other = KafkaSource::new(KafkaSettings::new(kafka.bootstrap())).unwrap();
    let topics = [rig.topic.parse().unwrap()];
    rig.member.runtime.block_on(other.topics(&topics)).unwrap();
    kafka.pause();
    let since = Instant::now();
    // Inside the runtime of the member, as an application would.
    rig.member.runtime.block_on(async move { drop(other) });
    thread::sleep(Duration::from_millis(TTL_MS * 3));
    rig.judge("a kafka client dropped, its broker hung", since).unwrap();
    assert_eq!(rig.epochs(), epochs);
    kafka.resume();
}

#[test]
fn busy_processors_delay_no_heartbeat() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let rig = Rig::new(kafka, || {});
    let epochs = rig.epochs();
    let ending = AtomicBool::new(false);
    let threads = thread::available_parallelism().map_or(2, std::num::NonZeroUsize::get) * 2;
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !ending.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let since = Instant::now();
        thread::sleep(Duration::from_millis(TTL_MS * 3));
        let verdict = rig.judge("twice as many busy threads as processors", since);
        // Before any panic: the scope waits for its threads.
        ending.store(true, Ordering::Relaxed);
        verdict.unwrap();
    });
    assert_eq!(rig.epochs(), epochs);
}
