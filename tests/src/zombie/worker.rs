//! The worker process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use rustix::process::{Signal, getpid, kill_process};
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{LeaseSettings, NextOffset};
use tenure_sdk::consumer::{AcquireStep, Consumer, ConsumerBuilder, Limits};
use tenure_sdk::grant::Grant;
use tenure_sdk::lease::LeaseCheck;
use tenure_sdk::session::CoordinatorClient;
use tenure_sdk::sink::{BoxError, FencedSink};
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Mutex;
use tokio_postgres::NoTls;

use super::copy::{Hands, Offsets};
use super::late::Late;
use super::offset_table::OffsetTable;
use super::{Line, OffsetHome, Point, What};

/// How long a shutdown may take.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// How long a static member that ended in an orderly way keeps its place.
const RETURNS_WITHIN: Duration = Duration::from_secs(60);

/// Longer than any stop: nothing aborts the late acts.
const LOST_GRACE: Duration = Duration::from_secs(60);

/// Longest time between the order to stop and the stop of every thread.
const STOP_TAKES: Duration = Duration::from_millis(50);

/// What the worker is told.
#[derive(Debug, Parser)]
pub struct Args {
    /// Name in the table of effects and at the coordinator.
    #[arg(long)]
    pub(super) name: String,
    #[arg(long)]
    pub(super) group: String,
    #[arg(long)]
    pub(super) topic: String,
    /// Any nodes, `host:port`.
    #[arg(long, value_delimiter = ',', required = true)]
    pub(super) coordinators: Vec<String>,
    /// Bootstrap servers.
    #[arg(long)]
    pub(super) kafka: String,
    /// URL of the database.
    #[arg(long)]
    pub(super) postgres: String,
    #[arg(long)]
    pub(super) ttl_ms: u64,
    /// Where the offsets live.
    #[arg(long)]
    pub(super) offsets: OffsetHome,
    /// The negative control: PostgreSQL compares nothing.
    #[arg(long)]
    pub(super) without_fencing: bool,
    /// Where to be stopped; without it the worker is never stopped and heeds its lease.
    #[arg(long)]
    pub(super) point: Option<Point>,
    /// How many times.
    #[arg(long, default_value_t = 0)]
    pub(super) stops: u32,
    /// Makes the member static.
    #[arg(long)]
    instance: Option<String>,
    /// When its partitions may be taken.
    #[arg(long, default_value = "lease")]
    takeover: Takeover,
    /// Records in one batch, and how long one waits for them.
    #[arg(long, default_value_t = 25)]
    batch_records: usize,
    #[arg(long, default_value_t = 60)]
    batch_wait_ms: u64,
    /// Pause between the receipt of a batch and its write: at any moment somebody has one in hand.
    #[arg(long, default_value_t = 0)]
    pub(super) hold_ms: u64,
    /// Connections to the database.
    #[arg(long, default_value_t = 4)]
    connections: usize,
    /// Charges each record under its idempotency key, before the write.
    #[arg(long)]
    pub(super) charges: bool,
    /// Writes what comes again again; otherwise the sink's own offset tells what was written.
    #[arg(long)]
    pub(super) replays: bool,
    /// Leaves it to the database to refuse a stale write.
    #[arg(long)]
    without_lease_check: bool,
}

/// When the partitions of a worker that does not answer may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Takeover {
    Lease,
    Fence,
}

/// What all partitions of the worker share.
pub(super) struct Worker {
    pub(super) args: Args,
    pub(super) sink: PostgresSink,
    pub(super) table: Option<OffsetTable>,
    pub(super) coordinator: CoordinatorClient,
    /// Held by whoever writes or is stopped: at a stop nothing else of the process is under way.
    pub(super) turn: Arc<Mutex<()>>,
    stops_made: AtomicU32,
}

/// Runs until SIGTERM.
///
/// # Errors
///
/// Whatever keeps it from running.
pub fn run(args: Args) -> Result<(), BoxError> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(work(args))?;
    Line::new(What::Ended).say();
    Ok(())
}

async fn work(args: Args) -> Result<(), BoxError> {
    let settings = PostgresSettings {
        dangerously_without_fencing: args.without_fencing,
        connections_max: args.connections,
        ..PostgresSettings::default()
    };
    let sink = PostgresSink::connect(args.postgres.parse()?, settings).await?;
    let mut table = None;
    if args.offsets == OffsetHome::Table {
        let (client, connection) = tokio_postgres::connect(&args.postgres, NoTls).await?;
        drop(tokio::spawn(connection));
        table = Some(OffsetTable::new(client));
    }
    let settings =
        KafkaSettings { client_id: args.name.clone(), ..KafkaSettings::new(args.kafka.as_str()) };
    let source = Arc::new(KafkaSource::new(settings)?);
    let coordinator = CoordinatorClient::new(args.coordinators.clone());
    let (turn, stops_made) = (Arc::new(Mutex::new(())), AtomicU32::new(0));
    let worker = Arc::new(Worker { args, sink, table, coordinator, turn, stops_made });
    let builder = Consumer::builder(
        worker.args.group.parse()?,
        vec![worker.args.topic.parse()?],
        source,
        worker.args.coordinators.clone(),
    );
    let sink = worker.sink.clone();
    match (worker.args.offsets, &worker.table) {
        (OffsetHome::Coordinator, _) => {
            consume(&worker, builder.also(Arc::new(sink)), |worker, grant, offsets| {
                (worker.sink.writer(grant), Offsets::Coordinator(offsets))
            })
            .await
        }
        (OffsetHome::Table, Some(table)) => {
            let builder = builder.home(table.clone()).also(Arc::new(sink));
            consume(&worker, builder, |worker, grant, offsets| {
                (worker.sink.writer(grant), Offsets::Table(offsets))
            })
            .await
        }
        (OffsetHome::Sink | OffsetHome::Table, _) => {
            consume(&worker, builder.home(sink), |_, _, writer| (writer, Offsets::InData)).await
        }
    }
}

/// Consumes until SIGTERM; `split` makes the sink's writer and the offsets' of what the home gave.
async fn consume<S: FencedSink>(
    worker: &Arc<Worker>,
    builder: ConsumerBuilder<S>,
    split: impl Fn(&Worker, &Grant, S::Writer) -> (PostgresWriter, Offsets) + Send + Sync + 'static,
) -> Result<(), BoxError> {
    let is_reckless = worker.args.point.is_some() || worker.args.without_lease_check;
    let check = if is_reckless { LeaseCheck::Off } else { LeaseCheck::On };
    let hooked = Arc::clone(worker);
    let mut builder = builder.takeover(match worker.args.takeover {
        Takeover::Lease => tenure_model::Takeover::Lease,
        Takeover::Fence => tenure_model::Takeover::Fence,
    });
    if is_reckless {
        builder = builder.lost_grace(LOST_GRACE);
    }
    if let Some(instance) = &worker.args.instance {
        builder = builder.instance_id(instance.parse()?).returning_within(RETURNS_WITHIN);
    }
    let consumer = builder
        .client(worker.args.name.as_str())
        .lease(LeaseSettings::for_ttl(worker.args.ttl_ms))
        .lease_check(check)
        .on_acquire_step(move |step, grant| Arc::clone(&hooked).stop_in_acquire(step, grant))
        .build()?;
    let stopper = consumer.stopper();
    let mut terminate = signal(SignalKind::terminate())?;
    drop(tokio::spawn(async move {
        terminate.recv().await;
        stopper.stop(STOP_DEADLINE);
    }));
    let worker = Arc::clone(worker);
    let split = Arc::new(split);
    let stopped = consumer
        .run(move |owned| {
            let (worker, split) = (Arc::clone(&worker), Arc::clone(&split));
            async move {
                let grant = owned.grant().clone();
                let (input, home) = owned.split();
                let (writer, offsets) = split(&worker, &grant, home);
                worker.own(Hands { grant, input, writer, offsets }).await
            }
        })
        .await?;
    if stopped.clean { Ok(()) } else { Err("the consumer did not end cleanly".into()) }
}

impl Worker {
    pub(super) fn limits(&self) -> Limits {
        let Args { batch_records, batch_wait_ms, .. } = self.args;
        let wait = Duration::from_millis(batch_wait_ms);
        Limits { records: batch_records, bytes: 1 << 20, wait }
    }

    /// How many times it was stopped so far.
    pub(super) fn stops_made(&self) -> u32 {
        self.stops_made.load(Ordering::SeqCst)
    }

    /// Counts one more stop; answers its number.
    pub(super) fn count_stop(&self) -> u32 {
        self.stops_made.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The point, if there are stops left. Asked with the turn held.
    fn point(&self) -> Option<Point> {
        self.args.point.filter(|_| self.stops_made() < self.args.stops)
    }

    /// The point, if it lies in the handler and there are stops left.
    pub(super) fn point_in_handler(&self) -> Option<Point> {
        self.point().filter(|point| step_of(*point).is_none())
    }

    /// Says where the process is, and stops it there. Returns once it was woken.
    pub(super) fn stand_still(&self, what: What, grant: &Grant, next: Option<NextOffset>) {
        Line {
            stop: self.stops_made(),
            partition: grant.partition.index.get(),
            epoch: grant.epoch.get(),
            next: next.map_or(0, NextOffset::get),
            ..Line::new(what)
        }
        .say();
        kill_process(getpid(), Signal::STOP).expect("a process may stop itself");
        // The order may go to another thread first, and this one would run on for a moment.
        std::thread::sleep(STOP_TAKES);
    }

    async fn stop_in_acquire(self: Arc<Self>, step: AcquireStep, grant: Grant) {
        let Some(point) = self.args.point.filter(|point| step_of(*point) == Some(step)) else {
            return;
        };
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if self.point().is_none() {
            return;
        }
        // A task of its own: the run loop drops the acquire as soon as it learns of the loss.
        let acts = tokio::spawn(async move {
            Late::stop(&self, &grant, None).go_on_acquiring(point).await;
            drop(turn);
        });
        if let Err(error) = acts.await {
            tracing::error!(%error, "the late acts failed");
        }
    }
}

const fn step_of(point: Point) -> Option<AcquireStep> {
    match point {
        Point::BeforeRegister => Some(AcquireStep::Register),
        Point::BeforeVerify => Some(AcquireStep::Verify),
        Point::BeforeResume => Some(AcquireStep::Resume),
        Point::AfterBegin
        | Point::AfterData
        | Point::CommitUnanswered
        | Point::BeforeOffsetCommit => None,
    }
}
