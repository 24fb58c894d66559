//! Counts records by key; the counts are loaded before the cut-over, while the present owner still counts.
//!
//! Counts and offset are in one transaction, so that the loaded counts are those of *some* offset: if the owner has gone
//! on since, what it wrote is loaded once more after the fence is in. Nothing is counted twice, and nothing is lost.

mod common;

use std::collections::HashMap;
use std::error::Error;

use common::{Setup, stop_when_asked};
use tenure_model::{NextOffset, Partition};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sdk::{Limits, Owned};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink};

const TABLE: &str = "CREATE TABLE IF NOT EXISTS counts (
    partition TEXT, key TEXT, count INTEGER NOT NULL, next_offset INTEGER NOT NULL,
    PRIMARY KEY (partition, key))";

/// Counts of one partition.
#[derive(Default)]
struct Counts {
    by_key: HashMap<String, i64>,
    /// Every record before it is in them.
    until: u64,
}

async fn load(sink: &SqliteSink, partition: Partition) -> Result<Counts, SinkError> {
    let of = partition.to_string();
    sink.with_connection(move |connection| {
        let mut select = connection
            .prepare("SELECT key, count, next_offset FROM counts WHERE partition = ?1")?;
        let mut counts = Counts::default();
        let mut rows = select.query([of])?;
        while let Some(row) = rows.next()? {
            counts.by_key.insert(row.get(0)?, row.get(1)?);
            counts.until = counts.until.max(row.get::<_, i64>(2)?.cast_unsigned());
        }
        Ok(counts)
    })
    .await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let setup = Setup::new()?;
    let sink = SqliteSink::open(setup.data.join("counts.db"), SqliteSettings::default()).await?;
    sink.migrate().await?;
    sink.with_connection(|connection| connection.execute_batch(TABLE)).await?;
    let consumer = setup.consumer("aggregator")?.home(sink.clone()).build()?;
    stop_when_asked(consumer.stopper())?;
    let early = sink.clone();
    consumer
        .run_warm(
            move |preparation| {
                let sink = early.clone();
                async move { Ok(load(&sink, preparation.partition()).await?) }
            },
            move |owned: Owned<SqliteSink>, counts: Counts| aggregate(sink.clone(), owned, counts),
        )
        .await?;
    Ok(())
}

async fn aggregate(
    sink: SqliteSink,
    owned: Owned<SqliteSink>,
    mut counts: Counts,
) -> Result<(), BoxError> {
    let (partition, resume) = (owned.grant().partition, owned.resume());
    if counts.until < resume.get() {
        // A hint was loaded, and the owner has gone on since. The fence is in now: this is the last word.
        counts = load(&sink, partition).await?;
    }
    let of = partition.to_string();
    let (mut input, mut out) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        let mut tx = out.begin().await?;
        let next = batch.next();
        for record in &batch {
            let key = String::from_utf8_lossy(record.key.as_deref().unwrap_or_default());
            *counts.by_key.entry(key.into_owned()).or_default() += 1;
        }
        for (key, count) in changed(&batch, &counts) {
            let row = (of.clone(), key, count, signed(next));
            tx.execute("INSERT OR REPLACE INTO counts VALUES (?1, ?2, ?3, ?4)", row).await?;
        }
        tx.commit(next).await?;
        counts.until = next.get();
    }
    Ok(())
}

/// Counts of the keys in `batch`, each once.
fn changed(batch: &tenure_sdk::Batch, counts: &Counts) -> Vec<(String, i64)> {
    let mut keys: Vec<String> = batch
        .iter()
        .map(|record| String::from_utf8_lossy(record.key.as_deref().unwrap_or_default()).into())
        .collect();
    keys.sort_unstable();
    keys.dedup();
    keys.into_iter()
        .map(|key| {
            let count = counts.by_key.get(&key).copied().unwrap_or_default();
            (key, count)
        })
        .collect()
}

const fn signed(next: NextOffset) -> i64 {
    next.signed()
}
