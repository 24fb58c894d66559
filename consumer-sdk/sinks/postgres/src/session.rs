//! One connection with an open transaction, bounded in time.

use std::time::Duration;

use deadpool_postgres::{Client, Object, Pool};
use tenure_model::Epoch;
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{FenceRow, SinkError, epoch_from_column, epoch_to_column};
use tokio_postgres::types::{ToSql, Type};

use crate::error::{classify, no_connection, transient};
use crate::settings::Bounds;
use crate::sql;

/// What a call waits beyond the bound that the server keeps itself.
const ANSWER_GRACE: Duration = Duration::from_secs(1);

/// Longest wait for a rollback; after it the connection is closed, which the server takes as one.
const ROLLBACK_MAX: Duration = Duration::from_secs(2);

/// A fence row and the epoch that its registration displaced.
pub(crate) type Read = Option<(FenceRow, Option<Epoch>)>;

/// What became of a registration.
pub(crate) struct Raised {
    /// The epoch that it displaced, if any; nothing when the fence was as high already.
    pub(crate) displaced: Option<Option<i64>>,
    /// The fence's row after it.
    pub(crate) row: Read,
}

/// Open transaction. Dropped, it is rolled back before the connection goes back to the pool.
pub(crate) struct Session {
    client: Option<Client>,
    limit: Duration,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl Session {
    /// Opens a transaction for a grant and reads its fence row with `read`.
    ///
    /// The three statements go out together: none of them writes, and their answers are read before anything else goes.
    pub(crate) async fn begin(
        pool: &Pool,
        resource: &Resource,
        epoch: Epoch,
        bounds: Bounds,
        read: &str,
    ) -> Result<(Self, Read), SinkError> {
        let (session, settings) = Self::over(pool, resource, epoch, bounds).await?;
        let settings = typed_texts(&settings);
        let client = session.client();
        let (opened, bounded, row) = tokio::join!(
            session.bounded(client.batch_execute(sql::BEGIN)),
            session.bounded(client.query_typed(sql::BOUND, &settings)),
            session.read(read, resource),
        );
        opened?;
        bounded?;
        let row = row?;
        Ok((session, row))
    }

    /// Raises a fence with `register`, in a transaction of its own, and reads its row with `read`, in a statement of its
    /// own after that.
    ///
    /// All of it goes out together: nothing after the registration depends on its count, since without a row there is
    /// nothing to commit, and after an error COMMIT rolls back. The server takes the read up after it has answered
    /// COMMIT, with a snapshot of that moment, so that it sees everything that an earlier owner got in. An answer to
    /// COMMIT that did not come is [`SinkError::Unknown`].
    pub(crate) async fn raise(
        pool: &Pool,
        grant: &Grant,
        bounds: Bounds,
        register: &str,
        read: &str,
    ) -> Result<Raised, SinkError> {
        let (session, settings) = Self::over(pool, &grant.resource, grant.epoch, bounds).await?;
        let settings = typed_texts(&settings);
        let (resource, epoch) = (grant.resource.as_str(), epoch_to_column(grant.epoch));
        let holder = grant.member.as_str();
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&resource, Type::TEXT), (&epoch, Type::INT8), (&holder, Type::TEXT)];
        let client = session.client();
        let (opened, bounded, durable, raised, committed, row) = tokio::join!(
            session.bounded(client.batch_execute(sql::BEGIN)),
            session.bounded(client.query_typed(sql::BOUND, &settings)),
            session.bounded(client.batch_execute(sql::DURABLE)),
            session.bounded(client.query_typed(register, &parameters)),
            session.bounded(client.batch_execute("COMMIT")),
            session.read(read, &grant.resource),
        );
        // A statement that was not answered may still be under way on the connection.
        match (&committed, &row) {
            (Ok(()), Ok(_)) => session.keep(),
            (Err(_), _) | (_, Err(_)) => session.close(),
        }
        committed.map_err(|error| SinkError::Unknown(Box::new(error)))?;
        opened?;
        bounded?;
        durable?;
        let displaced = raised?.pop();
        let displaced = displaced.map(|row| row.try_get(0).map_err(classify)).transpose()?;
        // Without it, the resume point is read when it is asked for.
        Ok(Raised { displaced, row: row.ok().flatten() })
    }

    async fn over(
        pool: &Pool,
        resource: &Resource,
        epoch: Epoch,
        bounds: Bounds,
    ) -> Result<(Self, [String; 4]), SinkError> {
        let client = pool.get().await.map_err(no_connection)?;
        let session = Self { client: Some(client), limit: bounds.statement + ANSWER_GRACE };
        let settings = [
            resource.as_str().to_owned(),
            epoch.get().to_string(),
            bounds.statement.as_millis().to_string(),
            bounds.idle.as_millis().to_string(),
        ];
        Ok((session, settings))
    }

    /// Ends without a word to the server: the transaction has ended there.
    fn keep(mut self) {
        drop(self.client.take());
    }

    /// Closes the connection.
    fn close(mut self) {
        drop(Closing(self.client.take()));
    }

    pub(crate) fn client(&self) -> &Client {
        self.client.as_ref().expect("taken only by commit and drop, which end the session")
    }

    /// Waits for one answer; a server that does not keep its own bound is given up.
    pub(crate) async fn bounded<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, SinkError> {
        match tokio::time::timeout(self.limit, call).await {
            Ok(result) => result.map_err(classify),
            Err(elapsed) => Err(transient(elapsed)),
        }
    }

    pub(crate) async fn read(&self, sql: &str, resource: &Resource) -> Result<Read, SinkError> {
        let name = resource.as_str();
        let parameters: [(&(dyn ToSql + Sync), Type); 1] = [(&name, Type::TEXT)];
        let query = self.client().query_typed(sql, &parameters);
        let Some(row) = self.bounded(query).await?.pop() else { return Ok(None) };
        let columns = || -> Result<_, tokio_postgres::Error> {
            Ok((
                row.try_get(0)?,
                row.try_get(1)?,
                row.try_get(2)?,
                row.try_get(3)?,
                row.try_get(4)?,
            ))
        };
        let (epoch, holder, next_offset, sequence, displaced) = columns().map_err(|error| {
            SinkError::Misconfigured(format!("the fence table differs: {error}"))
        })?;
        let row = FenceRow::from_columns(epoch, holder, next_offset, sequence)?;
        let displaced: Option<i64> = displaced;
        Ok(Some((row, displaced.map(epoch_from_column).transpose()?)))
    }

    /// Sends COMMIT. An error means: it may or may not have happened; the connection is closed.
    pub(crate) async fn commit(mut self) -> Result<(), SinkError> {
        let client = self.client.take().expect("a session has a client until it ends");
        let closing = Closing(Some(client));
        let answer = self.bounded(closing.client().batch_execute("COMMIT")).await;
        if answer.is_ok() {
            closing.keep();
        }
        answer
    }
}

fn typed_texts(texts: &[String]) -> Vec<(&(dyn ToSql + Sync), Type)> {
    texts.iter().map(|text| (text as &(dyn ToSql + Sync), Type::TEXT)).collect()
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(client) = self.client.take() else { return };
        let closing = Closing(Some(client));
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        drop(runtime.spawn(async move {
            let rollback = closing.client().batch_execute("ROLLBACK");
            if let Ok(Ok(())) = tokio::time::timeout(ROLLBACK_MAX, rollback).await {
                closing.keep();
            }
        }));
    }
}

/// Connection that is closed unless it is kept, so that none goes back to the pool inside a transaction.
struct Closing(Option<Client>);

impl Closing {
    fn client(&self) -> &Client {
        self.0.as_ref().expect("taken only by keep and drop, which end it")
    }

    fn keep(mut self) {
        drop(self.0.take());
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            drop(Object::take(client));
        }
    }
}
