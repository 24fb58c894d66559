//! Writes of one grant.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::Rng;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::ToBytes;
use rdkafka::producer::BaseRecord;
use tenure_model::NextOffset;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    FenceRow, FencedWriter, Fencing, Resolved, Role, SinkError, Standing, Verified,
};

use crate::client::{Look, Opened, Session, Shared, Uncommitted};
use crate::error::{classify, transient};

/// Longest pause before a recovery.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Looks for a commit in doubt before the caller is told.
const RESOLVE_TRIES: usize = 3;

/// Writer of one grant.
///
/// A producer that was shut out or failed is thrown away. The next call makes a new one and looks at the stamp: under
/// a newer epoch the writer is fenced for good, under its own it goes on.
pub struct KafkaWriter {
    shared: Arc<Shared>,
    grant: Grant,
    standing: Standing,
    /// Nothing: lost, or with a call that was cancelled.
    session: Option<Box<Session>>,
    /// The stamp as this writer's producer left it.
    row: FenceRow,
    pause: Duration,
}

impl std::fmt::Debug for KafkaWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaWriter")
            .field("resource", &self.grant.resource)
            .field("standing", &self.standing)
            .finish_non_exhaustive()
    }
}

impl KafkaWriter {
    pub(crate) fn new(
        shared: Arc<Shared>,
        grant: Grant,
        session: Box<Session>,
        row: FenceRow,
    ) -> Self {
        let standing = Standing::new(grant.epoch, Role::Home, shared.settings.fencing());
        let pause = shared.settings.recovery_pause;
        Self { shared, grant, standing, session: Some(session), row, pause }
    }

    /// Begins a transaction.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`], [`SinkError::Fenced`], [`SinkError::Unknown`] while an earlier write is not resolved,
    /// [`SinkError::Transient`] when the brokers do not answer or another producer got in between; any other.
    pub async fn begin(&mut self) -> Result<KafkaTx<'_>, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        self.ensure_session().await?;
        let row = self.standing.admit(Some(self.row.clone()))?;
        self.blocking(Session::begin).await?;
        Ok(KafkaTx { writer: self, row })
    }

    /// Does `work` on a thread that may block. The session is thrown away when it fails.
    async fn blocking<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Session) -> Result<T, SinkError> + Send + 'static,
    ) -> Result<T, SinkError> {
        let mut session = self.session.take().ok_or_else(lost)?;
        let done = tokio::task::spawn_blocking(move || {
            let result = work(&mut session);
            (session, result)
        });
        let (session, result) = done.await.map_err(|error| transient(error.to_string()))?;
        match result {
            Ok(value) => {
                self.session = Some(session);
                Ok(value)
            }
            Err(error) => {
                session.close();
                Err(error)
            }
        }
    }

    /// Has a producer that is the newest, or had been when it was made.
    async fn ensure_session(&mut self) -> Result<(), SinkError> {
        if self.session.is_some() {
            return Ok(());
        }
        if let Some(row) = self.open().await? {
            self.row = row;
            return Ok(());
        }
        Err(SinkError::FenceRegressed { ours: self.standing.epoch(), seen: None })
    }

    /// Makes a new producer and answers the stamp. With a newer epoch in the stamp there is no producer.
    async fn open(&mut self) -> Result<Option<FenceRow>, SinkError> {
        if let Some(session) = self.session.take() {
            session.close();
        }
        // First the pause: whoever shut this writer out may be about to stamp a newer epoch.
        let pause = self.pause.mul_f64(rand::rng().random_range(0.5..1.5));
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        tokio::time::sleep(pause).await;
        self.grant.lease.check()?;
        let (shared, grant) = (Arc::clone(&self.shared), self.grant.clone());
        let ours = (shared.settings.fencing() == Fencing::On).then_some(grant.epoch);
        let opened = tokio::task::spawn_blocking(move || Session::open(&shared, &grant, ours))
            .await
            .map_err(|error| transient(error.to_string()))??;
        match opened {
            Opened::Newest(session, row) => {
                self.session = Some(session);
                Ok(row)
            }
            Opened::Newer(row) => Ok(Some(row)),
        }
    }

    fn landed(&mut self, row: FenceRow) {
        self.row = row;
        self.pause = self.shared.settings.recovery_pause;
    }
}

impl FencedWriter for KafkaWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.standing.check()?;
        self.ensure_session().await?;
        // Without a session there was a newer stamp.
        if self.session.is_some() {
            match self.blocking(Session::last_look).await? {
                Look::Done => {}
                Look::Found(row) => self.row = row,
                Look::Absent => return self.standing.resume(None, verified),
            }
        }
        self.standing.resume(Some(&self.row), verified)
    }

    /// As [`FencedWriter::initialise`]; a lost answer is [`SinkError::Transient`] here, because the next call looks
    /// first and sets the start only where there is none.
    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        self.ensure_session().await?;
        let unfenced = self.shared.settings.fencing() == Fencing::Off;
        if unfenced || self.row.epoch == self.standing.epoch() {
            // Stamped also where there is an offset: that shows that no newer owner came.
            let next_offset = Some(self.row.next_offset.unwrap_or(start));
            let row = FenceRow { next_offset, ..self.row.clone() };
            let stamped = row.clone();
            match self.blocking(move |session| session.stamp(&stamped)).await {
                Ok(()) => self.landed(row),
                Err(error) => {
                    self.ensure_session().await?;
                    if self.session.is_some() {
                        return Err(error);
                    }
                }
            }
        }
        self.standing.initialised(Some(&self.row))
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        // The new producer ends whatever the old one left under way, a commit that is still on its way included.
        let row = match self.open().await {
            Ok(row) => row,
            Err(error @ (SinkError::LeaseEnded(_) | SinkError::Misconfigured(_))) => {
                return Err(error);
            }
            Err(error) => return Err(SinkError::Unknown(Box::new(error))),
        };
        let resolved = self.standing.resolve(row.as_ref())?;
        if let Some(row) = row {
            self.row = row;
        }
        Ok(resolved)
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}

impl Drop for KafkaWriter {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            session.close();
        }
    }
}

/// Open transaction of one grant. Dropped without a commit, it is aborted by the next one, or when the writer ends.
#[derive(Debug)]
pub struct KafkaTx<'w> {
    writer: &'w mut KafkaWriter,
    row: FenceRow,
}

impl KafkaTx<'_> {
    /// Adds a record. It is on its way when this returns; whether it arrived is known with the commit.
    ///
    /// # Errors
    ///
    /// [`SinkError::Rejected`] for a record that is too large, [`SinkError::Transient`] when the client's queue stays full
    /// or the producer was shut out; any other.
    pub async fn send<K, P>(&mut self, record: BaseRecord<'_, K, P>) -> Result<(), SinkError>
    where
        K: ToBytes + ?Sized + Sync,
        P: ToBytes + ?Sized + Sync,
    {
        const PAUSE: Duration = Duration::from_millis(5);
        let deadline = Instant::now() + self.writer.shared.settings.call_timeout;
        let mut record = record;
        loop {
            let session = self.writer.session.as_ref().ok_or_else(lost)?;
            match session.producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back))
                    if Instant::now() < deadline =>
                {
                    record = back;
                }
                Err((error, _)) => return Err(classify(error)),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Moves the offset to `next` and commits, records and offset in one step. A lost answer is looked up.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Unknown`] when it could not be looked up either; any other: no reader of
    /// committed records sees anything of it.
    pub async fn commit(self, next: NextOffset) -> Result<(), SinkError> {
        let Self { writer, row } = self;
        let target = writer.standing.target(&row, next)?;
        writer.grant.lease.check()?;
        let after =
            FenceRow { next_offset: Some(target), sequence: row.sequence + 1, ..row.clone() };
        let mut session = writer.session.take().ok_or_else(lost)?;
        let (stamp, within) = (after.clone(), writer.grant.lease.remaining());
        writer.standing.sent(&row, target);
        let done = tokio::task::spawn_blocking(move || {
            let result = session.commit(&stamp, within);
            (session, result)
        });
        let (session, result) =
            done.await.map_err(|error| SinkError::Unknown(error.to_string().into()))?;
        match result {
            Ok(()) => {
                writer.session = Some(session);
                writer.landed(after);
                writer.standing.landed(target);
                Ok(())
            }
            Err(Uncommitted::NotSent(error)) => {
                session.close();
                writer.standing.refused(&row);
                writer.explain(error).await
            }
            Err(Uncommitted::InDoubt(error)) => {
                session.close();
                tracing::debug!(resource = %writer.grant.resource, %error, "commit in doubt, looking");
                writer.look_up(error).await
            }
        }
    }

    /// Gives the transaction up.
    pub fn roll_back(self) {}
}

impl KafkaWriter {
    /// The brokers refuse alike whether a newer owner or a late one got in between; the stamp tells which.
    async fn explain(&mut self, error: SinkError) -> Result<(), SinkError> {
        if let Ok(()) = self.ensure_session().await {
            self.standing.admit(Some(self.row.clone()))?;
        }
        Err(error)
    }

    async fn look_up(&mut self, failure: SinkError) -> Result<(), SinkError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.resolve().await {
                Ok(Resolved::Applied(_)) => return Ok(()),
                Ok(Resolved::NotApplied(_)) => return Err(failure),
                Err(SinkError::Unknown(_)) if tries < RESOLVE_TRIES => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn lost() -> SinkError {
    transient("the producer is gone: an earlier call was cancelled or failed")
}
