//! Plays seeds of the simulator: many with a summary, or one with every step printed.

#![allow(clippy::print_stdout, reason = "a program for people")]

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use tenure_tests::sim::control::Protection;
use tenure_tests::sim::matrix::Matrix;
use tenure_tests::sim::{self, Plan};

#[derive(Parser)]
struct Options {
    /// How many seeds to play.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Plays this one and prints every step.
    #[arg(long)]
    seed: Option<u64>,
    /// Takes a protection away, by its name.
    #[arg(long, value_parser = protection)]
    without: Option<Protection>,
    /// Members prepare for partitions before they get them.
    #[arg(long)]
    warm: bool,
}

fn protection(name: &str) -> Result<Protection, String> {
    let names: Vec<&str> = Protection::ALL.iter().map(|one| one.as_str()).collect();
    let found = Protection::ALL.iter().find(|one| one.as_str() == name);
    found.copied().ok_or_else(|| format!("there is no {name}: give one of {}", names.join(", ")))
}

fn main() -> ExitCode {
    let Options { seeds, first, seed, without, warm: is_warm } = Options::parse();
    if let Some(seed) = seed {
        let report = sim::run(Plan { seed, without, is_warm, prints: true });
        println!("{:?} trace {:016x}", report.violation, report.trace);
        return if report.violation.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let started = Instant::now();
    let mut matrix = Matrix::default();
    let (mut entries, mut events, mut handoffs, mut faults, mut broken) = (0, 0, 0, 0, 0_u64);
    let mut fewest = (usize::MAX, usize::MAX);
    for seed in first..first + seeds {
        let plan = Plan { seed, without, is_warm, prints: false };
        let report = sim::run(plan);
        if let Some(violation) = &report.violation {
            broken += 1;
            println!("seed {seed}: {violation}\n  {}", sim::replay(plan));
        } else {
            fewest.0 = fewest.0.min(report.handoff_count);
            fewest.1 = fewest.1.min(report.fault_count);
        }
        matrix.add(&report.matrix);
        entries += report.entry_count;
        events += report.event_count;
        handoffs += report.handoff_count;
        faults += report.fault_count;
    }
    let took = started.elapsed();
    println!("{matrix}");
    println!(
        "{seeds} seeds from {first}, {broken} broken; {faults} faults (fewest {}), {handoffs} handoffs (fewest {}), {entries} entries, {events} events in {took:.1?}: {:.1} seeds/s",
        fewest.1,
        fewest.0,
        seeds as f64 / took.as_secs_f64(),
    );
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
