//! Writes of one grant.

use std::sync::Arc;

use sqlx::PgConnection;
use tenure_model::NextOffset;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    FenceRow, FencedWriter, Resolved, SinkError, Standing, Verified, epoch_to_column, look_up,
};
use tenure_sink_postgres::Bounds;

use crate::session::{Session, statement};
use crate::shared::Shared;

/// Writer of one grant.
#[derive(Debug)]
pub struct SqlxWriter {
    shared: Arc<Shared>,
    grant: Grant,
    standing: Standing,
}

impl SqlxWriter {
    pub(crate) const fn new(shared: Arc<Shared>, grant: Grant, standing: Standing) -> Self {
        Self { shared, grant, standing }
    }

    /// Opens a transaction that has locked the fence row and compared epoch and offset.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`], [`SinkError::Fenced`], [`SinkError::OffsetConflict`], [`SinkError::Unknown`] while an
    /// earlier write is not resolved, [`SinkError::Transient`] when the server is not reachable; any other.
    pub async fn begin(&mut self) -> Result<SqlxTx<'_>, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let bounds = self.shared.settings.bounds_under(&self.grant.lease);
        let (session, row) = self.open(bounds, &self.shared.statements.lock).await?;
        let row = self.standing.admit(row)?;
        Ok(SqlxTx { writer: self, session, row })
    }

    async fn open(
        &self,
        bounds: Bounds,
        read: &str,
    ) -> Result<(Session, Option<FenceRow>), SinkError> {
        let (resource, epoch) = (&self.grant.resource, self.standing.epoch());
        let (session, row) = Session::begin(&self.shared, resource, epoch, bounds, read).await?;
        Ok((session, row.map(|(row, _)| row)))
    }
}

impl FencedWriter for SqlxWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.standing.check()?;
        let (_session, row) =
            self.open(self.shared.settings.bounds(), &self.shared.statements.read).await?;
        self.standing.resume(row.as_ref(), verified)
    }

    /// An answer that was lost is [`SinkError::Unknown`]; repeat it.
    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let bounds = self.shared.settings.bounds_under(&self.grant.lease);
        let (mut session, _before) = self.open(bounds, &self.shared.statements.lock).await?;
        let initialise = statement(&self.shared.statements.initialise)
            .bind(self.grant.resource.to_string())
            .bind(epoch_to_column(self.standing.epoch()))
            .bind(start.signed());
        // No row changed: the offset is there already, or the read below finds out why not.
        let _changed = session.execute(initialise).await?;
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
pub struct SqlxTx<'w> {
    writer: &'w mut SqlxWriter,
    session: Session,
    row: FenceRow,
}

impl SqlxTx<'_> {
    /// The first offset that is not in yet, read under the fence: records below it are a replay and are skipped.
    ///
    /// Nothing before the first commit, and nothing without fencing.
    #[must_use]
    pub fn applied(&self) -> Option<NextOffset> {
        self.writer.standing.applied(&self.row)
    }

    /// The connection inside the transaction, for any statement of sqlx; errors are for [`classify`](crate::classify).
    ///
    /// `begin` on it makes a savepoint. The transaction itself must not be ended through it: its commit is then refused.
    pub fn connection(&mut self) -> &mut PgConnection {
        self.session.connection()
    }

    /// Moves the offset to `next` and commits, data and offset in one step. A lost answer is looked up on another
    /// connection.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Unknown`] when it could not be looked up either; any other: nothing was
    /// written.
    pub async fn commit(self, next: NextOffset) -> Result<(), SinkError> {
        let Self { writer, mut session, row } = self;
        let target = writer.standing.target(&row, next)?;
        writer.grant.lease.check()?;
        let moving = statement(&writer.shared.statements.moving)
            .bind(writer.grant.resource.to_string())
            .bind(epoch_to_column(writer.standing.epoch()))
            .bind(row.sequence.cast_signed())
            .bind(target.signed());
        let moved = session.execute(moving).await?;
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
