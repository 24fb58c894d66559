//! Fenced PostgreSQL sink.
//!
//! The offset's row is the fence. Every write locks it, compares epoch and offset, and only then sends data; data,
//! offset and the comparison are one transaction. What it protects, what it cannot, and every failure:
//! `docs/sinks/postgres.md`.
//!
//! ```no_run
//! use tenure_model::NextOffset;
//! use tenure_sdk::sink::SinkError;
//! use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};
//!
//! /// Called once at start.
//! async fn connect() -> Result<PostgresSink, SinkError> {
//!     let config = "postgres://billing@127.0.0.1/billing".parse().expect("the URL is one");
//!     let sink = PostgresSink::connect(config, PostgresSettings::default()).await?;
//!     sink.migrate().await?;
//!     Ok(sink)
//! }
//!
//! /// Called for each batch, with the writer that the SDK gives out with the partition.
//! async fn bill(writer: &mut PostgresWriter, id: i64, next: NextOffset) -> Result<(), SinkError> {
//!     let tx = writer.begin().await?;
//!     tx.execute("INSERT INTO bill (id) VALUES ($1)", &[&id]).await?;
//!     tx.commit(next).await
//! }
//! # let _ = (connect, bill);
//! ```

#![warn(missing_docs)]

#[cfg(feature = "driver")]
mod error;
#[cfg(feature = "driver")]
mod session;
mod settings;
#[cfg(feature = "driver")]
mod shared;
#[cfg(feature = "driver")]
mod sink;
pub mod sql;
mod sqlstate;
#[cfg(feature = "driver")]
mod writer;

#[cfg(feature = "driver")]
pub use deadpool_postgres;
#[cfg(feature = "driver")]
pub use error::classify;
pub use settings::{Bounds, PostgresSettings, TIMEOUT_MIN};
#[cfg(feature = "driver")]
pub use sink::PostgresSink;
pub use sqlstate::Meaning;
#[cfg(feature = "driver")]
pub use tokio_postgres;
#[cfg(feature = "driver")]
pub use writer::{PgTx, PostgresWriter};
