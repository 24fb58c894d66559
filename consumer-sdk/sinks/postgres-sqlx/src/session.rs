//! One connection with an open transaction, bounded in time.

use std::time::Duration;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgConnection, PgTransaction, Postgres, Row};
use tenure_model::Epoch;
use tenure_sdk::grant::Resource;
use tenure_sdk::sink::{FenceRow, SinkError, epoch_from_column};
use tenure_sink_postgres::{Bounds, sql};

use crate::error::{classify, transient};
use crate::shared::Shared;

/// What a call waits beyond the bound that the server keeps itself.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// A fence row and the epoch that its registration displaced.
pub(crate) type Read = Option<(FenceRow, Option<Epoch>)>;

/// Open transaction of sqlx's own, so that a `begin` of the caller's inside it is a savepoint. Dropped, it is rolled back
/// before the connection goes back to the pool.
#[derive(Debug)]
pub(crate) struct Session {
    transaction: PgTransaction<'static>,
    limit: Duration,
}

impl Session {
    /// Opens a transaction for a grant and reads its fence row with `read`.
    pub(crate) async fn begin(
        shared: &Shared,
        resource: &Resource,
        epoch: Epoch,
        bounds: Bounds,
        read: &str,
    ) -> Result<(Self, Read), SinkError> {
        let mut session = Self::open(shared, resource, epoch, bounds).await?;
        let row = session.read(read, resource).await?;
        Ok((session, row))
    }

    /// Opens a transaction for a grant.
    pub(crate) async fn open(
        shared: &Shared,
        resource: &Resource,
        epoch: Epoch,
        bounds: Bounds,
    ) -> Result<Self, SinkError> {
        let limit = bounds.statement + ANSWER_GRACE;
        let begin = shared.pool.begin_with(sql::BEGIN);
        let transaction = match tokio::time::timeout(shared.settings.connect_timeout, begin).await {
            Ok(result) => result.map_err(classify)?,
            Err(elapsed) => return Err(transient(elapsed)),
        };
        let mut session = Self { transaction, limit };
        let bound = statement(sql::BOUND)
            .bind(resource.to_string())
            .bind(epoch.get().to_string())
            .bind(bounds.statement.as_millis().to_string())
            .bind(bounds.idle.as_millis().to_string());
        session.execute(bound).await?;
        Ok(session)
    }

    pub(crate) fn connection(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }

    /// Runs one statement; answers how many rows it changed.
    pub(crate) async fn execute(
        &mut self,
        query: Query<'_, Postgres, PgArguments>,
    ) -> Result<u64, SinkError> {
        let limit = self.limit;
        Ok(bounded(limit, query.execute(self.connection())).await?.rows_affected())
    }

    /// Runs one query; answers its first row.
    pub(crate) async fn first(
        &mut self,
        query: Query<'_, Postgres, PgArguments>,
    ) -> Result<Option<PgRow>, SinkError> {
        let limit = self.limit;
        bounded(limit, query.fetch_optional(self.connection())).await
    }

    pub(crate) async fn read(&mut self, sql: &str, resource: &Resource) -> Result<Read, SinkError> {
        let query = statement(sql).bind(resource.to_string());
        self.first(query).await?.as_ref().map(decode).transpose()
    }

    /// Sends COMMIT. An error means: it may or may not have happened.
    pub(crate) async fn commit(self) -> Result<(), SinkError> {
        bounded(self.limit, self.transaction.commit()).await
    }
}

/// A statement of the sink's own. Not kept prepared by name: a pooler in transaction mode would lose it.
pub(crate) fn statement(sql: &str) -> Query<'static, Postgres, PgArguments> {
    // Texts of this sink, over a table whose name the settings have let through.
    sqlx::query(AssertSqlSafe(sql.to_owned())).persistent(false)
}

/// Waits for one answer; a server that does not keep its own bound is given up.
async fn bounded<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, SinkError> {
    match tokio::time::timeout(limit, call).await {
        Ok(result) => result.map_err(classify),
        Err(elapsed) => Err(transient(elapsed)),
    }
}

fn decode(row: &PgRow) -> Result<(FenceRow, Option<Epoch>), SinkError> {
    let differs =
        |error: sqlx::Error| SinkError::Misconfigured(format!("the fence table differs: {error}"));
    let fence = FenceRow::from_columns(
        row.try_get(0).map_err(differs)?,
        row.try_get(1).map_err(differs)?,
        row.try_get(2).map_err(differs)?,
        row.try_get(3).map_err(differs)?,
    )?;
    let displaced: Option<i64> = row.try_get(4).map_err(differs)?;
    Ok((fence, displaced.map(epoch_from_column).transpose()?))
}
