//! The conformance kit.

use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_mysql::{MysqlSettings, MysqlSink, MysqlWriter, sqlx};
use tenure_tests::figures::tell;
use tenure_tests::tier;

use crate::scene::{Database, INSERT};

struct Kit {
    database: Database,
    settings: MysqlSettings,
}

impl Subject for Kit {
    type Sink = MysqlSink;

    async fn connect(&self) -> Result<MysqlSink, SinkError> {
        Ok(self.database.sink(self.settings.clone()).await)
    }

    async fn write(
        &self,
        writer: &mut MysqlWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        let part = i32::try_from(rows.partition).expect("the kit's partitions are few") + 1;
        let epoch = rows.epoch.get().cast_signed();
        for offset in rows.offsets() {
            let insert = sqlx::query(INSERT).bind(offset.signed()).bind(epoch).bind(part);
            tx.execute(insert).await?;
            pauses.here().await;
        }
        tx.commit(rows.next).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        let query =
            format!("SELECT id, epoch FROM bill WHERE amount = {partition} + 1 ORDER BY id, place");
        let (server, name) = (self.database.server, self.database.name.clone());
        let text = tokio::task::spawn_blocking(move || server.sql(&name, &query)).await?;
        let mut rows = Vec::new();
        for line in text.lines() {
            let (id, epoch) = line.split_once('\t').ok_or("a row has two columns")?;
            let offset = NextOffset::new(id.parse()?)?;
            rows.push(Row { offset, epoch: Epoch::new(epoch.parse()?)? });
        }
        Ok(rows)
    }

    fn beside(&self, sink: &MysqlSink, grant: &Grant) -> Option<MysqlWriter> {
        Some(sink.writer(grant))
    }
}

fn options() -> Options {
    let handovers = u32::try_from(tier::Tier::current().repetitions(1_000)).unwrap();
    Options { handovers, ..Options::with_seed(tier::seed()) }
}

fn kit(settings: MysqlSettings) -> Option<Arc<Kit>> {
    let database = Database::new()?;
    let settings = MysqlSettings {
        idle_in_transaction_timeout: Duration::from_secs(1),
        connections_max: 40,
        ..settings
    };
    Some(Arc::new(Kit { database, settings }))
}

#[tokio::test(flavor = "multi_thread")]
async fn mariadb_conforms() {
    let Some(kit) = kit(MysqlSettings::default()) else { return };
    let report = conformance::run(&kit, options()).await;
    tell(&report);
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_the_damage_without_fencing() {
    let settings = MysqlSettings { dangerously_without_fencing: true, ..Default::default() };
    let Some(kit) = kit(settings) else { return };
    for check in [Check::StaleWrite, Check::LateRegistration, Check::Retire, Check::Restart] {
        let outcome = conformance::run_one(&kit, options(), check).await;
        tell(&outcome);
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}
