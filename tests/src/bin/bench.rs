//! Runs one bench scenario.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints")]

use std::process::ExitCode;

use clap::Parser;
use tenure_tests::bench::{self, Options, SCENARIOS, Scenario};

/// Measures one scenario on real parts.
#[derive(Debug, Parser)]
#[command(
    name = "bench",
    after_help = "Exit codes: 0 measured, all bounds hold; 1 not measured, or a bound was missed; 2 wrong usage."
)]
struct Args {
    /// Which one; `list` names them all.
    scenario: String,
    /// Ends with one line of JSON.
    #[arg(long)]
    json: bool,
    /// Rounds instead of the scenario's own number.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: Option<u32>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.scenario == "list" {
        for Scenario { name, about, .. } in SCENARIOS {
            println!("{name:<20} {about}");
        }
        return ExitCode::SUCCESS;
    }
    let Some(scenario) = SCENARIOS.iter().find(|scenario| scenario.name == args.scenario) else {
        eprintln!("error: no scenario {:?}; `bench list` names them all", args.scenario);
        return ExitCode::from(2);
    };
    match (scenario.run)(&Options { rounds: args.rounds }) {
        Ok(measured) => {
            println!("{}", bench::text(scenario, &measured));
            if args.json {
                println!("{}", measured.json(scenario));
            }
            if measured.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
