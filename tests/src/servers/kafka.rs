//! A throw-away Apache Kafka.
//!
//! The client calls block; use them outside an async runtime or in a blocking task.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};
use std::time::Duration;
use std::{env, fs};

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rustix::process::{Pid, Signal, kill_process};

use super::guarded::Guarded;
use super::{Missing, downloads, free_port, refuse_in_fast_tier, unique_name, wait_until};

const PART: &str = "Kafka";
/// Folder of the jars below the downloads; the version that `tests/run` fetches.
const JARS: &str = "kafka-4.3.1";
/// What [`class_path`] finds.
pub(crate) const VERSION: &str = "Apache Kafka 4.3.1";
/// Any valid id; it keeps clusters apart that share a disk, and these share none.
const CLUSTER_ID: &str = "VGVudXJlVGVzdENsdXN0ZQ";
/// A first start on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Another process may take a port between the look and the start.
const START_ATTEMPTS: usize = 3;
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// An Apache Kafka broker: one KRaft node on a loopback port without automatic topics, or the one
/// that `KAFKA_BOOTSTRAP` names. Dropping it stops the former and removes its data.
#[derive(Debug)]
pub struct Kafka {
    bootstrap: String,
    server: Option<Guarded>,
}

impl Kafka {
    /// Starts a broker, in about four seconds.
    ///
    /// # Errors
    ///
    /// [`Missing`] where Java or the jars are not found or in the fast tier.
    ///
    /// # Panics
    ///
    /// When Kafka is there and does not start.
    pub fn start() -> Result<Self, Missing> {
        refuse_in_fast_tier(PART)?;
        if let Ok(bootstrap) = env::var("KAFKA_BOOTSTRAP") {
            assert!(answers(&bootstrap), "no broker answers at KAFKA_BOOTSTRAP={bootstrap}");
            return Ok(Self { bootstrap, server: None });
        }
        let class_path = class_path()?;
        let mut last_log = String::new();
        for _ in 0..START_ATTEMPTS {
            match Self::start_once(&class_path) {
                Ok(kafka) => return Ok(kafka),
                Err(log) => last_log = log,
            }
        }
        panic!("Kafka did not start; the end of its log:\n{last_log}");
    }

    /// The one broker of this test process, started by the first caller. Tests keep apart by
    /// topic names, see [`Kafka::new_topic`].
    ///
    /// # Errors
    ///
    /// As [`Kafka::start`].
    pub fn shared() -> Result<&'static Self, Missing> {
        static SHARED: OnceLock<Result<Kafka, Missing>> = OnceLock::new();
        SHARED.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    /// Value for `bootstrap.servers`.
    #[must_use]
    pub fn bootstrap(&self) -> &str {
        &self.bootstrap
    }

    /// Process id of the broker, unless somebody else runs it.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Guarded::pid)
    }

    /// Kills the broker and starts it again with its data, and waits until it answers.
    ///
    /// # Panics
    ///
    /// When somebody else runs the broker, or it does not come back.
    pub fn restart(&mut self) {
        let server = self.server.as_mut().expect("this test runs the broker");
        server.restart();
        assert!(answers(&self.bootstrap), "Kafka did not come back: {}", server.log_tail());
    }

    /// Ends the broker for good.
    ///
    /// # Panics
    ///
    /// When somebody else runs the broker.
    pub fn end(&mut self) {
        drop(self.server.take().expect("this test runs the broker"));
    }

    /// Stops (SIGSTOP) the broker: its connections stay open and nothing is answered.
    ///
    /// # Panics
    ///
    /// When somebody else runs the broker, or it has ended.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Wakes (SIGCONT) a broker that was stopped.
    ///
    /// # Panics
    ///
    /// As [`Kafka::pause`].
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = self.pid().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.expect("this test runs the broker");
        kill_process(pid, signal).expect("the broker runs");
    }

    /// Client settings with the bootstrap address.
    #[must_use]
    pub fn client_config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap);
        config
    }

    /// Creates a topic and waits until each partition has a leader.
    ///
    /// # Panics
    ///
    /// When Kafka refuses, for example because the topic exists.
    pub fn create_topic(&self, topic: &str, partition_count: u16) {
        let admin: AdminClient<DefaultClientContext> =
            self.client_config().create().expect("an admin client is made");
        let new = NewTopic::new(topic, partition_count.into(), TopicReplication::Fixed(1));
        let options = AdminOptions::new().operation_timeout(Some(CALL_TIMEOUT));
        let results = block_on(admin.create_topics([&new], &options)).expect("Kafka answers");
        results.into_iter().for_each(|result| {
            result.unwrap_or_else(|(topic, code)| panic!("topic {topic} is refused: {code}"));
        });
        let is_led = || {
            let metadata = admin.inner().fetch_metadata(Some(topic), CALL_TIMEOUT);
            metadata.is_ok_and(|metadata| {
                metadata.topics().iter().any(|found| {
                    found.partitions().len() == usize::from(partition_count)
                        && found.partitions().iter().all(|partition| partition.leader() >= 0)
                })
            })
        };
        assert!(wait_until(CALL_TIMEOUT, is_led), "topic {topic} got no leaders");
    }

    /// Creates a topic under a name that no other test uses and returns the name.
    #[must_use]
    pub fn new_topic(&self, prefix: &str, partition_count: u16) -> String {
        let topic = unique_name(prefix);
        self.create_topic(&topic, partition_count);
        topic
    }

    /// Deletes a topic. The broker takes a moment to tell everyone.
    ///
    /// # Panics
    ///
    /// When Kafka refuses.
    pub fn delete_topic(&self, topic: &str) {
        let admin: AdminClient<DefaultClientContext> =
            self.client_config().create().expect("an admin client is made");
        let options = AdminOptions::new().operation_timeout(Some(CALL_TIMEOUT));
        let results = block_on(admin.delete_topics(&[topic], &options)).expect("Kafka answers");
        results.into_iter().for_each(|result| {
            result.unwrap_or_else(|(topic, code)| panic!("topic {topic} stays: {code}"));
        });
    }

    /// Appends `payloads` in this order to one partition, without keys, and waits for all acks.
    ///
    /// # Panics
    ///
    /// When Kafka does not take all of them.
    pub fn produce<P: AsRef<[u8]>>(&self, topic: &str, partition: u16, payloads: &[P]) {
        let mut config = self.client_config();
        config.set("enable.idempotence", "true").set("linger.ms", "5");
        let producer: BaseProducer = config.create().expect("a producer is made");
        let before = self.end_offset(topic, partition);
        for payload in payloads {
            let record = BaseRecord::<(), [u8]>::to(topic).partition(partition.into());
            send(&producer, record.payload(payload.as_ref()));
        }
        producer.flush(CALL_TIMEOUT).expect("Kafka takes all records");
        let added = self.end_offset(topic, partition) - before;
        let wanted = i64::try_from(payloads.len()).expect("a test's records can be counted");
        assert!(added >= wanted, "Kafka took {added} of {wanted} records");
    }

    /// Offset that the next record of the partition will get.
    ///
    /// # Panics
    ///
    /// When Kafka does not answer.
    #[must_use]
    pub fn end_offset(&self, topic: &str, partition: u16) -> i64 {
        let consumer: BaseConsumer = self.client_config().create().expect("a consumer is made");
        // A broker that has just started, or a topic, may have no leader yet.
        let mut watermarks = Err(KafkaError::Canceled);
        wait_until(CALL_TIMEOUT, || {
            watermarks = consumer.fetch_watermarks(topic, partition.into(), CALL_TIMEOUT);
            watermarks.is_ok()
        });
        watermarks.expect("Kafka answers").1
    }

    /// Does one transaction, so that later ones do not pay for making the internal topics (4 to
    /// 8 s).
    ///
    /// # Panics
    ///
    /// When the transaction fails.
    pub fn warm_up_transactions(&self) {
        let topic = self.new_topic("warm_up", 1);
        let producer: BaseProducer = self
            .client_config()
            .set("transactional.id", &topic)
            .create()
            .expect("a producer is made");
        producer.init_transactions(CALL_TIMEOUT).expect("Kafka knows transactions");
        producer.begin_transaction().expect("a transaction begins");
        send(&producer, BaseRecord::<(), [u8]>::to(&topic).payload(b"warm"));
        producer.commit_transaction(CALL_TIMEOUT).expect("a transaction is committed");
    }

    fn start_once(class_path: &str) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("tenure-kafka-").tempdir().expect("a folder");
        let (port, controller_port) = (free_port(), free_port());
        let bootstrap = format!("127.0.0.1:{port}");
        let settings = folder.path().join("server.properties");
        fs::write(&settings, properties(folder.path(), port, controller_port))
            .expect("the settings are written");
        format_storage(class_path, &settings);
        let command = [
            "java",
            "-Xms128m",
            "-Xmx512m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            class_path,
            "kafka.Kafka",
            &settings.to_string_lossy(),
        ]
        .map(str::to_owned);
        // SIGKILL: the data goes away, so a clean stop of seconds is for nothing.
        let server = Guarded::spawn(folder, None, "KILL", &command);
        wait_until(START_TIMEOUT, || listens(port) || !server.is_running());
        if server.is_running() && answers(&bootstrap) {
            Ok(Self { bootstrap, server: Some(server) })
        } else {
            Err(server.log_tail())
        }
    }
}

/// Runs `future` on this thread. Needs no runtime, so it also works beside one.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// Hands a record to the client, again while its queue is full.
pub(crate) fn send(producer: &BaseProducer, mut record: BaseRecord<'_, (), [u8]>) {
    use rdkafka::error::RDKafkaErrorCode;
    while let Err((error, refused)) = producer.send(record) {
        let full = KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull);
        assert_eq!(error, full, "the client refuses a record");
        producer.poll(Duration::from_millis(20));
        record = refused;
    }
}

fn properties(folder: &Path, port: u16, controller_port: u16) -> String {
    format!(
        "process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
group.initial.rebalance.delay.ms=0
log.cleaner.backoff.ms=500
auto.create.topics.enable=false
",
        folder.join("data").display()
    )
}

pub(crate) fn format_storage(class_path: &str, settings: &Path) {
    let output = Command::new("java")
        .args(["-XX:TieredStopAtLevel=1", "-cp", class_path, "kafka.tools.StorageTool"])
        .args(["format", "-t", CLUSTER_ID, "-c"])
        .arg(settings)
        .stdin(Stdio::null())
        .output()
        .expect("java starts");
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "StorageTool: {}", String::from_utf8_lossy(&text));
}

pub(super) fn listens(port: u16) -> bool {
    std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// Whether a broker at `bootstrap` gives metadata with itself in it.
fn answers(bootstrap: &str) -> bool {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", bootstrap)
        .create()
        .expect("a consumer is made");
    wait_until(CALL_TIMEOUT, || {
        let metadata = client.fetch_metadata(None, Duration::from_secs(5));
        metadata.is_ok_and(|metadata| !metadata.brokers().is_empty())
    })
}

/// Class path, where Java is there to read it.
///
/// # Errors
///
/// [`Missing`] where Java or the jars are not found.
pub(crate) fn class_path() -> Result<String, Missing> {
    find_java(PART)?;
    find_jars()
}

/// Class path of `KAFKA_HOME`, else of what `tests/run` has downloaded.
fn find_jars() -> Result<String, Missing> {
    let folder = match env::var_os("KAFKA_HOME") {
        Some(home) => PathBuf::from(home).join("libs"),
        None => downloads()
            .ok_or_else(|| Missing::new(PART, "neither XDG_CACHE_HOME nor HOME is set"))?
            .join(JARS),
    };
    let has_jars = fs::read_dir(&folder).is_ok_and(|files| {
        files.flatten().any(|file| file.file_name().to_string_lossy().starts_with("kafka_"))
    });
    if has_jars {
        Ok(folder.join("*").to_string_lossy().into_owned())
    } else {
        let why = format!(
            "no jars in {}; let tests/run fetch them, or set KAFKA_HOME or KAFKA_BOOTSTRAP",
            folder.display()
        );
        Err(Missing::new(PART, why))
    }
}

pub(super) fn find_java(part: &'static str) -> Result<(), Missing> {
    let version = Command::new("java").arg("-version").stdin(Stdio::null()).output();
    match version {
        Ok(output) if output.status.success() => Ok(()),
        Ok(_) | Err(_) => Err(Missing::new(part, "no java found; install a JRE of 17 or later")),
    }
}
