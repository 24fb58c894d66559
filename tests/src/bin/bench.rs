//! Runs one bench scenario.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints")]

use std::process::{Command, ExitCode};

use clap::Parser;
use tenure_tests::bench::{self, Options, Peer, SCENARIOS, Scenario};

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
    /// Measures for so many seconds instead of the scenario's own length.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: Option<u32>,
    /// Little of everything: whether it works, not how fast it is.
    #[arg(long)]
    small: bool,
    /// Fetches and starts a peer, etcd or kafka, and gives it the same load in the same run.
    #[arg(long, value_name = "PEER")]
    beside: Option<Peer>,
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
    if let Err(error) = build_the_program() {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    let options = Options {
        rounds: args.rounds,
        seconds: args.seconds,
        beside: args.beside,
        is_small: args.small,
    };
    match (scenario.run)(&options) {
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

/// Under `cargo run`: brings the program `tenure` beside this one up to date, in the same profile.
fn build_the_program() -> Result<(), String> {
    let Some(cargo) = std::env::var_os("CARGO") else { return Ok(()) };
    if std::env::var_os("TENURE_BIN").is_some() {
        return Ok(());
    }
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--locked", "--package", "tenure-cli"]);
    if let Some(folder) = std::env::var_os("CARGO_MANIFEST_DIR") {
        build.current_dir(folder);
    }
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    match build.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("cargo build --package tenure-cli: {status}")),
        Err(error) => Err(format!("cargo: {error}")),
    }
}
