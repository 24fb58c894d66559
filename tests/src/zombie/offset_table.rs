//! Offsets in a table that compares no epoch: what services do that keep offsets beside their data.

use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Home, NextOffset};
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{
    Capabilities, Enforcement, FencedSink, FencedWriter, Registered, Resolved, Scope, SinkError,
    Takeover, Verified,
};
use tenure_sink_postgres::classify;
use tokio_postgres::Client;

/// The table: one row per partition, nothing that names an owner.
pub const OFFSET_TABLE: &str = "\
CREATE TABLE plain_offsets (
    resource    text   PRIMARY KEY,
    next_offset bigint NOT NULL
)";

/// Home of offsets without a fence, for the negative control alone.
#[derive(Clone)]
pub(super) struct OffsetTable {
    client: Arc<Client>,
}

impl OffsetTable {
    pub(super) fn new(client: Client) -> Self {
        Self { client: Arc::new(client) }
    }

    pub(super) fn writer(&self, resource: &Resource) -> OffsetTableWriter {
        OffsetTableWriter { client: Arc::clone(&self.client), resource: resource.clone() }
    }
}

/// Moves the offset of one partition, for anyone.
#[derive(Debug)]
pub(super) struct OffsetTableWriter {
    client: Arc<Client>,
    resource: Resource,
}

impl OffsetTableWriter {
    pub(super) async fn commit(&self, next: NextOffset) -> Result<(), SinkError> {
        let statement = "UPDATE plain_offsets SET next_offset = $2 WHERE resource = $1";
        let (resource, next) = (self.resource.as_str(), next.signed());
        match self.client.execute(statement, &[&resource, &next]).await.map_err(classify)? {
            1 => Ok(()),
            count => Err(SinkError::Misconfigured(format!("{count} rows of {}", self.resource))),
        }
    }

    async fn read(&self) -> Result<Option<NextOffset>, SinkError> {
        let statement = "SELECT next_offset FROM plain_offsets WHERE resource = $1";
        let row = self.client.query_opt(statement, &[&self.resource.as_str()]).await;
        let Some(row) = row.map_err(classify)? else { return Ok(None) };
        let offset: i64 = row.try_get(0).map_err(classify)?;
        NextOffset::from_signed(offset)
            .map(Some)
            .map_err(|error| SinkError::Misconfigured(error.to_string()))
    }
}

impl FencedSink for OffsetTable {
    type Writer = OffsetTableWriter;

    fn name(&self) -> &'static str {
        "plain"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Append,
            home: Home::Sink,
            enforcement: Enforcement::BestEffort("nothing is compared"),
            takeover: Takeover::Bounded(Duration::ZERO),
        }
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<OffsetTableWriter>, SinkError> {
        Ok(Registered { writer: self.writer(&grant.resource), displaced: None })
    }
}

impl FencedWriter for OffsetTableWriter {
    async fn resume(&mut self, _verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.read().await
    }

    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        let statement = "INSERT INTO plain_offsets VALUES ($1, $2) ON CONFLICT DO NOTHING";
        let (resource, start) = (self.resource.as_str(), start.signed());
        self.client.execute(statement, &[&resource, &start]).await.map_err(classify)?;
        self.read().await?.ok_or_else(|| SinkError::Misconfigured("no row".to_owned()))
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        let at = self.read().await?.unwrap_or(NextOffset::ZERO);
        Ok(Resolved::Applied(at))
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}
