//! How long a planned move keeps a partition from being worked on.

mod kafka;
mod names;
mod trail;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rand::Rng as _;
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{LeaseSettings, MemberId, TopicName};
use tenure_proto::v1;
use tenure_sdk::consumer::{ConsumerBuilder, Preparation};
use tenure_sdk::offsets::{CoordinatorOffsets, OffsetWriter};
use tenure_sdk::session::Repeat;
use tenure_sdk::sink::{BoxError, FencedSink};
use tenure_sdk::{Batch, Consumer, Limits, Owned, Stopper};
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use self::names::{COORDINATOR, FullNames, Names, POSTGRES};
use self::trail::{Move, Step, Trail};
use super::disk::Syncs;
use super::usage::Load;
use super::{BenchError, Bound, Measured, Options, Scenario, median, percentile};
use crate::cluster::{Cluster, block_on};
use crate::feed::{Feed, Rate};
use crate::servers::{Kafka, Postgres, unique_name, wait_until};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "handoff",
    about: "planned moves under load: last effect of the old owner to first record of the new one",
    run,
};

const NODES: u64 = 1;
/// One for each partition that a member may have, and some for registrations: those must not queue behind the writers.
const CONNECTIONS: usize = FULL.partitions as usize + 4;
/// Heartbeats tell soon where a partition is read, so that the next move of it is a warm one.
const TTL_MS: u64 = 1_500;
/// Not counted: connections, prepared statements, the broker's virtual machine.
const WARM_UP_MOVES: u32 = 30;

/// How much there is to do meanwhile.
#[derive(Clone, Copy)]
struct Work {
    partitions: u16,
    rate: Rate,
    moves: u32,
}

/// A record each 4 ms at each partition, and an effect for each: the processors are busy and have room, and the next
/// record is never far. Kafka's client sends one partition in a request, and a broker takes up one request of a
/// connection at a time: beyond some 2,500 of them a second here, records come late.
const STEADY: Work =
    Work { partitions: 8, rate: Rate { pause: Duration::from_millis(4), records: 1 }, moves: 200 };
/// More than the machine can do: records come in bursts, and the gap is the broker's as much as the move's.
const FULL: Work =
    Work { partitions: 24, rate: Rate { pause: Duration::from_millis(2), records: 1 }, moves: 60 };
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

fn run(options: &Options) -> Result<Measured, BenchError> {
    let (kafka, postgres) = (Kafka::start()?, Postgres::start()?);
    let cluster = Cluster::start(NODES);
    let mut measured = Measured::default();
    let mut syncs = Syncs::default();
    let folder = tempfile::tempdir()?;
    syncs.time(folder.path())?;
    syncs.note(&mut measured);
    let disk_ms = syncs.p50_ms();
    let disk = if disk_ms > SLOW_DISK_MS { DISK_WAITS * disk_ms } else { 0.0 };
    let sized = |work: Work| {
        let moves = options.rounds.unwrap_or(if options.is_small { 5 } else { work.moves });
        Work { moves, ..work }
    };
    let (steady, full) = (sized(STEADY), sized(FULL));
    measured.setup("partitions", steady.partitions);
    measured.setup("nodes", NODES);
    measured.setup("moves", steady.moves);
    measured.setup("way", "warm: records are read ahead, there is no state to load");
    measured.setup("load", "250 records a second and partition, batches that do not wait");
    measured
        .setup("full", "24 partitions, 500 records a second each: more than the machine can do");
    measured.setup("unowned", "from the old owner's end of work to the new one's start");
    measured.setup("undisturbed", "between two effects of one owner");

    let rig = Rig { kafka: &kafka, postgres: &postgres, cluster: &cluster };
    let (mut worst, mut unowned) = ((0.0_f64, 0.0_f64), (0.0_f64, 0.0_f64));
    for home in [Home::Coordinator, Home::Postgres] {
        let seen = rig.measure_home(home, steady)?;
        let (gaps, waits) = seen.note(home.names(), &mut measured);
        worst = (worst.0.max(median(&gaps)), worst.1.max(percentile(&gaps, 99)));
        unowned = (unowned.0.max(median(&waits)), unowned.1.max(percentile(&waits, 99)));
        rig.measure_home(home, full)?.note_full(&home.names().full, &mut measured);
    }
    measured.metric("unowned_p50_ms", unowned.0);
    measured.metric("unowned_p99_ms", unowned.1);
    measured.bounded("gap_p50_ms", worst.0, Bound::AtMost(GAP_P50_MAX_MS + disk));
    measured.bounded("gap_p99_ms", worst.1, Bound::AtMost(GAP_P99_MAX_MS + disk));
    kafka::measure(&mut measured, &kafka)?;
    Ok(measured)
}

/// Where the offsets are.
#[derive(Clone, Copy)]
enum Home {
    Coordinator,
    Postgres,
}

impl Home {
    const fn names(self) -> &'static Names {
        match self {
            Self::Coordinator => &COORDINATOR,
            Self::Postgres => &POSTGRES,
        }
    }
}

type Started<T> = (Stopper, JoinHandle<T>);
type Ran = Result<tenure_sdk::consumer::Stopped, tenure_sdk::consumer::ConsumerError>;

struct Rig<'a> {
    kafka: &'a Kafka,
    postgres: &'a Postgres,
    cluster: &'a Cluster,
}

impl Rig<'_> {
    fn measure_home(&self, home: Home, work: Work) -> Result<Seen, BenchError> {
        match home {
            Home::Coordinator => self.measure(work, |builder, trail| {
                let consumer = builder.build()?;
                let stopper = consumer.stopper();
                let own = move |owned, ()| done(owned, Arc::clone(&trail));
                Ok((stopper, tokio::spawn(consumer.run_warm(nothing_to_load, own))))
            }),
            Home::Postgres => {
                let database = self.postgres.new_database();
                let create = format!("{}; {CREATE}", tenure_sink_postgres::sql::MIGRATE);
                self.postgres.sql(&database, &create);
                let url = self.postgres.url_of(&database, self.postgres.port());
                self.measure(work, |builder, trail| {
                    let settings = PostgresSettings {
                        connections_max: CONNECTIONS,
                        ..PostgresSettings::default()
                    };
                    let sink = tokio::task::block_in_place(|| {
                        let connecting = PostgresSink::connect(url.parse()?, settings);
                        Ok::<_, BenchError>(tokio::runtime::Handle::current().block_on(connecting)?)
                    })?;
                    let consumer = builder.home(sink).build()?;
                    let stopper = consumer.stopper();
                    let own = move |owned, ()| insert(owned, Arc::clone(&trail));
                    Ok((stopper, tokio::spawn(consumer.run_warm(nothing_to_load, own))))
                })
            }
        }
    }

    /// Moves single partitions to and fro between two members, each with a runtime and a source of its own.
    fn measure(
        &self,
        work: Work,
        start: impl Fn(
            ConsumerBuilder<CoordinatorOffsets>,
            Arc<Trail>,
        ) -> Result<Started<Ran>, BenchError>,
    ) -> Result<Seen, BenchError> {
        let Work { partitions, rate, moves: count } = work;
        let topic = self.kafka.new_topic("handoff", partitions);
        let group = unique_name("handoff");
        let feed = Feed::start(self.kafka, &topic, partitions.into(), rate);
        let trail = Arc::new(Trail::default());
        let mut members = Vec::new();
        for name in ["ann", "bob"] {
            members.push(self.join(name, &group, &topic.parse()?, &trail, &start)?);
        }
        let half = usize::from(partitions) / 2;
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
        let index = |number: u32| number % u32::from(partitions);
        for number in 0..WARM_UP_MOVES {
            self.move_one(&group, index(number), &members, &trail)?;
        }
        let (load, started) = (Load::start()?, Instant::now());
        drop(trail.take_pauses());
        let mut moves = Vec::new();
        for number in WARM_UP_MOVES..WARM_UP_MOVES + count {
            moves.push(self.move_one(&group, index(number), &members, &trail)?);
        }
        let (busy_share, pauses) = (load.busy_share()?, trail.take_pauses());
        let effects_per_s = pauses.len() as f64 / started.elapsed().as_secs_f64();
        for member in members {
            member.stop()?;
        }
        let _records = feed.end();
        Ok(Seen { moves, pauses, busy_share, effects_per_s })
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
                    .lease(LeaseSettings::for_ttl(TTL_MS))
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
        index: u32,
        members: &[Member],
        trail: &Trail,
    ) -> Result<Move, BenchError> {
        // Not in step with the feed, and never the same partition twice in a row.
        thread::sleep(Duration::from_micros(rand::rng().random_range(8_000..16_000)));
        // Nobody moves a partition that has just been moved: by now its owner has told where it reads.
        let found = self.running(group, index)?;
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
            format!("move of partition {index} from e{from} did not end: {marks}\n{output}").into()
        })
    }
}

impl Seen {
    fn of(&self, length: impl Fn(&Move) -> f64) -> Vec<f64> {
        self.moves.iter().map(length).collect()
    }

    /// Notes everything; answers the gaps, and how long nobody worked.
    fn note(&self, names: &Names, measured: &mut Measured) -> (Vec<f64>, Vec<f64>) {
        let (gaps, waits) = (self.of(Move::gap_ms), self.of(Move::unowned_ms));
        for ((p50, p99), step) in names.steps.into_iter().zip(Step::ALL) {
            let lengths = self.of(|one| one.step_ms(step));
            measured.metric(p50, median(&lengths));
            measured.metric(p99, percentile(&lengths, 99));
        }
        measured.metric(names.busy, self.busy_share);
        measured.metric(names.effects, self.effects_per_s);
        measured.metric(names.undisturbed_p50, median(&self.pauses));
        measured.metric(names.undisturbed_p99, percentile(&self.pauses, 99));
        measured.metric(names.unowned_p50, median(&waits));
        measured.metric(names.unowned_p99, percentile(&waits, 99));
        measured.metric(names.p50, median(&gaps));
        measured.metric(names.p99, percentile(&gaps, 99));
        (gaps, waits)
    }

    fn note_full(&self, names: &FullNames, measured: &mut Measured) {
        let (gaps, waits) = (self.of(Move::gap_ms), self.of(Move::unowned_ms));
        measured.metric(names.undisturbed_p99, percentile(&self.pauses, 99));
        measured.metric(names.unowned_p50, median(&waits));
        measured.metric(names.unowned_p99, percentile(&waits, 99));
        measured.metric(names.p50, median(&gaps));
        measured.metric(names.p99, percentile(&gaps, 99));
    }
}

/// What was measured with one home.
struct Seen {
    moves: Vec<Move>,
    /// Between two effects of one owner, in milliseconds.
    pauses: Vec<f64>,
    /// Share of the machine's processors that was in use.
    busy_share: f64,
    effects_per_s: f64,
}

impl Rig<'_> {
    /// A partition once its owner's heartbeats tell where it reads.
    fn running(&self, group: &str, index: u32) -> Result<v1::PartitionInfo, BenchError> {
        let is_it = |found: &v1::PartitionInfo| {
            let of = found.partition.as_ref().is_some_and(|of| of.index == index);
            of && found.acquired && found.position.is_some()
        };
        let until = Instant::now() + STEP_MAX;
        while Instant::now() < until {
            let described = self.cluster.describe(group)?;
            if let Some(found) = described.partitions.into_iter().find(is_it) {
                return Ok(found);
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(format!("the owner of partition {index} does not tell where it reads").into())
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
        trail.note_effect(&grant);
    }
    trail.note(&grant, |marks, now| marks.ended = Some(now));
    Ok(())
}
