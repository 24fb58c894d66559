//! Tokens of something else than a coordinator, on a real server.

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};

use crate::postgres::{Database, write};

fn grant(token: u64) -> Grant {
    Grant::external(Resource::named("orders/7").unwrap(), Epoch::new(token).unwrap())
}

async fn own(sink: &PostgresSink, grant: &Grant) -> (PostgresWriter, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let next = match writer.resume(&Verified::without_coordinator(false)).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

#[tokio::test]
async fn higher_external_token_takes_over_and_the_lower_one_is_refused() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let (mut old, _) = own(&sink, &grant(4_711)).await;
    write(&mut old, 0).await.unwrap();
    let (mut new, resumed) = own(&sink, &grant(Epoch::MAX)).await;
    assert_eq!(resumed.get(), 1);
    let refused = write(&mut old, 1).await.unwrap_err();
    assert!(
        matches!(refused, SinkError::Fenced { seen: Some(seen), .. } if seen.get() == Epoch::MAX),
        "{refused}"
    );
    let late = sink.register(&grant(4_711)).await.unwrap_err();
    assert!(matches!(late, SinkError::Fenced { .. }), "{late}");
    write(&mut new, 1).await.unwrap();
    assert_eq!(database.bills(), vec![0, 1]);
}

#[tokio::test]
async fn one_external_token_in_the_hands_of_two_is_refused() {
    let Some(database) = Database::new() else { return };
    let sink = database.sink(PostgresSettings::default()).await;
    let first = grant(5);
    sink.register(&first).await.unwrap();
    sink.register(&first).await.unwrap();
    let stolen = sink.register(&grant(5)).await.unwrap_err();
    assert!(matches!(stolen, SinkError::Fenced { .. }), "{stolen}");
}
