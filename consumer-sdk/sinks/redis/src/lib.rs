//! Fenced Redis sink: best effort, because a fail-over can lose the fence.
//!
//! Comparing, writing and moving the offset are one Lua script over one fence key. What it protects, what it cannot,
//! and every failure: `docs/sinks/redis.md`.
//!
//! ```no_run
//! use tenure_model::NextOffset;
//! use tenure_sdk::sink::SinkError;
//! use tenure_sink_redis::{Command, RedisSettings, RedisSink, RedisWriter};
//!
//! /// Called once at start. There is nothing to migrate.
//! async fn connect() -> Result<RedisSink, SinkError> {
//!     // A registration counts once a replica has it; a fail-over may still lose it.
//!     let settings = RedisSettings { replicas_min: 1, ..RedisSettings::default() };
//!     RedisSink::connect("redis://127.0.0.1", settings).await
//! }
//!
//! /// Called for each batch, with the writer that the SDK gives out with the partition.
//! async fn bill(writer: &mut RedisWriter, id: i64, next: NextOffset) -> Result<(), SinkError> {
//!     let mut tx = writer.begin().await?;
//!     tx.push(Command::new("RPUSH").arg(tx.key("bills")).arg(id.to_string()))?;
//!     tx.commit(next).await
//! }
//! # let _ = (connect, bill);
//! ```

#![warn(missing_docs)]

mod command;
mod error;
mod link;
mod row;
pub mod script;
mod settings;
mod sink;
mod writer;

pub use command::Command;
pub use redis;
pub use script::RedisScript;
pub use settings::RedisSettings;
pub use sink::RedisSink;
pub use writer::{RedisTx, RedisWriter};
