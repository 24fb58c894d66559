//! The sink on a real file.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]
#![allow(clippy::wildcard_enum_match_arm, reason = "any other error fails the test")]

use std::path::Path;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset, Tick};
use tenure_sdk::grant::Grant;
use tenure_sdk::lease::{BootClock, Lease, LeaseCheck};
use tenure_sdk::sink::{FencedSink, FencedWriter, Resolved, SinkError, Verified, conformance};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink, SqliteWriter};

fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

async fn open(path: &Path, settings: SqliteSettings) -> SqliteSink {
    let sink = SqliteSink::open(path.join("data.db"), settings).await.unwrap();
    sink.migrate().await.unwrap();
    sink.migrate().await.unwrap();
    sink.with_connection(|connection| {
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS bill (id INTEGER, epoch INTEGER, amount INTEGER CHECK (amount > 0))",
        )
    })
    .await
    .unwrap();
    sink
}

async fn owner(sink: &SqliteSink, grant: &Grant) -> (SqliteWriter, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let verified = Verified::without_coordinator(false);
    let next = match writer.resume(&verified).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

async fn write(writer: &mut SqliteWriter, id: u64) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    tx.execute("INSERT INTO bill VALUES (?1, 0, 1)", [id.cast_signed()]).await?;
    tx.commit(at(id + 1)).await
}

async fn bills(sink: &SqliteSink) -> Vec<i64> {
    sink.with_connection(|connection| {
        let mut statement = connection.prepare("SELECT id FROM bill ORDER BY id")?;
        statement.query_map([], |row| row.get(0))?.collect()
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn data_and_offset_move_together_and_outlive_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let (mut writer, start) = owner(&sink, &grant("ann", 1)).await;
    assert_eq!(start, at(0));
    write(&mut writer, 0).await.unwrap();
    write(&mut writer, 1).await.unwrap();
    let mut given_up = writer.begin().await.unwrap();
    given_up.execute("INSERT INTO bill VALUES (2, 0, 1)", []).await.unwrap();
    given_up.roll_back();
    drop((writer, sink));
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let (_, resumed) = owner(&sink, &grant("bob", 2)).await;
    assert_eq!((resumed, bills(&sink).await), (at(2), vec![0, 1]));
}

#[tokio::test]
async fn old_owner_is_refused_by_the_file_and_stays_refused() {
    let folder = tempfile::tempdir().unwrap();
    let old_process = open(folder.path(), SqliteSettings::default()).await;
    let new_process = open(folder.path(), SqliteSettings::default()).await;
    let (mut old, _) = owner(&old_process, &grant("ann", 1)).await;
    let registered = new_process.register(&grant("bob", 2)).await.unwrap();
    assert_eq!(registered.displaced, Some(Epoch::FIRST));
    for _ in 0..2 {
        let refused = write(&mut old, 0).await.unwrap_err();
        assert!(matches!(refused, SinkError::Fenced { seen: Some(seen), .. } if seen.get() == 2));
    }
    let late = old_process.register(&grant("ann", 1)).await.unwrap_err();
    assert!(matches!(late, SinkError::Fenced { .. }), "{late}");
    assert_eq!(bills(&new_process).await, Vec::<i64>::new());
}

#[tokio::test]
async fn own_registration_may_be_repeated_and_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    owner(&sink, &grant("ann", 1)).await;
    let first = sink.register(&grant("bob", 2)).await.unwrap().displaced;
    let again = sink.register(&grant("bob", 2)).await.unwrap().displaced;
    assert_eq!((first, again), (Some(Epoch::FIRST), Some(Epoch::FIRST)));
    let other = sink.register(&grant("eve", 2)).await.unwrap_err();
    assert!(matches!(other, SinkError::Fenced { .. }), "{other}");
}

#[tokio::test]
async fn without_fencing_the_old_owner_does_the_damage() {
    let folder = tempfile::tempdir().unwrap();
    let settings = SqliteSettings { dangerously_without_fencing: true, ..Default::default() };
    let sink = open(folder.path(), settings).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let (mut new, _) = owner(&sink, &grant("bob", 2)).await;
    write(&mut new, 0).await.unwrap();
    assert_eq!(new.begin().await.unwrap().applied(), None);
    write(&mut old, 0).await.unwrap();
    assert_eq!(bills(&sink).await, vec![0, 0]);
}

#[tokio::test]
async fn replay_beside_the_home_is_told_by_the_watermark() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
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
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    tx.execute("INSERT INTO bill VALUES (0, 0, 1)", []).await.unwrap();
    let refused = tx.execute("INSERT INTO bill VALUES (1, 0, -1)", []).await.unwrap_err();
    assert!(matches!(refused, SinkError::Rejected(_)), "{refused}");
    let missing = tx.execute("INSERT INTO nowhere VALUES (1)", []).await.unwrap_err();
    assert!(matches!(missing, SinkError::Misconfigured(_)), "{missing}");
    drop(tx);
    assert_eq!(bills(&sink).await, Vec::<i64>::new());
    write(&mut writer, 0).await.unwrap();
}

#[tokio::test]
async fn transaction_that_ended_from_inside_takes_nothing_more() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    tx.run(|connection| connection.execute_batch("ROLLBACK")).await.unwrap_err();
    let refused = tx.execute("INSERT INTO bill VALUES (0, 0, 1)", []).await.unwrap_err();
    assert!(matches!(refused, SinkError::Misconfigured(_)), "{refused}");
    drop(tx);
    assert_eq!(bills(&sink).await, Vec::<i64>::new());
}

#[tokio::test]
async fn frozen_writer_keeps_the_lock_until_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let settings =
        SqliteSettings { busy_timeout: Duration::from_millis(200), ..Default::default() };
    let frozen = open(folder.path(), settings.clone()).await;
    let other = open(folder.path(), settings).await;
    let (mut old, _) = owner(&frozen, &grant("ann", 1)).await;
    let tx = old.begin().await.unwrap();
    let waited = other.register(&grant("bob", 2)).await.unwrap_err();
    assert!(matches!(waited, SinkError::Transient { .. }), "{waited}");
    drop(tx);
    other.register(&grant("bob", 2)).await.unwrap();
    write(&mut old, 0).await.unwrap_err();
}

#[tokio::test]
async fn nothing_is_sent_after_the_lease() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let ann = grant("ann", 1);
    let (mut writer, _) = owner(&sink, &ann).await;
    let mut tx = writer.begin().await.unwrap();
    tx.execute("INSERT INTO bill VALUES (0, 0, 1)", []).await.unwrap();
    ann.lease.stop();
    let ended = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(ended, SinkError::LeaseEnded(_)), "{ended}");
    assert!(matches!(writer.begin().await.unwrap_err(), SinkError::LeaseEnded(_)));
    assert_eq!(bills(&sink).await, Vec::<i64>::new());
}

#[tokio::test]
async fn old_owner_without_a_lease_check_is_left_to_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let mut ann = grant("ann", 1);
    ann.lease = Lease::new(std::sync::Arc::new(BootClock), Tick(1), LeaseCheck::Off);
    let (mut writer, _) = owner(&sink, &ann).await;
    write(&mut writer, 0).await.unwrap();
    sink.register(&grant("bob", 2)).await.unwrap();
    let refused = write(&mut writer, 1).await.unwrap_err();
    assert!(matches!(refused, SinkError::Fenced { .. }), "{refused}");
}

#[tokio::test]
async fn emptied_or_restored_file_is_no_fresh_start() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 3)).await;
    let initialised = Verified::without_coordinator(true);
    for (damage, regressed) in [
        ("UPDATE tenure_fence SET next_offset = NULL", false),
        ("UPDATE tenure_fence SET next_offset = 7, epoch = 2", true),
        ("DELETE FROM tenure_fence", false),
    ] {
        sink.with_connection(move |connection| connection.execute_batch(damage)).await.unwrap();
        let error = writer.resume(&initialised).await.unwrap_err();
        match error {
            SinkError::FenceRegressed { .. } => assert!(regressed, "{damage}"),
            SinkError::Misconfigured(_) => assert!(!regressed, "{damage}"),
            other => panic!("{damage}: {other}"),
        }
    }
}

#[tokio::test]
async fn cancelled_commit_blocks_the_writer_until_it_is_resolved() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path(), SqliteSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let (mut unknown, mut id) = (0, 0_u64);
    while unknown < 20 {
        let mut tx = writer.begin().await.unwrap();
        tx.execute("INSERT INTO bill VALUES (?1, 0, 1)", [id.cast_signed()]).await.unwrap();
        // Polled a few times and dropped: the work goes on without anybody who waits for the answer.
        let polls = unknown % 3 + 1;
        let commit = Box::pin(tx.commit(at(id + 1)));
        let finished = poll_some(commit, polls).await;
        let stands = match (finished, writer.begin().await.map(drop)) {
            (true, _) => at(id + 1),
            (false, Ok(())) => match writer.resolve().await.unwrap() {
                Resolved::Applied(next) | Resolved::NotApplied(next) => next,
            },
            (false, Err(SinkError::Unknown(_))) => match writer.resolve().await.unwrap() {
                Resolved::Applied(next) | Resolved::NotApplied(next) => next,
            },
            (false, Err(other)) => panic!("{other}"),
        };
        unknown += 1;
        let expected: Vec<i64> = (0..stands.get().cast_signed()).collect();
        assert_eq!(bills(&sink).await, expected);
        id = stands.get();
    }
}

/// Polls a future at most `polls` times; whether it finished.
async fn poll_some(
    mut future: std::pin::Pin<Box<impl Future<Output = Result<(), SinkError>>>>,
    polls: u32,
) -> bool {
    let mut left = polls;
    std::future::poll_fn(|context| {
        left -= 1;
        match future.as_mut().poll(context) {
            std::task::Poll::Ready(result) => {
                result.unwrap();
                std::task::Poll::Ready(true)
            }
            std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(false),
            std::task::Poll::Pending => std::task::Poll::Pending,
        }
    })
    .await
}

/// A new file gets its journal while others open it too, as when all processes of a service start at once.
#[tokio::test(flavor = "multi_thread")]
async fn new_file_may_be_opened_by_many_at_once() {
    for _ in 0..20 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new.db");
        let openings = (0..8).map(|_| {
            let path = path.clone();
            tokio::spawn(async move {
                let sink = SqliteSink::open(path, SqliteSettings::default()).await?;
                sink.migrate().await
            })
        });
        for opened in openings.collect::<Vec<_>>() {
            opened.await.unwrap().unwrap();
        }
    }
}
