//! Owners of one partition on a server of the test's own.

use std::time::{Duration, Instant};

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance;
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_redis::{Command, RedisSettings, RedisSink, RedisWriter};
use tenure_tests::servers::Redis;

pub(crate) fn url(port: u16) -> String {
    format!("redis://127.0.0.1:{port}")
}

pub(crate) async fn sink_on(server: &Redis, settings: RedisSettings) -> RedisSink {
    RedisSink::connect(url(server.port()), settings).await.unwrap()
}

pub(crate) fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

pub(crate) fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

/// Key of a partition as the sink makes it.
pub(crate) fn key(partition: u32, name: &str) -> String {
    format!("{{{}}}:{name}", conformance::grant("any", partition, Epoch::FIRST).resource)
}

/// Acquires as the consumer does: what is lost or late is asked again.
pub(crate) async fn owner(sink: &RedisSink, grant: &Grant) -> (RedisWriter, NextOffset) {
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

pub(crate) async fn patiently<T>(mut attempt: impl AsyncFnMut() -> Result<T, SinkError>) -> T {
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

pub(crate) async fn write(writer: &mut RedisWriter, id: u64) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg(id.to_string()))?;
    tx.commit(at(id + 1)).await
}

pub(crate) fn bills(server: &Redis) -> Vec<u64> {
    let text = server.call(&["LRANGE", &key(0, "bills"), "0", "-1"]);
    text.lines().filter(|line| !line.is_empty()).map(|line| line.parse().unwrap()).collect()
}
