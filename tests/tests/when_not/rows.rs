//! Rows that need a database, a queue or a consumer group, and nothing that owns.

use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::Message as _;

use super::{LONGEST, Told, connect};

/// Takes items until there are none: the condition is in the write.
pub(crate) async fn conditional(told: &Told) -> u64 {
    let client = connect(&told.at[0]).await;
    let sell = "UPDATE stock SET remaining = remaining - 1 WHERE id = 1 AND remaining > 0";
    let mut sold = 0;
    while client.execute(sell, &[]).await.unwrap() == 1 {
        sold += 1;
    }
    sold
}

/// Adds 1 a hundred times: a change of a document that another has changed is made anew.
pub(crate) async fn version(told: &Told) -> u64 {
    let client = connect(&told.at[0]).await;
    let mut added = 0;
    while added < 100 {
        let row =
            client.query_one("SELECT version, body FROM doc WHERE id = 1", &[]).await.unwrap();
        let (version, body): (i64, i64) = (row.get(0), row.get(1));
        let save = "UPDATE doc SET version = version + 1, body = $2 WHERE id = 1 AND version = $1";
        added += client.execute(save, &[&version, &(body + 1)]).await.unwrap();
    }
    added
}

/// Both pay the same 200 payments: the key and the effect are in one transaction.
pub(crate) async fn idempotency(told: &Told) -> u64 {
    let mut client = connect(&told.at[0]).await;
    let mut paid = 0;
    for number in 0..200 {
        let transaction = client.transaction().await.unwrap();
        let key = format!("payment-{number}");
        let insert = "INSERT INTO payment VALUES ($1) ON CONFLICT DO NOTHING";
        if transaction.execute(insert, &[&key]).await.unwrap() == 1 {
            transaction.execute("UPDATE account SET balance = balance + 1", &[]).await.unwrap();
            paid += 1;
        }
        transaction.commit().await.unwrap();
    }
    paid
}

/// Both send 20 versions of 10 prices, in opposite orders: the newest stays.
pub(crate) async fn dedup(told: &Told) -> u64 {
    let client = connect(&told.at[0]).await;
    let upsert = "INSERT INTO price VALUES ($1, $2, $3) ON CONFLICT (key)
                  DO UPDATE SET version = excluded.version, amount = excluded.amount
                  WHERE price.version < excluded.version";
    let mut versions: Vec<i64> = (0..20).collect();
    if told.is_first() {
        versions.reverse();
    }
    let mut sent = 0;
    for version in versions {
        for key in 0..10 {
            let key = format!("key-{key}");
            client.execute(upsert, &[&key, &version, &(version * 10)]).await.unwrap();
            sent += 1;
        }
    }
    sent
}

/// Does jobs; ann dies with its fifth in hand, which bob finds once it is visible again.
pub(crate) async fn queue(told: &Told) -> u64 {
    let client = connect(&told.at[0]).await;
    let claim = "UPDATE job SET visible_at = now() + interval '1 second', claim = claim + 1
                 WHERE id = (SELECT id FROM job WHERE done_by IS NULL AND visible_at <= now()
                             ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 1)
                 RETURNING id, claim";
    let (mut done, started) = (0, Instant::now());
    let begun = "SELECT count(*) FROM job WHERE claim > 0";
    while !told.is_first() && client.query_one(begun, &[]).await.unwrap().get::<_, i64>(0) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    loop {
        assert!(started.elapsed() < LONGEST, "jobs are left");
        let Some(row) = client.query_opt(claim, &[]).await.unwrap() else {
            let left = client.query_one("SELECT count(*) FROM job WHERE done_by IS NULL", &[]);
            if left.await.unwrap().get::<_, i64>(0) == 0 {
                return done;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        if told.is_first() && done == 4 {
            return done;
        }
        let (id, claim): (i32, i32) = (row.get(0), row.get(1));
        // The claim is compared: a worker that was slow has lost the job.
        let finish = "UPDATE job SET done_by = $3 WHERE id = $1 AND claim = $2 AND done_by IS NULL";
        done += client.execute(finish, &[&id, &claim, &told.name]).await.unwrap();
        // bob leaves some for ann.
        tokio::time::sleep(Duration::from_millis(if told.is_first() { 1 } else { 20 })).await;
    }
}

/// Reads its share of a topic in a consumer group, and does what may be done twice.
pub(crate) async fn group(told: &Told) -> u64 {
    let client = connect(&told.at[0]).await;
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", &told.at[1])
        .set("group.id", format!("when-not-{}", told.at[2]))
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "false")
        .set("session.timeout.ms", "6000")
        .create()
        .unwrap();
    consumer.subscribe(&[&told.at[2]]).unwrap();
    let upsert =
        "INSERT INTO seen VALUES ($1, 1) ON CONFLICT (key) DO UPDATE SET times = seen.times + 1";
    let (mut read, started) = (0, Instant::now());
    loop {
        assert!(started.elapsed() < LONGEST, "records are left");
        match consumer.poll(Duration::from_millis(100)) {
            Some(Ok(message)) => {
                let key = String::from_utf8(message.payload().unwrap().to_vec()).unwrap();
                client.execute(upsert, &[&key]).await.unwrap();
                consumer.commit_message(&message, CommitMode::Async).unwrap();
                read += 1;
            }
            Some(Err(_passes)) => {}
            None => {
                let seen = client.query_one("SELECT count(*) FROM seen", &[]).await.unwrap();
                if seen.get::<_, i64>(0) == 200 {
                    return read;
                }
            }
        }
    }
}
