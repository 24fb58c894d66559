//! Writes of one grant.

use std::sync::Arc;

use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{MySql, MySqlConnection};
use tenure_model::NextOffset;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    FenceRow, FencedWriter, Resolved, SinkError, Standing, Verified, epoch_to_column, look_up,
};

use crate::error::{classify, transient};
use crate::session::Session;
use crate::settings::Bounds;
use crate::shared::Shared;
use crate::sql::{self, Literal, fill};

/// Writer of one grant.
#[derive(Debug)]
pub struct MysqlWriter {
    shared: Arc<Shared>,
    grant: Grant,
    standing: Standing,
}

impl MysqlWriter {
    pub(crate) const fn new(shared: Arc<Shared>, grant: Grant, standing: Standing) -> Self {
        Self { shared, grant, standing }
    }

    /// Opens a transaction that has locked the fence row and compared epoch and offset.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`], [`SinkError::Fenced`], [`SinkError::OffsetConflict`], [`SinkError::Unknown`] while an
    /// earlier write is not resolved, [`SinkError::Transient`] when the server is not reachable; any other.
    pub async fn begin(&mut self) -> Result<MysqlTx<'_>, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let bounds = self.shared.settings.bounds_under(&self.grant.lease);
        let (session, row) = self.open(bounds, &self.shared.statements.lock).await?;
        let row = self.standing.admit(row)?;
        Ok(MysqlTx { writer: self, state: State::Open(session), row })
    }

    async fn open(
        &self,
        bounds: Bounds,
        read: &str,
    ) -> Result<(Session, Option<FenceRow>), SinkError> {
        let (session, row) =
            Session::begin(&self.shared, &self.grant.resource, bounds, read).await?;
        Ok((session, row.map(|(row, _)| row)))
    }
}

impl FencedWriter for MysqlWriter {
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
        let statement = fill(
            &self.shared.statements.initialise,
            &[
                Literal::Number(start.signed()),
                Literal::Text(self.grant.resource.as_str()),
                Literal::Number(epoch_to_column(self.standing.epoch())),
            ],
        );
        // No row changed: the offset is there already, or the read below finds out why not.
        session.run(statement).await.map_err(classify)?;
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
/// The fence row is locked and compared: what is sent from here on is fenced. After its first error it is rolled back and
/// takes nothing more. Statements that commit by themselves, such as `CREATE TABLE`, do not belong here: what came before
/// them stays, without the offset, and the commit is refused.
#[derive(Debug)]
pub struct MysqlTx<'w> {
    writer: &'w mut MysqlWriter,
    state: State,
    row: FenceRow,
}

#[derive(Debug)]
enum State {
    Open(Session),
    /// Rolled back after an error; whether the data was at fault.
    Failed {
        rejected: bool,
    },
}

impl State {
    fn session(&mut self) -> Result<&mut Session, SinkError> {
        match self {
            Self::Open(session) => Ok(session),
            Self::Failed { rejected } => Err(over(*rejected)),
        }
    }
}

fn over(rejected: bool) -> SinkError {
    let text = "the transaction has failed and was rolled back: begin another";
    if rejected { SinkError::Rejected(text.into()) } else { transient(text) }
}

impl MysqlTx<'_> {
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
    /// As [`classify`]. The transaction is rolled back then.
    pub async fn execute(
        &mut self,
        query: Query<'_, MySql, MySqlArguments>,
    ) -> Result<u64, SinkError> {
        let result = self.state.session()?.execute(query).await;
        self.noted(result)
    }

    /// Runs one query; answers its rows.
    ///
    /// # Errors
    ///
    /// As [`MysqlTx::execute`].
    pub async fn fetch_all(
        &mut self,
        query: Query<'_, MySql, MySqlArguments>,
    ) -> Result<Vec<MySqlRow>, SinkError> {
        let result = self.state.session()?.fetch_all(query).await;
        self.noted(result)
    }

    /// The connection itself, for everything else of the driver. The transaction must not be ended through it; after an
    /// error, which is for [`classify`], drop it.
    ///
    /// # Errors
    ///
    /// When the transaction has failed before.
    pub fn connection(&mut self) -> Result<&mut MySqlConnection, SinkError> {
        Ok(self.state.session()?.connection())
    }

    /// The server ends a statement, or all of it: which one is not left to the caller.
    fn noted<T>(&mut self, result: Result<T, SinkError>) -> Result<T, SinkError> {
        if let Err(error) = &result {
            self.state = State::Failed { rejected: matches!(error, SinkError::Rejected(_)) };
        }
        result
    }

    /// Moves the offset to `next` and commits, data and offset in one step. A lost answer is looked up on another
    /// connection.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Unknown`] when it could not be looked up either; any other: nothing was
    /// written.
    pub async fn commit(self, next: NextOffset) -> Result<(), SinkError> {
        let Self { writer, state, row } = self;
        let mut session = match state {
            State::Open(session) => session,
            State::Failed { rejected } => return Err(over(rejected)),
        };
        let target = writer.standing.target(&row, next)?;
        writer.grant.lease.check()?;
        let moving = fill(
            &writer.shared.statements.moving,
            &[
                Literal::Number(target.signed()),
                Literal::Text(writer.grant.resource.as_str()),
                Literal::Number(epoch_to_column(writer.standing.epoch())),
                Literal::Number(row.sequence.cast_signed()),
            ],
        );
        // Two statements in one piece: the second is not run when the first fails.
        let moved = session.run(format!("{}; {moving}", sql::CHECK)).await.map_err(classify)?;
        if moved != 1 {
            return Err(SinkError::Misconfigured(format!(
                "the offset's update touched {moved} rows under the lock: a trigger?"
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
