//! The sink: connects and registers grants.

use std::sync::Arc;

use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::{AssertSqlSafe, Executor, MySqlPool, Row};
use tenure_model::{Epoch, Home};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    Capabilities, Enforcement, FencedSink, Fencing, Registered, Role, Scope, SinkError, Standing,
    Takeover, epoch_to_column,
};

use crate::error::{DUPLICATE_KEY, classify, number, transient};
use crate::session::Session;
use crate::settings::{Flavour, MysqlSettings};
use crate::shared::Shared;
use crate::sql::{Literal, Statements, fill};
use crate::writer::MysqlWriter;

/// Longest resource, as the fence table has it.
const RESOURCE_BYTES_MAX: usize = 1024;

/// Registrations that lose a race for the first row look again this often.
const FIRST_ROW_TRIES: u32 = 3;

/// Sink over one MySQL or MariaDB database. Cheap to clone; clones share one pool.
#[derive(Clone, Debug)]
pub struct MysqlSink {
    shared: Arc<Shared>,
}

impl MysqlSink {
    /// Connects. Call [`MysqlSink::migrate`] before the first grant.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a bad setting, a read-only server or a fence table without transactions;
    /// [`SinkError::Transient`] when the server is not reachable.
    pub async fn connect(
        options: MySqlConnectOptions,
        settings: MysqlSettings,
    ) -> Result<Self, SinkError> {
        settings.validate()?;
        let pool = MySqlPoolOptions::new()
            .max_connections(settings.connections_max)
            .acquire_timeout(settings.connect_timeout)
            // Without it, a statement after one that ended the transaction would be committed alone, unfenced.
            .after_connect(|connection, _| {
                Box::pin(async move { connection.execute("SET autocommit = 0").await.map(drop) })
            })
            .connect_lazy_with(options);
        let flavour = look(&pool, settings.flavour).await?;
        let statements = Statements::new(&settings.table, settings.fencing());
        let sink = Self { shared: Arc::new(Shared { settings, statements, flavour, pool }) };
        sink.check_table().await?;
        Ok(sink)
    }

    /// Creates the fence table where there is none. May run any number of times.
    ///
    /// # Errors
    ///
    /// Any [`SinkError`].
    pub async fn migrate(&self) -> Result<(), SinkError> {
        let create = AssertSqlSafe(self.shared.statements.migrate.clone());
        sqlx::raw_sql(create).execute(&self.shared.pool).await.map_err(classify)?;
        self.check_table().await
    }

    /// Writer beside the home, for a grant that the SDK has registered here. Registers nothing: each write compares the
    /// epoch, so that a grant that is not registered is refused.
    #[must_use]
    pub fn writer(&self, grant: &Grant) -> MysqlWriter {
        self.writer_as(grant, Role::Also)
    }

    fn writer_as(&self, grant: &Grant, role: Role) -> MysqlWriter {
        let standing = Standing::new(grant.epoch, role, self.shared.settings.fencing());
        MysqlWriter::new(Arc::clone(&self.shared), grant.clone(), standing)
    }

    /// A table of another engine takes the statements and rolls nothing back.
    async fn check_table(&self) -> Result<(), SinkError> {
        let table = Literal::Text(&self.shared.settings.table);
        let query = fill(
            "SELECT engine FROM information_schema.tables WHERE table_schema = database() AND table_name = ?",
            &[table],
        );
        let mut connection = self.shared.pool.acquire().await.map_err(classify)?;
        let rows = sqlx::raw_sql(AssertSqlSafe(query)).fetch_all(&mut *connection).await;
        sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.map_err(classify)?;
        let rows = rows.map_err(classify)?;
        let Some(row) = rows.first() else { return Ok(()) };
        let engine: Option<String> = row.try_get(0).map_err(classify)?;
        match engine {
            Some(engine) if engine.eq_ignore_ascii_case("innodb") => Ok(()),
            other => Err(SinkError::Misconfigured(format!(
                "the fence table's engine is {other:?}: it must be InnoDB"
            ))),
        }
    }

    /// Locks the row, looks at it, and raises it, in one transaction of its own.
    async fn raise(&self, grant: &Grant) -> Result<Option<Epoch>, SinkError> {
        if grant.resource.as_str().len() > RESOURCE_BYTES_MAX {
            return Err(SinkError::Misconfigured(format!(
                "the resource's name has more than {RESOURCE_BYTES_MAX} bytes"
            )));
        }
        for _ in 0..FIRST_ROW_TRIES {
            if let Some(displaced) = self.raise_once(grant).await? {
                return Ok(displaced);
            }
        }
        Err(transient("the fence row appears and disappears"))
    }

    /// Nothing: another registration made the first row at the same moment.
    async fn raise_once(&self, grant: &Grant) -> Result<Option<Option<Epoch>>, SinkError> {
        let Shared { settings, statements, .. } = &*self.shared;
        let holder = grant.member.to_string();
        let (mut session, found) =
            Session::begin(&self.shared, &grant.resource, settings.bounds(), &statements.lock)
                .await?;
        let resource = Literal::Text(grant.resource.as_str());
        let epoch = Literal::Number(epoch_to_column(grant.epoch));
        let by = Literal::Text(&holder);
        let displaced = match found {
            None => {
                match session.run(fill(&statements.register, &[resource, epoch, by])).await {
                    Err(error) if number(&error) == Some(DUPLICATE_KEY) => return Ok(None),
                    result => result.map_err(classify)?,
                };
                None
            }
            Some((row, _)) if row.epoch < grant.epoch && settings.fencing() == Fencing::On => {
                let lower = Literal::Number(epoch_to_column(row.epoch));
                let raise = fill(&statements.raise, &[lower, epoch, by, resource]);
                session.run(raise).await.map_err(classify)?;
                Some(row.epoch)
            }
            Some((row, displaced)) => {
                let mut standing = Standing::new(grant.epoch, Role::Home, settings.fencing());
                standing.registered(&row, &holder)?;
                displaced
            }
        };
        session.commit().await.map_err(|error| SinkError::Unknown(Box::new(error)))?;
        Ok(Some(displaced))
    }
}

/// Looks at the server once: what it is, and whether it takes writes and keeps them.
async fn look(pool: &MySqlPool, flavour: Flavour) -> Result<Flavour, SinkError> {
    const LOOK: &str = "\
SELECT version(), CAST(@@global.read_only AS SIGNED), CAST(@@global.innodb_flush_log_at_trx_commit AS SIGNED)";

    let mut connection = pool.acquire().await.map_err(classify)?;
    let row = sqlx::raw_sql(LOOK).fetch_one(&mut *connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.map_err(classify)?;
    let row = row.map_err(classify)?;
    let column = |index| row.try_get::<i64, usize>(index).map_err(classify);
    let version: String = row.try_get(0).map_err(classify)?;
    if column(1)? != 0 {
        return Err(SinkError::Misconfigured(
            "the server is read-only, as a replica is: connect to the primary".into(),
        ));
    }
    if column(2)? != 1 {
        tracing::warn!(
            version,
            "innodb_flush_log_at_trx_commit is not 1: a power cut may take a registration with it"
        );
    }
    Ok(match flavour {
        Flavour::Detect if version.to_ascii_lowercase().contains("mariadb") => Flavour::MariaDb,
        Flavour::Detect => Flavour::MySql,
        named @ (Flavour::MariaDb | Flavour::MySql) => named,
    })
}

impl FencedSink for MysqlSink {
    type Writer = MysqlWriter;

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
    async fn register(&self, grant: &Grant) -> Result<Registered<MysqlWriter>, SinkError> {
        let displaced = self.raise(grant).await?;
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = displaced.map(Epoch::get), "epoch registered");
        Ok(Registered { writer: self.writer_as(grant, Role::Home), displaced })
    }
}
