//! Answers that are lost, and servers that are not what they must be.

use std::time::Duration;

use tenure_model::Epoch;
use tenure_sdk::sink::{FencedWriter, Resolved, SinkError, Verified};
use tenure_sink_redis::{Command, RedisSettings, RedisSink};
use tenure_tests::figures::tell;
use tenure_tests::proxy::{Direction, Proxy};
use tenure_tests::servers::{Redis, require};

use crate::scene::{at, bills, grant, key, owner, patiently, sink_on, url, write};

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
    tell(format_args!("{applied} of {ROUNDS} held writes were in"));
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
