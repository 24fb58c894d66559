//! The program `tenure`: serve, operate, demo.

mod address;
mod args;
mod cluster;
mod demo;
mod import;
mod lock;
mod metadata;
mod operate;
mod output;
mod past;
mod serve;
mod signing;
mod sink;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use args::{Cli, Command};
use clap::Parser as _;

/// Exit codes, as the help says them.
mod exit {
    /// Refused or failed; nothing half done.
    pub(crate) const FAILED: u8 = 1;
    /// Wrong usage.
    pub(crate) const USAGE: u8 = 2;
    /// No answer: it may or may not have happened.
    pub(crate) const UNKNOWN: u8 = 3;

    /// `tenure lock`: the coordinator refuses the lock for good.
    pub(crate) const LOCK_REFUSED: u8 = 69;
    /// `tenure lock`: another owns it, and the wait is over. The command did not start.
    pub(crate) const LOCK_NOT_IN_TIME: u8 = 75;
    /// `tenure lock`: the command was stopped, because the lock was at risk, asked for or lost.
    pub(crate) const LOCK_LOST: u8 = 79;
    /// `tenure lock`: the command is there and cannot be started.
    pub(crate) const COMMAND_NOT_STARTED: u8 = 126;
    /// `tenure lock`: there is no such command.
    pub(crate) const COMMAND_NOT_FOUND: u8 = 127;
}

/// Why a command did not do what was asked.
#[derive(Debug)]
struct Failure {
    /// For people, with the next step.
    message: String,
    exit: u8,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_log(&cli.command);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            output::complain(format_args!("error: no runtime: {error}"));
            return ExitCode::from(exit::FAILED);
        }
    };
    let outcome = runtime.block_on(run(cli.command));
    // A read of standard input that is still waiting must not hold the end up.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(failure) => {
            output::complain(format_args!("error: {}", failure.message));
            ExitCode::from(failure.exit)
        }
    }
}

async fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Lock(args) => return lock::run(&args).await,
        Command::Groups(args) => operate::groups(&args).await,
        Command::Describe(args) => operate::describe(&args).await,
        Command::Members(args) => operate::members(&args).await,
        Command::Partitions(args) => operate::partitions(&args).await,
        Command::Cluster(args) => cluster::run(&args).await,
        Command::Watch(args) => past::watch(&args).await,
        Command::History(args) => past::history(&args).await,
        Command::Move(args) => operate::move_partition(&args).await,
        Command::Rebalance(args) => operate::rebalance(&args).await,
        Command::Drain(args) => operate::drain(&args, false).await,
        Command::Undrain(args) => operate::drain(&args, true).await,
        Command::RaiseEpochFloor(args) => operate::raise_epoch_floor(&args).await,
        Command::Serve(args) => serve::run(args).await,
        Command::SigningKey(args) => signing::run(&args),
        Command::ImportKafkaGroup(args) => import::run(&args).await,
        Command::Demo(args) => demo::run(args).await,
        Command::Sink(command) => sink::run(&command).await,
        Command::DemoWorker(args) => demo::run_worker(args).await,
    }
    .map(|()| ExitCode::SUCCESS)
}

/// Logs go to standard error; `TENURE_LOG` chooses what (default: `info` for processes that run on, else `warn`).
fn start_log(command: &Command) {
    use tracing_subscriber::EnvFilter;
    let (default, json) = match command {
        Command::Serve(args) => ("info,openraft=error", args.log_json),
        Command::DemoWorker(_) => ("info", false),
        Command::Demo(_)
        | Command::Lock(_)
        | Command::ImportKafkaGroup(_)
        | Command::SigningKey(_)
        | Command::Groups(_)
        | Command::Describe(_)
        | Command::Members(_)
        | Command::Partitions(_)
        | Command::Cluster(_)
        | Command::Watch(_)
        | Command::History(_)
        | Command::Move(_)
        | Command::Rebalance(_)
        | Command::Drain(_)
        | Command::Undrain(_)
        | Command::RaiseEpochFloor(_)
        | Command::Sink(_) => ("warn", false),
    };
    let filter = EnvFilter::try_from_env("TENURE_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    if json {
        log.json().init();
    } else {
        log.init();
    }
}
