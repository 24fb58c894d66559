//! Fences of a receiving service in its PostgreSQL.

use std::time::Duration;

use bytes::Bytes;
use deadpool_postgres::Pool;
use futures::future::BoxFuture;
use tenure_model::{Epoch, NextOffset};
use tokio_postgres::error::Error;
use tokio_postgres::{Row, Transaction};

use crate::fence::{Answer, Change, Fence, FenceStore, Found, Raised};
use crate::refusal::Refusal;

/// Creates both tables; does nothing where they are.
pub const MIGRATE: &str = "\
CREATE TABLE IF NOT EXISTS tenure_http_fence (
    resource    text   NOT NULL PRIMARY KEY,
    epoch       bigint NOT NULL CHECK (epoch > 0),
    holder      text   NOT NULL,
    next_offset bigint CHECK (next_offset >= 0),
    sequence    bigint NOT NULL DEFAULT 0,
    displaced   bigint
) WITH (fillfactor = 50);
CREATE TABLE IF NOT EXISTS tenure_http_answer (
    resource text        NOT NULL,
    key      text        NOT NULL,
    status   int         NOT NULL,
    body     bytea       NOT NULL,
    kept_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (resource, key)
)";

const BOUND: &str = "SELECT set_config('idle_in_transaction_session_timeout', $1, true)";

/// `FOR KEY SHARE` would not exclude a registration, `FOR SHARE` would starve it.
const LOCK: &str = "\
SELECT epoch, holder, next_offset, sequence, displaced FROM tenure_http_fence WHERE resource = $1
FOR NO KEY UPDATE";

const RAISE: &str = "\
INSERT INTO tenure_http_fence AS fence (resource, epoch, holder) VALUES ($1, $2, $3)
ON CONFLICT (resource) DO UPDATE
    SET displaced = fence.epoch, epoch = excluded.epoch, holder = excluded.holder
    WHERE fence.epoch < excluded.epoch
RETURNING displaced";

const STORE: &str = "\
UPDATE tenure_http_fence SET next_offset = $3, sequence = $4 WHERE resource = $1 AND epoch = $2";

const RECALL: &str = "SELECT status, body FROM tenure_http_answer WHERE resource = $1 AND key = $2";

const KEEP: &str = "\
INSERT INTO tenure_http_answer (resource, key, status, body) VALUES ($1, $2, $3, $4)
ON CONFLICT (resource, key) DO UPDATE SET status = excluded.status, body = excluded.body";

const FORGET: &str =
    "DELETE FROM tenure_http_answer WHERE kept_at < now() - make_interval(secs => $1)";

const DURABLE: &str = "\
SELECT set_config('synchronous_commit', 'on', true)
WHERE current_setting('synchronous_commit') = 'off'";

/// Fences in the tables of [`MIGRATE`], in the database of the service's effects. Clones share the pool.
///
/// A handler opens a transaction of `tokio_postgres`, READ COMMITTED, and hands it to [`Claim::admit`](crate::Claim).
#[derive(Clone, Debug)]
pub struct PostgresFences {
    pool: Pool,
    idle_in_transaction_timeout: Duration,
}

impl PostgresFences {
    /// Longest pause between two statements of a handler's transaction, unless said otherwise.
    pub const IDLE_IN_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(3);

    /// Store over a pool, which the registration calls take their connections from.
    #[must_use]
    pub const fn new(pool: Pool) -> Self {
        Self { pool, idle_in_transaction_timeout: Self::IDLE_IN_TRANSACTION_TIMEOUT }
    }

    /// Sets the longest pause between two statements of a handler's transaction, at least 1 ms; the server then ends it.
    /// It bounds how long a handler that stands still delays the next owner. Default 3 s.
    #[must_use]
    pub fn idle_in_transaction_timeout(mut self, longest: Duration) -> Self {
        self.idle_in_transaction_timeout = longest.max(Duration::from_millis(1));
        self
    }

    /// Creates the tables where there are none.
    ///
    /// # Errors
    ///
    /// [`Refusal::Unavailable`].
    pub async fn migrate(&self) -> Result<(), Refusal> {
        let client = self.pool.get().await.map_err(Refusal::unavailable)?;
        client.batch_execute(MIGRATE).await.map_err(|error| before_commit(&error))
    }

    /// Forgets answers that were kept longer ago than `age`, and answers how many. A replay of their requests does the
    /// effect again: keep them longer than a record may take to be read again.
    ///
    /// # Errors
    ///
    /// [`Refusal::Unavailable`].
    pub async fn forget_answers(&self, age: Duration) -> Result<u64, Refusal> {
        let client = self.pool.get().await.map_err(Refusal::unavailable)?;
        let forgotten = client.execute(FORGET, &[&age.as_secs_f64()]).await;
        forgotten.map_err(|error| before_commit(&error))
    }

    /// What an error before COMMIT means: nothing was written.
    #[must_use]
    pub fn before_commit(error: &Error) -> Refusal {
        before_commit(error)
    }

    /// What an error in answer to COMMIT means: certain only if the server itself refused.
    #[must_use]
    pub fn at_commit(error: &Error) -> Refusal {
        match error.code().map(|code| code.code().get(..2).unwrap_or_default()) {
            None | Some("08" | "57" | "58") => Refusal::in_doubt(describe(error)),
            Some(_) => before_commit(error),
        }
    }
}

fn before_commit(error: &Error) -> Refusal {
    Refusal::unavailable(describe(error))
}

fn describe(error: &Error) -> String {
    match error.as_db_error() {
        Some(cause) => format!("{} ({})", cause.message(), cause.code().code()),
        None => error.to_string(),
    }
}

fn damaged(error: impl std::fmt::Display) -> Refusal {
    Refusal::unavailable(format!("the fence row is damaged: {error}"))
}

fn epoch(value: i64) -> Result<Epoch, Refusal> {
    Epoch::new(u64::try_from(value).map_err(damaged)?).map_err(damaged)
}

fn fence(row: &Row) -> Result<Fence, Refusal> {
    let (next_offset, displaced): (Option<i64>, Option<i64>) =
        (row.try_get(2).map_err(damaged)?, row.try_get(4).map_err(damaged)?);
    let sequence: i64 = row.try_get(3).map_err(damaged)?;
    Ok(Fence {
        epoch: epoch(row.try_get(0).map_err(damaged)?)?,
        holder: row.try_get(1).map_err(damaged)?,
        next_offset: next_offset.map(NextOffset::from_signed).transpose().map_err(damaged)?,
        sequence: u64::try_from(sequence).map_err(damaged)?,
        displaced: displaced.map(epoch).transpose()?,
    })
}

impl FenceStore for PostgresFences {
    type Transaction<'t> = Transaction<'t>;

    fn lock<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_>,
        resource: &'a str,
    ) -> BoxFuture<'a, Result<Option<Fence>, Refusal>> {
        Box::pin(async move {
            let idle = self.idle_in_transaction_timeout.as_millis().to_string();
            let bounded = transaction.query_opt(BOUND, &[&idle]).await;
            bounded.map_err(|error| before_commit(&error))?;
            let row = transaction.query_opt(LOCK, &[&resource]).await;
            row.map_err(|error| before_commit(&error))?.as_ref().map(fence).transpose()
        })
    }

    fn raise<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_>,
        resource: &'a str,
        epoch_: Epoch,
        holder: &'a str,
    ) -> BoxFuture<'a, Result<Raised, Refusal>> {
        Box::pin(async move {
            let durable = transaction.query_opt(DURABLE, &[]).await;
            durable.map_err(|error| before_commit(&error))?;
            let value = epoch_.get().cast_signed();
            let row = transaction.query_opt(RAISE, &[&resource, &value, &holder]).await;
            let Some(row) = row.map_err(|error| before_commit(&error))? else {
                return Ok(Raised::AlreadyAsHigh);
            };
            let displaced: Option<i64> = row.try_get(0).map_err(damaged)?;
            Ok(Raised::Done { displaced: displaced.map(epoch).transpose()? })
        })
    }

    fn store<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_>,
        resource: &'a str,
        fence: &'a Fence,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let next_offset = fence.next_offset.map(NextOffset::signed);
            let (epoch, sequence) = (fence.epoch.get().cast_signed(), fence.sequence.cast_signed());
            let stored =
                transaction.execute(STORE, &[&resource, &epoch, &next_offset, &sequence]).await;
            match stored.map_err(|error| before_commit(&error))? {
                1 => Ok(()),
                rows => Err(Refusal::unavailable(format!(
                    "the fence's update touched {rows} rows under the lock: a trigger?"
                ))),
            }
        })
    }

    fn recall<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_>,
        resource: &'a str,
        key: &'a str,
    ) -> BoxFuture<'a, Result<Option<Answer>, Refusal>> {
        Box::pin(async move {
            let row = transaction.query_opt(RECALL, &[&resource, &key]).await;
            let Some(row) = row.map_err(|error| before_commit(&error))? else { return Ok(None) };
            let status: i32 = row.try_get(0).map_err(damaged)?;
            let body: Vec<u8> = row.try_get(1).map_err(damaged)?;
            let status = u16::try_from(status).map_err(damaged)?;
            Ok(Some(Answer { status, body: Bytes::from(body) }))
        })
    }

    fn keep<'a>(
        &'a self,
        transaction: &'a mut Transaction<'_>,
        resource: &'a str,
        key: &'a str,
        answer: &'a Answer,
    ) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let status = i32::from(answer.status);
            let kept =
                transaction.execute(KEEP, &[&resource, &key, &status, &&answer.body[..]]).await;
            kept.map(drop).map_err(|error| before_commit(&error))
        })
    }

    fn alone(&self, change: Change) -> BoxFuture<'static, Result<Found, Refusal>> {
        let store = self.clone();
        Box::pin(async move {
            let mut client = store.pool.get().await.map_err(Refusal::unavailable)?;
            let client: &mut tokio_postgres::Client = &mut client;
            let opened = client.build_transaction();
            let opened = opened.isolation_level(tokio_postgres::IsolationLevel::ReadCommitted);
            let mut transaction = opened.start().await.map_err(|error| before_commit(&error))?;
            let found = change.apply(&store, &mut transaction).await?;
            transaction.commit().await.map_err(|error| Self::at_commit(&error))?;
            Ok(found)
        })
    }
}
