//! Fenced SQLite sink.
//!
//! Data, fence and offset are in one file and move in one transaction: at the home of the offset this is exactly once.
//! What it protects, what it cannot, and every failure: `docs/sinks.md`.
//!
//! ```
//! use tenure_model::{Epoch, NextOffset};
//! use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified, conformance};
//! use tenure_sink_sqlite::{SqliteSettings, SqliteSink};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), SinkError> {
//! let sink = SqliteSink::open(":memory:", SqliteSettings::default()).await?;
//! sink.migrate().await?;
//! sink.with_connection(|c| c.execute_batch("CREATE TABLE bill (id INTEGER)")).await?;
//!
//! // The SDK does this; here the grant comes from nobody.
//! let grant = conformance::grant("ann", 0, Epoch::FIRST);
//! let mut writer = sink.register(&grant).await?.writer;
//! let verified = Verified::without_coordinator(false);
//! let start = match writer.resume(&verified).await? {
//!     Some(next) => next,
//!     None => writer.initialise(NextOffset::ZERO).await?,
//! };
//!
//! let mut tx = writer.begin().await?;
//! tx.execute("INSERT INTO bill VALUES (?1)", [start.signed()]).await?;
//! tx.commit(NextOffset::new(start.get() + 1).expect("a small offset")).await?;
//! # Ok(())
//! # }
//! ```

#![warn(missing_docs)]

mod connection;
mod error;
mod settings;
mod sink;
pub mod sql;
mod writer;

pub use rusqlite;
pub use settings::{SqliteSettings, Synchronous};
pub use sink::SqliteSink;
pub use writer::{SqliteTx, SqliteWriter};
