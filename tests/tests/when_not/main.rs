//! What does without Tenure, as docs/when-not.md has it: each row run by two processes on real servers.
//!
//! The processes are this very program, told by `WHEN_NOT` which row to run.

#![allow(clippy::unwrap_used, reason = "a worker that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "workers tell their parent what they did")]

mod locks;
mod rows;

use std::env;
use std::process::Command;
use std::time::Duration;

use tenure_tests::process::Process;
use tenure_tests::servers::{Kafka, Postgres, Redis, require, wait_until};
use tokio_postgres::{Client, NoTls};

const LONGEST: Duration = Duration::from_secs(60);

/// What a worker is told.
struct Told {
    row: String,
    name: String,
    /// Addresses of servers, whatever the row needs.
    at: Vec<String>,
}

impl Told {
    fn is_first(&self) -> bool {
        self.name == "ann"
    }
}

fn told() -> Option<Told> {
    let row = env::var("WHEN_NOT").ok()?;
    let at = env::var("WHEN_NOT_AT").unwrap().split(' ').map(str::to_owned).collect();
    Some(Told { row, name: env::var("WHEN_NOT_NAME").unwrap(), at })
}

/// Both processes of one row.
fn pair(row: &str, at: &[&str]) -> [Process; 2] {
    ["ann", "bob"].map(|name| {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "worker", "--nocapture"])
            .env("WHEN_NOT", row)
            .env("WHEN_NOT_NAME", name)
            .env("WHEN_NOT_AT", at.join(" "));
        Process::spawn(name, &mut command)
    })
}

/// Waits until both have ended well; answers the number that each said last.
fn counts(mut workers: [Process; 2]) -> [u64; 2] {
    for worker in &mut workers {
        let status = worker.wait(LONGEST);
        assert!(status.is_some_and(|status| status.success()), "{}", worker.tail());
    }
    workers.map(|worker| {
        let lines = worker.lines();
        let said = lines.iter().rev().find_map(|line| line.split("did ").nth(1)?.parse().ok());
        said.unwrap_or_else(|| panic!("{} says no count: {lines:?}", worker.name()))
    })
}

/// Not a test of its own: a row's process, when this program is started as one.
#[test]
fn worker() {
    let Some(told) = told() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let did = runtime.block_on(async {
        match told.row.as_str() {
            "conditional" => rows::conditional(&told).await,
            "version" => rows::version(&told).await,
            "idempotency" => rows::idempotency(&told).await,
            "dedup" => rows::dedup(&told).await,
            "queue" => rows::queue(&told).await,
            "group" => rows::group(&told).await,
            "efficiency" => locks::efficiency(&told),
            "redlock" => locks::redlock(&told).await,
            other => panic!("no row {other}"),
        }
    });
    println!("did {did}");
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(async move { connection.await.unwrap() });
    client
}

fn postgres(schema: &str) -> Option<(&'static Postgres, String, String)> {
    let server = require(Postgres::shared())?;
    let database = server.new_database();
    server.sql(&database, schema);
    let url = server.url_of(&database, server.port());
    Some((server, database, url))
}

#[test]
fn conditional_update_sells_each_item_once() {
    let schema =
        "CREATE TABLE stock (id int PRIMARY KEY, remaining int); INSERT INTO stock VALUES (1, 100)";
    let Some((server, database, url)) = postgres(schema) else { return };
    let sold = counts(pair("conditional", &[&url]));
    assert_eq!(sold.iter().sum::<u64>(), 100, "{sold:?}");
    assert_eq!(server.sql(&database, "SELECT remaining FROM stock").trim(), "0");
}

#[test]
fn version_that_is_compared_loses_no_change() {
    let schema = "CREATE TABLE doc (id int PRIMARY KEY, version bigint, body bigint); INSERT INTO doc VALUES (1, 0, 0)";
    let Some((server, database, url)) = postgres(schema) else { return };
    assert_eq!(counts(pair("version", &[&url])), [100, 100]);
    assert_eq!(server.sql(&database, "SELECT body FROM doc").trim(), "200");
}

#[test]
fn unique_key_makes_an_effect_happen_once() {
    let schema = "CREATE TABLE payment (key text PRIMARY KEY); CREATE TABLE account (balance bigint); INSERT INTO account VALUES (0)";
    let Some((server, database, url)) = postgres(schema) else { return };
    let paid = counts(pair("idempotency", &[&url]));
    assert_eq!(paid.iter().sum::<u64>(), 200, "{paid:?}");
    assert_eq!(server.sql(&database, "SELECT balance FROM account").trim(), "200");
}

#[test]
fn newest_of_a_key_stays_whatever_comes_late() {
    let schema = "CREATE TABLE price (key text PRIMARY KEY, version bigint, amount bigint)";
    let Some((server, database, url)) = postgres(schema) else { return };
    assert_eq!(counts(pair("dedup", &[&url])), [200, 200]);
    let wrong = "SELECT count(*) FROM price WHERE version <> 19 OR amount <> 190";
    assert_eq!(server.sql(&database, wrong).trim(), "0");
    assert_eq!(server.sql(&database, "SELECT count(*) FROM price").trim(), "10");
}

#[test]
fn job_of_a_worker_that_died_becomes_visible_again() {
    let schema = "CREATE TABLE job (id int PRIMARY KEY, visible_at timestamptz DEFAULT now(), claim int DEFAULT 0, done_by text);
                  INSERT INTO job SELECT generate_series(1, 50)";
    let Some((server, database, url)) = postgres(schema) else { return };
    let done = counts(pair("queue", &[&url]));
    // One process dies on its fifth job; the other does that one too.
    assert_eq!(done.iter().sum::<u64>(), 50, "{done:?}");
    assert_eq!(server.sql(&database, "SELECT count(*) FROM job WHERE done_by IS NULL").trim(), "0");
    assert_eq!(server.sql(&database, "SELECT max(claim) FROM job").trim(), "2");
}

#[test]
fn consumer_group_alone_is_enough_where_an_effect_may_happen_twice() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let schema = "CREATE TABLE seen (key text PRIMARY KEY, times int)";
    let Some((server, database, url)) = postgres(schema) else { return };
    let topic = kafka.new_topic("group", 4);
    for partition in 0..4_u16 {
        let values: Vec<String> = (0..50).map(|n| format!("{partition}-{n}")).collect();
        kafka.produce(&topic, partition, &values);
    }
    counts(pair("group", &[&url, kafka.bootstrap(), &topic]));
    assert_eq!(server.sql(&database, "SELECT count(*) FROM seen").trim(), "200");
}

#[test]
fn lock_for_efficiency_is_released_by_its_value_only() {
    let Some(redis) = require(Redis::start()) else { return };
    let did = counts(pair("efficiency", &[&redis.port().to_string()]));
    // ann overslept its lock; its release left bob's alone.
    assert_eq!(did, [0, 1], "ann released nothing, bob its own lock");
}

#[test]
fn paused_holder_of_a_lock_is_not_refused_unless_the_resource_compares_an_epoch() {
    let Some(redis) = require(Redis::start()) else { return };
    let schema = "CREATE TABLE doc (id text PRIMARY KEY, epoch bigint, body text);
                  INSERT INTO doc VALUES ('unfenced', 0, ''), ('fenced', 0, '')";
    let Some((server, database, url)) = postgres(schema) else { return };
    let workers = pair("redlock", &[&url, &redis.port().to_string()]);
    let [ann, bob] = &workers;
    ann.wait_for_line(|line| line.contains("holds the lock"), LONGEST).unwrap();
    ann.pause();
    bob.wait_for_line(|line| line.contains("has written"), LONGEST).unwrap();
    ann.resume();
    ann.wait_for_line(|line| line.contains("has written"), LONGEST).unwrap();
    let body = |id: &str| server.sql(&database, &format!("SELECT body FROM doc WHERE id = '{id}'"));
    assert!(wait_until(LONGEST, || body("unfenced").trim() == "ann"), "the stale write is in");
    assert_eq!(body("fenced").trim(), "bob", "the epoch kept it out");
    assert_eq!(counts(workers), [0, 1], "rows that the fenced write of each changed");
}
