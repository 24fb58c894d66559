//! Fenced SQLite sink.
//!
//! Data, fence and offset are in one file and move in one transaction: at the home of the offset this is exactly once.
//! What it protects, what it cannot, and every failure: `docs/sinks.md`.

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
