//! The sink that keeps a group's offsets.

use std::path::Path;

use tenure_sdk::sink::SinkError;
use tenure_sink_postgres::{PostgresSettings, PostgresSink};
use tenure_sink_sqlite::{SqliteSettings, SqliteSink};
use tokio_postgres::Config;

use super::failed;
use crate::args::ImportArgs;
use crate::{Failure, exit};

/// Where a group keeps its offsets.
pub(super) enum Home {
    Coordinator,
    Postgres(Box<PostgresSink>),
    Sqlite(Box<SqliteSink>),
}

impl Home {
    /// Connects to the home that was named.
    pub(super) async fn open(args: &ImportArgs) -> Result<Self, Failure> {
        let Some(url) = &args.home else { return Ok(Self::Coordinator) };
        let (name, table) = (args.home_name.clone(), args.home_table.clone());
        if let Some(path) = url.strip_prefix("sqlite:") {
            let defaults = SqliteSettings::default();
            let name = name.unwrap_or_else(|| defaults.name.clone());
            let settings = SqliteSettings { name, table, ..defaults };
            let path = path.trim_start_matches("//");
            if !Path::new(path).is_file() {
                return Err(failed(&format!(
                    "--home: there is no file {path}: start the group's service once, it makes the file"
                )));
            }
            let sink = SqliteSink::open(path, settings).await.map_err(|error| fault(&error))?;
            return Ok(Self::Sqlite(Box::new(sink)));
        }
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            let defaults = PostgresSettings::default();
            let name = name.unwrap_or_else(|| defaults.name.clone());
            let settings = PostgresSettings { name, table, ..defaults };
            let config: Config = url.parse().map_err(|error| usage(format!("--home: {error}")))?;
            let sink =
                PostgresSink::connect(config, settings).await.map_err(|error| fault(&error))?;
            return Ok(Self::Postgres(Box::new(sink)));
        }
        Err(usage(
            "--home: give postgres://USER:PASSWORD@HOST:PORT/DATABASE or sqlite:PATH; for another sink, start the \
             service once with a source whose start() answers the offsets"
                .to_owned(),
        ))
    }
}

fn usage(message: String) -> Failure {
    Failure { message, exit: exit::USAGE }
}

fn fault(error: &SinkError) -> Failure {
    failed(&format!("--home: {error}"))
}
