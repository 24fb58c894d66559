//! Three Kafka brokers, and what a consumer of Kafka would do there: commits of a group's offsets.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tempfile::TempDir;

use super::super::load::{histogram, quantile_ms, rate, record};
use super::super::{BenchError, nodes};
use super::PeerCommits;
use crate::process::Process;
use crate::servers::kafka::{VERSION, block_on, class_path, format_storage};
use crate::servers::{free_port, wait_until};

/// Three first starts on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(180);
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Groups are found, connections made, and code compiled in this time.
const WARM_UP: Duration = Duration::from_secs(5);
/// Before a commit is tried again.
const COORDINATOR_PAUSE: Duration = Duration::from_millis(100);
const TOPIC: &str = "commits";

/// Commits of offsets: each member is a group of its own, and commits all its partitions in one request.
///
/// # Errors
///
/// When Kafka is not to be had, or refuses.
pub(in crate::bench) fn commits(
    members: u32,
    share: u32,
    length: Duration,
) -> Result<PeerCommits, BenchError> {
    let brokers = Brokers::start()?;
    let config = brokers.client_config();
    create_topic(&config, i32::try_from(share)?)?;
    let (timed, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let threads = (0..members).map(|member| {
        let (timed, stop) = (Arc::clone(&timed), Arc::clone(&stop));
        let mut config = config.clone();
        config.set("group.id", format!("bench-{member}")).set("enable.auto.commit", "false");
        std::thread::spawn(move || commit(&config, share, &timed, &stop))
    });
    let threads: Vec<_> = threads.collect();
    std::thread::sleep(WARM_UP);
    timed.store(true, Ordering::Relaxed);
    std::thread::sleep(length);
    stop.store(true, Ordering::Relaxed);
    let mut times = histogram();
    for thread in threads {
        times.add(thread.join().map_err(|_panic| "a committer panicked")??)?;
    }
    Ok(PeerCommits {
        version: VERSION.to_owned(),
        rate_per_s: rate(times.len() * u64::from(share), length.as_secs_f64()),
        p50_ms: quantile_ms(&times, 0.5),
        batched_rate_per_s: None,
    })
}

/// Gives the times after the warm-up.
fn commit(
    config: &ClientConfig,
    share: u32,
    timed: &AtomicBool,
    stop: &AtomicBool,
) -> Result<Histogram<u64>, BenchError> {
    let consumer: BaseConsumer = config.create()?;
    let mut times = histogram();
    for next in 1.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let mut offsets = TopicPartitionList::new();
        for partition in 0..i32::try_from(share)? {
            offsets.add_partition_offset(TOPIC, partition, Offset::Offset(next))?;
        }
        let is_timed = timed.load(Ordering::Relaxed);
        let started = Instant::now();
        commit_once(&consumer, &offsets, started + CALL_TIMEOUT)?;
        if is_timed {
            record(&mut times, started);
        }
    }
    Ok(times)
}

/// Commits, again and again while the group's coordinator moves or begins: a consumer would do the same.
fn commit_once(
    consumer: &BaseConsumer,
    offsets: &TopicPartitionList,
    limit: Instant,
) -> Result<(), BenchError> {
    while let Err(error) = consumer.commit(offsets, CommitMode::Sync) {
        let is_of_the_moment = matches!(
            error.rdkafka_error_code(),
            Some(
                RDKafkaErrorCode::NotCoordinator
                    | RDKafkaErrorCode::CoordinatorNotAvailable
                    | RDKafkaErrorCode::CoordinatorLoadInProgress
            )
        );
        if !is_of_the_moment || Instant::now() > limit {
            return Err(error.into());
        }
        std::thread::sleep(COORDINATOR_PAUSE);
    }
    Ok(())
}

fn create_topic(config: &ClientConfig, partitions: i32) -> Result<(), BenchError> {
    let admin: AdminClient<DefaultClientContext> = config.create()?;
    let new = NewTopic::new(TOPIC, partitions, TopicReplication::Fixed(3));
    let options = AdminOptions::new().operation_timeout(Some(CALL_TIMEOUT));
    for result in block_on(admin.create_topics([&new], &options))? {
        result.map_err(|(topic, code)| format!("topic {topic} is refused: {code}"))?;
    }
    Ok(())
}

/// Three brokers that are controllers too, on loopback. They end with this value.
struct Brokers {
    // Before the folder, so that no broker writes into it while it is removed.
    _brokers: Vec<Process>,
    bootstrap: String,
    _folder: TempDir,
}

impl Brokers {
    fn start() -> Result<Self, BenchError> {
        let class_path = class_path()?;
        let folder = tempfile::Builder::new().prefix("tenure-kafka-").tempdir()?;
        let ports: Vec<(u16, u16)> =
            (0..nodes::COUNT).map(|_| (free_port(), free_port())).collect();
        let voters = (1..).zip(&ports).map(|(node, (_, port))| format!("{node}@127.0.0.1:{port}"));
        let voters = voters.collect::<Vec<_>>().join(",");
        let mut brokers = Vec::new();
        for (node, (client, controller)) in (1..).zip(&ports) {
            let settings = folder.path().join(format!("broker-{node}.properties"));
            let data = folder.path().join(format!("broker-{node}"));
            fs::write(&settings, properties(node, *client, *controller, &voters, &data))?;
            format_storage(&class_path, &settings);
            let mut command = Command::new("java");
            command.args(["-Xms256m", "-Xmx512m", "-cp", &class_path, "kafka.Kafka"]);
            brokers.push(Process::spawn("broker", command.arg(settings)));
        }
        let listens = |port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_ok();
        if !wait_until(START_TIMEOUT, || ports.iter().all(|(client, _)| listens(client))) {
            let output = brokers.iter().map(Process::tail).collect::<Vec<_>>().join("\n");
            return Err(format!("Kafka does not start:\n{output}").into());
        }
        let bootstrap = ports.iter().map(|(client, _)| format!("127.0.0.1:{client}"));
        let bootstrap = bootstrap.collect::<Vec<_>>().join(",");
        Ok(Self { _brokers: brokers, bootstrap, _folder: folder })
    }

    fn client_config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap);
        config
    }
}

fn properties(node: u32, client: u16, controller: u16, voters: &str, data: &Path) -> String {
    format!(
        "process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{client}
controller.listener.names=CONTROLLER
log.dirs={}
min.insync.replicas=2
offsets.topic.replication.factor=3
offsets.topic.num.partitions=4
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
",
        data.display()
    )
}
