//! What the SDK costs a reader, against a bare loop over the Kafka client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::{Message as _, Offset, TopicPartitionList};
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::sink::BoxError;
use tenure_sdk::{Consumer, Limits, Owned};

use super::{BenchError, Bound, Measured, Options, Scenario, median};
use crate::cluster::Cluster;
use crate::servers::{Kafka, unique_name};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "consume",
    about: "CPU of a whole consumer process for each record, against a bare poll loop, in turns",
    run,
};

const PARTITIONS: u16 = 16;
const ROUNDS: u32 = 7;

/// Bytes of a value, and how many records of it.
const SIZES: [(usize, u64); 2] = [(100, 1_600_000), (1024, 320_000)];

const CPU_RATIO_BATCH_MAX: f64 = 1.0;
const CPU_RATIO_RECORD_MAX: f64 = 1.5;
const RATE_RATIO_MIN: f64 = 0.95;

/// Partitions whose memory is compared, and records in each.
const MANY_PARTITIONS: u16 = 1000;
const MANY_RECORDS: u64 = 20;
const MANY_MEMORY_MAX_MIB: f64 = 64.0;

/// Longest single pass.
const PASS_MAX: Duration = Duration::from_secs(60);

/// Says to a process of this program that it is to consume once and tell its memory.
const CHILD: &str = "TENURE_BENCH_CONSUME";

/// How records are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Bare,
    Batch,
    Record,
}

impl Way {
    const ALL: [Self; 3] = [Self::Bare, Self::Batch, Self::Record];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Batch => "batch",
            Self::Record => "record",
        }
    }
}

/// What one pass took.
#[derive(Clone, Copy, Debug)]
struct Pass {
    cpu_ns_per_record: f64,
    records_per_second: f64,
}

fn run(options: &Options) -> Result<Measured, BenchError> {
    if let Ok(job) = std::env::var(CHILD) {
        return child(&job);
    }
    let kafka = Kafka::start()?;
    let cluster = Cluster::start(1);
    let rounds = options.rounds.unwrap_or(if options.is_small { 1 } else { ROUNDS });
    let mut measured = Measured::default();
    measured.setup("partitions", PARTITIONS);
    measured.setup("rounds", rounds);
    measured.setup("order", "bare, batch, record in turns, each as a consumer of its own");
    measured.setup("headers", "left out by all ways");
    measured.setup("cpu", "user and system time of the whole process, the client's threads too");
    let mut worst = Worst::default();
    for (size_bytes, records) in SIZES {
        let records = if options.is_small { records / 20 } else { records };
        let topic = kafka.new_topic("consume", PARTITIONS);
        fill(&kafka, &topic, PARTITIONS, records / u64::from(PARTITIONS), size_bytes);
        let job = Job {
            bootstrap: kafka.bootstrap().to_owned(),
            coordinators: cluster.addresses().to_vec(),
            topic,
            partitions: PARTITIONS,
            records,
        };
        // Brings the broker's pages and the compiler of its virtual machine up to speed.
        consume(&job, Way::Bare)?;
        let mut passes: [Vec<Pass>; 3] = Default::default();
        for _ in 0..rounds {
            for (way, passes) in Way::ALL.into_iter().zip(&mut passes) {
                passes.push(consume(&job, way)?);
            }
        }
        report(&mut measured, size_bytes, &passes);
        worst.add(&passes);
    }
    measured.bounded("cpu_ratio_batch", worst.cpu_batch, Bound::AtMost(CPU_RATIO_BATCH_MAX));
    measured.bounded("cpu_ratio_record", worst.cpu_record, Bound::AtMost(CPU_RATIO_RECORD_MAX));
    measured.bounded("ratio_to_bare", worst.rate_batch, Bound::AtLeast(RATE_RATIO_MIN));
    memory(&mut measured, &kafka, &cluster)?;
    Ok(measured)
}

/// The worst ratio over all sizes; each is the median of the rounds' own.
struct Worst {
    cpu_batch: f64,
    cpu_record: f64,
    rate_batch: f64,
}

impl Default for Worst {
    fn default() -> Self {
        Self { cpu_batch: 0.0, cpu_record: 0.0, rate_batch: f64::INFINITY }
    }
}

impl Worst {
    fn add(&mut self, [bare, batch, record]: &[Vec<Pass>; 3]) {
        let ratio = |passes: &[Pass], of: fn(&Pass) -> f64| {
            let ratios: Vec<f64> =
                passes.iter().zip(bare).map(|(one, bare)| of(one) / of(bare)).collect();
            median(&ratios)
        };
        self.cpu_batch = self.cpu_batch.max(ratio(batch, |pass| pass.cpu_ns_per_record));
        self.cpu_record = self.cpu_record.max(ratio(record, |pass| pass.cpu_ns_per_record));
        self.rate_batch = self.rate_batch.min(ratio(batch, |pass| pass.records_per_second));
    }
}

fn report(measured: &mut Measured, size_bytes: usize, passes: &[Vec<Pass>; 3]) {
    let names: [[&'static str; 2]; 3] = match size_bytes {
        100 => [
            ["bare_100b_cpu_ns", "bare_100b_records_per_second"],
            ["batch_100b_cpu_ns", "batch_100b_records_per_second"],
            ["record_100b_cpu_ns", "record_100b_records_per_second"],
        ],
        _ => [
            ["bare_1kib_cpu_ns", "bare_1kib_records_per_second"],
            ["batch_1kib_cpu_ns", "batch_1kib_records_per_second"],
            ["record_1kib_cpu_ns", "record_1kib_records_per_second"],
        ],
    };
    for (passes, [cpu, rate]) in passes.iter().zip(names) {
        let all = |of: fn(&Pass) -> f64| passes.iter().map(of).collect::<Vec<f64>>();
        measured.metric(cpu, median(&all(|pass| pass.cpu_ns_per_record)));
        measured.metric(rate, median(&all(|pass| pass.records_per_second)));
    }
}

/// What is read, and from where.
struct Job {
    bootstrap: String,
    coordinators: Vec<String>,
    topic: String,
    partitions: u16,
    records: u64,
}

/// How far a pass has come.
struct Progress {
    records: u64,
    count: AtomicU64,
    started: Instant,
    first_ns: AtomicU64,
    last_ns: AtomicU64,
    done: tokio::sync::Notify,
    sum: AtomicU64,
}

impl Progress {
    fn new(records: u64) -> Self {
        Self {
            records,
            count: AtomicU64::new(0),
            started: Instant::now(),
            first_ns: AtomicU64::new(u64::MAX),
            last_ns: AtomicU64::new(0),
            done: tokio::sync::Notify::new(),
            sum: AtomicU64::new(0),
        }
    }

    /// Counts records; called once for many.
    fn add(&self, count: u64, sum: u64) {
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.first_ns.fetch_min(now, Ordering::Relaxed);
        self.last_ns.fetch_max(now, Ordering::Relaxed);
        self.sum.fetch_add(sum, Ordering::Relaxed);
        if self.count.fetch_add(count, Ordering::SeqCst) + count >= self.records {
            self.done.notify_one();
        }
    }

    fn is_done(&self) -> bool {
        self.count.load(Ordering::SeqCst) >= self.records
    }

    fn pass(&self, cpu: Duration) -> Pass {
        let first = self.first_ns.load(Ordering::Relaxed);
        let length = self.last_ns.load(Ordering::Relaxed).saturating_sub(first);
        let records = self.records as f64;
        Pass {
            cpu_ns_per_record: cpu.as_nanos() as f64 / records,
            records_per_second: records * 1e9 / length.max(1) as f64,
        }
    }
}

fn consume(job: &Job, way: Way) -> Result<Pass, BenchError> {
    let progress = Arc::new(Progress::new(job.records));
    let before = cpu_time();
    match way {
        Way::Bare => drop(bare(job, &progress)?),
        Way::Batch | Way::Record => sdk(job, way, &progress, |_| {})?,
    }
    let cpu = cpu_time().saturating_sub(before);
    if progress.sum.load(Ordering::Relaxed) == 0 {
        return Err("the values were not read".into());
    }
    Ok(progress.pass(cpu))
}

/// The settings of the source, so that only the ways differ.
fn settings(job: &Job) -> ClientConfig {
    let mut config = ClientConfig::new();
    for (key, value) in [
        ("bootstrap.servers", job.bootstrap.as_str()),
        ("group.id", "bare"),
        ("enable.auto.commit", "false"),
        ("enable.auto.offset.store", "false"),
        ("auto.offset.reset", "error"),
        ("queued.min.messages", "50000"),
        ("queued.max.messages.kbytes", "65536"),
        ("fetch.queue.backoff.ms", "10"),
        ("fetch.wait.max.ms", "20"),
        ("fetch.message.max.bytes", "1048576"),
    ] {
        config.set(key, value);
    }
    config
}

fn bare(job: &Job, progress: &Progress) -> Result<BaseConsumer, BenchError> {
    const COUNT_EVERY: u64 = 500;
    let consumer: BaseConsumer = settings(job).create()?;
    let mut list = TopicPartitionList::new();
    for partition in 0..job.partitions {
        list.add_partition_offset(&job.topic, partition.into(), Offset::Offset(0))?;
    }
    consumer.assign(&list)?;
    let (mut count, mut sum) = (0, 0);
    while !progress.is_done() && progress.started.elapsed() < PASS_MAX {
        if let Some(message) = consumer.poll(Duration::from_millis(100)) {
            sum += touch(message?.payload().unwrap_or_default());
            count += 1;
        }
        let all = progress.count.load(Ordering::SeqCst) + count;
        if count == COUNT_EVERY || all >= progress.records {
            progress.add(count, sum);
            (count, sum) = (0, 0);
        }
    }
    if progress.is_done() { Ok(consumer) } else { Err(too_slow(progress)) }
}

fn too_slow(progress: &Progress) -> BenchError {
    let count = progress.count.load(Ordering::SeqCst);
    format!("{count} of {} records in {PASS_MAX:?}", progress.records).into()
}

/// Reads the whole value, word by word.
fn touch(value: &[u8]) -> u64 {
    let (words, rest) = value.as_chunks::<8>();
    let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
    rest.iter().fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte))) & 0xffff
}

/// Consumes as a member of a group of its own, with the offsets at the coordinator. `at_the_end` is called with all
/// partitions owned.
fn sdk(
    job: &Job,
    way: Way,
    progress: &Arc<Progress>,
    at_the_end: impl FnOnce(&Progress),
) -> Result<(), BenchError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let stopped = runtime.block_on(async {
        // The bare loop looks for no headers either.
        let settings =
            KafkaSettings { headers: false, ..KafkaSettings::new(job.bootstrap.as_str()) };
        let source = Arc::new(KafkaSource::new(settings)?);
        let group = unique_name("consume").parse()?;
        let topics = vec![job.topic.parse()?];
        let consumer =
            Consumer::builder(group, topics, source, job.coordinators.clone()).build()?;
        let stopper = consumer.stopper();
        let shared = Arc::clone(progress);
        let run = tokio::spawn(consumer.run(move |owned| read(owned, way, Arc::clone(&shared))));
        if tokio::time::timeout(PASS_MAX, progress.done.notified()).await.is_err() {
            return Err(too_slow(progress));
        }
        at_the_end(progress);
        stopper.stop(Duration::from_secs(10));
        Ok(run.await??)
    })?;
    if stopped.clean { Ok(()) } else { Err("the consumer did not end cleanly".into()) }
}

async fn read(
    owned: Owned<CoordinatorOffsets>,
    way: Way,
    progress: Arc<Progress>,
) -> Result<(), BoxError> {
    const COUNT_EVERY: u64 = 500;
    let (mut input, mut offsets) = owned.split();
    if way == Way::Batch {
        while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
            let values = batch.iter().map(|record| record.value.as_deref().unwrap_or_default());
            let sum = values.map(touch).sum();
            offsets.done_before(batch.next());
            progress.add(u64::try_from(batch.len()).unwrap_or(0), sum);
        }
        return Ok(());
    }
    let (mut count, mut sum) = (0, 0);
    let each = progress.records / u64::from(PARTITIONS);
    while let Some(record) = input.next_record().await {
        sum += touch(record.value.as_deref().unwrap_or_default());
        count += 1;
        offsets.done(&record);
        if count == COUNT_EVERY || record.next().get() >= each {
            progress.add(count, sum);
            (count, sum) = (0, 0);
        }
    }
    Ok(())
}

/// Produces the same number of records to each partition.
fn fill(kafka: &Kafka, topic: &str, partitions: u16, records: u64, size_bytes: usize) {
    let mut config = kafka.client_config();
    config.set("linger.ms", "20").set("batch.size", "500000").set("acks", "1");
    config.set("queue.buffering.max.messages", "500000");
    let producer: BaseProducer = config.create().expect("a producer is made");
    let value: Vec<u8> = (0..size_bytes).map(|_| rand::random()).collect();
    for _ in 0..records {
        for partition in 0..partitions {
            let record = BaseRecord::<(), [u8]>::to(topic).partition(partition.into());
            crate::servers::kafka::send(&producer, record.payload(&value));
        }
    }
    producer.flush(Duration::from_secs(60)).expect("Kafka takes all records");
}

/// User and system time of this process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Memory with many partitions, in processes of their own.
fn memory(measured: &mut Measured, kafka: &Kafka, cluster: &Cluster) -> Result<(), BenchError> {
    let topic = kafka.new_topic("memory", MANY_PARTITIONS);
    fill(kafka, &topic, MANY_PARTITIONS, MANY_RECORDS, 100);
    let memory_of = |way: Way| -> Result<f64, BenchError> {
        let coordinators = cluster.addresses().join(",");
        let job = format!("{};{};{coordinators};{topic}", way.as_str(), kafka.bootstrap());
        let mut command = std::process::Command::new(std::env::current_exe()?);
        let output = command.arg("consume").env(CHILD, job).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().find_map(|line| line.trim().strip_prefix("resident_mib"));
        let value = line.and_then(|value| value.trim().parse().ok());
        value.ok_or_else(|| format!("no figure of the memory: {output:?}").into())
    };
    let (bare, sdk) = (memory_of(Way::Bare)?, memory_of(Way::Batch)?);
    measured.setup("memory", format!("{MANY_PARTITIONS} partitions, {MANY_RECORDS} records each"));
    measured.metric("memory_1000_partitions_bare_mib", bare);
    let most = Bound::AtMost(MANY_MEMORY_MAX_MIB);
    measured.bounded("memory_1000_partitions_above_bare_mib", sdk - bare, most);
    Ok(())
}

/// Consumes once, and tells the memory that is in use then.
fn child(job: &str) -> Result<Measured, BenchError> {
    let fields: Vec<&str> = job.split(';').collect();
    let [way, bootstrap, coordinators, topic] = fields[..] else {
        return Err(format!("{CHILD} has {} fields", fields.len()).into());
    };
    let job = Job {
        bootstrap: bootstrap.to_owned(),
        coordinators: coordinators.split(',').map(str::to_owned).collect(),
        topic: topic.to_owned(),
        partitions: MANY_PARTITIONS,
        records: u64::from(MANY_PARTITIONS) * MANY_RECORDS,
    };
    let progress = Arc::new(Progress::new(job.records));
    let mut resident = 0.0;
    if way == Way::Bare.as_str() {
        let _open = bare(&job, &progress)?;
        resident = resident_mib();
    } else {
        sdk(&job, Way::Batch, &progress, |_| resident = resident_mib())?;
    }
    let mut measured = Measured::default();
    measured.metric("resident_mib", resident);
    Ok(measured)
}

fn resident_mib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}
