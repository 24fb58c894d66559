//! Rows and offset in one transaction: exactly once.
//!
//! SQLite needs no server; with PostgreSQL or MySQL the handler looks the same.

mod common;

use std::error::Error;

use common::{Setup, stop_when_asked};
use tenure_sdk::{Limits, Owned};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink};

const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS orders (key TEXT PRIMARY KEY, body BLOB, epoch INTEGER NOT NULL)";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let setup = Setup::new()?;
    let sink = SqliteSink::open(setup.data.join("orders.db"), SqliteSettings::default()).await?;
    sink.migrate().await?;
    sink.with_connection(|connection| connection.execute_batch(TABLE)).await?;
    let consumer = setup.consumer("rows-and-offset")?.home(sink).build()?;
    stop_when_asked(consumer.stopper())?;
    consumer
        .run(|owned: Owned<SqliteSink>| async move {
            let epoch = owned.grant().epoch.get().cast_signed();
            let (mut input, mut out) = owned.split();
            while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                let mut tx = out.begin().await?;
                for record in &batch {
                    let row =
                        (record.idempotency_key(), record.value.clone().map(Vec::from), epoch);
                    tx.execute("INSERT INTO orders VALUES (?1, ?2, ?3)", row).await?;
                }
                // All rows and the offset, or nothing.
                tx.commit(batch.next()).await?;
            }
            Ok(())
        })
        .await?;
    Ok(())
}
