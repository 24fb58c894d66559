//! The sink: connects and registers grants.

use std::sync::Arc;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use tenure_model::{Epoch, Home};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    Capabilities, Enforcement, FenceRow, FencedSink, Fencing, Registered, Role, Scope, SinkError,
    Standing, Takeover, epoch_from_column,
};
use tokio_postgres::{Config, NoTls};

use crate::error::{classify, no_connection, transient};
use crate::session::{Raised, Session};
use crate::settings::PostgresSettings;
use crate::shared::Shared;
use crate::sql::Statements;
use crate::writer::PostgresWriter;

/// Sink over one PostgreSQL database. Cheap to clone; clones share one pool.
#[derive(Clone, Debug)]
pub struct PostgresSink {
    shared: Arc<Shared>,
}

impl PostgresSink {
    /// Connects without TLS. Call [`PostgresSink::migrate`] before the first grant.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a bad setting or a server that is a replica; [`SinkError::Transient`] when it is
    /// not reachable.
    pub async fn connect(config: Config, settings: PostgresSettings) -> Result<Self, SinkError> {
        let manager = Manager::from_config(config, NoTls, manager_config());
        Self::connect_with(manager, settings).await
    }

    /// Connects through a manager of one's own, for TLS.
    ///
    /// # Errors
    ///
    /// As [`PostgresSink::connect`].
    pub async fn connect_with(
        manager: Manager,
        settings: PostgresSettings,
    ) -> Result<Self, SinkError> {
        settings.validate()?;
        let pool = Pool::builder(manager)
            .max_size(settings.connections_max)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(settings.connect_timeout))
            .create_timeout(Some(settings.connect_timeout))
            .build()
            .map_err(|error| SinkError::Misconfigured(error.to_string()))?;
        let statements = Statements::new(&settings.table, settings.fencing());
        let sink = Self { shared: Arc::new(Shared { settings, statements, pool }) };
        let client = sink.shared.pool.get().await.map_err(no_connection)?;
        let row = client.query_one("SELECT pg_is_in_recovery()", &[]).await.map_err(classify)?;
        if row.try_get(0).map_err(classify)? {
            return Err(SinkError::Misconfigured(
                "the server is a replica: connect to the primary".into(),
            ));
        }
        Ok(sink)
    }

    /// Creates the fence table where there is none. May run any number of times.
    ///
    /// # Errors
    ///
    /// Any [`SinkError`].
    pub async fn migrate(&self) -> Result<(), SinkError> {
        let client = self.shared.pool.get().await.map_err(no_connection)?;
        match client.batch_execute(&self.shared.statements.migrate).await {
            Ok(()) => Ok(()),
            // IF NOT EXISTS does not see another session that creates the table at the same moment.
            Err(error) if is_created_twice(&error) => Ok(()),
            Err(error) => Err(classify(error)),
        }
    }

    /// The sink's pool: for tables of one's own and for reading.
    ///
    /// Writes of a partition belong into a [`PgTx`](crate::PgTx): nothing here is fenced.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// Writer beside the home, for a grant that the SDK has registered here. Registers nothing: each write compares the
    /// epoch, so that a grant that is not registered is refused.
    #[must_use]
    pub fn writer(&self, grant: &Grant) -> PostgresWriter {
        self.writer_as(grant, Role::Also, None)
    }

    fn writer_as(&self, grant: &Grant, role: Role, row: Option<FenceRow>) -> PostgresWriter {
        let standing = Standing::new(grant.epoch, role, self.shared.settings.fencing());
        PostgresWriter::new(Arc::clone(&self.shared), grant.clone(), standing, row)
    }

    /// The statement and, if it touched nothing, a look at the row, each in a transaction of its own. Answers the epoch
    /// that was displaced, and the row as read after the fence was in.
    async fn raise(&self, grant: &Grant) -> Result<(Option<Epoch>, Option<FenceRow>), SinkError> {
        let Shared { settings, statements, pool } = &*self.shared;
        let (register, read) = (&statements.register, &statements.read);
        let Raised { displaced, row } =
            Session::raise(pool, grant, settings.bounds(), register, read).await?;
        if let Some(displaced) = displaced {
            let displaced = displaced.map(epoch_from_column).transpose()?;
            return Ok((displaced, row.map(|(row, _)| row)));
        }
        let row = match row {
            Some(row) => Some(row),
            None => {
                let bounds = settings.bounds();
                Session::begin(pool, &grant.resource, grant.epoch, bounds, read).await?.1
            }
        };
        let (row, displaced) =
            row.ok_or_else(|| transient("the fence row was deleted while it was raised"))?;
        let mut standing = Standing::new(grant.epoch, Role::Home, settings.fencing());
        standing.registered(&row, grant.member.as_str())?;
        Ok((displaced, Some(row)))
    }
}

/// Defaults of the pool's connections. A connection that broke is found out by its first statement.
fn manager_config() -> ManagerConfig {
    ManagerConfig { recycling_method: RecyclingMethod::Fast }
}

fn is_created_twice(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|cause| {
        matches!(cause.code().code(), "42P07" | "42710")
            || (cause.code().code() == "23505" && cause.schema() == Some("pg_catalog"))
    })
}

impl FencedSink for PostgresSink {
    type Writer = PostgresWriter;

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
            takeover: Takeover::Bounded(self.shared.settings.bounds().idle),
        }
    }

    /// Opens one more connection where all are in use and the pool has room.
    async fn make_ready(&self) {
        let status = self.shared.pool.status();
        if status.available == 0
            && status.size < status.max_size
            && let Err(error) = self.shared.pool.get().await
        {
            tracing::debug!(sink = self.name(), %error, "no connection for a grant that is to come");
        }
    }

    /// A registration whose answer was lost is [`SinkError::Unknown`]; repeat it.
    async fn register(&self, grant: &Grant) -> Result<Registered<PostgresWriter>, SinkError> {
        let (displaced, row) = self.raise(grant).await?;
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = displaced.map(Epoch::get), "epoch registered");
        Ok(Registered { writer: self.writer_as(grant, Role::Home, row), displaced })
    }
}
