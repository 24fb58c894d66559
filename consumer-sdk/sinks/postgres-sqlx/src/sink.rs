//! The sink: takes the service's pool and registers grants.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, PgPool, Row};
use tenure_model::{Epoch, Home};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    Capabilities, Enforcement, FencedSink, Fencing, Registered, Role, Scope, SinkError, Standing,
    Takeover, epoch_from_column, epoch_to_column,
};
use tenure_sink_postgres::PostgresSettings;
use tenure_sink_postgres::sql::{self, Statements};

use crate::error::{classify, transient};
use crate::session::{Session, statement};
use crate::shared::Shared;
use crate::writer::SqlxWriter;

/// Sink over one PostgreSQL database by sqlx. Cheap to clone; clones share one pool.
#[derive(Clone, Debug)]
pub struct SqlxSink {
    shared: Arc<Shared>,
}

impl SqlxSink {
    /// Takes a pool of the service's own. Call [`SqlxSink::migrate`] before the first grant.
    ///
    /// An open transaction holds one connection, and a look after a lost answer another: give the pool at least one more
    /// than there are partitions written at a time. `connections_max` of the settings is not used.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a bad setting or a server that is a replica; [`SinkError::Transient`] when it is
    /// not reachable.
    pub async fn over(pool: PgPool, settings: PostgresSettings) -> Result<Self, SinkError> {
        settings.validate()?;
        let look = statement("SELECT pg_is_in_recovery()").fetch_one(&pool);
        let row = match tokio::time::timeout(settings.connect_timeout, look).await {
            Ok(row) => row.map_err(classify)?,
            Err(elapsed) => return Err(transient(elapsed)),
        };
        if row.try_get(0).map_err(classify)? {
            return Err(SinkError::Misconfigured(
                "the server is a replica: connect to the primary".into(),
            ));
        }
        let statements = Statements::new(&settings.table, settings.fencing());
        Ok(Self { shared: Arc::new(Shared { settings, statements, pool }) })
    }

    /// Creates the fence table where there is none. May run any number of times.
    ///
    /// # Errors
    ///
    /// Any [`SinkError`].
    pub async fn migrate(&self) -> Result<(), SinkError> {
        let create = AssertSqlSafe(self.shared.statements.migrate.clone());
        match sqlx::raw_sql(create).execute(&self.shared.pool).await {
            Ok(_) => Ok(()),
            // IF NOT EXISTS does not see another session that creates the table at the same moment.
            Err(error) if is_created_twice(&error) => Ok(()),
            Err(error) => Err(classify(error)),
        }
    }

    /// Writer beside the home, for a grant that the SDK has registered here. Registers nothing: each write compares the
    /// epoch, so that a grant that is not registered is refused.
    #[must_use]
    pub fn writer(&self, grant: &Grant) -> SqlxWriter {
        self.writer_as(grant, Role::Also)
    }

    fn writer_as(&self, grant: &Grant, role: Role) -> SqlxWriter {
        let standing = Standing::new(grant.epoch, role, self.shared.settings.fencing());
        SqlxWriter::new(Arc::clone(&self.shared), grant.clone(), standing)
    }

    /// The statement and, if it touched nothing, the look at the row, in one transaction of their own.
    async fn raise(&self, grant: &Grant) -> Result<Option<Epoch>, SinkError> {
        let Shared { settings, statements, .. } = &*self.shared;
        let holder = grant.member.to_string();
        let bounds = settings.bounds();
        let mut session = Session::open(&self.shared, &grant.resource, grant.epoch, bounds).await?;
        session.execute(statement(sql::DURABLE)).await?;
        let register = statement(&statements.register)
            .bind(grant.resource.to_string())
            .bind(epoch_to_column(grant.epoch))
            .bind(holder.clone());
        let displaced = match session.first(register).await? {
            Some(row) => {
                let displaced: Option<i64> = row.try_get(0).map_err(classify)?;
                displaced.map(epoch_from_column).transpose()?
            }
            None => {
                let (row, displaced) = session
                    .read(&statements.read, &grant.resource)
                    .await?
                    .ok_or_else(|| transient("the fence row was deleted while it was raised"))?;
                let mut standing = Standing::new(grant.epoch, Role::Home, settings.fencing());
                standing.registered(&row, &holder)?;
                displaced
            }
        };
        session.commit().await.map_err(|error| SinkError::Unknown(Box::new(error)))?;
        Ok(displaced)
    }
}

fn is_created_twice(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|cause| {
        matches!(cause.code().as_deref(), Some("42P07" | "42710"))
            || (cause.code().as_deref() == Some("23505")
                && cause.table().is_some_and(|table| table.starts_with("pg_")))
    })
}

impl FencedSink for SqlxSink {
    type Writer = SqlxWriter;

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

    /// A registration whose answer was lost is [`SinkError::Unknown`]; repeat it.
    async fn register(&self, grant: &Grant) -> Result<Registered<SqlxWriter>, SinkError> {
        let displaced = self.raise(grant).await?;
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = displaced.map(Epoch::get), "epoch registered");
        Ok(Registered { writer: self.writer_as(grant, Role::Home), displaced })
    }
}
