//! The one connection of a sink, used by one caller at a time and off the async runtime's threads.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tenure_model::Epoch;
use tenure_sdk::sink::{FenceRow, SinkError, epoch_from_column};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::error::{classify, is_busy};
use crate::settings::{SqliteSettings, Synchronous};
use crate::sql::Statements;

/// Who wants the file's lock. SQLite has no queue for it: whoever looks at the right moment gets it, and a writer that
/// has just let go looks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// A write. Looks every 2 ms.
    Write,
    /// A registration. Looks every 0.1 ms, so that it gets in between two writes of an old owner and is not starved.
    Registration,
}

impl Urgency {
    const fn pause(self) -> Duration {
        match self {
            Self::Write => Duration::from_millis(2),
            Self::Registration => Duration::from_micros(100),
        }
    }
}

/// What a sink and its writers share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: SqliteSettings,
    pub(crate) statements: Statements,
    connection: Arc<Mutex<Connection>>,
}

/// The connection, held by one caller. Rolls an open transaction back when it is given up.
#[derive(Debug)]
pub(crate) struct Held(Option<OwnedMutexGuard<Connection>>);

impl Held {
    fn connection(&self) -> &Connection {
        self.0.as_ref().expect("taken only in drop")
    }

    /// Does `work` on a thread that may block.
    pub(crate) async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce(&Connection) -> Result<T, SinkError> + Send + 'static,
    ) -> (Option<Self>, Result<T, SinkError>) {
        let done = tokio::task::spawn_blocking(move || {
            let result = work(self.connection());
            (self, result)
        });
        match done.await {
            Ok((held, result)) => (Some(held), result),
            Err(failure) if failure.is_panic() => std::panic::resume_unwind(failure.into_panic()),
            Err(failure) => (None, Err(SinkError::Unknown(Box::new(failure)))),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(guard) = self.0.take() else { return };
        if guard.is_autocommit() {
            return;
        }
        let roll_back = move || {
            if let Err(error) = guard.execute_batch("ROLLBACK") {
                tracing::warn!(%error, "rollback failed; the next transaction tries again");
            }
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(roll_back)),
            Err(_) => roll_back(),
        }
    }
}

impl Shared {
    pub(crate) async fn open(path: &Path, settings: SqliteSettings) -> Result<Self, SinkError> {
        settings.validate()?;
        let statements = Statements::new(&settings.table, settings.fencing());
        let (path, synchronous, busy) =
            (path.to_owned(), settings.synchronous, settings.busy_timeout);
        let opened = tokio::task::spawn_blocking(move || connect(&path, synchronous, busy)).await;
        let connection = opened
            .map_err(|failure| SinkError::Transient {
                retry_after: None,
                source: Box::new(failure),
            })?
            .map_err(classify)?;
        Ok(Self { settings, statements, connection: Arc::new(Mutex::new(connection)) })
    }

    /// Waits for the connection, at most the busy time-out.
    pub(crate) async fn hold(&self) -> Result<Held, SinkError> {
        let wait = Arc::clone(&self.connection).lock_owned();
        match tokio::time::timeout(self.settings.busy_timeout, wait).await {
            Ok(guard) => Ok(Held(Some(guard))),
            Err(elapsed) => Err(SinkError::Transient {
                retry_after: None,
                source: format!("another transaction of this process is open: {elapsed}").into(),
            }),
        }
    }
}

fn connect(
    path: &Path,
    synchronous: Synchronous,
    busy_timeout: Duration,
) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(busy_timeout)?;
    // The one statement that does not wait: a new file is just getting its journal from somebody else.
    let started = Instant::now();
    while let Err(error) = connection.pragma_update(None, "journal_mode", "WAL") {
        if !is_busy(&error) || started.elapsed() >= busy_timeout {
            return Err(error);
        }
        std::thread::sleep(Urgency::Registration.pause());
    }
    let level = match synchronous {
        Synchronous::Full => "FULL",
        Synchronous::Normal => "NORMAL",
    };
    connection.pragma_update(None, "synchronous", level)?;
    connection.pragma_update(None, "foreign_keys", true)?;
    Ok(connection)
}

/// Opens a transaction that holds the file's write lock.
pub(crate) fn begin(
    connection: &Connection,
    busy_timeout: Duration,
    urgency: Urgency,
) -> Result<(), SinkError> {
    if !connection.is_autocommit() {
        connection.execute_batch("ROLLBACK").map_err(classify)?;
    }
    let started = Instant::now();
    connection.busy_timeout(Duration::ZERO).map_err(classify)?;
    let result = loop {
        match connection.execute_batch("BEGIN IMMEDIATE") {
            Err(error) if is_busy(&error) && started.elapsed() < busy_timeout => {
                std::thread::sleep(urgency.pause());
            }
            result => break result.map_err(classify),
        }
    };
    connection.busy_timeout(busy_timeout).map_err(classify)?;
    result
}

/// A fence row and the epoch that its registration displaced.
pub(crate) type Read = Option<(FenceRow, Option<Epoch>)>;

pub(crate) fn read(connection: &Connection, sql: &str, resource: &str) -> Result<Read, SinkError> {
    type Columns = (i64, String, Option<i64>, i64, Option<i64>);
    let mut statement = connection.prepare_cached(sql).map_err(classify)?;
    let columns = |row: &rusqlite::Row<'_>| -> rusqlite::Result<Columns> {
        Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
    };
    let found = match statement.query_row([resource], columns) {
        Ok(found) => found,
        Err(rusqlite::Error::QueryReturnedNoRows) => return Ok(None),
        Err(error) => return Err(classify(error)),
    };
    let (epoch, holder, next_offset, sequence, displaced) = found;
    let row = FenceRow::from_columns(epoch, holder, next_offset, sequence)?;
    Ok(Some((row, displaced.map(epoch_from_column).transpose()?)))
}
