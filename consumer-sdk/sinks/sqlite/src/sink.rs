//! The sink: opens the file and registers grants.

use std::path::Path;
use std::sync::Arc;

use rusqlite::OptionalExtension;
use tenure_model::{Epoch, Home};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    Capabilities, Enforcement, FencedSink, Fencing, Registered, Role, Scope, SinkError, Standing,
    Takeover, epoch_from_column, epoch_to_column,
};

use crate::connection::{Shared, Urgency, begin, read};
use crate::error::classify;
use crate::settings::SqliteSettings;
use crate::writer::SqliteWriter;

/// Sink over one SQLite file. Cheap to clone; clones share one connection, whose transactions run one after the other.
#[derive(Clone, Debug)]
pub struct SqliteSink {
    shared: Arc<Shared>,
}

impl SqliteSink {
    /// Opens or creates the file, in WAL mode. Call [`SqliteSink::migrate`] before the first grant.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a file that cannot be a database or a bad setting; [`SinkError::Transient`].
    pub async fn open(path: impl AsRef<Path>, settings: SqliteSettings) -> Result<Self, SinkError> {
        Ok(Self { shared: Arc::new(Shared::open(path.as_ref(), settings).await?) })
    }

    /// Creates the fence table where there is none. May run any number of times.
    ///
    /// # Errors
    ///
    /// Any [`SinkError`].
    pub async fn migrate(&self) -> Result<(), SinkError> {
        let sql = self.shared.statements.migrate.clone();
        self.with_connection(move |connection| connection.execute_batch(&sql)).await
    }

    /// Does `work` on the sink's connection outside any grant: for tables of one's own and for reading.
    ///
    /// Writes of a partition belong into a [`SqliteTx`](crate::SqliteTx): nothing here is fenced.
    ///
    /// # Errors
    ///
    /// Any [`SinkError`].
    pub async fn with_connection<T: Send + 'static>(
        &self,
        work: impl FnOnce(&rusqlite::Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, SinkError> {
        let held = self.shared.hold().await?;
        held.run(move |connection| work(connection).map_err(classify)).await.1
    }

    /// Writer beside the home, for a grant that the SDK has registered here. Registers nothing: each write compares the
    /// epoch, so that a grant that is not registered is refused.
    #[must_use]
    pub fn writer(&self, grant: &Grant) -> SqliteWriter {
        self.writer_as(grant, Role::Also)
    }

    fn writer_as(&self, grant: &Grant, role: Role) -> SqliteWriter {
        let standing = Standing::new(grant.epoch, role, self.shared.settings.fencing());
        SqliteWriter::new(Arc::clone(&self.shared), grant.clone(), standing)
    }
}

impl FencedSink for SqliteSink {
    type Writer = SqliteWriter;

    fn name(&self) -> &str {
        &self.shared.settings.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Partition,
            home: Home::Sink,
            enforcement: match self.shared.settings.fencing() {
                Fencing::On => Enforcement::Resource,
                Fencing::Off => Enforcement::BestEffort("the fence is switched off"),
            },
            takeover: Takeover::Unbounded,
        }
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<SqliteWriter>, SinkError> {
        let held = self.shared.hold().await?;
        let shared = Arc::clone(&self.shared);
        let (resource, holder) = (grant.resource.clone(), grant.member.to_string());
        let mut standing = Standing::new(grant.epoch, Role::Home, self.shared.settings.fencing());
        let work = move |connection: &rusqlite::Connection| {
            begin(connection, shared.settings.busy_timeout, Urgency::Registration)?;
            let raised: Option<Option<i64>> = connection
                .prepare_cached(&shared.statements.register)
                .and_then(|mut statement| {
                    let parameters =
                        (resource.as_str(), epoch_to_column(standing.epoch()), &holder);
                    statement.query_row(parameters, |row| row.get(0)).optional()
                })
                .map_err(classify)?;
            let displaced = match raised {
                Some(displaced) => displaced.map(epoch_from_column).transpose()?,
                None => {
                    already_there(connection, &shared, resource.as_str(), &holder, &mut standing)?
                }
            };
            connection.execute_batch("COMMIT").map_err(classify)?;
            Ok(displaced)
        };
        let (_released, displaced) = held.run(work).await;
        let displaced = displaced?;
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = displaced.map(Epoch::get), "epoch registered");
        Ok(Registered { writer: self.writer_as(grant, Role::Home), displaced })
    }
}

fn already_there(
    connection: &rusqlite::Connection,
    shared: &Shared,
    resource: &str,
    holder: &str,
    standing: &mut Standing,
) -> Result<Option<Epoch>, SinkError> {
    let (row, displaced) = read(connection, &shared.statements.read, resource)?
        .ok_or_else(|| SinkError::Misconfigured("the fence row was not written".into()))?;
    standing.registered(&row, holder)?;
    Ok(displaced)
}
