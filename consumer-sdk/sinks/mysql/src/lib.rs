//! Fenced MySQL and MariaDB sink, proven on MariaDB.
//!
//! The offset's row is the fence. Every write locks it, compares epoch and offset, and only then sends data; data,
//! offset and the comparison are one transaction. What it protects, what it cannot, and every failure:
//! `docs/sinks/mysql.md`.
//!
//! ```no_run
//! use tenure_model::NextOffset;
//! use tenure_sdk::sink::SinkError;
//! use tenure_sink_mysql::{MysqlSettings, MysqlSink, MysqlWriter, sqlx};
//!
//! /// Called once at start.
//! async fn connect() -> Result<MysqlSink, SinkError> {
//!     let options = "mysql://billing@127.0.0.1/billing".parse().expect("the URL is one");
//!     let sink = MysqlSink::connect(options, MysqlSettings::default()).await?;
//!     sink.migrate().await?;
//!     Ok(sink)
//! }
//!
//! /// Called for each batch, with the writer that the SDK gives out with the partition.
//! async fn bill(writer: &mut MysqlWriter, id: i64, next: NextOffset) -> Result<(), SinkError> {
//!     let mut tx = writer.begin().await?;
//!     tx.execute(sqlx::query("INSERT INTO bill (id) VALUES (?)").bind(id)).await?;
//!     tx.commit(next).await
//! }
//! # let _ = (connect, bill);
//! ```

#![warn(missing_docs)]

mod error;
mod session;
mod settings;
mod shared;
mod sink;
pub mod sql;
mod writer;

pub use error::classify;
pub use settings::{Flavour, MysqlSettings, TIMEOUT_MIN};
pub use sink::MysqlSink;
pub use sqlx;
pub use writer::{MysqlTx, MysqlWriter};
