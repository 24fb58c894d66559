//! What the PostgreSQL sink does on a real server.

use std::time::{Duration, Instant};

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{FencedSink, FencedWriter, Resolved, SinkError, Verified, conformance};
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter, sql};
use tenure_tests::figures::tell;
use tenure_tests::proxy::Proxy;
use tenure_tests::servers::{Postgres, require};

/// A database of the test's own.
pub(crate) struct Database {
    pub(crate) server: &'static Postgres,
    pub(crate) name: String,
}

impl Database {
    pub(crate) fn new() -> Option<Self> {
        let server = require(Postgres::shared())?;
        let name = server.new_database();
        server.sql(
            &name,
            "CREATE TABLE bill (id bigint NOT NULL, epoch bigint, amount int CHECK (amount > 0))",
        );
        Some(Self { server, name })
    }

    pub(crate) async fn sink(&self, settings: PostgresSettings) -> PostgresSink {
        self.sink_through(self.server.port(), settings).await
    }

    async fn sink_through(&self, port: u16, settings: PostgresSettings) -> PostgresSink {
        let config = self.server.url_of(&self.name, port).parse().unwrap();
        let sink = PostgresSink::connect(config, settings).await.unwrap();
        sink.migrate().await.unwrap();
        sink
    }

    pub(crate) fn bills(&self) -> Vec<u64> {
        let rows = self.server.sql(&self.name, "SELECT id FROM bill ORDER BY id");
        rows.lines().filter(|line| !line.is_empty()).map(|line| line.parse().unwrap()).collect()
    }
}

fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

async fn owner(sink: &PostgresSink, grant: &Grant) -> (PostgresWriter, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let verified = Verified::without_coordinator(false);
    let next = match writer.resume(&verified).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

pub(crate) async fn write(writer: &mut PostgresWriter, id: u64) -> Result<(), SinkError> {
    let tx = writer.begin().await?;
    tx.execute("INSERT INTO bill VALUES ($1, 0, 1)", &[&id.cast_signed()]).await?;
    tx.commit(at(id + 1)).await
}

#[tokio::test]
async fn data_and_offset_move_together_and_outlive_the_process() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut writer, start) = owner(&sink, &grant("ann", 1)).await;
    assert_eq!(start, at(0));
    write(&mut writer, 0).await.unwrap();
    write(&mut writer, 1).await.unwrap();
    let given_up = writer.begin().await.unwrap();
    given_up.execute("INSERT INTO bill VALUES (2, 0, 1)", &[]).await.unwrap();
    given_up.roll_back();
    drop((writer, sink));
    let sink = database.sink(PostgresSettings::default()).await;
    let (_, resumed) = owner(&sink, &grant("bob", 2)).await;
    assert_eq!((resumed, database.bills()), (at(2), vec![0, 1]));
}

#[tokio::test]
async fn old_owner_is_refused_by_the_database_and_stays_refused() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let registered = sink.register(&grant("bob", 2)).await.unwrap();
    assert_eq!(registered.displaced, Some(Epoch::FIRST));
    for _ in 0..2 {
        let refused = write(&mut old, 0).await.unwrap_err();
        assert!(matches!(refused, SinkError::Fenced { seen: Some(seen), .. } if seen.get() == 2));
    }
    let late = sink.register(&grant("ann", 1)).await.unwrap_err();
    assert!(matches!(late, SinkError::Fenced { .. }), "{late}");
    assert_eq!(database.bills(), Vec::<u64>::new());
}

#[tokio::test]
async fn without_fencing_the_old_owner_does_the_damage() {
    let Some(database) = Database::new() else { return };
    let settings = PostgresSettings { dangerously_without_fencing: true, ..Default::default() };
    let sink = database.sink(settings).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let (mut new, _) = owner(&sink, &grant("bob", 2)).await;
    write(&mut new, 0).await.unwrap();
    assert_eq!(new.begin().await.unwrap().applied(), None);
    write(&mut old, 0).await.unwrap();
    assert_eq!(database.bills(), vec![0, 0]);
}

#[tokio::test]
async fn replay_beside_the_home_is_told_by_the_watermark() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let first = grant("ann", 1);
    let unregistered = sink.writer(&first).begin().await.unwrap_err();
    assert!(matches!(unregistered, SinkError::Misconfigured(_)), "{unregistered}");
    sink.register(&first).await.unwrap();
    let mut writer = sink.writer(&first);
    assert_eq!(writer.begin().await.unwrap().applied(), None);
    write(&mut writer, 0).await.unwrap();
    let second = grant("bob", 2);
    sink.register(&second).await.unwrap();
    let mut next_owner = sink.writer(&second);
    let replay = next_owner.begin().await.unwrap();
    assert_eq!(replay.applied(), Some(at(1)));
    replay.commit(at(0)).await.unwrap();
    assert_eq!(next_owner.begin().await.unwrap().applied(), Some(at(1)));
}

#[tokio::test]
async fn refused_data_leaves_data_and_offset_as_they_were() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    for (statement, rejected) in [
        ("INSERT INTO bill VALUES (0, 0, -1)", true),
        ("INSERT INTO bill VALUES (99999999999999999999, 0, 1)", true),
        ("INSERT INTO nowhere VALUES (0)", false),
    ] {
        let tx = writer.begin().await.unwrap();
        tx.execute("INSERT INTO bill VALUES (0, 0, 1)", &[]).await.unwrap();
        let refused = tx.execute(statement, &[]).await.unwrap_err();
        assert_eq!(matches!(refused, SinkError::Rejected(_)), rejected, "{statement}: {refused}");
        assert_eq!(matches!(refused, SinkError::Misconfigured(_)), !rejected, "{refused}");
        // A COMMIT of a transaction that has failed is answered with success: it must not be sent.
        tx.commit(at(1)).await.unwrap_err();
    }
    assert_eq!(database.bills(), Vec::<u64>::new());
    write(&mut writer, 0).await.unwrap();
}

#[tokio::test]
async fn constraint_that_fails_at_commit_is_certain_and_not_in_doubt() {
    let Some(database) = Database::new() else { return };
    database.server.sql(
        &database.name,
        "CREATE TABLE parent (id bigint PRIMARY KEY);
         CREATE TABLE child (id bigint REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
    );
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let tx = writer.begin().await.unwrap();
    tx.execute("INSERT INTO child VALUES (7)", &[]).await.unwrap();
    let refused = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Rejected(_)), "{refused}");
    write(&mut writer, 0).await.unwrap();
}

#[tokio::test]
async fn transaction_that_ended_from_inside_moves_no_offset() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let tx = writer.begin().await.unwrap();
    tx.client().batch_execute("ROLLBACK").await.unwrap();
    let refused = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Misconfigured(_)), "{refused}");
    let (_, resumed) = owner(&sink, &grant("bob", 2)).await;
    assert_eq!(resumed, at(0));
}

#[tokio::test]
async fn lost_answer_to_commit_is_found_out_by_the_commit_itself() {
    let Some(database) = Database::new() else { return };
    let proxy = Proxy::to_port(database.server.port());
    let settings =
        PostgresSettings { statement_timeout: Duration::from_millis(500), ..Default::default() };
    let sink = database.sink_through(proxy.port(), settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    proxy.hold_answers_after(b"COMMIT\0");
    write(&mut writer, 0).await.unwrap();
    assert!(proxy.answer_kept(Duration::ZERO), "the answer was held");
    assert_eq!(database.bills(), vec![0]);
    write(&mut writer, 1).await.unwrap();
    assert_eq!(database.bills(), vec![0, 1]);
}

#[tokio::test]
async fn commit_that_cannot_be_looked_up_is_unknown_until_resolved() {
    let Some(database) = Database::new() else { return };
    let proxy = Proxy::to_port(database.server.port());
    let settings = PostgresSettings {
        statement_timeout: Duration::from_millis(200),
        connect_timeout: Duration::from_millis(200),
        ..Default::default()
    };
    let sink = database.sink_through(proxy.port(), settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let tx = writer.begin().await.unwrap();
    tx.execute("INSERT INTO bill VALUES (0, 0, 1)", &[]).await.unwrap();
    proxy.hold_answers_after(b"COMMIT\0");
    let commit = tx.commit(at(1));
    let blind = async {
        while !proxy.answer_kept(Duration::ZERO) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        proxy.hold(tenure_tests::proxy::Direction::ToClient);
    };
    let (answer, ()) = tokio::join!(commit, blind);
    assert!(matches!(answer, Err(SinkError::Unknown(_))), "{answer:?}");
    assert!(matches!(writer.begin().await, Err(SinkError::Unknown(_))));
    proxy.release();
    let resolved = writer.resolve().await.unwrap();
    assert_eq!((resolved, database.bills()), (Resolved::Applied(at(1)), vec![0]));
    write(&mut writer, 1).await.unwrap();
}

#[tokio::test]
async fn paused_holder_delays_the_next_owner_at_most_as_declared() {
    let Some(database) = Database::new() else { return };
    let settings = PostgresSettings {
        idle_in_transaction_timeout: Duration::from_millis(500),
        ..Default::default()
    };
    let sink = database.sink(settings).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let paused = old.begin().await.unwrap();
    paused.execute("INSERT INTO bill VALUES (0, 0, 1)", &[]).await.unwrap();
    let started = Instant::now();
    sink.register(&grant("bob", 2)).await.unwrap();
    let waited = started.elapsed();
    tell(format_args!("registration behind a paused holder: {} ms", waited.as_millis()));
    assert!(waited < Duration::from_millis(1_000), "waited {waited:?}");
    let refused = paused.commit(at(1)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Transient { .. }), "{refused}");
    assert!(matches!(write(&mut old, 0).await, Err(SinkError::Fenced { .. })));
    assert_eq!(database.bills(), Vec::<u64>::new());
}

#[tokio::test]
async fn registration_brings_the_resume_point_and_sees_a_commit_that_it_waited_for() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let open = old.begin().await.unwrap();
    open.execute("INSERT INTO bill VALUES (0, 0, 1)", &[]).await.unwrap();
    let (new_sink, new) = (sink.clone(), grant("bob", 2));
    let registering = tokio::spawn(async move { new_sink.register(&new).await.unwrap().writer });
    // It waits for the lock of the open transaction.
    let waits = "SELECT count(*) FROM pg_stat_activity \
                 WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let waiting = async {
        while database.server.sql(&database.name, waits) != "1" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), waiting).await.unwrap();
    open.commit(at(1)).await.unwrap();
    let mut writer = registering.await.unwrap();
    // Nothing is left to be read.
    database.server.sql(&database.name, "ALTER TABLE tenure_fence RENAME TO gone");
    let resumed = writer.resume(&Verified::without_coordinator(true)).await.unwrap();
    assert_eq!(resumed, Some(at(1)));
}

#[tokio::test]
async fn emptied_or_restored_database_is_no_fresh_start() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 3)).await;
    let initialised = Verified::without_coordinator(true);
    for (damage, regressed) in [
        ("UPDATE tenure_fence SET next_offset = NULL", false),
        ("UPDATE tenure_fence SET next_offset = 7, epoch = 2", true),
        ("DELETE FROM tenure_fence", false),
    ] {
        database.server.sql(&database.name, damage);
        let error = writer.resume(&initialised).await.unwrap_err();
        assert_eq!(matches!(error, SinkError::FenceRegressed { .. }), regressed, "{error}");
        assert_eq!(matches!(error, SinkError::Misconfigured(_)), !regressed, "{error}");
    }
}

#[tokio::test]
async fn guard_refuses_writers_outside_the_sdk_and_lets_the_sdk_through() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    database.server.sql(&database.name, &sql::guard("tenure_fence", "bill"));
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    write(&mut writer, 0).await.unwrap();
    let client = sink.pool().get().await.unwrap();
    let code = |error: tokio_postgres::Error| error.code().unwrap().code().to_owned();
    let insert = "INSERT INTO bill VALUES (1, 0, 1)";
    assert_eq!(code(client.batch_execute(insert).await.unwrap_err()), "TN001");
    let resource = grant("ann", 1).resource;
    let stale = format!(
        "SELECT set_config('tenure.resource', '{resource}', true), set_config('tenure.epoch', '9', true); {insert}"
    );
    assert_eq!(code(client.batch_execute(&stale).await.unwrap_err()), "TN002");
    assert_eq!(database.bills(), vec![0]);
}

#[tokio::test]
async fn server_that_is_not_there_is_transient_and_a_missing_table_is_not() {
    let Some(database) = Database::new() else { return };
    let port = tenure_tests::servers::free_port();
    let config = database.server.url_of(&database.name, port).parse().unwrap();
    let absent = PostgresSink::connect(config, PostgresSettings::default()).await.unwrap_err();
    assert!(matches!(absent, SinkError::Transient { .. }), "{absent}");
    let config = database.server.url_of(&database.name, database.server.port()).parse().unwrap();
    let sink = PostgresSink::connect(config, PostgresSettings::default()).await.unwrap();
    let unmigrated = sink.register(&grant("ann", 1)).await.unwrap_err();
    assert!(matches!(unmigrated, SinkError::Misconfigured(_)), "{unmigrated}");
}
