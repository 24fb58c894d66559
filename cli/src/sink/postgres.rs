//! A PostgreSQL database as a sink.

mod look;
mod table;

use std::time::{Duration, Instant};

use tenure_sdk::sink::SinkError;
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Row};

use super::report::Report;
use super::trial;
use crate::{Failure, exit};

/// Bound that the check asks the server to keep.
const IDLE: Duration = Duration::from_millis(200);

/// How long it waits to see the bound kept.
const IDLE_SEEN: Duration = Duration::from_secs(3);

pub(super) async fn check(report: &mut Report, url: &str, table: &str) -> Result<(), Failure> {
    let config: Config = url.parse().map_err(|error| Failure {
        message: format!(
            "the URL: {error}\nnext: give postgres://USER:PASSWORD@HOST:PORT/DATABASE"
        ),
        exit: exit::USAGE,
    })?;
    let client = match connect(&config).await {
        Ok(client) => client,
        Err(error) => {
            let next =
                "see that it runs, takes connections without TLS from here, and knows the user";
            report.fail("connection", words(&error), next);
            return Ok(());
        }
    };
    if let Err(error) = look::server(report, &client).await {
        report.fail("server", words(&error), "give a user that may connect to the database");
        return Ok(());
    }
    pooler(report, &config, &client).await;
    bounds(report, &client).await;
    idle_transaction(report, &config).await;
    match table::look(&client, table).await {
        Ok(found) => found.add_to(report, table),
        Err(error) => report.fail("fence table", words(&error), "give a user that may read it"),
    }
    if report.has_failed() {
        report.skip("trial", "not before the above is mended");
    } else {
        try_out(report, config, &client, table).await;
    }
    Ok(())
}

async fn connect(config: &Config) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "connection ended");
        }
    });
    Ok(client)
}

/// The server's own words: the driver's text is only `db error`.
fn words(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(cause) => format!("{} ({})", cause.message(), cause.code().code()),
        None => {
            let cause = std::error::Error::source(error);
            cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
        }
    }
}

/// Asks without a named statement, which a pooler could lose.
async fn ask(
    client: &Client,
    sql: &str,
    texts: &[&str],
) -> Result<Option<Row>, tokio_postgres::Error> {
    let parameters: Vec<(&(dyn ToSql + Sync), Type)> =
        texts.iter().map(|text| (text as &(dyn ToSql + Sync), Type::TEXT)).collect();
    Ok(client.query_typed(sql, &parameters).await?.into_iter().next())
}

/// Sees one server process behind two connections, if a pooler shares it out by transaction.
async fn pooler(report: &mut Report, config: &Config, client: &Client) {
    const PID: &str = "SELECT pg_backend_pid()";
    let pid = async |client: &Client| -> Result<i32, tokio_postgres::Error> {
        ask(client, PID, &[]).await?.map_or(Ok(0), |row| row.try_get(0))
    };
    let compare = async {
        let other = connect(config).await?;
        let alone = pid(client).await?;
        other.batch_execute("BEGIN").await?;
        let shared = pid(&other).await? == alone;
        let moved = pid(client).await? != alone;
        other.batch_execute("ROLLBACK").await?;
        Ok::<bool, tokio_postgres::Error>(shared || moved)
    };
    match compare.await {
        Ok(false) => report.ok("pooler", "none in transaction mode was seen"),
        Ok(true) => report.warn(
            "pooler",
            "in transaction mode",
            "the sink works through it; do not use tx.prepare, advisory locks or LISTEN",
        ),
        Err(error) => report.fail("pooler", words(&error), "let the user have two connections"),
    }
}

/// Sees the bounds of a transaction taken.
async fn bounds(report: &mut Report, client: &Client) {
    const NEXT: &str = "let the role set statement_timeout and idle_in_transaction_session_timeout";
    const SQL: &str = "\
SELECT set_config('statement_timeout', $1, true) = current_setting('statement_timeout')
   AND set_config('idle_in_transaction_session_timeout', $1, true)
     = current_setting('idle_in_transaction_session_timeout')";
    match ask(client, SQL, &["1234ms"]).await {
        Ok(row) => {
            let taken = row.and_then(|row| row.try_get(0).ok()).unwrap_or(false);
            report.hold("bounds", taken, "each transaction sets its own time-outs", NEXT);
        }
        Err(error) => report.fail("bounds", words(&error), NEXT),
    }
}

/// Sees an idle transaction ended by the server: this is what bounds a paused owner.
async fn idle_transaction(report: &mut Report, config: &Config) {
    const NEXT: &str =
        "a paused owner would keep the next one out: have the server end its transactions";
    let wait = async {
        let client = connect(config).await?;
        let text =
            format!("BEGIN; SET LOCAL idle_in_transaction_session_timeout = {}", IDLE.as_millis());
        client.batch_execute(&text).await?;
        let started = Instant::now();
        while started.elapsed() < IDLE_SEEN && !client.is_closed() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok::<_, tokio_postgres::Error>(client.is_closed().then(|| started.elapsed()))
    };
    match wait.await {
        Ok(Some(after)) => {
            let found = format!("ended after {} ms of {}", after.as_millis(), IDLE.as_millis());
            report.ok("idle transaction", found);
        }
        Ok(None) => report.fail("idle transaction", "was not ended by the server", NEXT),
        Err(error) => report.fail("idle transaction", words(&error), NEXT),
    }
}

async fn try_out(report: &mut Report, config: Config, client: &Client, table: &str) {
    let settings =
        PostgresSettings { table: table.to_owned(), connections_max: 2, ..Default::default() };
    let sink = match PostgresSink::connect(config, settings).await {
        Ok(sink) => sink,
        Err(error) => return report.fail("trial", error.to_string(), "see the message"),
    };
    let resource = trial::resource();
    let write = async |writer: &mut PostgresWriter, next| -> Result<(), SinkError> {
        writer.begin().await?.commit(next).await
    };
    trial::run(report, &sink, &resource, write).await;
    match clean_up(client, table, resource.as_str()).await {
        Ok(()) => report.ok("clean-up", "the trial's row is gone"),
        Err(error) => report.warn(
            "clean-up",
            words(&error),
            format!("have someone delete the row {resource} from {table}"),
        ),
    }
}

async fn clean_up(
    client: &Client,
    table: &str,
    resource: &str,
) -> Result<(), tokio_postgres::Error> {
    // The database's default may be read-only.
    client.batch_execute("BEGIN READ WRITE").await?;
    let delete = format!("DELETE FROM {table} WHERE resource = $1");
    let deleted = ask(client, &delete, &[resource]).await;
    client.batch_execute("COMMIT").await?;
    deleted.map(drop)
}
