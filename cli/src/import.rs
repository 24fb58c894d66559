//! `tenure import-kafka-group`: takes the offsets of a Kafka consumer group over.
//!
//! It joins the Tenure group as a member, is granted its partitions, and sets their first offsets under its epochs, as
//! any owner would: no offset is ever set beside an owner.

mod home;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use serde_json::json;
use tenure_kafka::{GroupError, KafkaGroup, KafkaSettings, KafkaSource};
use tenure_model::{GroupId, NextOffset, Partition, TopicName};
use tenure_proto::v1;
use tenure_sdk::Consumer;
use tenure_sdk::consumer::{ConsumerBuilder, Lifecycle, LifecycleEvents};
use tenure_sdk::session::ReleaseReason;
use tenure_sdk::sink::FencedSink;
use tenure_sdk::source::{
    Fetched, ReadAhead, RecordSource, RecordStream, ResetPolicy, SourceError, TopicInfo,
};
use tokio::sync::mpsc;

use self::home::Home;
use crate::args::{ImportArgs, Output};
use crate::operate::{Cluster, Ownership, call};
use crate::output::{Table, json_line, line, optional};
use crate::{Failure, exit};

/// How long leaving the group may take.
const LEAVE: Duration = Duration::from_secs(10);

/// How long a group that is new is waited for, beyond `--timeout-ms`: settling and granting.
const GRANTS_MAX: Duration = Duration::from_secs(60);

pub(crate) async fn run(args: &ImportArgs) -> Result<(), Failure> {
    let usage = |message: String| Failure { message, exit: exit::USAGE };
    let target = args.group.as_deref().unwrap_or(&args.kafka_group);
    let group = GroupId::new(target).map_err(|error| usage(format!("--group: {error}")))?;
    let address = home::address(args)?;
    let mut topics = Vec::new();
    for topic in &args.topics {
        topics.push(TopicName::new(topic).map_err(|error| usage(format!("--topic: {error}")))?);
    }
    let settings = KafkaSettings::new(&args.kafka);
    let source = KafkaSource::new(settings.clone()).map_err(|error| usage(error.to_string()))?;
    let infos = source.topics(&topics).await.map_err(|error| failed(&error))?;
    if let Some(missing) = topics.iter().find(|topic| !infos.iter().any(|i| i.topic == **topic)) {
        return Err(failed(&format!("topic {missing} is not in Kafka: name one that is")));
    }
    let plan = read(&settings, &args.kafka_group, infos, args.apply).await?;
    refuse_members(args, &group).await?;
    let home = Home::open(args, address.as_ref()).await?;
    if !args.apply {
        show(args, &plan, None);
        if args.query.output == Output::Table {
            line(format_args!("nothing was changed: repeat it with --apply"));
        }
        return Ok(());
    }
    let done = import(args, group, topics, source, home, &plan).await?;
    show(args, &plan, Some(&done));
    Ok(())
}

fn failed(error: &impl ToString) -> Failure {
    Failure { message: error.to_string(), exit: exit::FAILED }
}

/// What is to be taken over.
struct Plan {
    topics: Vec<TopicInfo>,
    offsets: BTreeMap<(TopicName, u32), NextOffset>,
}

impl Plan {
    fn partitions(&self) -> impl Iterator<Item = (TopicName, u32)> {
        self.topics
            .iter()
            .flat_map(|info| (0..info.partition_count).map(|index| (info.topic.clone(), index)))
    }
}

async fn read(
    settings: &KafkaSettings,
    name: &str,
    topics: Vec<TopicInfo>,
    apply: bool,
) -> Result<Plan, Failure> {
    let (settings, name) = (settings.clone(), name.to_owned());
    let read = tokio::task::spawn_blocking(move || {
        let group = KafkaGroup::new(&settings, &name)?;
        group.check_is_empty()?;
        let offsets = group.committed(&topics)?;
        if apply {
            group.check_takes_no_members(&offsets)?;
        }
        Ok::<_, GroupError>(Plan { topics, offsets })
    });
    match read.await {
        Ok(plan) => plan.map_err(|error| failed(&error)),
        Err(panic) => Err(failed(&panic)),
    }
}

/// A group at work would hand its partitions over to this process.
async fn refuse_members(args: &ImportArgs, group: &GroupId) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.query);
    let request = v1::DescribeGroupRequest { group: group.to_string() };
    let members = match call!(cluster, Ownership, describe_group, request) {
        Ok(found) => found.members.len(),
        // Not there yet: this makes it.
        Err(failure) if failure.message.starts_with("UNKNOWN_GROUP") => 0,
        Err(failure) => return Err(failure),
    };
    if members == 0 {
        return Ok(());
    }
    Err(failed(&format!("group {group} has {members} members: stop them first")))
}

/// Partition by partition: where it starts now; nothing where Kafka had no offset.
type Done = BTreeMap<(TopicName, u32), Option<NextOffset>>;

async fn import(
    args: &ImportArgs,
    group: GroupId,
    topics: Vec<TopicName>,
    kafka: KafkaSource,
    home: Home,
    plan: &Plan,
) -> Result<Done, Failure> {
    let source = Arc::new(ImportSource {
        kafka,
        offsets: plan.offsets.clone(),
        without: Mutex::default(),
        open: Mutex::default(),
    });
    let consumer = Consumer::builder(
        group,
        topics,
        Arc::clone(&source) as Arc<dyn RecordSource>,
        args.query.coordinators.clone(),
    )
    .client(format!("tenure import-kafka-group {}", args.kafka_group));
    let wanted: BTreeSet<(TopicName, u32)> = plan.partitions().collect();
    match home {
        Home::Coordinator => own_all(args, consumer, &source, &wanted).await,
        Home::Postgres(sink) => own_all(args, consumer.home(*sink), &source, &wanted).await,
        Home::Sqlite(sink) => own_all(args, consumer.home(*sink), &source, &wanted).await,
    }
}

/// Owns each partition once, which sets its first offset at the home.
async fn own_all<S: FencedSink>(
    args: &ImportArgs,
    consumer: ConsumerBuilder<S>,
    source: &ImportSource,
    wanted: &BTreeSet<(TopicName, u32)>,
) -> Result<Done, Failure> {
    let consumer = consumer.build().map_err(|error| failed(&error))?;
    let (stopper, events) = (consumer.stopper(), consumer.lifecycle());
    let run = tokio::spawn(consumer.run(|owned| async move {
        let (input, _writer) = owned.split();
        input.ended().await;
        Ok(())
    }));
    let within = GRANTS_MAX + Duration::from_millis(args.query.timeout_ms);
    let granted = tokio::time::timeout(within, all_granted(events, source, wanted)).await;
    stopper.stop(LEAVE);
    let ended = run.await.map_err(|panic| failed(&panic))?;
    match (granted, ended) {
        (Ok(Granted::All(done)), _) => Ok(done),
        (Ok(Granted::Refused(error)), _) => Err(failed(&error)),
        (_, Err(error)) => Err(failed(&error)),
        (Ok(Granted::Ended) | Err(_), Ok(_)) => Err(Failure {
            message: format!(
                "not every partition was granted within {within:?}: look with `tenure partitions`, and repeat it; what was imported stays"
            ),
            exit: exit::UNKNOWN,
        }),
    }
}

/// How the wait for the partitions ended.
enum Granted {
    All(Done),
    /// One cannot be taken, whoever tries.
    Refused(String),
    /// With the consumer.
    Ended,
}

/// Waits until each partition was acquired, or is known to have nothing to import.
async fn all_granted(
    mut events: LifecycleEvents,
    source: &ImportSource,
    wanted: &BTreeSet<(TopicName, u32)>,
) -> Granted {
    let mut done = Done::new();
    while done.len() < wanted.len() {
        let look = tokio::time::timeout(Duration::from_millis(100), events.next()).await;
        match look {
            Ok(Some(Lifecycle::Acquired { topic, partition, resume, .. })) => {
                done.insert((topic, partition.index.get()), Some(resume));
            }
            Ok(Some(Lifecycle::Released { reason, error, .. }))
                if reason == ReleaseReason::AcquireFailed && !error.is_empty() =>
            {
                let text = "what was imported stays: put this right and repeat it";
                return Granted::Refused(format!("{error}; {text}"));
            }
            Ok(None) => return Granted::Ended,
            Ok(Some(_)) | Err(_) => {}
        }
        for key in source.without.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            done.entry(key.clone()).or_insert(None);
        }
    }
    Granted::All(done)
}

fn show(args: &ImportArgs, plan: &Plan, done: Option<&Done>) {
    let mut table = Table::new(&["TOPIC", "PARTITION", "KAFKA", "TENURE"]);
    let mut rows = Vec::new();
    for key in plan.partitions() {
        let kafka = plan.offsets.get(&key).copied();
        let now = done.and_then(|done| done.get(&key).copied().flatten());
        let result = match (done, kafka, now) {
            (None, Some(_), _) => "to be imported".to_owned(),
            (_, None, _) => "no offset: left to the group's reset policy".to_owned(),
            (Some(_), Some(kafka), Some(now)) if kafka == now => "imported".to_owned(),
            (Some(_), Some(_), Some(now)) => format!("kept: has {now} already"),
            (Some(_), Some(_), None) => "not imported".to_owned(),
        };
        rows.push(json!({
            "topic": key.0.as_str(),
            "partition": key.1,
            "kafka_offset": kafka.map(NextOffset::get),
            "result": result,
        }));
        table.row(vec![key.0.to_string(), key.1.to_string(), optional(kafka), result]);
    }
    match args.query.output {
        Output::Table => table.print(),
        Output::Json => json_line(&json!({ "applied": done.is_some(), "partitions": rows })),
    }
}

/// Partitions as Kafka has them, which start where the Kafka group was, and are never read.
struct ImportSource {
    kafka: KafkaSource,
    offsets: BTreeMap<(TopicName, u32), NextOffset>,
    /// Partitions that the Kafka group has no offset for.
    without: Mutex<BTreeSet<(TopicName, u32)>>,
    open: Mutex<Vec<mpsc::Sender<Fetched>>>,
}

impl RecordSource for ImportSource {
    fn topics<'a>(
        &'a self,
        names: &'a [TopicName],
    ) -> BoxFuture<'a, Result<Vec<TopicInfo>, SourceError>> {
        self.kafka.topics(names)
    }

    fn start<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        _policy: ResetPolicy,
    ) -> BoxFuture<'a, Result<NextOffset, SourceError>> {
        let key = (topic.clone(), partition.index.get());
        let found = self.offsets.get(&key).copied();
        if found.is_none() {
            self.without.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        }
        // The partition then stands still here, without an offset.
        let (topic, index) = (topic.clone(), partition.index.get());
        let none = SourceError::OutOfRange { topic, index, wanted: NextOffset::ZERO };
        Box::pin(async move { found.ok_or(none) })
    }

    fn open<'a>(
        &'a self,
        _topic: &'a TopicName,
        _partition: Partition,
        _from: NextOffset,
        _read_ahead: ReadAhead,
    ) -> BoxFuture<'a, Result<RecordStream, SourceError>> {
        let (sender, stream) = mpsc::channel(1);
        self.open.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        Box::pin(async move { Ok(stream) })
    }

    fn close(&self, _partition: Partition) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn shutdown(&self, deadline: Duration) -> BoxFuture<'_, ()> {
        self.kafka.shutdown(deadline)
    }
}
