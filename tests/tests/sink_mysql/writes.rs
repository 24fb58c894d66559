//! Writes, their refusals, and what a transaction takes.

use std::time::Duration;

use tenure_model::Epoch;
use tenure_sdk::sink::conformance;
use tenure_sdk::sink::{FencedSink, SinkError};
use tenure_sink_mysql::{MysqlSettings, sqlx};

use crate::scene::{Database, at, grant, insert, owner, write};

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
