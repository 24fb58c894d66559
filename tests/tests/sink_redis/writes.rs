//! Writes, their refusals, and what a write takes.

use tenure_model::Epoch;
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_redis::{Command, RedisScript, RedisSettings, RedisWriter};
use tenure_tests::servers::{Redis, require};

use crate::scene::{at, bills, grant, key, owner, sink_on, write};

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
