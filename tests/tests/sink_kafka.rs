//! The Kafka sink on a real broker.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rand::Rng;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};
use tenure_model::{Epoch, Home, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{
    self, Check, Options, Pauses, Row, Rows, Subject, Verdict, grant,
};
use tenure_sdk::sink::{BoxError, FencedSink, FencedWriter, Resolved, SinkError, Verified};
use tenure_sink_kafka::{KafkaSink, KafkaSinkSettings, KafkaWriter, Step};
use tenure_tests::servers::{Kafka, require};
use tenure_tests::tier;

const PATIENCE: Duration = Duration::from_secs(30);

/// A topic for records and the way to a sink; the offsets are kept under the same topic.
#[derive(Clone)]
struct Scene {
    bootstrap: String,
    topic: String,
}

impl Scene {
    /// Nothing, and the test is skipped, where there is no Kafka.
    fn new(name: &str) -> Option<Self> {
        let kafka = require(Kafka::shared())?;
        static WARM: std::sync::Once = std::sync::Once::new();
        WARM.call_once(|| kafka.warm_up_transactions());
        Some(Self { bootstrap: kafka.bootstrap().to_owned(), topic: kafka.new_topic(name, 1) })
    }

    fn settings(&self) -> KafkaSinkSettings {
        KafkaSinkSettings {
            anchor: Some(self.topic.clone()),
            // Groups and transactional ids of its own.
            prefix: self.topic.clone(),
            ..KafkaSinkSettings::new(&self.bootstrap)
        }
    }

    fn sink(&self) -> KafkaSink {
        KafkaSink::new(self.settings()).unwrap()
    }

    /// Payloads that a reader of committed records sees, in order.
    fn committed(&self) -> Vec<String> {
        let reader: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.bootstrap)
            .set("group.id", "reader")
            .set("isolation.level", "read_committed")
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .set("fetch.wait.max.ms", "20")
            .create()
            .unwrap();
        let mut from = TopicPartitionList::new();
        from.add_partition_offset(&self.topic, 0, Offset::Beginning).unwrap();
        reader.assign(&from).unwrap();
        let mut found = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "the reader reached no end of the partition");
            match reader.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => {
                    found.push(String::from_utf8(message.payload().unwrap().to_vec()).unwrap());
                }
                Some(Err(rdkafka::error::KafkaError::PartitionEOF(_))) => return found,
                Some(Err(error)) => println!("reader: {error}"),
                None => {}
            }
        }
    }

    async fn read(&self) -> Vec<String> {
        let scene = self.clone();
        tokio::task::spawn_blocking(move || scene.committed()).await.unwrap()
    }

    /// A producer outside the sink that initialises the transactional id of `grant`, as a sleeper would.
    fn intrude(&self, grant: &Grant) -> BaseProducer {
        let producer: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", &self.bootstrap)
            .set("transactional.id", self.sink().transactional_id(grant))
            .create()
            .unwrap();
        producer.init_transactions(PATIENCE).unwrap();
        producer
    }
}

fn epoch(value: u64) -> Epoch {
    Epoch::new(value).unwrap()
}

fn offset(value: u64) -> NextOffset {
    NextOffset::new(value).unwrap()
}

fn owner(value: u64) -> Grant {
    grant(&format!("owner-{value}"), 0, epoch(value))
}

async fn acquire(sink: &KafkaSink, grant: &Grant) -> Result<(KafkaWriter, u64), SinkError> {
    let mut writer = sink.register(grant).await?.writer;
    let next = match writer.resume(&Verified::without_coordinator(false)).await? {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await?,
    };
    Ok((writer, next.get()))
}

/// Writes records `first` to `next - 1` and the offset, once.
async fn write(
    scene: &Scene,
    writer: &mut KafkaWriter,
    first: u64,
    next: u64,
) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    for value in first..next {
        let payload = value.to_string();
        tx.send(BaseRecord::to(&scene.topic).key("").payload(&payload).partition(0)).await?;
    }
    tx.commit(offset(next)).await
}

/// As [`write`], until it is in: what is transient is repeated, what is unknown is resolved.
async fn write_surely(scene: &Scene, writer: &mut KafkaWriter, first: u64, next: u64) {
    loop {
        match write(scene, writer, first, next).await {
            Ok(()) => return,
            Err(SinkError::Transient { .. }) => {}
            Err(SinkError::Unknown(_)) => loop {
                match writer.resolve().await {
                    Ok(Resolved::Applied(_)) => return,
                    Ok(Resolved::NotApplied(_)) => break,
                    Err(SinkError::Unknown(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            },
            Err(error) => panic!("{error}"),
        }
    }
}

fn numbers(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|value| value.to_string()).collect()
}

// --- the kit -------------------------------------------------------------------------------------

/// Rows are `PARTITION OFFSET EPOCH` in one topic.
struct Topic {
    scene: Scene,
    settings: KafkaSinkSettings,
}

impl Subject for Topic {
    type Sink = KafkaSink;

    async fn connect(&self) -> Result<KafkaSink, SinkError> {
        KafkaSink::new(self.settings.clone())
    }

    async fn write(
        &self,
        writer: &mut KafkaWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        for offset in rows.offsets() {
            let payload = format!("{} {offset} {}", rows.partition, rows.epoch.get());
            let record = BaseRecord::to(&self.scene.topic).key("").payload(&payload).partition(0);
            tx.send(record).await?;
            pauses.here().await;
        }
        tx.commit(rows.next).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        let mut rows = Vec::new();
        for text in self.scene.read().await {
            let fields: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            let [at, offset, epoch] = fields[..] else {
                return Err("a row has three fields".into());
            };
            if at == u64::from(partition) {
                rows.push(Row { offset: NextOffset::new(offset)?, epoch: Epoch::new(epoch)? });
            }
        }
        rows.sort_by_key(|row| row.offset);
        Ok(rows)
    }

    fn beside(&self, _sink: &KafkaSink, _grant: &Grant) -> Option<KafkaWriter> {
        None
    }
}

fn options() -> Options {
    // Each hand-over makes a producer.
    let handovers = u32::try_from(tier::Tier::current().repetitions(300)).unwrap();
    let handover_interval_max = Duration::from_millis(1_200);
    Options { handovers, handover_interval_max, ..Options::with_seed(tier::seed()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_conforms() {
    let Some(scene) = Scene::new("conforms") else { return };
    let settings = scene.settings();
    let report = conformance::run(&Arc::new(Topic { scene, settings }), options()).await;
    println!("{report}");
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_kafka_without_a_look_after_the_initialisation() {
    for check in [Check::StaleWrite, Check::LateRegistration, Check::Retire, Check::Restart] {
        let Some(scene) = Scene::new("unfenced") else { return };
        let settings = KafkaSinkSettings { dangerously_without_fencing: true, ..scene.settings() };
        let subject = Arc::new(Topic { scene, settings });
        let outcome = conformance::run_one(&subject, options(), check).await;
        println!("{outcome}");
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}

// --- late initialisation --------------------------------------------------------------------------

/// Registers `sleeper` with a sink that sleeps before it initialises, after it looked, until `owned` has the partition;
/// answers what the sleeper's registration came to.
async fn sleep_until_owned(
    scene: &Scene,
    settings: KafkaSinkSettings,
    sleeper: Grant,
    owned: impl Future<Output = ()>,
) -> Result<KafkaWriter, SinkError> {
    let (asleep, looked) = tokio::sync::oneshot::channel();
    let (wake, woken) = mpsc::channel::<()>();
    let once = std::sync::Mutex::new(Some((asleep, woken)));
    let sink = KafkaSink::with_hook(settings, move |step, _| {
        if step == Step::Initialise
            && let Some((asleep, woken)) = once.lock().unwrap().take()
        {
            asleep.send(()).unwrap();
            woken.recv().unwrap();
        }
    });
    let sink = sink.unwrap();
    let late = tokio::spawn(async move { Ok(sink.register(&sleeper).await?.writer) });
    looked.await.unwrap();
    owned.await;
    wake.send(()).unwrap();
    let late = late.await.unwrap();
    println!("{}: the sleeper's registration: {late:?}", scene.topic);
    late
}

#[tokio::test(flavor = "multi_thread")]
async fn sleeper_that_initialises_after_the_new_owner_gets_no_record_in() {
    let Some(scene) = Scene::new("sleeper") else { return };
    let rounds = tier::Tier::current().repetitions(30);
    let mut written = 0;
    let mut slowest = Duration::ZERO;
    for round in 0..rounds as u64 {
        let (old, new) = (owner(2 * round + 1), owner(2 * round + 2));
        let mut kept = None;
        let owned = async {
            let (mut writer, resumed) = acquire(&scene.sink(), &new).await.unwrap();
            assert_eq!(resumed, written);
            write(&scene, &mut writer, written, written + 2).await.unwrap();
            kept = Some(writer);
        };
        let late = sleep_until_owned(&scene, scene.settings(), old, owned).await;
        assert!(matches!(late, Err(SinkError::Fenced { .. })), "{late:?}");
        written += 2;
        // The sleeper has shut the true owner out, which goes on by itself.
        let mut writer = kept.unwrap();
        let started = Instant::now();
        write_surely(&scene, &mut writer, written, written + 2).await;
        slowest = slowest.max(started.elapsed());
        written += 2;
    }
    println!("{rounds} sleepers, slowest recovery of the true owner {} ms", slowest.as_millis());
    assert!(slowest < Duration::from_secs(2), "the true owner took {slowest:?} to recover");
    assert_eq!(scene.read().await, numbers(0..written));
}

#[tokio::test(flavor = "multi_thread")]
async fn sleeper_does_damage_without_a_look_after_the_initialisation() {
    let Some(scene) = Scene::new("damage") else { return };
    let settings = KafkaSinkSettings { dangerously_without_fencing: true, ..scene.settings() };
    let sink = KafkaSink::new(settings.clone()).unwrap();
    let mut kept = None;
    let owned = async {
        let (mut writer, resumed) = acquire(&sink, &owner(2)).await.unwrap();
        assert_eq!(resumed, 0);
        write(&scene, &mut writer, 0, 2).await.unwrap();
        kept = Some(writer);
    };
    // It had read its resume point, 0, before it fell asleep.
    let mut sleeper = sleep_until_owned(&scene, settings, owner(1), owned).await.unwrap();
    sleeper.resume(&Verified::without_coordinator(false)).await.unwrap();
    write(&scene, &mut sleeper, 0, 2).await.unwrap();
    write_surely(&scene, kept.as_mut().unwrap(), 2, 4).await;
    let found = scene.read().await;
    assert_ne!(found, numbers(0..4), "the negative control did no damage");
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_ping_pongs_lose_nothing_and_double_nothing() {
    let Some(scene) = Scene::new("ping_pong") else { return };
    let rounds = tier::Tier::current().repetitions(500) as u64;
    let grant = owner(1);
    let (mut writer, _) = acquire(&scene.sink(), &grant).await.unwrap();
    let mut slowest = Duration::ZERO;
    for round in 0..rounds {
        let started = Instant::now();
        if round % 2 == 0 {
            // Between two writes.
            let (intruding, grant) = (scene.clone(), grant.clone());
            let intruder =
                tokio::task::spawn_blocking(move || intruding.intrude(&grant)).await.unwrap();
            write_surely(&scene, &mut writer, round, round + 1).await;
            std::thread::spawn(move || drop(intruder));
        } else {
            // While a write is open.
            let mut tx = writer.begin().await.unwrap();
            let payload = round.to_string();
            tx.send(BaseRecord::to(&scene.topic).key("").payload(&payload).partition(0))
                .await
                .unwrap();
            let (intruding, grant) = (scene.clone(), grant.clone());
            let intruder =
                tokio::task::spawn_blocking(move || intruding.intrude(&grant)).await.unwrap();
            let cut_off = tx.commit(offset(round + 1)).await;
            assert!(matches!(cut_off, Err(SinkError::Transient { .. })), "{cut_off:?}");
            write_surely(&scene, &mut writer, round, round + 1).await;
            std::thread::spawn(move || drop(intruder));
        }
        slowest = slowest.max(started.elapsed());
    }
    println!("{rounds} ping-pongs, slowest round {} ms", slowest.as_millis());
    assert_eq!(scene.read().await, numbers(0..rounds));
}

#[tokio::test(flavor = "multi_thread")]
async fn old_owner_that_is_shut_out_again_and_again_ends_with_the_new_registration() {
    let Some(scene) = Scene::new("bounded") else { return };
    let stop = Arc::new(AtomicBool::new(false));
    let (mut old, _) = acquire(&scene.sink(), &owner(1)).await.unwrap();
    let (busy, ended) = (scene.clone(), Arc::clone(&stop));
    let fighting = tokio::spawn(async move {
        let mut at = 0;
        while !ended.load(Ordering::SeqCst) {
            match write(&busy, &mut old, at, at + 1).await {
                Ok(()) => at += 1,
                Err(SinkError::Transient { .. } | SinkError::Unknown(_)) => {}
                Err(error) => return (at, Some(error)),
            }
        }
        (at, None)
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let started = Instant::now();
    let (mut new, resumed) = loop {
        match acquire(&scene.sink(), &owner(2)).await {
            Ok(acquired) => break acquired,
            Err(SinkError::Transient { .. }) if started.elapsed() < PATIENCE => {}
            Err(error) => panic!("{error}"),
        }
    };
    println!("registered after {} ms against a writer that goes on", started.elapsed().as_millis());
    write_surely(&scene, &mut new, resumed, resumed + 1).await;
    let (landed, error) = tokio::time::timeout(PATIENCE, fighting).await.unwrap().unwrap();
    stop.store(true, Ordering::SeqCst);
    assert!(matches!(error, Some(SinkError::Fenced { .. })), "{error:?}");
    assert!(landed <= resumed, "{landed} writes were answered, the new owner resumes at {resumed}");
    assert_eq!(scene.read().await, numbers(0..resumed + 1));
}

// --- answers that are lost ------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_commit_is_in_doubt_and_its_producer_is_never_used_again() {
    let Some(scene) = Scene::new("in_doubt") else { return };
    let (mut writer, _) = acquire(&scene.sink(), &owner(1)).await.unwrap();
    let rounds = tier::Tier::current().repetitions(60) as u64;
    let (mut at, mut landed) = (0, 0);
    for round in 0..rounds {
        let mut tx = writer.begin().await.unwrap();
        let payload = at.to_string();
        tx.send(BaseRecord::to(&scene.topic).key("").payload(&payload).partition(0)).await.unwrap();
        // At once, and at moments around the usual length of a commit.
        let patience = Duration::from_micros(round % 10 * 1_500);
        let answer = tokio::time::timeout(patience, tx.commit(offset(at + 1))).await;
        if let Ok(answer) = answer {
            answer.unwrap();
            at += 1;
            continue;
        }
        let next = writer.begin().await;
        if let Err(SinkError::Unknown(_)) = next {
            match writer.resolve().await.unwrap() {
                Resolved::Applied(next) => {
                    assert_eq!(next, offset(at + 1));
                    (at, landed) = (at + 1, landed + 1);
                }
                Resolved::NotApplied(next) => assert_eq!(next, offset(at)),
            }
        } else {
            // Cancelled before anything of the commit was sent.
            assert!(next.is_ok(), "{next:?}");
        }
    }
    println!("{rounds} commits cut off: {at} are in, {landed} of them were found by looking");
    assert_eq!(scene.read().await, numbers(0..at));
}

// --- kill -9 --------------------------------------------------------------------------------------

const CHILD_BOOTSTRAP: &str = "TENURE_TEST_SINK_KAFKA_BOOTSTRAP";
const CHILD_TOPIC: &str = "TENURE_TEST_SINK_KAFKA_TOPIC";
const CHILD_EPOCH: &str = "TENURE_TEST_SINK_KAFKA_EPOCH";

/// Not a test by itself: the owner that [`killed_owner_leaves_records_and_offset_at_one_point`] kills.
#[tokio::test(flavor = "multi_thread")]
async fn child_that_writes_until_it_is_killed() {
    let (Ok(bootstrap), Ok(topic), Ok(value)) =
        (std::env::var(CHILD_BOOTSTRAP), std::env::var(CHILD_TOPIC), std::env::var(CHILD_EPOCH))
    else {
        return;
    };
    let scene = Scene { bootstrap, topic };
    let grant = owner(value.parse().unwrap());
    let (mut writer, mut at) = loop {
        match acquire(&scene.sink(), &grant).await {
            Ok(acquired) => break acquired,
            Err(SinkError::Transient { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    loop {
        write_surely(&scene, &mut writer, at, at + 3).await;
        at += 3;
        println!("wrote up to {at}");
    }
}

#[test]
fn killed_owner_leaves_records_and_offset_at_one_point() {
    let Some(scene) = Scene::new("killed") else { return };
    let kills = tier::Tier::current().repetitions(40) as u64;
    let mut random = rand::rng();
    for value in 1..=kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_writes_until_it_is_killed", "--nocapture"])
            .env(CHILD_BOOTSTRAP, &scene.bootstrap)
            .env(CHILD_TOPIC, &scene.topic)
            .env(CHILD_EPOCH, value.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = std::io::BufReader::new(child.stdout.take().unwrap());
        let writes = random.random_range(0..4);
        let written = std::io::BufRead::lines(output)
            .map_while(Result::ok)
            .filter(|line| line.contains("wrote up to"))
            .nth(writes);
        assert!(written.is_some(), "the child ended before it was killed");
        // Somewhere in the next write.
        std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
        // SIGKILL.
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let resumed = runtime.block_on(async {
        let (writer, resumed) = acquire(&scene.sink(), &owner(kills + 1)).await.unwrap();
        drop(writer);
        resumed
    });
    println!("{kills} owners killed, {resumed} records");
    assert!(resumed > 0, "no owner wrote anything");
    assert_eq!(scene.committed(), numbers(0..resumed));
}

// --- what it says -----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn offset_that_another_program_commits_freezes_the_partition() {
    let Some(scene) = Scene::new("foreign") else { return };
    let sink = scene.sink();
    assert_eq!(sink.capabilities().home, Home::KafkaTransaction);
    let (mut writer, _) = acquire(&sink, &owner(1)).await.unwrap();
    write(&scene, &mut writer, 0, 2).await.unwrap();
    drop(writer);
    let (foreign, id) = (scene.clone(), sink.transactional_id(&owner(1)));
    tokio::task::spawn_blocking(move || {
        let other: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &foreign.bootstrap)
            .set("group.id", id)
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&foreign.topic, 0, Offset::Offset(1)).unwrap();
        other.commit(&list, rdkafka::consumer::CommitMode::Sync).unwrap();
    })
    .await
    .unwrap();
    let registered = sink.register(&owner(2)).await;
    assert!(matches!(registered, Err(SinkError::Misconfigured(_))), "{registered:?}");
}
