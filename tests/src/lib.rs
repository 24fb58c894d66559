//! Harness of the tests on real parts: servers, processes, a proxy, and how much to repeat.
//!
//! Everything here blocks and needs no async runtime. Call it before a runtime starts, or from a
//! blocking task.

#![allow(clippy::missing_panics_doc, reason = "a test harness reports by panicking")]

pub mod bench;
pub mod cluster;
pub mod effects;
pub mod feed;
pub mod figures;
pub mod load;
pub mod process;
pub mod proxy;
pub mod servers;
pub mod sim;
pub mod tier;
pub mod zombie;
