//! The story, step by step.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tenure_sdk::sink::SinkError;
use tenure_sink_sqlite::{SqliteSettings, SqliteSink};
use tokio::sync::mpsc;

use super::audit::{Audit, audit};
use super::cluster::Cluster;
use super::ledger::{Ledger, Refusal};
use super::orders::{Orders, Production};
use super::processes::Process;
use super::{now_us, worker};
use crate::args::DemoArgs;
use crate::output::line;
use crate::{Failure, exit};

const PARTITIONS: u16 = 12;
const GROUP: &str = "copiers";
const TTL_MS: u64 = 3_000;
const WORKERS: [&str; 3] = ["w1", "w2", "w3"];

/// Longest wait for one step; far above what a healthy machine needs.
const STEP: Duration = Duration::from_secs(30);

/// Everything on the stage.
struct Story {
    begun: Instant,
    fencing: bool,
    folder: PathBuf,
    orders: Orders,
    cluster: Cluster,
    workers: Vec<Process>,
    events: mpsc::UnboundedReceiver<(String, Value)>,
    ledger: Ledger,
}

pub(crate) async fn run(args: DemoArgs) -> Result<(), Failure> {
    let failed = |message: String| Failure { message, exit: exit::FAILED };
    let kept = args.keep.clone();
    let temporary = match &kept {
        Some(folder) => {
            prepare_folder(folder)?;
            None
        }
        None => Some(
            tempfile::tempdir().map_err(|error| failed(format!("no temporary folder: {error}")))?,
        ),
    };
    let folder = match (&kept, &temporary) {
        (Some(folder), _) => folder.clone(),
        (None, Some(temporary)) => temporary.path().to_owned(),
        (None, None) => return Err(failed("no folder".to_owned())),
    };
    let outcome = play(&args, folder.clone()).await.map_err(|message| {
        failed(format!(
            "the demo broke off: {message}\nnext: --keep DIR keeps the logs of every process"
        ))
    });
    if let Some(folder) = &kept {
        line(format_args!("kept: {}", folder.display()));
    }
    let report = outcome?;
    if args.json {
        line(&report.json);
    }
    if report.good { Ok(()) } else { Err(failed(report.verdict)) }
}

struct Report {
    json: Value,
    good: bool,
    verdict: String,
}

async fn play(args: &DemoArgs, folder: PathBuf) -> Result<Report, String> {
    let mut story = Story::set(args, folder).await?;
    let production = story.open().await?;
    story.freeze_the_reckless().await?;
    story.freeze_the_careful().await?;
    story.kill_the_raft_leader().await?;
    story.move_by_hand().await?;
    story.stop_one().await?;
    story.close(production).await
}

impl Story {
    async fn set(args: &DemoArgs, folder: PathBuf) -> Result<Self, String> {
        let begun = Instant::now();
        let (told, events) = mpsc::unbounded_channel();
        let orders = Orders::prepare(args.kafka.as_deref(), PARTITIONS).await?;
        let database = folder.join("orders.db");
        prepare_database(&database).await?;
        let cluster = Cluster::start(&folder, &told)?;
        let mut workers = Vec::new();
        for name in WORKERS {
            let mut arguments = vec![
                "demo-worker".to_owned(),
                format!("--name={name}"),
                format!("--coordinators={}", cluster.addresses.join(",")),
                format!("--kafka={}", orders.bootstrap),
                format!("--group={GROUP}"),
                format!("--topic={}", orders.topic),
                format!("--database={}", database.display()),
                format!("--ttl-ms={TTL_MS}"),
            ];
            if name == WORKERS[0] {
                arguments.push("--lease-check-off".to_owned());
            }
            if args.no_fencing {
                arguments.push("--no-fencing".to_owned());
            }
            let log = folder.join(format!("{name}.log"));
            workers.push(
                Process::start(name, &arguments, &log, told.clone())
                    .map_err(|error| format!("{name} did not start: {error}"))?,
            );
        }
        let ledger = Ledger::default();
        let fencing = !args.no_fencing;
        Ok(Self { begun, fencing, folder, orders, cluster, workers, events, ledger })
    }

    fn say(&self, text: impl std::fmt::Display) {
        let at = self.begun.elapsed();
        line(format_args!("[{:>6.2} s] {text}", at.as_secs_f64()));
    }

    /// Takes in what the workers tell until `done`.
    async fn until(&mut self, what: &str, done: impl Fn(&Ledger) -> bool) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + STEP;
        while !done(&self.ledger) {
            match tokio::time::timeout_at(deadline, self.events.recv()).await {
                Ok(Some((process, event))) => self.ledger.note(&process, &event),
                Ok(None) => return Err(format!("all processes are gone, waiting until {what}")),
                Err(_elapsed) => {
                    return Err(format!("{} s passed, waiting until {what}", STEP.as_secs()));
                }
            }
        }
        Ok(())
    }

    /// Takes in what the workers tell for a while.
    async fn watch(&mut self, length: Duration) {
        let end = tokio::time::Instant::now() + length;
        while let Ok(Some((process, event))) =
            tokio::time::timeout_at(end, self.events.recv()).await
        {
            self.ledger.note(&process, &event);
        }
    }

    async fn all_owned(&mut self, workers: &[&str]) -> Result<(), String> {
        let what = format!("{} own all {PARTITIONS} partitions", workers.join(" and "));
        self.until(&what, |ledger| ledger.all_owned_by(usize::from(PARTITIONS), workers)).await
    }

    async fn open(&mut self) -> Result<Production, String> {
        let kafka = if self.orders.is_embedded() { "an embedded Kafka" } else { "Kafka" };
        self.say(format_args!(
            "3 coordinator processes, {kafka}, 3 worker processes copy {PARTITIONS} partitions into one SQLite file; \
             ttl {TTL_MS} ms"
        ));
        if !self.fencing {
            self.say(
                "WITHOUT FENCING: the sink compares no epochs and the workers look at no lease",
            );
        }
        let leader = self.cluster.raft_leader().await?;
        self.say(format_args!("node {leader} is raft leader"));
        let production =
            self.orders.produce(PARTITIONS).map_err(|error| format!("no producer: {error}"))?;
        self.all_owned(&WORKERS).await?;
        // The first plan may have known fewer members.
        self.until("every worker owns a share", |ledger| {
            WORKERS
                .iter()
                .all(|worker| ledger.owned_by(worker).len() == usize::from(PARTITIONS) / 3)
        })
        .await?;
        self.say("each worker owns 4 partitions, each under an epoch of its own");
        self.watch(Duration::from_millis(1_000)).await;
        Ok(production)
    }

    /// Freezes a worker outside a transaction with a batch in hand, for longer than its lease, until others write.
    async fn freeze(&mut self, worker: usize, others: &[&str]) -> Result<(), String> {
        let name = WORKERS[worker];
        self.order(worker, "hold").await?;
        self.until("a batch is in hand", |ledger| ledger.holding.contains_key(name)).await?;
        let owned = self.ledger.owned_by(name);
        self.workers[worker]
            .freeze()
            .await
            .map_err(|error| format!("{name} is not frozen: {error}"))?;
        let frozen = Instant::now();
        self.ledger.gone(name, now_us());
        self.say(format_args!(
            "SIGSTOP to {name} (process {}): it owns partitions {owned:?} and stands still with records in hand, outside \
             a transaction (a frozen SQLite writer would keep the file's lock)",
            self.workers[worker].id()
        ));
        self.all_owned(others).await?;
        self.say(format_args!(
            "its lease ran out: {} own everything after {:.1} s, under new epochs",
            others.join(" and "),
            frozen.elapsed().as_secs_f64()
        ));
        self.watch(Duration::from_millis(1_000)).await;
        self.order(worker, "go").await?;
        self.workers[worker].wake().map_err(|error| format!("{name} is not woken: {error}"))
    }

    async fn freeze_the_reckless(&mut self) -> Result<(), String> {
        let name = WORKERS[0];
        self.freeze(0, &[WORKERS[1], WORKERS[2]]).await?;
        self.say(format_args!(
            "SIGCONT to {name}, whose local lease check is off: its late writes and commits go out"
        ));
        if !self.fencing {
            return self.nothing_stops_it().await;
        }
        self.until("its late write and its late commit are refused", |ledger| {
            !ledger.refused_sink_writes.is_empty() && !ledger.refused_offset_commits.is_empty()
        })
        .await?;
        self.watch(Duration::from_millis(300)).await;
        let lines: Vec<String> =
            self.ledger
                .refused_sink_writes
                .iter()
                .map(|refusal| refused("SQLite refused a write", refusal))
                .chain(
                    self.ledger.refused_offset_commits.iter().map(|refusal| {
                        refused("the coordinator refused an offset commit", refusal)
                    }),
                )
                .collect();
        for text in lines {
            self.say(text);
        }
        self.settle().await
    }

    /// The same step without fencing: there is no refusal at the sink to wait for.
    async fn nothing_stops_it(&mut self) -> Result<(), String> {
        self.watch(Duration::from_secs(1)).await;
        self.say("nothing stopped its late writes");
        self.settle().await
    }

    async fn freeze_the_careful(&mut self) -> Result<(), String> {
        let name = WORKERS[1];
        self.freeze(1, &[WORKERS[0], WORKERS[2]]).await?;
        if !self.fencing {
            self.say(format_args!("SIGCONT to {name}"));
            return self.nothing_stops_it().await;
        }
        self.say(format_args!("SIGCONT to {name}, whose local lease check is on"));
        self.until("it refuses itself", |ledger| ledger.refused_locally > 0).await?;
        self.say(format_args!(
            "{name} refused its own write: its lease had ended, nothing was sent"
        ));
        self.settle().await
    }

    async fn kill_the_raft_leader(&mut self) -> Result<(), String> {
        let leader = self.cluster.raft_leader().await?;
        let before = self.committed().await?;
        let moves = self.ledger.moves;
        self.cluster.kill(leader).await?;
        let killed = Instant::now();
        self.say(format_args!("SIGKILL to node {leader}, the raft leader"));
        let next = self.cluster.raft_leader().await?;
        while self.committed().await? <= before {
            if killed.elapsed() > STEP {
                return Err("no offset was committed after the raft leader was killed".to_owned());
            }
            self.watch(Duration::from_millis(20)).await;
        }
        let lost = match self.ledger.moves - moves {
            0 => "nobody lost a partition".to_owned(),
            moves => format!("{moves} partitions moved"),
        };
        self.say(format_args!(
            "node {next} is raft leader; offsets are committed again after {:.2} s, and {lost}",
            killed.elapsed().as_secs_f64()
        ));
        self.settle().await
    }

    /// Sum of the committed offsets.
    async fn committed(&self) -> Result<u64, String> {
        let group = self.cluster.describe(GROUP).await.map_err(|error| error.to_string())?;
        Ok(group.partitions.iter().filter_map(|partition| partition.committed).sum())
    }

    async fn move_by_hand(&mut self) -> Result<(), String> {
        let group = self.cluster.describe(GROUP).await.map_err(|error| error.to_string())?;
        let info = group.partitions.first().ok_or("the group has no partition")?;
        let partition = info.partition.clone().ok_or("a partition without a name")?;
        let index = u64::from(partition.index);
        let to = group
            .members
            .iter()
            .find(|member| member.member != info.member)
            .ok_or("there is nobody to move to")?;
        let (from, to) = (info.member.clone(), to.member.clone());
        let before = self.ledger.owner(index).map_or(0, |(_, epoch)| *epoch);
        let asked = Instant::now();
        self.cluster
            .move_partition(GROUP, partition, &to)
            .await
            .map_err(|error| error.to_string())?;
        self.until("the partition has moved", |ledger| {
            ledger.owner(index).is_some_and(|(_, epoch)| *epoch > before)
        })
        .await?;
        let epoch = self.ledger.owner(index).map_or(0, |(_, epoch)| *epoch);
        self.say(format_args!(
            "partition {index} moved by hand from {from} to {to} in {} ms: e{before} → e{epoch}, unowned {:.1} ms",
            asked.elapsed().as_millis(),
            self.ledger.unowned_us.last().map_or(0.0, |us| *us as f64 / 1000.0)
        ));
        self.watch(Duration::from_millis(500)).await;
        Ok(())
    }

    async fn stop_one(&mut self) -> Result<(), String> {
        let name = WORKERS[2];
        let asked = Instant::now();
        self.order(2, "stop").await?;
        self.until("it has stopped", |ledger| ledger.stopped.contains_key(name)).await?;
        self.ledger.gone(name, now_us());
        self.all_owned(&[WORKERS[0], WORKERS[1]]).await?;
        let clean = self.ledger.stopped.get(name).copied().unwrap_or(false);
        self.say(format_args!(
            "{name} stopped {} and its partitions moved, {} ms after it was asked to",
            if clean { "cleanly" } else { "but not cleanly" },
            asked.elapsed().as_millis()
        ));
        Ok(())
    }

    /// Waits until the woken worker is back and the partitions are spread again.
    async fn settle(&mut self) -> Result<(), String> {
        self.until("each worker owns its share again", |ledger| {
            WORKERS
                .iter()
                .all(|worker| ledger.owned_by(worker).len() == usize::from(PARTITIONS) / 3)
                && ledger.all_owned_by(usize::from(PARTITIONS), &WORKERS)
        })
        .await?;
        self.watch(Duration::from_millis(300)).await;
        Ok(())
    }

    async fn close(mut self, production: Production) -> Result<Report, String> {
        let produced = production.stop().await?;
        let total: u64 = produced.values().sum();
        self.say(format_args!("production stopped at {total} orders"));
        let started = Instant::now();
        let mut committed = self.committed().await?;
        while committed < total && started.elapsed() < STEP {
            self.watch(Duration::from_millis(50)).await;
            committed = self.committed().await?;
        }
        for worker in [0, 1] {
            self.order(worker, "stop").await?;
        }
        self.until("the workers have stopped", |ledger| {
            WORKERS[..2].iter().all(|worker| ledger.stopped.contains_key(*worker))
        })
        .await?;
        for process in &mut self.workers {
            process.wait(STEP).await.map_err(|error| format!("{}: {error}", process.name))?;
        }
        let found =
            audit(&self.folder.join("orders.db"), &produced).map_err(|error| error.to_string())?;
        Ok(self.report(&found))
    }

    fn report(&self, found: &Audit) -> Report {
        let ledger = &self.ledger;
        self.say(format_args!(
            "audit of the SQLite file: {} produced, {} copied, {} lost, {} duplicated, {} out of order",
            found.produced, found.copied, found.lost, found.duplicated, found.out_of_order
        ));
        let unowned = [0.5, 0.99, 1.0].map(|quantile| ledger.unowned_ms(quantile));
        self.say(format_args!(
            "{} moves; nobody could work on a moving partition for {:.1} ms (median), {:.0} ms (99 %), {:.0} ms (most: \
             a frozen owner's lease has to run out)",
            ledger.moves, unowned[0], unowned[1], unowned[2]
        ));
        let whole = found.lost == 0 && found.duplicated == 0 && found.out_of_order == 0;
        let refused = !ledger.refused_sink_writes.is_empty()
            && !ledger.refused_offset_commits.is_empty()
            && ledger.refused_locally > 0;
        let good = whole && refused && ledger.accepted_late_commits == 0;
        let verdict = match (self.fencing, whole, good) {
            (_, _, true) => {
                "nothing lost, duplicated or out of order; every stale owner was refused".to_owned()
            }
            (false, false, _) => "without fencing the data is damaged, as it must be".to_owned(),
            (false, true, _) => {
                "without fencing no damage was seen: the negative control failed".to_owned()
            }
            (true, false, _) => {
                "the data is damaged although fencing is on: this is a bug".to_owned()
            }
            (true, true, false) => {
                "not every kind of refusal was seen: the story did not take place".to_owned()
            }
        };
        self.say(&verdict);
        let json = json!({
            "fencing": self.fencing,
            "produced": found.produced,
            "copied": found.copied,
            "lost": found.lost,
            "duplicated": found.duplicated,
            "out_of_order": found.out_of_order,
            "refused_sink_writes": ledger.refused_sink_writes.len(),
            "refused_offset_commits": ledger.refused_offset_commits.len(),
            "refused_locally": ledger.refused_locally,
            "accepted_late_commits": ledger.accepted_late_commits,
            "moves": ledger.moves,
            "unowned_ms": { "p50": unowned[0], "p99": unowned[1], "max": unowned[2] },
            "seconds": self.begun.elapsed().as_secs_f64(),
        });
        Report { json, good, verdict }
    }

    async fn order(&mut self, worker: usize, order: &str) -> Result<(), String> {
        let process = &mut self.workers[worker];
        process
            .order(order)
            .await
            .map_err(|error| format!("{} takes no orders: {error}", process.name))
    }
}

fn refused(what: &str, refusal: &Refusal) -> String {
    let current = refusal.current.map_or_else(|| "none".to_owned(), |epoch| format!("e{epoch}"));
    format!(
        "{what} of {} to partition {}: given e{}, current is {current}",
        refusal.worker, refusal.partition, refusal.given
    )
}

/// Files of an earlier run would mix with this one's.
fn prepare_folder(folder: &Path) -> Result<(), Failure> {
    let failure = |error: &dyn std::fmt::Display| Failure {
        message: format!("{}: {error}", folder.display()),
        exit: exit::USAGE,
    };
    std::fs::create_dir_all(folder).map_err(|error| failure(&error))?;
    let mut files = std::fs::read_dir(folder).map_err(|error| failure(&error))?;
    match files.next() {
        None => Ok(()),
        Some(_) => Err(failure(&"is not empty: give --keep a new or an empty folder")),
    }
}

async fn prepare_database(file: &Path) -> Result<(), String> {
    let failed = |error: SinkError| format!("{}: {error}", file.display());
    let sink = SqliteSink::open(file, SqliteSettings::default()).await.map_err(failed)?;
    sink.migrate().await.map_err(failed)?;
    sink.with_connection(|connection| connection.execute_batch(worker::SCHEMA))
        .await
        .map_err(failed)
}
