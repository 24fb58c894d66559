//! Answers that are lost, owners that stand still, databases that are not what they were.

use std::time::{Duration, Instant};

use tenure_sdk::sink::{FencedSink, FencedWriter, Resolved, SinkError, Verified};
use tenure_sink_mysql::{Flavour, MysqlSettings, MysqlSink, MysqlWriter, sqlx};
use tenure_tests::figures::tell;
use tenure_tests::proxy::{Direction, Proxy};

use crate::scene::{Database, at, grant, insert, owner, write};

/// COMMIT as the protocol carries it: length 7, number 0, a query.
const COMMIT: &[u8] = b"\x07\0\0\0\x03COMMIT";

#[tokio::test]
async fn lost_answer_to_commit_is_found_out_by_the_commit_itself() {
    let Some(database) = Database::new() else { return };
    let proxy = Proxy::to_port(database.server.port());
    let settings =
        MysqlSettings { statement_timeout: Duration::from_secs(1), ..Default::default() };
    let sink = database.sink_through(proxy.port(), settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    proxy.hold_answers_after(COMMIT);
    write(&mut writer, 0).await.unwrap();
    assert!(proxy.answer_kept(Duration::ZERO), "the answer was held");
    assert_eq!(database.bills(), vec![0]);
    write(&mut writer, 1).await.unwrap();
    assert_eq!(database.bills(), vec![0, 1]);
}

#[tokio::test]
async fn connection_that_breaks_before_commit_arrives_wrote_nothing() {
    let Some(database) = Database::new() else { return };
    let proxy = Proxy::to_port(database.server.port());
    let settings =
        MysqlSettings { statement_timeout: Duration::from_secs(1), ..Default::default() };
    let sink = database.sink_through(proxy.port(), settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    tx.execute(insert(0, 1)).await.unwrap();
    proxy.cut();
    let broken = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(broken, SinkError::Transient { .. }), "{broken}");
    assert_eq!(database.bills(), Vec::<u64>::new());
    write(&mut writer, 0).await.unwrap();
    assert_eq!(database.bills(), vec![0]);
}

#[tokio::test]
async fn commit_that_cannot_be_looked_up_is_unknown_until_resolved() {
    let Some(database) = Database::new() else { return };
    let proxy = Proxy::to_port(database.server.port());
    let settings = MysqlSettings {
        statement_timeout: Duration::from_secs(1),
        connect_timeout: Duration::from_millis(300),
        ..Default::default()
    };
    let sink = database.sink_through(proxy.port(), settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    tx.execute(insert(0, 1)).await.unwrap();
    proxy.hold_answers_after(COMMIT);
    let commit = tx.commit(at(1));
    let blind = async {
        while !proxy.answer_kept(Duration::ZERO) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        proxy.hold(Direction::ToClient);
    };
    let (answer, ()) = tokio::join!(commit, blind);
    assert!(matches!(answer, Err(SinkError::Unknown(_))), "{answer:?}");
    assert!(matches!(writer.begin().await, Err(SinkError::Unknown(_))));
    proxy.release();
    let resolved = writer.resolve().await.unwrap();
    assert_eq!((resolved, database.bills()), (Resolved::Applied(at(1)), vec![0]));
    write(&mut writer, 1).await.unwrap();
}

async fn paused_holder_is_bounded(flavour: Flavour) {
    let Some(database) = Database::new() else { return };
    let settings = MysqlSettings {
        idle_in_transaction_timeout: Duration::from_secs(1),
        flavour,
        ..Default::default()
    };
    let sink = database.sink(settings).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let mut paused = old.begin().await.unwrap();
    paused.execute(insert(0, 1)).await.unwrap();
    let started = Instant::now();
    sink.register(&grant("bob", 2)).await.unwrap();
    let waited = started.elapsed();
    tell(format_args!(
        "{flavour:?}: registration behind a paused holder: {} ms",
        waited.as_millis()
    ));
    assert!(waited > Duration::from_millis(500), "nothing was held: {waited:?}");
    assert!(waited < Duration::from_millis(2_500), "waited {waited:?}");
    let refused = paused.commit(at(1)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Transient { .. }), "{refused}");
    assert!(matches!(write(&mut old, 0).await, Err(SinkError::Fenced { .. })));
    assert_eq!(database.bills(), Vec::<u64>::new());
}

#[tokio::test]
async fn paused_holder_delays_the_next_owner_at_most_as_declared() {
    paused_holder_is_bounded(Flavour::Detect).await;
}

#[tokio::test]
async fn paused_holder_is_bounded_by_wait_timeout_alone_as_on_mysql() {
    paused_holder_is_bounded(Flavour::MySql).await;
}

#[tokio::test]
async fn wait_timeout_of_a_transaction_does_not_end_idle_connections() {
    let Some(database) = Database::new() else { return };
    let settings = MysqlSettings {
        idle_in_transaction_timeout: Duration::from_secs(1),
        connections_max: 1,
        flavour: Flavour::MySql,
        ..Default::default()
    };
    let sink = database.sink(settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let connection_id = async |writer: &mut MysqlWriter| -> u64 {
        let mut tx = writer.begin().await.unwrap();
        let rows = tx.fetch_all(sqlx::query("SELECT CONNECTION_ID()")).await.unwrap();
        sqlx::Row::try_get(&rows[0], 0).unwrap()
    };
    let before = connection_id(&mut writer).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(connection_id(&mut writer).await, before);
}

#[tokio::test]
async fn emptied_or_restored_database_is_no_fresh_start() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(MysqlSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 3)).await;
    let initialised = Verified::without_coordinator(true);
    for (damage, regressed) in [
        ("UPDATE tenure_fence SET next_offset = NULL", false),
        ("UPDATE tenure_fence SET next_offset = 7, epoch = 2", true),
        ("DELETE FROM tenure_fence", false),
    ] {
        database.sql(damage);
        let error = writer.resume(&initialised).await.unwrap_err();
        assert_eq!(matches!(error, SinkError::FenceRegressed { .. }), regressed, "{error}");
        assert_eq!(matches!(error, SinkError::Misconfigured(_)), !regressed, "{error}");
    }
}

#[tokio::test]
async fn missing_server_is_transient_and_a_missing_or_wrong_table_is_not() {
    let Some(database) = Database::new() else { return };
    let settings =
        || MysqlSettings { connect_timeout: Duration::from_millis(500), ..Default::default() };
    let port = tenure_tests::servers::free_port();
    let absent = MysqlSink::connect(database.options(port), settings()).await.unwrap_err();
    assert!(matches!(absent, SinkError::Transient { .. }), "{absent}");
    let options = || database.options(database.server.port());
    let sink = MysqlSink::connect(options(), settings()).await.unwrap();
    let unmigrated = sink.register(&grant("ann", 1)).await.unwrap_err();
    assert!(matches!(unmigrated, SinkError::Misconfigured(_)), "{unmigrated}");
    database.sql("CREATE TABLE tenure_fence (resource VARBINARY(1024)) ENGINE = MyISAM");
    let no_transactions = MysqlSink::connect(options(), settings()).await.unwrap_err();
    assert!(matches!(no_transactions, SinkError::Misconfigured(_)), "{no_transactions}");
}
