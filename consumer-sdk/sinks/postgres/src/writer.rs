//! Writes of one grant.

use std::sync::Arc;

use tenure_model::NextOffset;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    FenceRow, FencedWriter, Resolved, SinkError, Standing, Verified, epoch_to_column, look_up,
};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, ToStatement};

use crate::session::Session;
use crate::settings::Bounds;
use crate::shared::Shared;

/// Writer of one grant.
#[derive(Debug)]
pub struct PostgresWriter {
    shared: Arc<Shared>,
    grant: Grant,
    standing: Standing,
    /// The fence's row as read right after it was raised. From then until the grant is verified nobody but this writer
    /// could change it; it is used once.
    registered: Option<FenceRow>,
}

impl PostgresWriter {
    pub(crate) const fn new(
        shared: Arc<Shared>,
        grant: Grant,
        standing: Standing,
        registered: Option<FenceRow>,
    ) -> Self {
        Self { shared, grant, standing, registered }
    }

    /// Opens a transaction that has locked the fence row and compared epoch and offset.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`], [`SinkError::Fenced`], [`SinkError::OffsetConflict`], [`SinkError::Unknown`] while an
    /// earlier write is not resolved, [`SinkError::Transient`] when the server is not reachable; any other.
    pub async fn begin(&mut self) -> Result<PgTx<'_>, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let bounds = self.shared.settings.bounds_under(&self.grant.lease);
        let (session, row) = self.open(bounds, &self.shared.statements.lock).await?;
        let row = self.standing.admit(row)?;
        Ok(PgTx { writer: self, session, row })
    }

    async fn open(
        &self,
        bounds: Bounds,
        read: &str,
    ) -> Result<(Session, Option<FenceRow>), SinkError> {
        let (resource, epoch) = (&self.grant.resource, self.standing.epoch());
        let (session, row) =
            Session::begin(&self.shared.pool, resource, epoch, bounds, read).await?;
        Ok((session, row.map(|(row, _)| row)))
    }
}

impl FencedWriter for PostgresWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.standing.check()?;
        let row = match self.registered.take() {
            Some(row) => Some(row),
            None => self.open(self.shared.settings.bounds(), &self.shared.statements.read).await?.1,
        };
        self.standing.resume(row.as_ref(), verified)
    }

    /// An answer that was lost is [`SinkError::Unknown`]; repeat it.
    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let bounds = self.shared.settings.bounds_under(&self.grant.lease);
        let (session, _before) = self.open(bounds, &self.shared.statements.lock).await?;
        let (resource, epoch) =
            (self.grant.resource.as_str(), epoch_to_column(self.standing.epoch()));
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&resource, Type::TEXT), (&epoch, Type::INT8), (&start.signed(), Type::INT8)];
        let statement = &self.shared.statements.initialise;
        // No row changed: the offset is there already, or the read below finds out why not.
        let _changed =
            session.bounded(session.client().execute_typed(statement, &parameters)).await?;
        let row = session.read(&self.shared.statements.read, &self.grant.resource).await?;
        session.commit().await.map_err(|error| SinkError::Unknown(Box::new(error)))?;
        self.standing.initialised(row.map(|(row, _)| row).as_ref())
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        // The lock is free only after the server has ended the transaction in doubt, one way or the other.
        let bounds = self.shared.settings.bounds();
        let (_session, row) = self
            .open(bounds, &self.shared.statements.lock)
            .await
            .map_err(|error| SinkError::Unknown(Box::new(error)))?;
        self.standing.resolve(row.as_ref())
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Open transaction of one grant. Dropped without a commit, it is rolled back.
///
/// The fence row is locked and compared: what is sent from here on is fenced.
#[derive(Debug)]
pub struct PgTx<'w> {
    writer: &'w mut PostgresWriter,
    session: Session,
    row: FenceRow,
}

impl PgTx<'_> {
    /// The first offset that is not in yet, read under the fence: records below it are a replay and are skipped.
    ///
    /// Nothing before the first commit, and nothing without fencing.
    #[must_use]
    pub fn applied(&self) -> Option<NextOffset> {
        self.writer.standing.applied(&self.row)
    }

    /// Runs one statement; answers how many rows it changed.
    ///
    /// # Errors
    ///
    /// As [`classify`](crate::classify). Nothing is written unless the commit succeeds.
    pub async fn execute<T>(
        &self,
        statement: &T,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<u64, SinkError>
    where
        T: ?Sized + ToStatement,
    {
        self.session.bounded(self.client().execute(statement, parameters)).await
    }

    /// Runs one query; answers its rows.
    ///
    /// # Errors
    ///
    /// As [`PgTx::execute`].
    pub async fn query<T>(
        &self,
        statement: &T,
        parameters: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, SinkError>
    where
        T: ?Sized + ToStatement,
    {
        self.session.bounded(self.client().query(statement, parameters)).await
    }

    /// Prepares a statement, once per connection.
    ///
    /// # Errors
    ///
    /// As [`PgTx::execute`].
    pub async fn prepare(&self, statement: &str) -> Result<tokio_postgres::Statement, SinkError> {
        self.session.bounded(self.session.client().prepare_cached(statement)).await
    }

    /// The connection itself, for everything else of the driver. The transaction must not be ended through it; errors
    /// are for [`classify`](crate::classify).
    #[must_use]
    pub fn client(&self) -> &tokio_postgres::Client {
        self.session.client()
    }

    /// Moves the offset to `next` and commits, data and offset in one step. A lost answer is looked up on another
    /// connection.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Unknown`] when it could not be looked up either; any other: nothing was
    /// written.
    pub async fn commit(self, next: NextOffset) -> Result<(), SinkError> {
        let Self { writer, session, row } = self;
        let target = writer.standing.target(&row, next)?;
        writer.grant.lease.check()?;
        let resource = writer.grant.resource.as_str();
        let epoch = epoch_to_column(writer.standing.epoch());
        let sequence = row.sequence.cast_signed();
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&resource, Type::TEXT),
            (&epoch, Type::INT8),
            (&sequence, Type::INT8),
            (&target.signed(), Type::INT8),
        ];
        let moving = session.client().execute_typed(&writer.shared.statements.moving, &parameters);
        let moved = session.bounded(moving).await?;
        if moved != 1 {
            return Err(SinkError::Misconfigured(format!(
                "the offset's update touched {moved} rows under the lock: the transaction was ended from inside, or a \
                 trigger"
            )));
        }
        writer.standing.sent(&row, target);
        let failure = match session.commit().await {
            Ok(()) => {
                writer.standing.landed(target);
                return Ok(());
            }
            Err(failure) => failure,
        };
        tracing::debug!(resource = %writer.grant.resource, %failure, "answer to COMMIT lost, looking");
        look_up(writer, failure).await
    }

    /// Gives the transaction up.
    pub fn roll_back(self) {}
}
