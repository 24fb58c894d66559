//! The PostgreSQL sink over sqlx on a real server.

use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_postgres_sqlx::sqlx::postgres::PgPoolOptions;
use tenure_sink_postgres_sqlx::sqlx::{Connection as _, PgPool, query, raw_sql};
use tenure_sink_postgres_sqlx::{PostgresSettings, SqlxSink, SqlxWriter, classify};
use tenure_tests::figures::tell;
use tenure_tests::proxy::Proxy;

use crate::kit::{options, read_back};
use crate::postgres::Database;

const INSERT: &str = "INSERT INTO bill VALUES ($1, $2, $3)";

async fn sink(database: &Database, port: u16, settings: PostgresSettings) -> SqlxSink {
    let pool: PgPool = PgPoolOptions::new()
        .max_connections(40)
        .acquire_timeout(settings.connect_timeout)
        .connect_lazy(&database.server.url_of(&database.name, port))
        .unwrap();
    let sink = SqlxSink::over(pool, settings).await.unwrap();
    sink.migrate().await.unwrap();
    sink.migrate().await.unwrap();
    sink
}

fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

async fn own<S: FencedSink>(sink: &S, grant: &Grant) -> (S::Writer, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let next = match writer.resume(&Verified::without_coordinator(false)).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

async fn write(writer: &mut SqlxWriter, id: u64) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    let insert = query(INSERT).bind(id.cast_signed()).bind(0_i64).bind(1_i32);
    insert.execute(tx.connection()).await.map_err(classify)?;
    tx.commit(at(id + 1)).await
}

struct Right {
    database: Database,
    settings: PostgresSettings,
}

impl Subject for Right {
    type Sink = SqlxSink;

    async fn connect(&self) -> Result<SqlxSink, SinkError> {
        Ok(sink(&self.database, self.database.server.port(), self.settings.clone()).await)
    }

    async fn write(
        &self,
        writer: &mut SqlxWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        let part = i32::try_from(rows.partition).expect("the kit's partitions are few") + 1;
        let epoch = rows.epoch.get().cast_signed();
        for offset in rows.offsets() {
            let insert = query(INSERT).bind(offset.signed()).bind(epoch).bind(part);
            insert.execute(tx.connection()).await.map_err(classify)?;
            pauses.here().await;
        }
        tx.commit(rows.next).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        read_back(&self.database, partition).await
    }

    fn beside(&self, sink: &SqlxSink, grant: &Grant) -> Option<SqlxWriter> {
        Some(sink.writer(grant))
    }
}

fn settings() -> PostgresSettings {
    PostgresSettings {
        idle_in_transaction_timeout: Duration::from_millis(500),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_over_sqlx_conforms() {
    let Some(database) = Database::new() else { return };
    let subject = Arc::new(Right { database, settings: settings() });
    let report = conformance::run(&subject, options()).await;
    tell(&report);
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_the_damage_over_sqlx_without_fencing() {
    let Some(database) = Database::new() else { return };
    let settings = PostgresSettings { dangerously_without_fencing: true, ..settings() };
    let subject = Arc::new(Right { database, settings });
    for check in [Check::StaleWrite, Check::LateRegistration] {
        let outcome = conformance::run_one(&subject, options(), check).await;
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}

#[tokio::test]
async fn services_on_both_drivers_share_one_fence() {
    let Some(database) = Database::new() else { return };
    let by_sqlx = sink(&database, database.server.port(), settings()).await;
    let by_tokio = database.sink(settings()).await;
    let (mut first, _) = own(&by_sqlx, &grant("ann", 1)).await;
    write(&mut first, 0).await.unwrap();
    let (mut second, resumed) = own(&by_tokio, &grant("bob", 2)).await;
    assert_eq!(resumed, at(1));
    assert!(matches!(write(&mut first, 1).await, Err(SinkError::Fenced { .. })));
    crate::postgres::write(&mut second, 1).await.unwrap();
    let (_, resumed) = own(&by_sqlx, &grant("cid", 3)).await;
    assert_eq!((resumed, database.bills()), (at(2), vec![0, 1]));
}

#[tokio::test]
async fn begin_inside_the_transaction_is_a_savepoint_and_an_end_inside_moves_no_offset() {
    let Some(database) = Database::new() else { return };
    let sink = sink(&database, database.server.port(), settings()).await;
    let (mut writer, _) = own(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    let insert = |id: i64| query(INSERT).bind(id).bind(0_i64).bind(1_i32);
    let mut inner = tx.connection().begin().await.unwrap();
    insert(0).execute(&mut *inner).await.unwrap();
    inner.commit().await.unwrap();
    let mut undone = tx.connection().begin().await.unwrap();
    insert(9).execute(&mut *undone).await.unwrap();
    undone.rollback().await.unwrap();
    assert_eq!(database.bills(), Vec::<u64>::new(), "nothing is in before the commit");
    tx.commit(at(1)).await.unwrap();
    assert_eq!(database.bills(), vec![0]);

    let mut tx = writer.begin().await.unwrap();
    raw_sql("ROLLBACK").execute(tx.connection()).await.unwrap();
    let refused = tx.commit(at(2)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Misconfigured(_)), "{refused}");
}

#[tokio::test]
async fn refused_data_and_a_dropped_transaction_leave_everything_as_it_was() {
    let Some(database) = Database::new() else { return };
    let sink = sink(&database, database.server.port(), settings()).await;
    let (mut writer, _) = own(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    let negative = query(INSERT).bind(0_i64).bind(0_i64).bind(-1_i32);
    let refused = negative.execute(tx.connection()).await.map_err(classify).unwrap_err();
    assert!(matches!(refused, SinkError::Rejected(_)), "{refused}");
    tx.commit(at(1)).await.unwrap_err();
    let mut dropped = writer.begin().await.unwrap();
    let insert = query(INSERT).bind(0_i64).bind(0_i64).bind(1_i32);
    insert.execute(dropped.connection()).await.unwrap();
    drop(dropped);
    let mut tx = writer.begin().await.unwrap();
    let missing = query("INSERT INTO nowhere VALUES (0)").execute(tx.connection()).await;
    let refused = missing.map_err(classify).unwrap_err();
    assert!(matches!(refused, SinkError::Misconfigured(_)), "{refused}");
    drop(tx);
    assert_eq!(database.bills(), Vec::<u64>::new());
    write(&mut writer, 0).await.unwrap();
}

#[tokio::test]
async fn lost_answer_to_commit_is_found_out_by_the_commit_over_sqlx() {
    let Some(database) = Database::new() else { return };
    let proxy = Proxy::to_port(database.server.port());
    let settings =
        PostgresSettings { statement_timeout: Duration::from_millis(500), ..Default::default() };
    let sink = sink(&database, proxy.port(), settings).await;
    let (mut writer, _) = own(&sink, &grant("ann", 1)).await;
    proxy.hold_answers_after(b"COMMIT\0");
    write(&mut writer, 0).await.unwrap();
    assert!(proxy.answer_kept(Duration::ZERO), "the answer was held");
    assert_eq!(database.bills(), vec![0]);
    write(&mut writer, 1).await.unwrap();
    assert_eq!(database.bills(), vec![0, 1]);
}
