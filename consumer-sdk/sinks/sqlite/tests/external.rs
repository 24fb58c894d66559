//! Tokens of something else than a coordinator, on a real file.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

use tenure_model::{Epoch, MemberId, NextOffset};
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink, SqliteWriter};

async fn open(folder: &tempfile::TempDir) -> SqliteSink {
    let sink =
        SqliteSink::open(folder.path().join("data.db"), SqliteSettings::default()).await.unwrap();
    sink.migrate().await.unwrap();
    let table = "CREATE TABLE IF NOT EXISTS bill (id INTEGER)";
    sink.with_connection(move |connection| connection.execute_batch(table)).await.unwrap();
    sink
}

fn grant(resource: &str, token: u64) -> Grant {
    Grant::external(Resource::named(resource).unwrap(), Epoch::new(token).unwrap())
}

async fn own(sink: &SqliteSink, grant: &Grant) -> (SqliteWriter, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let next = match writer.resume(&Verified::without_coordinator(false)).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

async fn write(writer: &mut SqliteWriter, id: u64) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    tx.execute("INSERT INTO bill VALUES (?1)", [id.cast_signed()]).await?;
    tx.commit(NextOffset::new(id + 1).unwrap()).await
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
async fn higher_external_token_takes_over_and_the_lower_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(&folder).await;
    let (mut old, start) = own(&sink, &grant("orders/7", 4_711)).await;
    assert_eq!(start, NextOffset::ZERO);
    write(&mut old, 0).await.unwrap();
    let (mut new, resumed) = own(&sink, &grant("orders/7", 90_210)).await;
    assert_eq!(resumed.get(), 1);
    let refused = write(&mut old, 1).await.unwrap_err();
    assert!(matches!(refused, SinkError::Fenced { seen: Some(seen), .. } if seen.get() == 90_210));
    let late = sink.register(&grant("orders/7", 4_711)).await.unwrap_err();
    assert!(matches!(late, SinkError::Fenced { .. }), "{late}");
    write(&mut new, 1).await.unwrap();
    let (_, other) = own(&sink, &grant("orders/8", 1)).await;
    assert_eq!(other, NextOffset::ZERO);
    assert_eq!(bills(&sink).await, vec![0, 1]);
}

#[tokio::test]
async fn one_token_in_the_hands_of_two_is_refused_unless_they_name_the_same_holder() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(&folder).await;
    let first = grant("orders/7", 5);
    sink.register(&first).await.unwrap();
    sink.register(&first).await.unwrap();
    let stolen = sink.register(&grant("orders/7", 5)).await.unwrap_err();
    assert!(matches!(stolen, SinkError::Fenced { .. }), "{stolen}");
    let restarted = || grant("orders/7", 6).held_by(MemberId::new("billing-3").unwrap());
    sink.register(&restarted()).await.unwrap();
    sink.register(&restarted()).await.unwrap();
}

#[tokio::test]
async fn grant_whose_token_was_given_up_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let sink = open(&folder).await;
    let held = grant("orders/7", 5);
    let (mut writer, _) = own(&sink, &held).await;
    held.lease.stop();
    let refused = write(&mut writer, 0).await.unwrap_err();
    assert!(matches!(refused, SinkError::LeaseEnded(_)), "{refused}");
    assert_eq!(bills(&sink).await, Vec::<i64>::new());
}
