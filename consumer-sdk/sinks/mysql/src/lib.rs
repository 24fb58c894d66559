//! Fenced MySQL and MariaDB sink, proven on MariaDB.
//!
//! The offset's row is the fence. Every write locks it, compares epoch and offset, and only then sends data; data,
//! offset and the comparison are one transaction. What it protects, what it cannot, and every failure: `docs/sinks.md`.

#![warn(missing_docs)]

mod error;
mod session;
mod settings;
mod sink;
pub mod sql;
mod writer;

pub use error::classify;
pub use settings::{Flavour, MysqlSettings, TIMEOUT_MIN};
pub use sink::MysqlSink;
pub use sqlx;
pub use writer::{MysqlTx, MysqlWriter};
