//! Patterns over PostgreSQL that look right and are not: the kit catches each by name.

use std::sync::Arc;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{
    BoxError, Capabilities, FencedSink, FencedWriter, Registered, Resolved, SinkError, Verified,
};
use tenure_sink_postgres::deadpool_postgres::Client;
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter, classify, sql};

use crate::kit::{options, read_back};
use crate::postgres::Database;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    /// Reads the fence without a lock.
    CheckBeforeWrite,
    /// A lock that a registration does not conflict with.
    ForKeyShare,
    /// A lock that excludes a registration and that writers share: there is always one that holds it.
    ForShare,
    /// The lock is right; the resume point is read by the registering statement.
    RegisterAndReadInOne,
}

impl Pattern {
    const fn lock(self) -> &'static str {
        match self {
            Self::CheckBeforeWrite => "",
            Self::ForKeyShare => " FOR KEY SHARE",
            Self::ForShare => " FOR SHARE",
            Self::RegisterAndReadInOne => " FOR NO KEY UPDATE",
        }
    }
}

struct BadSubject {
    database: Database,
    pattern: Pattern,
}

struct BadSink {
    inner: PostgresSink,
    pattern: Pattern,
}

struct BadWriter {
    inner: PostgresWriter,
    sink: PostgresSink,
    grant: Grant,
    pattern: Pattern,
    snapshot: Option<NextOffset>,
    moves_offset: bool,
}

async fn client_of(sink: &PostgresSink) -> Result<Client, SinkError> {
    let client = sink.pool().get().await;
    client.map_err(|error| SinkError::Transient { retry_after: None, source: Box::new(error) })
}

impl FencedSink for BadSink {
    type Writer = BadWriter;

    fn name(&self) -> &str {
        "bad"
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<BadWriter>, SinkError> {
        let snapshot = if self.pattern == Pattern::RegisterAndReadInOne {
            let one = format!(
                "WITH seen AS (SELECT next_offset FROM tenure_fence WHERE resource = $1), raised AS ({}) \
                 SELECT next_offset FROM seen",
                sql::REGISTER
            );
            let epoch = grant.epoch.get().cast_signed();
            let (resource, holder) = (grant.resource.as_str(), grant.member.to_string());
            let client = client_of(&self.inner).await?;
            let row = client.query_opt(&one, &[&resource, &epoch, &holder]).await;
            let offset: Option<i64> = row.map_err(classify)?.and_then(|row| row.get(0));
            offset.map(|value| NextOffset::from_signed(value).unwrap())
        } else {
            None
        };
        let Registered { writer: inner, displaced } = self.inner.register(grant).await?;
        let writer = BadWriter {
            inner,
            sink: self.inner.clone(),
            grant: grant.clone(),
            pattern: self.pattern,
            snapshot,
            moves_offset: true,
        };
        Ok(Registered { writer, displaced })
    }
}

impl FencedWriter for BadWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        match self.snapshot {
            Some(snapshot) => Ok(Some(snapshot)),
            None => self.inner.resume(verified).await,
        }
    }

    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.inner.initialise(start).await
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        self.inner.resolve().await
    }

    async fn retire(self) -> Result<(), SinkError> {
        self.inner.retire().await
    }
}

/// Connection that is closed, and its transaction with it, when a write is given up half-way.
struct Open(Option<Client>);

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            drop(Client::take(client));
        }
    }
}

impl Subject for BadSubject {
    type Sink = BadSink;

    async fn connect(&self) -> Result<BadSink, SinkError> {
        let settings = PostgresSettings { connections_max: 40, ..Default::default() };
        Ok(BadSink { inner: self.database.sink(settings).await, pattern: self.pattern })
    }

    async fn write(
        &self,
        writer: &mut BadWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let part = i32::try_from(rows.partition).expect("the kit's partitions are few") + 1;
        let (resource, epoch) = (writer.grant.resource.as_str(), rows.epoch.get().cast_signed());
        let mut open = Open(Some(client_of(&writer.sink).await?));
        let client = open.0.as_ref().unwrap();
        client.batch_execute(sql::BEGIN).await.map_err(classify)?;
        let check =
            format!("SELECT epoch FROM tenure_fence WHERE resource = $1{}", writer.pattern.lock());
        let row = client.query_one(&check, &[&resource]).await.map_err(classify)?;
        let seen: i64 = row.get(0);
        if seen != epoch {
            let seen = Epoch::new(seen.cast_unsigned()).ok();
            return Err(SinkError::Fenced { ours: rows.epoch, seen });
        }
        for offset in rows.offsets() {
            let insert = "INSERT INTO bill VALUES ($1, $2, $3)";
            client.execute(insert, &[&offset.signed(), &epoch, &part]).await.map_err(classify)?;
            pauses.here().await;
        }
        if writer.moves_offset {
            let moving = "UPDATE tenure_fence SET next_offset = $2 WHERE resource = $1";
            client.execute(moving, &[&resource, &rows.next.signed()]).await.map_err(classify)?;
        }
        client.batch_execute("COMMIT").await.map_err(classify)?;
        drop(open.0.take());
        Ok(())
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        read_back(&self.database, partition).await
    }

    fn beside(&self, sink: &BadSink, grant: &Grant) -> Option<BadWriter> {
        Some(BadWriter {
            inner: sink.inner.writer(grant),
            sink: sink.inner.clone(),
            grant: grant.clone(),
            pattern: sink.pattern,
            snapshot: None,
            moves_offset: false,
        })
    }
}

async fn assert_caught(pattern: Pattern, check: Check) {
    let Some(database) = Database::new() else { return };
    let subject = Arc::new(BadSubject { database, pattern });
    let outcome = conformance::run_one(&subject, options(), check).await;
    println!("{pattern:?}: {outcome}");
    assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_before_write_is_caught() {
    assert_caught(Pattern::CheckBeforeWrite, Check::StaleWrite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_before_write_does_damage_under_the_hammer() {
    assert_caught(Pattern::CheckBeforeWrite, Check::Hammer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn for_key_share_is_caught() {
    assert_caught(Pattern::ForKeyShare, Check::StaleWrite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn for_share_is_caught() {
    assert_caught(Pattern::ForShare, Check::Starvation).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn register_and_read_in_one_statement_is_caught() {
    assert_caught(Pattern::RegisterAndReadInOne, Check::ReadOrder).await;
}
