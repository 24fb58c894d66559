//! The conformance kit against PostgreSQL, right and wrong.

use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};
use tenure_tests::figures::tell;
use tenure_tests::tier;

use crate::postgres::Database;

pub(crate) struct Right {
    pub(crate) database: Database,
    pub(crate) settings: PostgresSettings,
}

pub(crate) async fn read_back(database: &Database, partition: u32) -> Result<Vec<Row>, BoxError> {
    let query =
        format!("SELECT id, epoch FROM bill WHERE amount = {partition} + 1 ORDER BY id, ctid");
    let (server, name) = (database.server, database.name.clone());
    let text = tokio::task::spawn_blocking(move || server.sql(&name, &query)).await?;
    let mut rows = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let (id, epoch) = line.split_once('|').ok_or("a row has two columns")?;
        let offset = NextOffset::new(id.parse()?)?;
        rows.push(Row { offset, epoch: Epoch::new(epoch.parse()?)? });
    }
    Ok(rows)
}

impl Subject for Right {
    type Sink = PostgresSink;

    async fn connect(&self) -> Result<PostgresSink, SinkError> {
        Ok(self.database.sink(self.settings.clone()).await)
    }

    async fn write(
        &self,
        writer: &mut PostgresWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let tx = writer.begin().await?;
        let part = i32::try_from(rows.partition).expect("the kit's partitions are few") + 1;
        let epoch = rows.epoch.get().cast_signed();
        for offset in rows.offsets() {
            tx.execute("INSERT INTO bill VALUES ($1, $2, $3)", &[&offset.signed(), &epoch, &part])
                .await?;
            pauses.here().await;
        }
        tx.commit(rows.next).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        read_back(&self.database, partition).await
    }

    fn beside(&self, sink: &PostgresSink, grant: &Grant) -> Option<PostgresWriter> {
        Some(sink.writer(grant))
    }
}

pub(crate) fn options() -> Options {
    let handovers = u32::try_from(tier::Tier::current().repetitions(1_000)).unwrap();
    Options { handovers, ..Options::with_seed(tier::seed()) }
}

fn settings() -> PostgresSettings {
    PostgresSettings {
        idle_in_transaction_timeout: Duration::from_millis(500),
        connections_max: 40,
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_conforms() {
    let Some(database) = Database::new() else { return };
    let subject = Arc::new(Right { database, settings: settings() });
    let report = conformance::run(&subject, options()).await;
    tell(&report);
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_the_damage_without_fencing() {
    let Some(database) = Database::new() else { return };
    let settings = PostgresSettings { dangerously_without_fencing: true, ..settings() };
    let subject = Arc::new(Right { database, settings });
    for check in [Check::StaleWrite, Check::LateRegistration, Check::Retire, Check::Restart] {
        let outcome = conformance::run_one(&subject, options(), check).await;
        tell(&outcome);
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}
