//! How long a planned move keeps a partition from being worked on.

mod kafka;
mod trail;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rand::Rng as _;
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{MemberId, TopicName};
use tenure_proto::v1;
use tenure_sdk::consumer::{ConsumerBuilder, Preparation};
use tenure_sdk::offsets::{CoordinatorOffsets, OffsetWriter};
use tenure_sdk::session::Repeat;
use tenure_sdk::sink::{BoxError, FencedSink};
use tenure_sdk::{Batch, Consumer, Limits, Owned, Stopper};
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use self::trail::{Move, Step, Trail};
use super::disk::Syncs;
use super::{BenchError, Bound, Measured, Options, Scenario, median, percentile};
use crate::cluster::{Cluster, block_on};
use crate::feed::{Feed, Rate};
use crate::servers::{Kafka, Postgres, unique_name, wait_until};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "handoff",
    about: "planned moves under load: last effect of the old owner to first record of the new one",
    run,
};

const PARTITIONS: u16 = 24;
const NODES: u64 = 1;
/// One for each partition, and some for registrations: those must not queue behind the writers.
const CONNECTIONS: usize = PARTITIONS as usize + 4;
const MOVES: u32 = 200;
/// Not counted: connections, prepared statements, the broker's virtual machine.
const WARM_UP_MOVES: u32 = 30;
/// 500 records a second and partition.
const RATE: Rate = Rate { pause: Duration::from_millis(2), records: 1 };
/// A batch does not wait for more: an effect follows its record at once.
const LIMITS: Limits = Limits { wait: Duration::ZERO, ..Limits::DEFAULT };

const GAP_P50_MAX_MS: f64 = 10.0;
const GAP_P99_MAX_MS: f64 = 50.0;
/// Waits for the disk that a move may have, each of one fdatasync, and from where on a disk counts as slow.
const DISK_WAITS: f64 = 4.0;
const SLOW_DISK_MS: f64 = 1.0;

const STEP_MAX: Duration = Duration::from_secs(30);

const CREATE: &str = "CREATE TABLE handoff (part int NOT NULL, at_offset bigint NOT NULL)";
const INSERT: &str = "INSERT INTO handoff SELECT $1, unnest($2::bigint[])";

/// Names of the figures of one home.
struct Names {
    p50: &'static str,
    p99: &'static str,
    unowned_p50: &'static str,
    unowned_p99: &'static str,
    steps: [&'static str; Step::ALL.len()],
}

const COORDINATOR: Names = Names {
    p50: "coordinator_gap_p50_ms",
    p99: "coordinator_gap_p99_ms",
    unowned_p50: "coordinator_unowned_p50_ms",
    unowned_p99: "coordinator_unowned_p99_ms",
    steps: [
        "coordinator_revoke_ms",
        "coordinator_release_to_grant_ms",
        "coordinator_register_ms",
        "coordinator_verify_ms",
        "coordinator_resume_ms",
        "coordinator_open_ms",
        "coordinator_first_fetch_ms",
    ],
};

const POSTGRES: Names = Names {
    p50: "postgres_gap_p50_ms",
    p99: "postgres_gap_p99_ms",
    unowned_p50: "postgres_unowned_p50_ms",
    unowned_p99: "postgres_unowned_p99_ms",
    steps: [
        "postgres_revoke_ms",
        "postgres_release_to_grant_ms",
        "postgres_register_ms",
        "postgres_verify_ms",
        "postgres_resume_ms",
        "postgres_open_ms",
        "postgres_first_fetch_ms",
    ],
};

fn run(options: &Options) -> Result<Measured, BenchError> {
    let moves = options.rounds.unwrap_or(if options.is_small { 5 } else { MOVES });
    let (kafka, postgres) = (Kafka::start()?, Postgres::start()?);
    let cluster = Cluster::start(NODES);
    let mut measured = Measured::default();
    let mut syncs = Syncs::default();
    let folder = tempfile::tempdir()?;
    syncs.time(folder.path())?;
    syncs.note(&mut measured);
    let disk_ms = syncs.p50_ms();
    let disk = if disk_ms > SLOW_DISK_MS { DISK_WAITS * disk_ms } else { 0.0 };
    measured.setup("partitions", PARTITIONS);
    measured.setup("nodes", NODES);
    measured.setup("moves", moves);
    measured.setup("way", "warm: records are read ahead, there is no state to load");
    measured.setup("load", "500 records a second and partition, batches that do not wait");
    measured.setup("unowned", "from the old owner's end of work to the new one's start");

    let rig = Rig { kafka: &kafka, cluster: &cluster, moves };
    let coordinator = rig.measure(|builder, trail| {
        let consumer = builder.build()?;
        let stopper = consumer.stopper();
        let own = move |owned, ()| done(owned, Arc::clone(&trail));
        Ok((stopper, tokio::spawn(consumer.run_warm(nothing_to_load, own))))
    })?;
    let database = postgres.new_database();
    postgres.sql(&database, &format!("{}; {CREATE}", tenure_sink_postgres::sql::MIGRATE));
    let url = postgres.url_of(&database, postgres.port());
    let in_postgres = rig.measure(|builder, trail| {
        let settings =
            PostgresSettings { connections_max: CONNECTIONS, ..PostgresSettings::default() };
        let sink = tokio::task::block_in_place(|| {
            let connecting = PostgresSink::connect(url.parse()?, settings);
            Ok::<_, BenchError>(tokio::runtime::Handle::current().block_on(connecting)?)
        })?;
        let consumer = builder.home(sink).build()?;
        let stopper = consumer.stopper();
        let own = move |owned, ()| insert(owned, Arc::clone(&trail));
        Ok((stopper, tokio::spawn(consumer.run_warm(nothing_to_load, own))))
    })?;
    let mut worst = (0.0_f64, 0.0_f64);
    let mut unowned = (0.0_f64, 0.0_f64);
    for (names, moves) in [(&COORDINATOR, &coordinator), (&POSTGRES, &in_postgres)] {
        let of = |length: &dyn Fn(&Move) -> f64| moves.iter().map(length).collect::<Vec<f64>>();
        let (gaps, waits) = (of(&Move::gap_ms), of(&Move::unowned_ms));
        for (place, step) in Step::ALL.into_iter().enumerate() {
            measured.metric(names.steps[place], median(&of(&|one| one.step_ms(step))));
        }
        measured.metric(names.unowned_p50, median(&waits));
        measured.metric(names.unowned_p99, percentile(&waits, 99));
        measured.metric(names.p50, median(&gaps));
        measured.metric(names.p99, percentile(&gaps, 99));
        worst = (worst.0.max(median(&gaps)), worst.1.max(percentile(&gaps, 99)));
        unowned = (unowned.0.max(median(&waits)), unowned.1.max(percentile(&waits, 99)));
    }
    measured.metric("unowned_p50_ms", unowned.0);
    measured.metric("unowned_p99_ms", unowned.1);
    measured.bounded("gap_p50_ms", worst.0, Bound::AtMost(GAP_P50_MAX_MS + disk));
    measured.bounded("gap_p99_ms", worst.1, Bound::AtMost(GAP_P99_MAX_MS + disk));
    kafka::measure(&mut measured, &kafka)?;
    Ok(measured)
}

type Started<T> = (Stopper, JoinHandle<T>);
type Ran = Result<tenure_sdk::consumer::Stopped, tenure_sdk::consumer::ConsumerError>;

struct Rig<'a> {
    kafka: &'a Kafka,
    cluster: &'a Cluster,
    moves: u32,
}

impl Rig<'_> {
    /// Moves single partitions to and fro between two members, each with a runtime and a source of its own.
    fn measure(
        &self,
        start: impl Fn(
            ConsumerBuilder<CoordinatorOffsets>,
            Arc<Trail>,
        ) -> Result<Started<Ran>, BenchError>,
    ) -> Result<Vec<Move>, BenchError> {
        let topic = self.kafka.new_topic("handoff", PARTITIONS);
        let group = unique_name("handoff");
        let feed = Feed::start(self.kafka, &topic, PARTITIONS.into(), RATE);
        let trail = Arc::new(Trail::default());
        let mut members = Vec::new();
        for name in ["ann", "bob"] {
            members.push(self.join(name, &group, &topic.parse()?, &trail, &start)?);
        }
        let half = usize::from(PARTITIONS) / 2;
        let is_shared = || {
            let described = self.cluster.describe(&group).ok();
            described.is_some_and(|group| {
                let owned = |member: &Member| {
                    let of = |found: &&v1::PartitionInfo| found.member == member.id.as_str();
                    group.partitions.iter().filter(of).filter(|found| found.acquired).count()
                };
                members.iter().all(|member| owned(member) == half)
            })
        };
        if !wait_until(STEP_MAX, is_shared) {
            return Err(format!("the partitions were not shared: {}", self.cluster.output()).into());
        }
        let mut moves = Vec::new();
        for number in 0..WARM_UP_MOVES + self.moves {
            let moved = self.move_one(&group, number, &members, &trail)?;
            if number >= WARM_UP_MOVES {
                moves.push(moved);
            }
        }
        for member in members {
            member.stop()?;
        }
        let _records = feed.end();
        Ok(moves)
    }

    fn join(
        &self,
        name: &str,
        group: &str,
        topic: &TopicName,
        trail: &Arc<Trail>,
        start: &impl Fn(
            ConsumerBuilder<CoordinatorOffsets>,
            Arc<Trail>,
        ) -> Result<Started<Ran>, BenchError>,
    ) -> Result<Member, BenchError> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let id = MemberId::new(&unique_name(name))?;
        let (stopper, run) = runtime.block_on(async {
            let source = KafkaSource::new(KafkaSettings::new(self.kafka.bootstrap()))?;
            let addresses = self.cluster.addresses().to_vec();
            let seen = Arc::clone(trail);
            let builder =
                Consumer::builder(group.parse()?, vec![topic.clone()], Arc::new(source), addresses)
                    .member(id.clone())
                    .on_acquire_step(move |step, grant| {
                        seen.note_step(step, &grant);
                        std::future::ready(())
                    });
            start(builder, Arc::clone(trail))
        })?;
        Ok(Member { id, runtime, stopper, run })
    }

    fn move_one(
        &self,
        group: &str,
        number: u32,
        members: &[Member],
        trail: &Trail,
    ) -> Result<Move, BenchError> {
        // Not in step with the feed, and never the same partition twice in a row.
        thread::sleep(Duration::from_micros(rand::rng().random_range(8_000..16_000)));
        let index = number % u32::from(PARTITIONS);
        let described = self.cluster.describe(group)?;
        let found = described
            .partitions
            .iter()
            .find(|found| found.partition.as_ref().is_some_and(|of| of.index == index))
            .ok_or("the partition is not known")?;
        let to = members
            .iter()
            .find(|member| member.id.as_str() != found.member)
            .ok_or("nobody to move the partition to")?;
        // There is no gap without an effect before it.
        if !wait_until(STEP_MAX, || trail.has_effect(index, found.epoch)) {
            return Err(format!("partition {index} is not worked on: {}", trail.of(index)).into());
        }
        let request = v1::MoveRequest {
            context: Some(v1::OperatorContext {
                request_id: String::new(),
                reason: "bench".to_owned(),
                actor: "bench".to_owned(),
                dry_run: false,
            }),
            group: group.to_owned(),
            partition: found.partition.clone(),
            to_member: to.id.to_string(),
        };
        block_on(self.cluster.client().call(Repeat::Safe, STEP_MAX, |channel| {
            let request = request.clone();
            async move {
                let mut client = v1::operator_client::OperatorClient::new(channel);
                Ok(client.r#move(request).await?.into_inner())
            }
        }))?;
        let moved = trail.wait_for_move(index, found.epoch, Instant::now() + STEP_MAX);
        moved.ok_or_else(|| {
            let (marks, output) = (trail.of(index), self.cluster.output());
            let from = found.epoch;
            format!(
                "move {number} of partition {index} from e{from} did not end: {marks}\n{output}"
            )
            .into()
        })
    }
}

struct Member {
    id: MemberId,
    runtime: Runtime,
    stopper: Stopper,
    run: JoinHandle<Ran>,
}

impl Member {
    fn stop(self) -> Result<(), BenchError> {
        let Self { id: _, runtime, stopper, run } = self;
        stopper.stop(Duration::from_secs(10));
        runtime.block_on(run)??;
        Ok(())
    }
}

/// What is made ready is the records: they are read ahead.
async fn nothing_to_load(_of: Preparation) -> Result<(), BoxError> {
    Ok(())
}

/// Effects in memory, offsets at the coordinator.
async fn done(owned: Owned<CoordinatorOffsets>, trail: Arc<Trail>) -> Result<(), BoxError> {
    work(owned, trail, async |_, offsets: &mut OffsetWriter, batch| {
        offsets.done_before(batch.next());
        Ok(())
    })
    .await
}

/// Rows and offset in one transaction.
async fn insert(owned: Owned<PostgresSink>, trail: Arc<Trail>) -> Result<(), BoxError> {
    work(owned, trail, async |part, writer: &mut PostgresWriter, batch| {
        let offsets: Vec<i64> = batch.iter().map(|record| record.offset.signed()).collect();
        let tx = writer.begin().await?;
        let statement = tx.prepare(INSERT).await?;
        tx.execute(&statement, &[&part, &offsets]).await?;
        tx.commit(batch.next()).await?;
        Ok(())
    })
    .await
}

async fn work<S: FencedSink>(
    owned: Owned<S>,
    trail: Arc<Trail>,
    effect: impl AsyncFn(i32, &mut S::Writer, &Batch) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let grant = owned.grant().clone();
    let part = i32::try_from(grant.partition.index.get())?;
    trail.note(&grant, |marks, now| marks.started = Some(now));
    let (mut input, mut writer) = owned.split();
    while let Some(batch) = input.next_batch(&LIMITS).await {
        trail.note_first(&grant);
        effect(part, &mut writer, &batch).await?;
        trail.note(&grant, |marks, now| marks.effect = Some(now));
    }
    trail.note(&grant, |marks, now| marks.ended = Some(now));
    Ok(())
}
