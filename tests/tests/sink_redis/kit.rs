//! The conformance kit.

use std::sync::Arc;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_redis::{Command, RedisSettings, RedisSink, RedisWriter, redis};
use tenure_tests::figures::tell;
use tenure_tests::servers::{Redis, require};
use tenure_tests::tier;

use crate::scene::{key, url};

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
    tell(&report);
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_a_check_before_the_write() {
    let Some(server) = require(Redis::start()) else { return };
    let kit = Arc::new(CheckThenWrite(Kit { server, settings: RedisSettings::default() }));
    for check in [Check::StaleWrite, Check::PausedHolder] {
        let outcome = conformance::run_one(&kit, options(), check).await;
        tell(&outcome);
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
        tell(&outcome);
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}
