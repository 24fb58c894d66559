//! One worker of the demo: copies orders from its partitions into a SQLite file.
//!
//! It tells what happens as JSON lines on standard output and takes orders as lines on standard input: `hold` makes it
//! stand still outside any transaction with a batch in hand, `go` lets it go on, `stop` ends it cleanly.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{CommitSequence, LeaseSettings};
use tenure_sdk::consumer::{Batch, Consumer, Limits, Owned, Stopper};
use tenure_sdk::grant::Grant;
use tenure_sdk::lease::LeaseCheck;
use tenure_sdk::offsets::{CommitError, CoordinatorOffsets, OffsetWriter};
use tenure_sdk::session::{CallError, CoordinatorClient, OffsetCommit};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink, SqliteWriter};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::{Notify, RwLock};

use super::now_us;
use crate::args::WorkerArgs;
use crate::output::line;
use crate::{Failure, exit};

/// Copies: one row per effect, in the order in which they took place.
pub(crate) const SCHEMA: &str = "\
    CREATE TABLE IF NOT EXISTS copies (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        partition_index INTEGER NOT NULL,
        record_offset INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        worker TEXT NOT NULL,
        payload BLOB
    )";

const INSERT: &str = "\
    INSERT INTO copies (partition_index, record_offset, epoch, worker, payload) VALUES (?1, ?2, ?3, ?4, ?5)";

const LIMITS: Limits = Limits { records: 50, bytes: 1 << 20, wait: Duration::from_millis(20) };

/// How long a shutdown may take.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// What all handlers of the worker share.
struct Worker {
    name: String,
    sink: SqliteSink,
    gate: Gate,
    client: CoordinatorClient,
    /// The late writer's code: it does not look whether it still owns anything.
    reckless: bool,
}

/// Handlers pass it around each write; whoever closes it knows that no write is under way.
#[derive(Default)]
struct Gate {
    lock: RwLock<()>,
    in_hand: AtomicUsize,
    go: Notify,
}

pub(crate) async fn run(args: WorkerArgs) -> Result<(), Failure> {
    let failed =
        |error: &dyn std::fmt::Display| Failure { message: error.to_string(), exit: exit::FAILED };
    let settings = SqliteSettings {
        dangerously_without_fencing: args.no_fencing,
        ..SqliteSettings::default()
    };
    let sink = SqliteSink::open(&args.database, settings).await.map_err(|error| failed(&error))?;
    let source =
        KafkaSource::new(KafkaSettings::new(args.kafka.as_str())).map_err(|e| failed(&e))?;
    let worker = Arc::new(Worker {
        name: args.name.clone(),
        sink: sink.clone(),
        gate: Gate::default(),
        client: CoordinatorClient::new(args.coordinators.clone()),
        reckless: args.lease_check_off || args.no_fencing,
    });
    let group = args.group.parse().map_err(|error| failed(&error))?;
    let topic = args.topic.parse().map_err(|error| failed(&error))?;
    let member = format!("{}-{:08x}", args.name, rand::random::<u32>());
    let check = if worker.reckless { LeaseCheck::Off } else { LeaseCheck::On };
    let consumer = Consumer::builder(group, vec![topic], Arc::new(source), args.coordinators)
        .member(member.parse().map_err(|error| failed(&error))?)
        .client(args.name.clone())
        .lease(LeaseSettings::for_ttl(args.ttl_ms))
        .lease_check(check)
        .also(Arc::new(sink))
        .build()
        .map_err(|error| failed(&error))?;
    drop(tokio::spawn(take_orders(Arc::clone(&worker), consumer.stopper())));
    tell(json!({ "event": "started", "member": member }));
    let stopped = consumer
        .run(move |owned| {
            let worker = Arc::clone(&worker);
            async move { worker.own(owned).await }
        })
        .await
        .map_err(|error| failed(&error))?;
    tell(json!({ "event": "stopped", "clean": stopped.clean }));
    Ok(())
}

fn tell(mut event: Value) {
    event["t_us"] = json!(now_us());
    line(event);
}

async fn take_orders(worker: Arc<Worker>, stopper: Stopper) {
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(order)) = lines.next_line().await {
        match order.trim() {
            "hold" => drop(tokio::spawn(hold(Arc::clone(&worker)))),
            // Kept until it is waited for, should it come first.
            "go" => worker.gate.go.notify_one(),
            "stop" => stopper.stop(STOP_DEADLINE),
            other => tell(json!({ "event": "unknown_order", "order": other })),
        }
    }
    // The demo is gone: so is the worker.
    stopper.stop(STOP_DEADLINE);
}

/// Closes the gate, waits until records are in hand, says so, and opens it on `go`.
async fn hold(worker: Arc<Worker>) {
    let closed = worker.gate.lock.write().await;
    while worker.gate.in_hand.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tell(json!({ "event": "holding", "in_hand": worker.gate.in_hand.load(Ordering::SeqCst) }));
    worker.gate.go.notified().await;
    drop(closed);
}

impl Worker {
    /// Runs for one owned partition.
    async fn own(&self, owned: Owned<CoordinatorOffsets>) -> Result<(), BoxError> {
        let grant = owned.grant().clone();
        let (mut input, mut offsets) = owned.split();
        let mut writer = self.sink.writer(&grant);
        self.say("owned", &grant, json!({}));
        let mut first = true;
        let result = loop {
            let Some(batch) = input.next_batch(&LIMITS).await else { break Ok(()) };
            self.gate.in_hand.fetch_add(1, Ordering::SeqCst);
            let passed = self.gate.lock.read().await;
            self.gate.in_hand.fetch_sub(1, Ordering::SeqCst);
            if std::mem::take(&mut first) {
                self.say("first", &grant, json!({ "offset": batch.first().get() }));
            }
            let copied = self.copy(&grant, &mut writer, &mut offsets, &batch).await;
            drop(passed);
            if let Err(error) = copied {
                break Err(error);
            }
        };
        self.say(
            "ended",
            &grant,
            json!({ "error": result.as_ref().err().map(ToString::to_string) }),
        );
        result
    }

    /// Writes one batch under the epoch, then commits its offset under the epoch.
    async fn copy(
        &self,
        grant: &Grant,
        writer: &mut SqliteWriter,
        offsets: &mut OffsetWriter,
        batch: &Batch,
    ) -> Result<(), BoxError> {
        if let Err(error) = self.write(grant, writer, batch).await {
            self.tell_refusal(grant, &error);
            if self.reckless && matches!(error, SinkError::Fenced { .. }) {
                self.commit_late(grant, batch).await;
            }
            return Err(error.into());
        }
        match offsets.commit(batch.next()).await {
            Ok(_) => Ok(()),
            Err(CommitError::LeaseEnded(_) | CommitError::Released) if self.reckless => {
                self.commit_late(grant, batch).await;
                Ok(())
            }
            Err(error) => {
                if let CommitError::Fenced { ours, current } = &error {
                    self.say_refused(
                        "refused_offset_commit",
                        grant,
                        ours.get(),
                        current.map(|e| e.get()),
                    );
                }
                Err(error.into())
            }
        }
    }

    async fn write(
        &self,
        grant: &Grant,
        writer: &mut SqliteWriter,
        batch: &Batch,
    ) -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        // What an earlier owner wrote and did not get to commit is not written again.
        let applied = tx.applied();
        let rows: Vec<(i64, i64, i64, String, Vec<u8>)> = batch
            .iter()
            .filter(|record| applied.is_none_or(|applied| record.offset >= applied))
            .map(|record| {
                (
                    i64::from(record.partition.index.get()),
                    record.offset.signed(),
                    i64::try_from(grant.epoch.get()).unwrap_or(i64::MAX),
                    self.name.clone(),
                    record.value.as_ref().map(|value| value.to_vec()).unwrap_or_default(),
                )
            })
            .collect();
        tx.run(move |connection| {
            let mut insert = connection.prepare_cached(INSERT)?;
            for row in rows {
                insert.execute(row)?;
            }
            Ok(())
        })
        .await?;
        tx.commit(batch.next()).await
    }

    /// Commits as code would that never asks whether it still owns the partition.
    async fn commit_late(&self, grant: &Grant, batch: &Batch) {
        let commit = OffsetCommit {
            partition: grant.partition,
            epoch: grant.epoch,
            sequence: CommitSequence(u64::MAX >> 1),
            next_offset: batch.next(),
            metadata: Vec::new(),
        };
        let answer = self
            .client
            .commit(&grant.group, &grant.member, vec![commit], Duration::from_secs(5))
            .await;
        let refused = match answer {
            Ok(verdicts) => verdicts.into_iter().find_map(Result::err),
            Err(CallError::Refused(refused)) => Some(refused),
            Err(CallError::Unknown { last, .. }) => {
                return tell(json!({ "event": "late_commit_unknown", "error": last }));
            }
        };
        match refused {
            Some(refused) => {
                let current = refused.current_epoch.map(|epoch| epoch.get());
                self.say_refused("refused_offset_commit", grant, grant.epoch.get(), current);
            }
            None => self.say("accepted_late_commit", grant, json!({})),
        }
    }

    fn tell_refusal(&self, grant: &Grant, error: &SinkError) {
        match error {
            SinkError::Fenced { ours, seen } => {
                self.say_refused(
                    "refused_sink_write",
                    grant,
                    ours.get(),
                    seen.map(|epoch| epoch.get()),
                );
            }
            SinkError::LeaseEnded(_) => self.say("refused_locally", grant, json!({})),
            SinkError::OffsetConflict { .. }
            | SinkError::Unknown(_)
            | SinkError::Transient { .. }
            | SinkError::Rejected(_)
            | SinkError::Misconfigured(_)
            | SinkError::FenceRegressed { .. } => {
                self.say("sink_failed", grant, json!({ "error": error.to_string() }));
            }
        }
    }

    fn say_refused(&self, event: &str, grant: &Grant, given: u64, current: Option<u64>) {
        self.say(event, grant, json!({ "given": given, "current": current }));
    }

    fn say(&self, event: &str, grant: &Grant, more: Value) {
        let mut value = json!({
            "event": event,
            "partition": grant.partition.index.get(),
            "epoch": grant.epoch.get(),
        });
        if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
            value.extend(more);
        }
        tell(value);
    }
}
