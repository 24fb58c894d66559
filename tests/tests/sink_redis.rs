//! The Redis sink on a real server and a real replica, and the conformance kit against it.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, FencedSink, FencedWriter, Resolved, SinkError, Verified};
use tenure_sink_redis::{Command, RedisScript, RedisSettings, RedisSink, RedisWriter, redis};
use tenure_tests::proxy::{Direction, Proxy};
use tenure_tests::servers::{Redis, require, wait_until};
use tenure_tests::tier;

fn url(port: u16) -> String {
    format!("redis://127.0.0.1:{port}")
}

async fn sink_on(server: &Redis, settings: RedisSettings) -> RedisSink {
    RedisSink::connect(url(server.port()), settings).await.unwrap()
}

fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

/// Key of a partition as the sink makes it.
fn key(partition: u32, name: &str) -> String {
    format!("{{{}}}:{name}", conformance::grant("any", partition, Epoch::FIRST).resource)
}

/// Acquires as the consumer does: what is lost or late is asked again.
async fn owner(sink: &RedisSink, grant: &Grant) -> (RedisWriter, NextOffset) {
    let verified = Verified::without_coordinator(false);
    let mut writer = patiently(async || sink.register(grant).await).await.writer;
    let next = loop {
        let found = match writer.resume(&verified).await {
            Ok(None) => writer.initialise(NextOffset::ZERO).await.map(Some),
            found => found,
        };
        match found {
            Ok(found) => break found.unwrap(),
            Err(SinkError::Unknown(_) | SinkError::Transient { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    (writer, next)
}

async fn patiently<T>(mut attempt: impl AsyncFnMut() -> Result<T, SinkError>) -> T {
    let started = Instant::now();
    loop {
        match attempt().await {
            Err(error @ (SinkError::Unknown(_) | SinkError::Transient { .. })) => {
                assert!(started.elapsed() < Duration::from_secs(30), "{error}");
            }
            result => return result.unwrap(),
        }
    }
}

async fn write(writer: &mut RedisWriter, id: u64) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg(id.to_string()))?;
    tx.commit(at(id + 1)).await
}

fn bills(server: &Redis) -> Vec<u64> {
    let text = server.call(&["LRANGE", &key(0, "bills"), "0", "-1"]);
    text.lines().filter(|line| !line.is_empty()).map(|line| line.parse().unwrap()).collect()
}

#[tokio::test]
async fn data_and_offset_move_together_and_outlive_the_process() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut writer, start) = owner(&sink, &grant("ann", 1)).await;
    assert_eq!(start, at(0));
    write(&mut writer, 0).await.unwrap();
    // A server that was started again has forgotten its scripts.
    server.call(&["SCRIPT", "FLUSH"]);
    write(&mut writer, 1).await.unwrap();
    let mut given_up = writer.begin().await.unwrap();
    given_up.push(Command::new("RPUSH").arg(given_up.key("bills")).arg("2")).unwrap();
    given_up.roll_back();
    drop((writer, sink));
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (_, resumed) = owner(&sink, &grant("bob", 2)).await;
    assert_eq!((resumed, bills(&server)), (at(2), vec![0, 1]));
    assert_eq!(server.call(&["TTL", &key(0, "tenure_fence")]), "-1");
}

#[tokio::test]
async fn old_owner_is_refused_with_both_epochs_and_stays_refused() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut old, _) = owner(&sink, &grant("ann", 9)).await;
    let overtaken = old.begin().await.unwrap();
    // As text without its zeros, 10 would be below 9.
    let registered = sink.register(&grant("bob", 10)).await.unwrap();
    assert_eq!(registered.displaced.map(Epoch::get), Some(9));
    let refused = overtaken.commit(at(1)).await.unwrap_err();
    let SinkError::Fenced { ours, seen } = refused else { panic!("{refused}") };
    assert_eq!((ours.get(), seen.map(Epoch::get)), (9, Some(10)));
    assert!(matches!(write(&mut old, 0).await, Err(SinkError::Fenced { .. })));
    let late = sink.register(&grant("ann", 9)).await.unwrap_err();
    assert!(matches!(late, SinkError::Fenced { .. }), "{late}");
    assert_eq!(bills(&server), Vec::<u64>::new());
}

#[tokio::test]
async fn own_registration_may_be_repeated_and_nobody_elses() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    owner(&sink, &grant("ann", 1)).await;
    let first = sink.register(&grant("bob", 2)).await.unwrap().displaced;
    let again = sink.register(&grant("bob", 2)).await.unwrap().displaced;
    assert_eq!((first, again), (Some(Epoch::FIRST), Some(Epoch::FIRST)));
    let other = sink.register(&grant("eve", 2)).await.unwrap_err();
    assert!(matches!(other, SinkError::Fenced { .. }), "{other}");
}

#[tokio::test]
async fn without_fencing_the_old_owner_does_the_damage() {
    let Some(server) = require(Redis::start()) else { return };
    let settings = RedisSettings { dangerously_without_fencing: true, ..Default::default() };
    let sink = sink_on(&server, settings).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    let (mut new, _) = owner(&sink, &grant("bob", 2)).await;
    write(&mut new, 0).await.unwrap();
    assert_eq!(new.begin().await.unwrap().applied(), None);
    write(&mut old, 0).await.unwrap();
    assert_eq!(bills(&server), vec![0, 0]);
}

#[tokio::test]
async fn replay_beside_the_home_is_told_by_the_watermark() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
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
async fn command_that_would_fail_half_way_is_refused_before_the_first_write() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    server.call(&["SET", &key(0, "text"), "abc"]);
    let word = |name: &str, rest: &[&str]| {
        let named = Command::new(name).arg(key(0, "text"));
        rest.iter().fold(named, |command, word| command.arg(word))
    };
    for failing in [
        vec![word("HSET", &["f", "v"])],
        vec![word("INCRBY", &["1"])],
        vec![word("SET", &["5"]), word("INCRBY", &["1"])],
        vec![word("SET", &["5"]), word("LPUSH", &["1"])],
        vec![word("DEL", &[]), word("HSET", &["f", "v"]), word("SADD", &["1"])],
    ] {
        let mut tx = writer.begin().await.unwrap();
        tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg("0")).unwrap();
        for command in &failing {
            tx.push(command.clone()).unwrap();
        }
        let refused = tx.commit(at(1)).await.unwrap_err();
        assert!(matches!(refused, SinkError::Rejected(_)), "{failing:?}: {refused}");
        assert_eq!(bills(&server), Vec::<u64>::new());
        assert_eq!(server.call(&["GET", &key(0, "text")]), "abc");
    }
    let mut tx = writer.begin().await.unwrap();
    for command in [
        word("DEL", &[]),
        word("HSET", &["f", "v"]),
        word("HINCRBY", &["count", "3"]),
        Command::new("INCRBY").arg(key(0, "sum")).arg("4"),
        Command::new("INCRBY").arg(key(0, "sum")).arg("-1"),
        Command::new("ZADD").arg(key(0, "rank")).arg("1.5").arg("a"),
        Command::new("XADD").arg(key(0, "log")).arg("*").arg("k").arg("v"),
    ] {
        tx.push(command).unwrap();
    }
    let refused = tx.commit(at(1)).await.unwrap_err();
    assert!(refused.to_string().contains("another command of this write"), "{refused}");
    let mut tx = writer.begin().await.unwrap();
    tx.push(Command::new("INCRBY").arg(key(0, "sum")).arg("4")).unwrap();
    tx.push(Command::new("INCRBY").arg(key(0, "sum")).arg("-1")).unwrap();
    tx.push(Command::new("XADD").arg(key(0, "log")).arg("*").arg("k").arg("v")).unwrap();
    tx.commit(at(1)).await.unwrap();
    assert_eq!(server.call(&["GET", &key(0, "sum")]), "3");
    assert_eq!(server.call(&["XLEN", &key(0, "log")]), "1");
}

#[tokio::test]
async fn keys_outside_of_the_partition_and_the_fence_itself_are_refused() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    for key in ["plain".to_owned(), key(1, "bills"), key(0, "tenure_fence")] {
        let refused = tx.push(Command::new("DEL").arg(&key)).unwrap_err();
        assert!(matches!(refused, SinkError::Misconfigured(_)), "{key}: {refused}");
    }
    let settings = RedisSettings { keys_without_tag: true, ..Default::default() };
    let sink = sink_on(&server, settings).await;
    let mut writer = sink.writer(&grant("ann", 1));
    let mut tx = writer.begin().await.unwrap();
    tx.push(Command::new("SET").arg("plain").arg("1")).unwrap();
    tx.push(Command::new("DEL").arg(key(0, "tenure_fence"))).unwrap_err();
    tx.commit(at(1)).await.unwrap();
    assert_eq!(server.call(&["GET", "plain"]), "1");
}

#[tokio::test]
async fn own_script_writes_behind_the_same_fence_and_may_refuse() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let spend = RedisScript::new(
        "local left = tonumber(redis.call('GET', KEYS[1]) or '10') - tonumber(ARGV[1])
         if left < 0 then return 'not enough' end
         redis.call('SET', KEYS[1], left)",
    );
    let spent = async |writer: &mut RedisWriter, amount: &str, next: u64| {
        let mut tx = writer.begin().await?;
        let keys = vec![tx.key("purse")];
        tx.script(&spend, keys, vec![amount.as_bytes().to_vec()])?;
        tx.commit(at(next)).await
    };
    spent(&mut writer, "7", 1).await.unwrap();
    let refused = spent(&mut writer, "7", 2).await.unwrap_err();
    assert!(matches!(refused, SinkError::Rejected(_)), "{refused}");
    spent(&mut writer, "3", 2).await.unwrap();
    assert_eq!(server.call(&["GET", &key(0, "purse")]), "0");
    let (_, resumed) = owner(&sink, &grant("bob", 2)).await;
    assert_eq!(resumed, at(2));
    assert!(matches!(spent(&mut writer, "0", 3).await, Err(SinkError::Fenced { .. })));
}

#[tokio::test]
async fn script_that_fails_half_way_stops_the_partition_until_someone_looks() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let mut tx = writer.begin().await.unwrap();
    let broken = RedisScript::new(
        "redis.call('SET', KEYS[1], 'half') redis.call('HSET', KEYS[1], 'f', 'v')",
    );
    let keys = vec![tx.key("text")];
    tx.script(&broken, keys, Vec::new()).unwrap();
    let stopped = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(stopped, SinkError::Misconfigured(_)), "{stopped}");
    let still = writer.begin().await.unwrap_err();
    assert!(matches!(still, SinkError::Misconfigured(_)), "{still}");
    let mut next_owner = sink.register(&grant("bob", 2)).await.unwrap().writer;
    let verified = Verified::without_coordinator(true);
    let still = next_owner.resume(&verified).await.unwrap_err();
    assert!(matches!(still, SinkError::Misconfigured(_)), "{still}");
    server.call(&["HDEL", &key(0, "tenure_fence"), "damaged"]);
    assert_eq!(next_owner.resume(&verified).await.unwrap(), Some(at(0)));
    write(&mut next_owner, 0).await.unwrap();
}

fn impatient() -> RedisSettings {
    RedisSettings {
        response_timeout: Duration::from_millis(400),
        connect_timeout: Duration::from_millis(400),
        ..Default::default()
    }
}

#[tokio::test]
async fn lost_answer_is_found_out_by_the_commit_itself() {
    let Some(server) = require(Redis::start()) else { return };
    let proxy = Proxy::to_port(server.port());
    let sink = RedisSink::connect(url(proxy.port()), impatient()).await.unwrap();
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    write(&mut writer, 0).await.unwrap();
    proxy.hold_answers_after(b"EVALSHA");
    write(&mut writer, 1).await.unwrap();
    assert!(proxy.answer_kept(Duration::ZERO), "the answer was held");
    write(&mut writer, 2).await.unwrap();
    assert_eq!(bills(&server), vec![0, 1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn write_that_arrives_after_it_was_given_up_is_in_once_or_never() {
    const ROUNDS: u32 = 4;

    let Some(server) = require(Redis::start()) else { return };
    let proxy = Proxy::to_port(server.port());
    let sink = RedisSink::connect(url(proxy.port()), impatient()).await.unwrap();
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    write(&mut writer, 0).await.unwrap();
    let (mut id, mut applied) = (1, 0);
    for _ in 0..ROUNDS {
        let mut tx = writer.begin().await.unwrap();
        tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg(id.to_string())).unwrap();
        proxy.hold(Direction::ToServer);
        let unknown = tx.commit(at(id + 1)).await.unwrap_err();
        assert!(matches!(unknown, SinkError::Unknown(_)), "{unknown}");
        assert!(matches!(writer.begin().await, Err(SinkError::Unknown(_))));
        // The write goes on towards the server while the question about it is asked.
        proxy.release();
        let resolved = patiently(async || writer.resolve().await).await;
        if let Resolved::NotApplied(_) = resolved {
            write(&mut writer, id).await.unwrap();
        } else {
            applied += 1;
        }
        id += 1;
    }
    println!("{applied} of {ROUNDS} held writes were in");
    assert_eq!(bills(&server), (0..id).collect::<Vec<_>>());
}

#[tokio::test]
async fn write_in_doubt_that_was_ruled_out_is_refused_when_it_arrives() {
    let Some(server) = require(Redis::start()) else { return };
    let proxy = Proxy::to_port(server.port());
    let sink = RedisSink::connect(url(proxy.port()), impatient()).await.unwrap();
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    let direct = sink_on(&server, RedisSettings::default()).await;
    // The same write once more, as a copy that the network keeps back: same epoch, same sequence, same attempt.
    let mut network = direct.writer(&grant("ann", 1));
    let mut kept_back = network.begin().await.unwrap();
    kept_back.push(Command::new("RPUSH").arg(kept_back.key("bills")).arg("0")).unwrap();
    let mut tx = writer.begin().await.unwrap();
    tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg("0")).unwrap();
    proxy.hold(Direction::ToServer);
    let unknown = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(unknown, SinkError::Unknown(_)), "{unknown}");
    proxy.cut();
    proxy.release();
    assert_eq!(patiently(async || writer.resolve().await).await, Resolved::NotApplied(at(0)));
    let refused = kept_back.commit(at(1)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Transient { .. }), "{refused}");
    assert_eq!(bills(&server), Vec::<u64>::new());
    write(&mut writer, 0).await.unwrap();
    assert_eq!(bills(&server), vec![0]);
}

#[tokio::test]
async fn fence_that_is_gone_or_lower_stops_the_owner() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 3)).await;
    let fence = key(0, "tenure_fence");
    server.call(&["HSET", &fence, "epoch", "00000000000000000002"]);
    let lower = write(&mut writer, 0).await.unwrap_err();
    let SinkError::FenceRegressed { ours, seen } = lower else { panic!("{lower}") };
    assert_eq!((ours.get(), seen.map(Epoch::get)), (3, Some(2)));
    server.call(&["FLUSHALL"]);
    let gone = write(&mut writer, 0).await.unwrap_err();
    assert!(matches!(gone, SinkError::FenceRegressed { seen: None, .. }), "{gone}");
    let emptied = writer.resume(&Verified::without_coordinator(true)).await.unwrap_err();
    assert!(matches!(emptied, SinkError::Misconfigured(_)), "{emptied}");
}

#[tokio::test]
async fn server_that_may_drop_the_fence_is_refused() {
    let Some(server) = require(Redis::start()) else { return };
    for (policy, taken) in
        [("allkeys-lru", false), ("allkeys-random", false), ("volatile-lru", true)]
    {
        server.call(&["CONFIG", "SET", "maxmemory-policy", policy]);
        let connected = RedisSink::connect(url(server.port()), RedisSettings::default()).await;
        match connected {
            Ok(_) => assert!(taken, "{policy}"),
            Err(error) => {
                assert!(!taken && matches!(error, SinkError::Misconfigured(_)), "{policy}: {error}")
            }
        }
    }
    let Some(replica) = require(Redis::start_replica(server.port())) else { return };
    let error =
        RedisSink::connect(url(replica.port()), RedisSettings::default()).await.unwrap_err();
    assert!(matches!(error, SinkError::Misconfigured(_)), "{error}");
    let absent = url(tenure_tests::servers::free_port());
    let error = RedisSink::connect(absent, RedisSettings::default()).await.unwrap_err();
    assert!(matches!(error, SinkError::Transient { .. }), "{error}");
}

#[tokio::test]
async fn full_server_is_transient_and_writes_nothing() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    server.call(&["CONFIG", "SET", "maxmemory", "1"]);
    let full = write(&mut writer, 0).await.unwrap_err();
    assert!(matches!(full, SinkError::Transient { .. }), "{full}");
    server.call(&["CONFIG", "SET", "maxmemory", "0"]);
    write(&mut writer, 0).await.unwrap();
    assert_eq!(bills(&server), vec![0]);
}

#[tokio::test]
async fn nothing_is_sent_after_the_lease() {
    let Some(server) = require(Redis::start()) else { return };
    let sink = sink_on(&server, RedisSettings::default()).await;
    let ann = grant("ann", 1);
    let (mut writer, _) = owner(&sink, &ann).await;
    let mut tx = writer.begin().await.unwrap();
    tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg("0")).unwrap();
    ann.lease.stop();
    let ended = tx.commit(at(1)).await.unwrap_err();
    assert!(matches!(ended, SinkError::LeaseEnded(_)), "{ended}");
    assert!(matches!(writer.begin().await.unwrap_err(), SinkError::LeaseEnded(_)));
    assert_eq!(bills(&server), Vec::<u64>::new());
}

/// A primary, a replica, and the line between them.
struct Pair {
    primary: Redis,
    line: Proxy,
    replica: Redis,
}

impl Pair {
    fn start() -> Option<Self> {
        let primary = require(Redis::start())?;
        let line = Proxy::to_port(primary.port());
        let replica = require(Redis::start_replica(line.port()))?;
        Some(Self { primary, line, replica })
    }

    /// From now on nothing reaches the replica.
    fn fall_behind(&self) {
        self.line.hold(Direction::ToClient);
    }

    fn catch_up(&self) {
        self.line.release();
    }

    /// The primary dies with all that was on its way, and the replica takes its place as it is.
    fn fail_over(self) -> Redis {
        drop(self.line);
        drop(self.primary);
        self.replica.call(&["REPLICAOF", "NO", "ONE"]);
        self.replica
    }
}

#[tokio::test]
async fn replica_promoted_while_behind_loses_the_fence_and_the_writes() {
    let Some(pair) = Pair::start() else { return };
    let sink = sink_on(&pair.primary, RedisSettings::default()).await;
    let (mut old, _) = owner(&sink, &grant("ann", 1)).await;
    write(&mut old, 0).await.unwrap();
    let has_all = || bills(&pair.replica) == vec![0];
    assert!(wait_until(Duration::from_secs(10), has_all), "the replica does not follow");
    pair.fall_behind();
    let bob = grant("bob", 2);
    let (mut new, _) = owner(&sink, &bob).await;
    write(&mut new, 1).await.unwrap();
    let promoted = pair.fail_over();
    let sink = sink_on(&promoted, RedisSettings::default()).await;
    // Lost: the registration of e2 and record 1. The old owner is let in again.
    let mut old = sink.writer(&grant("ann", 1));
    let mut tx = old.begin().await.unwrap();
    tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg("66")).unwrap();
    tx.commit(at(67)).await.unwrap();
    assert_eq!(bills(&promoted), vec![0, 66]);
    // The new owner sees it and stops; the next registration shuts the old one out again.
    let regressed = sink.writer(&bob).begin().await.unwrap_err();
    let SinkError::FenceRegressed { seen, .. } = regressed else { panic!("{regressed}") };
    assert_eq!(seen, Some(Epoch::FIRST));
    sink.register(&grant("cid", 3)).await.unwrap();
    assert!(matches!(old.begin().await, Err(SinkError::Fenced { .. })));
}

#[tokio::test]
async fn registration_that_too_few_replicas_have_does_not_count() {
    let Some(pair) = Pair::start() else { return };
    let settings = RedisSettings {
        replicas_min: 1,
        wait_timeout: Duration::from_secs(1),
        ..Default::default()
    };
    let sink = sink_on(&pair.primary, settings.clone()).await;
    owner(&sink, &grant("ann", 1)).await;
    pair.fall_behind();
    let refused = sink.register(&grant("bob", 2)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Unknown(_)), "{refused}");
    assert!(refused.to_string().contains("0 of 1 replicas"), "{refused}");
    // Nor does the same again, which writes nothing new.
    let refused = sink.register(&grant("bob", 2)).await.unwrap_err();
    assert!(matches!(refused, SinkError::Unknown(_)), "{refused}");
    pair.catch_up();
    patiently(async || sink.register(&grant("bob", 2)).await).await;
    pair.fall_behind();
    let promoted = pair.fail_over();
    let sink = sink_on(&promoted, RedisSettings::default()).await;
    let old = sink.register(&grant("ann", 1)).await.unwrap_err();
    assert!(matches!(old, SinkError::Fenced { .. }), "{old}");
}

#[tokio::test]
async fn write_that_too_few_replicas_have_is_unknown_until_they_do() {
    let Some(pair) = Pair::start() else { return };
    let settings = RedisSettings {
        replicas_min: 1,
        wait_timeout: Duration::from_secs(1),
        wait_on_write: true,
        ..Default::default()
    };
    let sink = sink_on(&pair.primary, settings).await;
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    write(&mut writer, 0).await.unwrap();
    pair.fall_behind();
    let unknown = write(&mut writer, 1).await.unwrap_err();
    assert!(matches!(unknown, SinkError::Unknown(_)), "{unknown}");
    assert!(matches!(writer.begin().await, Err(SinkError::Unknown(_))));
    assert!(matches!(writer.resolve().await, Err(SinkError::Unknown(_))));
    pair.catch_up();
    assert_eq!(patiently(async || writer.resolve().await).await, Resolved::Applied(at(2)));
    write(&mut writer, 2).await.unwrap();
    pair.fall_behind();
    let promoted = pair.fail_over();
    assert_eq!(bills(&promoted), vec![0, 1, 2]);
}

struct Kit {
    server: Redis,
    settings: RedisSettings,
}

async fn read_back(port: u16, partition: u32) -> Result<Vec<Row>, BoxError> {
    let client = redis::Client::open(url(port))?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    let rows: Vec<String> = redis::cmd("LRANGE")
        .arg(key(partition, "rows"))
        .arg(0)
        .arg(-1)
        .query_async(&mut connection)
        .await?;
    let mut found = Vec::new();
    for row in rows {
        let (id, epoch) = row.split_once(' ').ok_or("a row has two numbers")?;
        let offset = NextOffset::new(id.parse()?)?;
        found.push(Row { offset, epoch: Epoch::new(epoch.parse()?)? });
    }
    found.sort_by_key(|row| row.offset);
    Ok(found)
}

impl Subject for Kit {
    type Sink = RedisSink;

    async fn connect(&self) -> Result<RedisSink, SinkError> {
        RedisSink::connect(url(self.server.port()), self.settings.clone()).await
    }

    async fn write(
        &self,
        writer: &mut RedisWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        for offset in rows.offsets() {
            let row = format!("{} {}", offset.get(), rows.epoch.get());
            tx.push(Command::new("RPUSH").arg(tx.key("rows")).arg(row))?;
            pauses.here().await;
        }
        tx.commit(rows.next).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        read_back(self.server.port(), partition).await
    }

    fn beside(&self, sink: &RedisSink, grant: &Grant) -> Option<RedisWriter> {
        Some(sink.writer(grant))
    }
}

/// Looks at the fence first and writes without a script then, as is often advised.
struct CheckThenWrite(Kit);

impl Subject for CheckThenWrite {
    type Sink = RedisSink;

    async fn connect(&self) -> Result<RedisSink, SinkError> {
        self.0.connect().await
    }

    async fn write(
        &self,
        writer: &mut RedisWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        writer.begin().await?.roll_back();
        let broken = |error: redis::RedisError| SinkError::Unknown(Box::new(error));
        let client = redis::Client::open(url(self.0.server.port())).map_err(broken)?;
        let mut connection = client.get_multiplexed_async_connection().await.map_err(broken)?;
        let mut both = redis::pipe();
        both.atomic();
        for offset in rows.offsets() {
            let row = format!("{} {}", offset.get(), rows.epoch.get());
            both.cmd("RPUSH").arg(key(rows.partition, "rows")).arg(row);
            pauses.here().await;
        }
        both.cmd("HSET").arg(key(rows.partition, "tenure_fence"));
        both.arg("next_offset").arg(rows.next.get());
        both.query_async::<()>(&mut connection).await.map_err(broken)
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        self.0.read_back(partition).await
    }

    fn beside(&self, sink: &RedisSink, grant: &Grant) -> Option<RedisWriter> {
        self.0.beside(sink, grant)
    }
}

fn options() -> Options {
    let handovers = u32::try_from(tier::Tier::current().repetitions(1_000)).unwrap();
    Options { handovers, ..Options::with_seed(tier::seed()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_conforms() {
    let Some(server) = require(Redis::start()) else { return };
    let kit = Arc::new(Kit { server, settings: RedisSettings::default() });
    let report = conformance::run(&kit, options()).await;
    println!("{report}");
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_a_check_before_the_write() {
    let Some(server) = require(Redis::start()) else { return };
    let kit = Arc::new(CheckThenWrite(Kit { server, settings: RedisSettings::default() }));
    for check in [Check::StaleWrite, Check::PausedHolder] {
        let outcome = conformance::run_one(&kit, options(), check).await;
        println!("{outcome}");
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_the_damage_without_fencing() {
    let Some(server) = require(Redis::start()) else { return };
    let settings = RedisSettings { dangerously_without_fencing: true, ..Default::default() };
    let kit = Arc::new(Kit { server, settings });
    for check in [Check::StaleWrite, Check::LateRegistration, Check::Retire, Check::Restart] {
        let outcome = conformance::run_one(&kit, options(), check).await;
        println!("{outcome}");
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}
