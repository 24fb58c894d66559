//! Fenced SQLite sink.
//!
//! Data, fence and offset are in one file and move in one transaction: at the home of the offset this is exactly once.
//! What it protects, what it cannot, and every failure: `docs/sinks/sqlite.md`.
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
//!
//! Without a coordinator, under the token of something else:
//!
//! ```
//! use tenure_model::{Epoch, NextOffset};
//! use tenure_sdk::grant::{Grant, Resource};
//! use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
//! use tenure_sink_sqlite::{SqliteSettings, SqliteSink, SqliteWriter};
//!
//! /// `revision` rises with every owner: that of the etcd key which the lock was taken with.
//! async fn own(sink: &SqliteSink, revision: u64) -> Result<(SqliteWriter, NextOffset), SinkError> {
//!     let token = Epoch::new(revision).expect("a revision is below 2^53");
//!     let grant = Grant::external(Resource::named("orders/7").expect("a name"), token);
//!     let mut writer = sink.register(&grant).await?.writer;
//!     // A sink that needs it: ask the lock's service here whether the lock is still held.
//!     let next = match writer.resume(&Verified::without_coordinator(false)).await? {
//!         Some(next) => next,
//!         None => writer.initialise(NextOffset::ZERO).await?,
//!     };
//!     Ok((writer, next))
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), SinkError> {
//! let sink = SqliteSink::open(":memory:", SqliteSettings::default()).await?;
//! sink.migrate().await?;
//! let (mut old, _) = own(&sink, 41).await?;
//! let (mut new, _) = own(&sink, 97).await?;
//! assert!(matches!(old.begin().await, Err(SinkError::Fenced { .. })));
//! new.begin().await?.commit(NextOffset::new(1).expect("a small offset")).await?;
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
