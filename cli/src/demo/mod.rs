//! The main job, told on real processes: three coordinators, Kafka, three workers, one SQLite file.

mod audit;
mod cluster;
mod ledger;
mod orders;
mod processes;
mod story;
mod worker;

use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) use story::run;
pub(crate) use worker::run as run_worker;

/// Wall clock in microseconds: all processes of the demo are on one machine.
fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
