//! The MySQL sink on a real MariaDB, and the conformance kit against it.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::mysql::MySqlConnectOptions;
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, FencedSink, FencedWriter, Resolved, SinkError, Verified};
use tenure_sink_mysql::{Flavour, MysqlSettings, MysqlSink, MysqlWriter, sqlx};
use tenure_tests::proxy::{Direction, Proxy};
use tenure_tests::servers::{MariaDb, require};
use tenure_tests::tier;

const INSERT: &str = "INSERT INTO bill (id, epoch, amount) VALUES (?, ?, ?)";

/// A database of the test's own.
struct Database {
    server: &'static MariaDb,
    name: String,
}

impl Database {
    fn new() -> Option<Self> {
        let server = require(MariaDb::shared())?;
        let name = server.new_database();
        server.sql(
            &name,
            "CREATE TABLE bill (
                 place BIGINT AUTO_INCREMENT PRIMARY KEY,
                 id BIGINT NOT NULL, epoch BIGINT, amount INT CHECK (amount > 0)
             ) ENGINE = InnoDB",
        );
        Some(Self { server, name })
    }

    fn options(&self, port: u16) -> MySqlConnectOptions {
        MySqlConnectOptions::new()
            .host("127.0.0.1")
            .port(port)
            .username("root")
            .database(&self.name)
    }

    async fn sink(&self, settings: MysqlSettings) -> MysqlSink {
        self.sink_through(self.server.port(), settings).await
    }

    async fn sink_through(&self, port: u16, settings: MysqlSettings) -> MysqlSink {
        let sink = MysqlSink::connect(self.options(port), settings).await.unwrap();
        sink.migrate().await.unwrap();
        sink
    }

    fn sql(&self, statements: &str) -> String {
        self.server.sql(&self.name, statements)
    }

    fn bills(&self) -> Vec<u64> {
        let rows = self.sql("SELECT id FROM bill ORDER BY id");
        rows.lines().map(|line| line.parse().unwrap()).collect()
    }
}

fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

async fn owner(sink: &MysqlSink, grant: &Grant) -> (MysqlWriter, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let verified = Verified::without_coordinator(false);
    let next = match writer.resume(&verified).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

fn insert(
    id: u64,
    amount: i32,
) -> sqlx::query::Query<'static, sqlx::MySql, sqlx::mysql::MySqlArguments> {
    sqlx::query(INSERT).bind(id.cast_signed()).bind(0_i64).bind(amount)
}

async fn write(writer: &mut MysqlWriter, id: u64) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    tx.execute(insert(id, 1)).await?;
    tx.commit(at(id + 1)).await
}

#[tokio::test]
async fn data_and_offset_move_together_and_outlive_the_process() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(MysqlSettings::default()).await;
    let (mut writer, start) = owner(&sink, &grant("ann", 1)).await;
    assert_eq!(start, at(0));
    write(&mut writer, 0).await.unwrap();
    write(&mut writer, 1).await.unwrap();
    let mut given_up = writer.begin().await.unwrap();
    given_up.execute(insert(2, 1)).await.unwrap();
    given_up.roll_back();
    drop((writer, sink));
    let sink = database.sink(MysqlSettings::default()).await;
    let (_, resumed) = owner(&sink, &grant("bob", 2)).await;
    assert_eq!((resumed, database.bills()), (at(2), vec![0, 1]));
}

#[tokio::test]
async fn old_owner_is_refused_with_both_epochs_and_stays_refused() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(MysqlSettings::default()).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let registered = sink.register(&grant("bob", 2)).await.unwrap();
    assert_eq!(registered.displaced, Some(Epoch::FIRST));
    for _ in 0..2 {
        let refused = write(&mut old, 0).await.unwrap_err();
        let SinkError::Fenced { ours, seen } = refused else { panic!("{refused}") };
        assert_eq!((ours.get(), seen.map(Epoch::get)), (1, Some(2)));
    }
    let late = sink.register(&grant("ann", 1)).await.unwrap_err();
    assert!(matches!(late, SinkError::Fenced { .. }), "{late}");
    assert_eq!(database.bills(), Vec::<u64>::new());
}

#[tokio::test]
async fn own_registration_may_be_repeated_and_nobody_elses() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(MysqlSettings::default()).await;
    owner(&sink, &grant("ann", 1)).await;
    let first = sink.register(&grant("bob", 2)).await.unwrap().displaced;
    let again = sink.register(&grant("bob", 2)).await.unwrap().displaced;
    assert_eq!((first, again), (Some(Epoch::FIRST), Some(Epoch::FIRST)));
    let other = sink.register(&grant("eve", 2)).await.unwrap_err();
    assert!(matches!(other, SinkError::Fenced { .. }), "{other}");
}

#[tokio::test(flavor = "multi_thread")]
async fn registrations_that_race_for_the_first_row_leave_the_highest() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(MysqlSettings::default()).await;
    for partition in 0..20 {
        let racers = (1..=4).map(|epoch| {
            let sink = sink.clone();
            let grant =
                conformance::grant(&format!("m{epoch}"), partition, Epoch::new(epoch).unwrap());
            tokio::spawn(async move {
                sink.register(&grant).await.map(|registered| registered.displaced)
            })
        });
        let mut highest = false;
        for (racer, epoch) in racers.collect::<Vec<_>>().into_iter().zip(1_u64..) {
            match racer.await.unwrap() {
                Ok(_) => highest |= epoch == 4,
                Err(error) => assert!(matches!(error, SinkError::Fenced { .. }), "{error}"),
            }
        }
        assert!(highest, "partition {partition}");
    }
    assert_eq!(database.sql("SELECT min(epoch), max(epoch) FROM tenure_fence"), "4\t4");
}

#[tokio::test]
async fn without_fencing_the_old_owner_does_the_damage() {
    let Some(database) = Database::new() else { return };
    let settings = MysqlSettings { dangerously_without_fencing: true, ..Default::default() };
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
    let sink = database.sink(MysqlSettings::default()).await;
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
    let sink = database.sink(MysqlSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    for (statement, rejected) in [
        ("INSERT INTO bill (id, amount) VALUES (0, -1)", true),
        ("INSERT INTO bill (id, amount) VALUES (99999999999999999999, 1)", true),
        ("INSERT INTO nowhere VALUES (0)", false),
    ] {
        let mut tx = writer.begin().await.unwrap();
        tx.execute(insert(0, 1)).await.unwrap();
        let refused = tx.execute(sqlx::query(statement)).await.unwrap_err();
        assert_eq!(matches!(refused, SinkError::Rejected(_)), rejected, "{statement}: {refused}");
        assert_eq!(matches!(refused, SinkError::Misconfigured(_)), !rejected, "{refused}");
        // The server would take more and commit what came before: that is not left to the caller.
        tx.execute(insert(0, 1)).await.unwrap_err();
        tx.commit(at(1)).await.unwrap_err();
    }
    assert_eq!(database.bills(), Vec::<u64>::new());
    write(&mut writer, 0).await.unwrap();
}

#[tokio::test]
async fn lock_wait_that_runs_out_rolls_the_whole_transaction_back() {
    let Some(database) = Database::new() else { return };
    database.sql("INSERT INTO bill (id, epoch, amount) VALUES (100, 0, 1)");
    let settings =
        MysqlSettings { statement_timeout: Duration::from_secs(1), ..Default::default() };
    let sink = database.sink(settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let mut other = <sqlx::MySqlConnection as sqlx::Connection>::connect_with(
        &database.options(database.server.port()),
    )
    .await
    .unwrap();
    sqlx::raw_sql("BEGIN; UPDATE bill SET amount = 2 WHERE place = 1")
        .execute(&mut other)
        .await
        .unwrap();
    let mut tx = writer.begin().await.unwrap();
    tx.execute(insert(0, 1)).await.unwrap();
    let waited = tx.execute(sqlx::query("UPDATE bill SET amount = 3 WHERE place = 1")).await;
    assert!(matches!(waited, Err(SinkError::Transient { .. })), "{waited:?}");
    let refused = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Transient { .. }), "{refused}");
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    assert_eq!(database.bills(), vec![100]);
    write(&mut writer, 0).await.unwrap();
    assert_eq!(database.bills(), vec![0, 100]);
}

#[tokio::test]
async fn transaction_that_ended_from_inside_moves_no_offset_and_writes_nothing_more() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(MysqlSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    for ending in ["ROLLBACK", "COMMIT", "CREATE TABLE other (id INT)"] {
        let mut tx = writer.begin().await.unwrap();
        sqlx::raw_sql(ending).execute(tx.connection().unwrap()).await.unwrap();
        tx.execute(insert(7, 1)).await.unwrap();
        let refused = tx.commit(at(1)).await.unwrap_err();
        assert!(matches!(refused, SinkError::Misconfigured(_)), "{ending}: {refused}");
    }
    let (_, resumed) = owner(&sink, &grant("bob", 2)).await;
    assert_eq!((resumed, database.bills()), (at(0), vec![]));
}

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
    println!("{flavour:?}: registration behind a paused holder: {} ms", waited.as_millis());
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
    println!("{report}");
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_the_damage_without_fencing() {
    let settings = MysqlSettings { dangerously_without_fencing: true, ..Default::default() };
    let Some(kit) = kit(settings) else { return };
    for check in [Check::StaleWrite, Check::LateRegistration, Check::Retire, Check::Restart] {
        let outcome = conformance::run_one(&kit, options(), check).await;
        println!("{outcome}");
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}
