//! Fenced PostgreSQL sink for services on sqlx.
//!
//! The same fence table, statements and settings as `tenure-sink-postgres`: services on both drivers may share a group.
//! What it protects, what it cannot, and every failure: `docs/sinks/postgres.md`.
//!
//! ```no_run
//! use sqlx::PgPool;
//! use tenure_model::NextOffset;
//! use tenure_sdk::sink::SinkError;
//! use tenure_sink_postgres_sqlx::{PostgresSettings, SqlxSink, SqlxWriter, classify};
//!
//! /// Called once at start.
//! async fn connect(pool: PgPool) -> Result<SqlxSink, SinkError> {
//!     let sink = SqlxSink::over(pool, PostgresSettings::default()).await?;
//!     sink.migrate().await?;
//!     Ok(sink)
//! }
//!
//! /// Called for each batch, with the writer that the SDK gives out with the partition.
//! async fn bill(writer: &mut SqlxWriter, id: i64, next: NextOffset) -> Result<(), SinkError> {
//!     let mut tx = writer.begin().await?;
//!     let insert = sqlx::query("INSERT INTO bill (id) VALUES ($1)").bind(id);
//!     insert.execute(tx.connection()).await.map_err(classify)?;
//!     tx.commit(next).await
//! }
//! # let _ = (connect, bill);
//! ```

#![warn(missing_docs)]

mod error;
mod session;
mod shared;
mod sink;
mod writer;

pub use error::classify;
pub use sink::SqlxSink;
pub use sqlx;
pub use tenure_sink_postgres::{PostgresSettings, sql};
pub use writer::{SqlxTx, SqlxWriter};
