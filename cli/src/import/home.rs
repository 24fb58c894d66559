//! The sink that keeps a group's offsets.

use std::path::Path;

use tenure_sdk::sink::SinkError;
use tenure_sink_postgres::{PostgresSettings, PostgresSink};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink};
use tokio_postgres::Config;

use super::failed;
use crate::address::{Address, Ways};
use crate::args::ImportArgs;
use crate::{Failure, exit};

/// How the address is given.
const HOME: Ways = Ways { argument: "--home", file: "--home-file", variable: "TENURE_IMPORT_HOME" };

/// Address of the home; nothing for the coordinator.
pub(super) fn address(args: &ImportArgs) -> Result<Option<Address>, Failure> {
    let found = HOME.find(args.home.as_ref(), args.home_file.as_deref())?;
    if found.is_none() && (args.home_name.is_some() || args.home_table.is_some()) {
        return Err(usage(format!(
            "--home-name and --home-table are about a home: give it by {} FILE, {} or {}",
            HOME.file, HOME.variable, HOME.argument
        )));
    }
    Ok(found)
}

/// Where a group keeps its offsets.
pub(super) enum Home {
    Coordinator,
    Postgres(Box<PostgresSink>),
    Sqlite(Box<SqliteSink>),
}

impl Home {
    /// Connects to the home that was named.
    pub(super) async fn open(
        args: &ImportArgs,
        address: Option<&Address>,
    ) -> Result<Self, Failure> {
        let Some(url) = address.map(Address::expose) else { return Ok(Self::Coordinator) };
        let name = args.home_name.clone();
        if let Some(path) = url.strip_prefix("sqlite:") {
            let defaults = SqliteSettings::default();
            let name = name.unwrap_or_else(|| defaults.name.clone());
            let table = args.home_table.clone().unwrap_or_else(|| defaults.table.clone());
            let settings = SqliteSettings { name, table, ..defaults };
            let path = path.trim_start_matches("//");
            if !Path::new(path).is_file() {
                return Err(failed(&format!(
                    "home: there is no file {path}: start the group's service once, it makes the file"
                )));
            }
            let sink = SqliteSink::open(path, settings).await.map_err(|error| fault(&error))?;
            return Ok(Self::Sqlite(Box::new(sink)));
        }
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            let defaults = PostgresSettings::default();
            let name = name.unwrap_or_else(|| defaults.name.clone());
            let table = args.home_table.clone().unwrap_or_else(|| defaults.table.clone());
            let settings = PostgresSettings { name, table, ..defaults };
            let config: Config = url.parse().map_err(|error| usage(format!("home: {error}")))?;
            let sink =
                PostgresSink::connect(config, settings).await.map_err(|error| fault(&error))?;
            return Ok(Self::Postgres(Box::new(sink)));
        }
        Err(usage(
            "home: give postgres://USER:PASSWORD@HOST:PORT/DATABASE or sqlite:PATH; for another sink, start the \
             service once with a source whose start() answers the offsets"
                .to_owned(),
        ))
    }
}

fn usage(message: String) -> Failure {
    Failure { message, exit: exit::USAGE }
}

fn fault(error: &SinkError) -> Failure {
    failed(&format!("home: {error}"))
}
