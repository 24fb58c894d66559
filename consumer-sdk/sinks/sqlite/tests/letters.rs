//! Dead letters in the file that keeps the offset: a letter and the offset behind it in one transaction.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tenure_model::{GroupId, MemberId, TopicName};
use tenure_sdk::consumer::{Backoff, ConsumerBuilder, DeadLetter, Then};
use tenure_sdk::lease::LeaseCheck;
use tenure_sdk::sink::BoxError;
use tenure_sdk::testing::{MemoryCoordinator, MemorySource, RuntimeClock};
use tenure_sdk::{Consumer, ErrorPolicy, Limits, Owned};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink, SqliteWriter};

const LONGEST: Duration = Duration::from_secs(20);
const RECORDS: u64 = 6;
/// The record that no handler can do.
const BAD: u64 = 3;

const LETTER: &str = "INSERT INTO letter VALUES (?1)";

async fn open(folder: &Path) -> SqliteSink {
    let path = folder.join("data.db");
    let sink = SqliteSink::open(path, SqliteSettings::default()).await.unwrap();
    sink.migrate().await.unwrap();
    sink.with_connection(|connection| {
        connection.execute_batch("CREATE TABLE bill (id INTEGER); CREATE TABLE letter (id INTEGER)")
    })
    .await
    .unwrap();
    sink
}

async fn ids(sink: &SqliteSink, table: &'static str) -> Vec<i64> {
    sink.with_connection(move |connection| {
        let mut statement =
            connection.prepare(&format!("SELECT id FROM {table} ORDER BY rowid"))?;
        statement.query_map([], |row| row.get(0))?.collect()
    })
    .await
    .unwrap()
}

async fn bill(owned: Owned<SqliteSink>) -> Result<(), BoxError> {
    let (mut input, mut out) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        let mut tx = out.begin().await?;
        for record in &batch {
            if record.offset.get() == BAD {
                return Err("no bill can be made of it".into());
            }
            tx.execute("INSERT INTO bill VALUES (?1)", [record.offset.signed()]).await?;
        }
        tx.commit(batch.next()).await?;
    }
    Ok(())
}

/// Runs a consumer until the last bill is there; answers the bills and the letters.
async fn bills_and_letters(
    sink: &SqliteSink,
    set: impl FnOnce(ConsumerBuilder<SqliteSink>) -> ConsumerBuilder<SqliteSink>,
) -> (Vec<i64>, Vec<i64>) {
    let (group, topic) = (GroupId::new("g").unwrap(), TopicName::new("t").unwrap());
    let source = MemorySource::new();
    let partition = source.create_topic(&topic, 1)[0];
    for number in 0..RECORDS {
        source.append(&topic, 0, number.to_string()).unwrap();
    }
    let clock = Arc::new(RuntimeClock::new());
    let coordinator = MemoryCoordinator::new(group.clone(), clock.clone(), LeaseCheck::On);
    let nodes = vec!["nowhere:1".to_owned()];
    let builder = Consumer::builder(group, vec![topic.clone()], Arc::new(source), nodes)
        .clock(clock)
        .home(sink.clone());
    let consumer = set(builder).build().unwrap();
    let (stopper, member) = (consumer.stopper(), MemberId::new("ann").unwrap());
    let (running, ann) = (coordinator.clone(), member.clone());
    let run = tokio::spawn(async move { running.run(&ann, consumer, bill).await });
    coordinator.logged("ann joined").await;
    coordinator.grant(&topic, partition, &member);
    let started = Instant::now();
    while ids(sink, "bill").await.last() != Some(&(RECORDS - 1).cast_signed()) {
        assert!(started.elapsed() < LONGEST, "{}", coordinator.log().join("\n"));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stopper.stop(LONGEST);
    assert!(run.await.unwrap().unwrap().clean);
    (ids(sink, "bill").await, ids(sink, "letter").await)
}

fn policy(then: Then) -> ErrorPolicy {
    let pause = Duration::from_millis(10);
    ErrorPolicy::retry(1, Backoff { first: pause, max: pause }).then(then)
}

/// Writes the letter; the first time, what follows it fails.
async fn put(
    letter: DeadLetter,
    writer: &mut SqliteWriter,
    attempts: &AtomicUsize,
) -> Result<(), BoxError> {
    let mut tx = writer.begin().await?;
    tx.execute(LETTER, [letter.record.offset.signed()]).await?;
    if attempts.fetch_add(1, Ordering::SeqCst) == 0 {
        return Err("the process falls here".into());
    }
    Ok(tx.commit(letter.record.next()).await?)
}

#[tokio::test]
async fn letter_at_the_home_is_there_once_though_its_first_attempt_fell() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path()).await;
    let attempts = Arc::new(AtomicUsize::new(0));
    let tried = Arc::clone(&attempts);
    let found = bills_and_letters(&sink, |builder| {
        builder.on_error(policy(Then::DeadLetterAtHome)).dead_letters_at_home(
            move |letter, writer| {
                let attempts = Arc::clone(&tried);
                Box::pin(async move { put(letter, writer, &attempts).await })
            },
        )
    })
    .await;
    assert_eq!(found, (vec![0, 1, 2, 4, 5], vec![BAD.cast_signed()]));
    assert_eq!(attempts.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn letter_beside_the_offset_comes_twice_when_its_first_attempt_fell() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(folder.path()).await;
    let (beside, attempts) = (sink.clone(), Arc::new(AtomicUsize::new(0)));
    let (bills, letters) = bills_and_letters(&sink, |builder| {
        builder.on_error(policy(Then::dead_letter(move |letter| {
            let (beside, attempts) = (beside.clone(), Arc::clone(&attempts));
            async move {
                let id = letter.record.offset.signed();
                beside.with_connection(move |file| file.execute(LETTER, [id])).await?;
                match attempts.fetch_add(1, Ordering::SeqCst) {
                    0 => Err("the process falls here".into()),
                    _ => Ok(()),
                }
            }
        })))
    })
    .await;
    assert_eq!(bills, [0, 1, 2, 4, 5]);
    assert_eq!(letters, [BAD.cast_signed(); 2], "the control: without an idempotency key");
}
