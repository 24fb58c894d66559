//! Exhaustive models of the protocol: every order of steps within small bounds.
//!
//! `handover` plays the real core with two owners, two partitions and one sink, without any clock: safety never rests
//! on time. `leases` plays the rules of DESIGN.md, section 5, with a clock that ticks: who stops first, and when the
//! dead are freed. Each guard that is taken away gives a counter-example.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it explored; clippy exempts only test functions"
)]

mod handover;
mod leases;

use std::fmt::Debug;
use std::hash::Hash;

use stateright::{Checker, Model};

/// Explores every state within the model's bounds; answers the properties that were found broken, or seen, with the
/// steps to it.
fn explore<M>(name: &str, model: M) -> Vec<(&'static str, Vec<M::Action>)>
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + PartialEq + Hash + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let checker = model.checker().threads(threads).spawn_bfs().join();
    assert!(checker.is_done(), "{name}: not every state was explored");
    println!("{name}: {} states", checker.unique_state_count());
    let found = checker.discoveries().into_iter();
    found.map(|(property, path)| (property, path.into_actions())).collect()
}
