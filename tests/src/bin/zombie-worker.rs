//! Worker of the suite `zombie`; see `tenure_tests::zombie`.

use clap::Parser as _;
use tenure_tests::zombie::worker::{Args, run};

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
    run(Args::parse())
}
