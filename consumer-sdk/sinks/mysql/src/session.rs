//! One connection with an open transaction, bounded in time.

use std::time::Duration;

use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::pool::PoolConnection;
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Executor, MySql, MySqlConnection, Row};
use tenure_model::Epoch;
use tenure_sdk::grant::Resource;
use tenure_sdk::sink::{FenceRow, SinkError, epoch_from_column};

use crate::error::{classify, transient};
use crate::settings::{Bounds, Flavour};
use crate::shared::Shared;
use crate::sql::{self, Literal, fill};

/// What a call waits beyond the bound that the server keeps itself.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// Longest wait for a rollback; after it the connection is closed, which the server takes as one.
const ROLLBACK_MAX: Duration = Duration::from_secs(2);

/// Undoes the `wait_timeout` that stands in for a bound inside the transaction.
const RESTORE: &str = "SET SESSION wait_timeout = DEFAULT";

/// A fence row and the epoch that its registration displaced.
pub(crate) type Read = Option<(FenceRow, Option<Epoch>)>;

/// Open transaction. Dropped, it is rolled back before the connection goes back to the pool.
pub(crate) struct Session {
    connection: Option<PoolConnection<MySql>>,
    limit: Duration,
    flavour: Flavour,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl Session {
    /// Opens a transaction and reads the fence row of `resource` with `read`.
    ///
    /// The statements go out in one piece: none of them writes, and the row is read before anything else goes.
    pub(crate) async fn begin(
        shared: &Shared,
        resource: &Resource,
        bounds: Bounds,
        read: &str,
    ) -> Result<(Self, Read), SinkError> {
        let connection = shared.pool.acquire().await.map_err(classify)?;
        let limit = bounds.statement + ANSWER_GRACE;
        let mut session = Self { connection: Some(connection), limit, flavour: shared.flavour };
        let opening = format!(
            "{}; {}; {}",
            limits(shared.flavour, bounds),
            sql::OPEN,
            fill(read, &[Literal::Text(resource.as_str())])
        );
        let rows = session.rows(opening).await?;
        let row = rows.last().map(decode).transpose()?;
        Ok((session, row))
    }

    /// Reads the fence row again.
    pub(crate) async fn read(
        &mut self,
        read: &str,
        resource: &Resource,
    ) -> Result<Read, SinkError> {
        let rows = self.rows(fill(read, &[Literal::Text(resource.as_str())])).await?;
        rows.last().map(decode).transpose()
    }

    pub(crate) fn connection(&mut self) -> &mut MySqlConnection {
        self.connection.as_mut().expect("taken only by commit and drop, which end the session")
    }

    /// Runs statements of the sink's own; answers how many rows they changed.
    pub(crate) async fn run(&mut self, statements: String) -> Result<u64, sqlx::Error> {
        let limit = self.limit;
        let call = sqlx::raw_sql(AssertSqlSafe(statements)).execute(self.connection());
        Ok(bounded(limit, call).await?.rows_affected())
    }

    /// Runs one statement of the caller's.
    pub(crate) async fn execute(
        &mut self,
        query: Query<'_, MySql, MySqlArguments>,
    ) -> Result<u64, SinkError> {
        let limit = self.limit;
        let call = self.connection().execute(query);
        Ok(bounded(limit, call).await.map_err(classify)?.rows_affected())
    }

    /// Runs one query of the caller's.
    pub(crate) async fn fetch_all(
        &mut self,
        query: Query<'_, MySql, MySqlArguments>,
    ) -> Result<Vec<MySqlRow>, SinkError> {
        let limit = self.limit;
        bounded(limit, self.connection().fetch_all(query)).await.map_err(classify)
    }

    async fn rows(&mut self, statements: String) -> Result<Vec<MySqlRow>, SinkError> {
        let limit = self.limit;
        let call = sqlx::raw_sql(AssertSqlSafe(statements)).fetch_all(self.connection());
        bounded(limit, call).await.map_err(classify)
    }

    /// Sends COMMIT. An error means: it may or may not have happened; the connection is closed.
    pub(crate) async fn commit(mut self) -> Result<(), SinkError> {
        let connection = self.connection.take().expect("a session has a connection until it ends");
        let mut closing = Closing(Some(connection));
        let call = sqlx::raw_sql("COMMIT").execute(closing.connection());
        bounded(self.limit, call).await.map_err(classify)?;
        match self.flavour {
            Flavour::Detect | Flavour::MariaDb => closing.keep(),
            Flavour::MySql => closing.end_with(RESTORE.to_owned()),
        }
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        let closing = Closing(Some(connection));
        closing.end_with(match self.flavour {
            Flavour::Detect | Flavour::MariaDb => "ROLLBACK".to_owned(),
            Flavour::MySql => format!("ROLLBACK; {RESTORE}"),
        });
    }
}

/// Waits for one answer; a server that does not keep its own bound is given up.
pub(crate) async fn bounded<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match tokio::time::timeout(limit, call).await {
        Ok(result) => result,
        Err(elapsed) => Err(sqlx::Error::Io(elapsed.into())),
    }
}

fn limits(flavour: Flavour, Bounds { statement, idle }: Bounds) -> String {
    let (statement, idle) = (statement.as_secs(), idle.as_secs());
    let more = match flavour {
        Flavour::Detect | Flavour::MariaDb => format!(
            "@@SESSION.idle_transaction_timeout = {idle}, @@SESSION.max_statement_time = {statement}"
        ),
        Flavour::MySql => format!("@@SESSION.wait_timeout = {idle}"),
    };
    format!("SET @@SESSION.innodb_lock_wait_timeout = {statement}, {more}")
}

fn decode(row: &MySqlRow) -> Result<(FenceRow, Option<Epoch>), SinkError> {
    let differs =
        |error: sqlx::Error| SinkError::Misconfigured(format!("the fence table differs: {error}"));
    let holder: Vec<u8> = row.try_get(1).map_err(differs)?;
    let fence = FenceRow::from_columns(
        row.try_get(0).map_err(differs)?,
        String::from_utf8_lossy(&holder).into_owned(),
        row.try_get(2).map_err(differs)?,
        row.try_get(3).map_err(differs)?,
    )?;
    let displaced: Option<i64> = row.try_get(4).map_err(differs)?;
    Ok((fence, displaced.map(epoch_from_column).transpose()?))
}

/// Connection that is closed unless it is kept, so that none goes back to the pool inside a transaction.
struct Closing(Option<PoolConnection<MySql>>);

impl Closing {
    fn connection(&mut self) -> &mut MySqlConnection {
        self.0.as_mut().expect("taken only by keep and drop, which end it")
    }

    fn keep(mut self) {
        drop(self.0.take());
    }

    /// Gives the connection back after `statements`, in the background.
    fn end_with(mut self, statements: String) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        drop(runtime.spawn(async move {
            let call = sqlx::raw_sql(AssertSqlSafe(statements)).execute(self.connection());
            match bounded(ROLLBACK_MAX, call).await {
                Ok(_) => self.keep(),
                Err(error) => {
                    let error: SinkError = transient(error);
                    tracing::debug!(%error, "connection closed: its transaction could not be ended");
                }
            }
        }));
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(connection.detach());
        }
    }
}
