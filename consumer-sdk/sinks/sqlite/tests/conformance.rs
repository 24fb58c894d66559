//! The conformance kit against a real file.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and the report is for the reader of a failure"
)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_sqlite::rusqlite::Connection;
use tenure_sink_sqlite::{SqliteSettings, SqliteSink, SqliteWriter};

#[derive(Debug)]
struct File {
    path: PathBuf,
    settings: SqliteSettings,
}

impl Subject for File {
    type Sink = SqliteSink;

    async fn connect(&self) -> Result<SqliteSink, SinkError> {
        let sink = SqliteSink::open(&self.path, self.settings.clone()).await?;
        sink.migrate().await?;
        sink.with_connection(|connection| {
            connection.execute_batch(
                "CREATE TABLE IF NOT EXISTS effect (part INTEGER, id INTEGER, epoch INTEGER)",
            )
        })
        .await?;
        Ok(sink)
    }

    async fn write(
        &self,
        writer: &mut SqliteWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        for offset in rows.offsets() {
            let parameters = (rows.partition, offset.signed(), rows.epoch.get().cast_signed());
            tx.execute("INSERT INTO effect VALUES (?1, ?2, ?3)", parameters).await?;
            pauses.here().await;
        }
        tx.commit(rows.next).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        let connection = Connection::open(&self.path)?;
        let mut statement = connection
            .prepare("SELECT id, epoch FROM effect WHERE part = ?1 ORDER BY id, rowid")?;
        let found = statement.query_map([partition], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let mut rows = Vec::new();
        for pair in found {
            let (id, epoch): (i64, i64) = pair?;
            let offset = NextOffset::from_signed(id)?;
            rows.push(Row { offset, epoch: Epoch::new(epoch.cast_unsigned())? });
        }
        Ok(rows)
    }

    fn beside(&self, sink: &SqliteSink, grant: &Grant) -> Option<SqliteWriter> {
        Some(sink.writer(grant))
    }
}

fn handovers() -> u32 {
    if std::env::var("TENURE_TEST_TIER").is_ok_and(|tier| tier == "full") { 1000 } else { 100 }
}

async fn failed_of(settings: SqliteSettings, options: Options) -> Vec<Check> {
    let folder = tempfile::tempdir().unwrap();
    let settings = SqliteSettings { busy_timeout: Duration::from_secs(2), ..settings };
    let subject = Arc::new(File { path: folder.path().join("data.db"), settings });
    let report = conformance::run(&subject, options).await;
    println!("{report}");
    report.failed()
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_conforms() {
    let options = Options { handovers: handovers(), ..Options::with_seed(rand::random()) };
    assert_eq!(failed_of(SqliteSettings::default(), options).await, Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_the_damage_without_fencing() {
    for check in [Check::StaleWrite, Check::LateRegistration, Check::Retire, Check::Restart] {
        let folder = tempfile::tempdir().unwrap();
        let settings = SqliteSettings { dangerously_without_fencing: true, ..Default::default() };
        let subject = Arc::new(File { path: folder.path().join("data.db"), settings });
        let outcome = conformance::run_one(&subject, Options::with_seed(1), check).await;
        println!("{outcome}");
        assert!(matches!(outcome.verdict, conformance::Verdict::Failed(_)), "{outcome}");
    }
}
