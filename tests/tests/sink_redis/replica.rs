//! Fail-overs to a replica, with and without `WAIT`.

use std::time::Duration;

use tenure_model::Epoch;
use tenure_sdk::sink::{FencedSink, FencedWriter, Resolved, SinkError};
use tenure_sink_redis::{Command, RedisSettings};
use tenure_tests::proxy::{Direction, Proxy};
use tenure_tests::servers::{Redis, require, wait_until};

use crate::scene::{at, bills, grant, owner, patiently, sink_on, write};

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
