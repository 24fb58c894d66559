//! A database of the test's own and owners of one partition.

use sqlx::mysql::MySqlConnectOptions;
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance;
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_mysql::{MysqlSettings, MysqlSink, MysqlWriter, sqlx};
use tenure_tests::servers::{MariaDb, require};

pub(crate) const INSERT: &str = "INSERT INTO bill (id, epoch, amount) VALUES (?, ?, ?)";

/// A database of the test's own.
pub(crate) struct Database {
    pub(crate) server: &'static MariaDb,
    pub(crate) name: String,
}

impl Database {
    pub(crate) fn new() -> Option<Self> {
        let server = require(MariaDb::shared())?;
        let name = server.new_database();
        server.sql(
            &name,
            "CREATE TABLE bill (
                 place BIGINT AUTO_INCREMENT PRIMARY KEY,
                 id BIGINT NOT NULL, epoch BIGINT, amount INT CHECK (amount > 0)
             ) ENGINE = InnoDB",
        );
        Some(Self { server, name })
    }

    pub(crate) fn options(&self, port: u16) -> MySqlConnectOptions {
        MySqlConnectOptions::new()
            .host("127.0.0.1")
            .port(port)
            .username("root")
            .database(&self.name)
    }

    pub(crate) async fn sink(&self, settings: MysqlSettings) -> MysqlSink {
        self.sink_through(self.server.port(), settings).await
    }

    pub(crate) async fn sink_through(&self, port: u16, settings: MysqlSettings) -> MysqlSink {
        let sink = MysqlSink::connect(self.options(port), settings).await.unwrap();
        sink.migrate().await.unwrap();
        sink
    }

    pub(crate) fn sql(&self, statements: &str) -> String {
        self.server.sql(&self.name, statements)
    }

    pub(crate) fn bills(&self) -> Vec<u64> {
        let rows = self.sql("SELECT id FROM bill ORDER BY id");
        rows.lines().map(|line| line.parse().unwrap()).collect()
    }
}

pub(crate) fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

pub(crate) fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

pub(crate) async fn owner(sink: &MysqlSink, grant: &Grant) -> (MysqlWriter, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let verified = Verified::without_coordinator(false);
    let next = match writer.resume(&verified).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

pub(crate) fn insert(
    id: u64,
    amount: i32,
) -> sqlx::query::Query<'static, sqlx::MySql, sqlx::mysql::MySqlArguments> {
    sqlx::query(INSERT).bind(id.cast_signed()).bind(0_i64).bind(amount)
}

pub(crate) async fn write(writer: &mut MysqlWriter, id: u64) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    tx.execute(insert(id, 1)).await?;
    tx.commit(at(id + 1)).await
}
