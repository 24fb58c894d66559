//! Writes of one grant.

use std::sync::Arc;

use rusqlite::Connection;
use tenure_model::NextOffset;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    FenceRow, FencedWriter, Resolved, SinkError, Standing, Verified, epoch_to_column, look_up,
};

use crate::connection::{Held, Shared, Urgency, begin, read};
use crate::error::classify;

/// Writer of one grant.
#[derive(Debug)]
pub struct SqliteWriter {
    shared: Arc<Shared>,
    grant: Grant,
    standing: Standing,
}

impl SqliteWriter {
    pub(crate) const fn new(shared: Arc<Shared>, grant: Grant, standing: Standing) -> Self {
        Self { shared, grant, standing }
    }

    /// Opens a transaction that holds the file's write lock and has compared epoch and offset.
    ///
    /// While it is open no other process and no other grant writes to the file: keep it short.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`], [`SinkError::Fenced`], [`SinkError::OffsetConflict`], [`SinkError::Unknown`] while an
    /// earlier write is not resolved, [`SinkError::Transient`] when the lock was not free in time; any other.
    pub async fn begin(&mut self) -> Result<SqliteTx<'_>, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let held = self.shared.hold().await?;
        let (shared, resource) = (Arc::clone(&self.shared), self.grant.resource.clone());
        let (held, row) = held
            .run(move |connection| {
                begin(connection, shared.settings.busy_timeout, Urgency::Write)?;
                read(connection, &shared.statements.read, resource.as_str())
            })
            .await;
        let row = self.standing.admit(row?.map(|(row, _)| row))?;
        Ok(SqliteTx { writer: self, held, row })
    }

    async fn row(&self) -> Result<Option<FenceRow>, SinkError> {
        let held = self.shared.hold().await?;
        let (shared, resource) = (Arc::clone(&self.shared), self.grant.resource.clone());
        let (_released, row) = held
            .run(move |connection| read(connection, &shared.statements.read, resource.as_str()))
            .await;
        Ok(row?.map(|(row, _)| row))
    }
}

impl FencedWriter for SqliteWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.standing.check()?;
        let row = self.row().await?;
        self.standing.resume(row.as_ref(), verified)
    }

    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let held = self.shared.hold().await?;
        let (shared, resource) = (Arc::clone(&self.shared), self.grant.resource.clone());
        let epoch = epoch_to_column(self.standing.epoch());
        let (_released, row) = held
            .run(move |connection| {
                begin(connection, shared.settings.busy_timeout, Urgency::Write)?;
                let parameters = (resource.as_str(), epoch, start.signed());
                // No row changed: the offset is there already, or the read below finds out why not.
                let _changed = connection
                    .execute(&shared.statements.initialise, parameters)
                    .map_err(classify)?;
                let row = read(connection, &shared.statements.read, resource.as_str())?;
                connection.execute_batch("COMMIT").map_err(classify)?;
                Ok(row)
            })
            .await;
        let row = row?.map(|(row, _)| row);
        self.standing.initialised(row.as_ref())
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        // The connection is free only after the write in doubt has ended, one way or the other.
        let row = self.row().await.map_err(|error| SinkError::Unknown(Box::new(error)))?;
        self.standing.resolve(row.as_ref())
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Open transaction of one grant. Dropped without a commit, it is rolled back.
#[derive(Debug)]
pub struct SqliteTx<'w> {
    writer: &'w mut SqliteWriter,
    held: Option<Held>,
    row: FenceRow,
}

impl SqliteTx<'_> {
    /// The first offset that is not in yet, read under the fence: records below it are a replay and are skipped.
    ///
    /// Nothing before the first commit, and nothing without fencing.
    #[must_use]
    pub fn applied(&self) -> Option<NextOffset> {
        self.writer.standing.applied(&self.row)
    }

    /// Does `work` inside the transaction, on a thread that may block. It must not end the transaction itself.
    ///
    /// # Errors
    ///
    /// [`SinkError::Rejected`] for data that a constraint or a type refuses; [`SinkError::Misconfigured`] for a missing
    /// table; any other. Nothing is written unless the commit succeeds.
    pub async fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, SinkError> {
        self.run_checked(move |connection| work(connection).map_err(classify)).await
    }

    /// Runs one statement; answers how many rows it changed.
    ///
    /// # Errors
    ///
    /// As [`SqliteTx::run`].
    pub async fn execute<P>(
        &mut self,
        sql: impl Into<String>,
        parameters: P,
    ) -> Result<usize, SinkError>
    where
        P: rusqlite::Params + Send + 'static,
    {
        let sql = sql.into();
        self.run(move |connection| connection.prepare_cached(&sql)?.execute(parameters)).await
    }

    /// Moves the offset to `next` and commits, data and offset in one step. A lost answer is looked up.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Unknown`] when it could not be looked up either; any other: nothing was
    /// written.
    pub async fn commit(mut self, next: NextOffset) -> Result<(), SinkError> {
        let target = self.writer.standing.target(&self.row, next)?;
        self.writer.grant.lease.check()?;
        let (shared, resource) =
            (Arc::clone(&self.writer.shared), self.writer.grant.resource.clone());
        let epoch = epoch_to_column(self.writer.standing.epoch());
        let sequence = i64::try_from(self.row.sequence)
            .map_err(|error| SinkError::Misconfigured(error.to_string()))?;
        self.run_checked(move |connection| {
            let parameters = (resource.as_str(), epoch, sequence, target.signed());
            match connection
                .prepare_cached(&shared.statements.commit)
                .map_err(classify)?
                .execute(parameters)
            {
                Ok(1) => Ok(()),
                Ok(rows) => Err(SinkError::Misconfigured(format!(
                    "the offset's update touched {rows} rows under the lock: a trigger?"
                ))),
                Err(error) => Err(classify(error)),
            }
        })
        .await?;
        let held = self.held.take().ok_or_else(cancelled)?;
        self.writer.standing.sent(&self.row, target);
        let (held, result) =
            held.run(|connection| connection.execute_batch("COMMIT").map_err(classify)).await;
        let failure = match result {
            Ok(()) => {
                self.writer.standing.landed(target);
                return Ok(());
            }
            Err(failure) => failure,
        };
        // A failed COMMIT leaves the transaction open or has ended it: after the rollback the row tells.
        drop(held);
        look_up(self.writer, failure).await
    }

    /// Gives the transaction up.
    pub fn roll_back(self) {}

    async fn run_checked<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Connection) -> Result<T, SinkError> + Send + 'static,
    ) -> Result<T, SinkError> {
        let held = self.held.take().ok_or_else(cancelled)?;
        let (held, result) = held
            .run(move |connection| {
                // Outside the transaction a statement would commit by itself, without the fence.
                check_open(connection)?;
                let value = work(connection)?;
                check_open(connection)?;
                Ok(value)
            })
            .await;
        self.held = held;
        result
    }
}

fn check_open(connection: &Connection) -> Result<(), SinkError> {
    if connection.is_autocommit() {
        return Err(SinkError::Misconfigured(
            "the transaction has ended inside: by a statement of its own or a rollback on conflict"
                .into(),
        ));
    }
    Ok(())
}

fn cancelled() -> SinkError {
    SinkError::Transient {
        retry_after: None,
        source: "the transaction was rolled back: an earlier call in it was cancelled".into(),
    }
}
