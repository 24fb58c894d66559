//! Sinks: the schema that they need, whether a database can be one, and what one has published.

mod check;
#[cfg(feature = "sink-object-store")]
mod files;
mod kafka;
#[cfg(feature = "sink-mysql")]
mod mysql;
mod postgres;
#[cfg(feature = "sink-redis")]
mod redis;
mod report;
mod schema;
mod sqlite;
#[cfg(feature = "sink-object-store")]
mod store;
mod trial;

use crate::args::SinkCommand;
use crate::{Failure, exit};

/// Runs one of the commands.
pub(crate) async fn run(command: &SinkCommand) -> Result<(), Failure> {
    match command {
        SinkCommand::Sql(args) => schema::print(args),
        SinkCommand::Check(args) => check::check(args).await,
        #[cfg(feature = "sink-object-store")]
        SinkCommand::Files(args) => files::files(args).await,
        #[cfg(not(feature = "sink-object-store"))]
        SinkCommand::Files(_) => Err(without_driver("object stores", "sink-object-store")),
    }
}

/// What to do about a sink whose driver is a feature that this build was made without.
#[cfg(not(all(feature = "sink-mysql", feature = "sink-redis", feature = "sink-object-store")))]
fn without_driver(sink: &str, feature: &str) -> Failure {
    usage(format!(
        "this build has no driver for {sink}\n\
         next: build the program with `cargo build --release --features {feature}`"
    ))
}

fn usage(message: String) -> Failure {
    Failure { message, exit: exit::USAGE }
}
