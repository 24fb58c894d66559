//! Coordinator processes that are restarted, wiped, stopped, cut off and run out of room, while members commit.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

mod cuts;
mod disk;
mod reigns;
mod rejoin;
mod restart;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use tenure_tests::cluster::{Cluster, SHORT_LENGTHS};
use tenure_tests::load::Report;

/// Short elections, and a comparison of the nodes' states every second: one that differs stops.
const RAFT: &str = "[raft]
heartbeat_interval_ms = 100
election_timeout_min_ms = 500
election_timeout_max_ms = 1000
digest_interval_ms = 1000";

fn settings() -> String {
    format!("{SHORT_LENGTHS}\n{RAFT}\n")
}

/// Tests that measure how long something takes run alone, the others beside each other.
static MACHINE: RwLock<()> = RwLock::new(());

fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(PoisonError::into_inner)
}

fn beside_others() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().unwrap_or_else(PoisonError::into_inner)
}

fn cluster(count: u64) -> Cluster {
    Cluster::start_with(count, &settings())
}

/// Nobody lost anything, and everything is owned under the epoch of the start.
fn assert_undisturbed(before: &Report, after: &Report) {
    assert!(after.complaints.is_empty(), "{:#?}", after.complaints);
    assert_eq!(after.epochs, before.epochs, "nothing has moved");
}

/// Longest wait for something that takes an election.
const PATIENCE: Duration = Duration::from_secs(60);
