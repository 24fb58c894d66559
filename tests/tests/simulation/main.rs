//! Seeds of the simulator: both ends of the protocol in a virtual world with faults.

mod controls;
mod wire;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tenure_tests::figures::tell;
use tenure_tests::sim::matrix::{Matrix, UNREACHABLE};
use tenure_tests::sim::{self, Plan, Report};
use tenure_tests::tier;

/// Seeds of a full run.
const SEEDS_FULL: usize = 2_000;

/// First seed of a run that is not a full one: always the same, so that a change is judged by itself. A full run takes
/// seeds that nobody has played.
const SEED_FIRST: u64 = 100_000;

/// From this many seeds on every cell of the matrix that can be reached must have been.
const SEEDS_FOR_MATRIX: u64 = 20_000;

/// Least that one run must be worth.
const SIMULATED_MS_LEAST: u64 = 60_000;
const MEMBERS_LEAST: usize = 3;
const FAULTS_LEAST: usize = 5;
const HANDOFFS_LEAST: usize = 1;

fn check(plan: Plan, report: &Report) -> Result<(), String> {
    let again = || format!("seed {}: play it again with\n  {}", plan.seed, sim::replay(plan));
    if let Some(violation) = &report.violation {
        return Err(format!("{violation}\n{}", again()));
    }
    let is_worth_it = report.simulated_ms >= SIMULATED_MS_LEAST
        && report.member_count >= MEMBERS_LEAST
        && report.fault_count >= FAULTS_LEAST
        && report.handoff_count >= HANDOFFS_LEAST;
    if is_worth_it { Ok(()) } else { Err(format!("too little happened: {report:?}\n{}", again())) }
}

/// Plays seeds on all processors; answers the matrix, the number of preparations and what was broken.
fn play(first: u64, count: u64, is_warm: bool) -> (Matrix, usize, Vec<String>) {
    tell(format_args!("{count} seeds from {first}, warm: {is_warm}\n"));
    let next = AtomicU64::new(0);
    let totals = Mutex::new((Matrix::default(), 0, Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let position = next.fetch_add(1, Ordering::Relaxed);
                    if position >= count {
                        break;
                    }
                    let seed = first.wrapping_add(position);
                    let plan = Plan { seed, is_warm, ..Plan::default() };
                    let report = sim::run(plan);
                    let checked = check(plan, &report);
                    let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
                    totals.0.add(&report.matrix);
                    totals.1 += report.prepared_count;
                    totals.2.extend(checked.err());
                }
            });
        }
    });
    totals.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn first_seed() -> u64 {
    match tier::Tier::current() {
        tier::Tier::Full => tier::seed(),
        tier::Tier::Fast | tier::Tier::Ci => SEED_FIRST,
    }
}

#[test]
fn no_seed_breaks_a_property() {
    let count = tier::seed_count(SEEDS_FULL) as u64;
    let (matrix, _, broken) = play(first_seed(), count, false);
    let reasons =
        UNREACHABLE.iter().map(|(cell, reason)| format!("not to be reached: {cell}: {reason}\n"));
    tell(format_args!("{matrix}\n{}", reasons.collect::<String>()));
    assert!(broken.is_empty(), "{} seeds are broken:\n{}", broken.len(), broken.join("\n"));
    let empty = matrix.empty();
    println!("cells not reached: {empty:?}");
    assert!(count < SEEDS_FOR_MATRIX || empty.is_empty(), "cells not reached: {empty:?}");
}

#[test]
fn no_seed_breaks_a_property_where_members_prepare() {
    let count = tier::seed_count(SEEDS_FULL / 4) as u64;
    let (_, prepared, broken) = play(first_seed(), count, true);
    assert!(broken.is_empty(), "{} seeds are broken:\n{}", broken.len(), broken.join("\n"));
    tell(format_args!("{count} warm seeds: {prepared} preparations came to their end\n"));
    assert!(prepared as u64 >= count, "hardly anything was prepared: {prepared} in {count} runs");
}

#[test]
fn same_seed_plays_the_same() {
    let first = tier::seed();
    println!("seeds from {first} (TENURE_SEED)");
    let trace = |seed| {
        let report = sim::run(Plan { seed, ..Plan::default() });
        (report.trace, report.event_count, report.matrix)
    };
    for seed in first..first.saturating_add(3) {
        assert_eq!(trace(seed), trace(seed), "seed {seed}");
    }
    assert_ne!(trace(first), trace(first.wrapping_add(1)), "seeds {first} and the next");
}
