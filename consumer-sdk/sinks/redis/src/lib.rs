//! Fenced Redis sink: best effort, because a fail-over can lose the fence.
//!
//! Comparing, writing and moving the offset are one Lua script over one fence key. What it protects, what it cannot,
//! and every failure: `docs/sinks.md`.

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
