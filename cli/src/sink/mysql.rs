//! A MySQL or MariaDB database as a sink.

mod look;
mod table;

use std::time::{Duration, Instant};

use tenure_sdk::sink::SinkError;
use tenure_sink_mysql::sqlx::mysql::{MySqlConnectOptions, MySqlRow};
use tenure_sink_mysql::sqlx::{
    self, AssertSqlSafe, ConnectOptions as _, Connection as _, MySqlConnection, Row as _,
};
use tenure_sink_mysql::{MysqlSettings, MysqlSink, MysqlWriter};

use super::report::Report;
use super::{trial, usage};
use crate::Failure;
use look::Server;

/// How long it waits to see the bound of one second kept.
const IDLE_SEEN: Duration = Duration::from_secs(5);

pub(super) async fn check(report: &mut Report, url: &str, table: &str) -> Result<(), Failure> {
    let options: MySqlConnectOptions = url.parse().map_err(|error| {
        usage(format!("the URL: {error}\nnext: give mysql://USER:PASSWORD@HOST:PORT/DATABASE"))
    })?;
    if options.get_database().is_none_or(str::is_empty) {
        return Err(usage(
            "the URL names no database: mysql://USER:PASSWORD@HOST:PORT/DATABASE".into(),
        ));
    }
    // Statements are in errors already.
    let options = options.disable_statement_logging();
    let mut connection = match MySqlConnection::connect_with(&options).await {
        Ok(connection) => connection,
        Err(error) => {
            let next =
                "see that it runs, takes connections without TLS from here, and knows the user";
            report.fail("connection", words(&error), next);
            return Ok(());
        }
    };
    let server = match Server::look(&mut connection).await {
        Ok(server) => server,
        Err(error) => {
            report.fail(
                "server",
                words(&error),
                "give a user that may read the server's variables",
            );
            return Ok(());
        }
    };
    server.add_to(report);
    look::replication(report, &mut connection).await;
    pooler(report, &options, &mut connection).await;
    idle_transaction(report, &options, &mut connection, &server).await;
    match table::look(&mut connection, table).await {
        Ok(found) => found.add_to(report, table),
        Err(error) => report.fail("fence table", words(&error), "give a user that may read it"),
    }
    if report.has_failed() {
        report.skip("trial", "not before the above is mended");
    } else {
        try_out(report, options, &mut connection, table).await;
    }
    Ok(())
}

/// The server's own words and number, without the driver's around them.
fn words(error: &sqlx::Error) -> String {
    match error.as_database_error() {
        Some(cause) => format!("{} ({})", cause.message(), cause.code().unwrap_or_default()),
        None => error.to_string(),
    }
}

/// Asks in text, as the sink does: a proxy may not keep prepared statements.
async fn ask(connection: &mut MySqlConnection, sql: String) -> Result<Vec<MySqlRow>, sqlx::Error> {
    // Of this module's texts, table names that were let through, and hexadecimal literals.
    sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await
}

async fn tell(connection: &mut MySqlConnection, sql: &str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.map(drop)
}

/// A text as a literal that needs no escaping.
fn literal(text: &str) -> String {
    let digits: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("X'{digits}'")
}

async fn connection_id(connection: &mut MySqlConnection) -> Result<String, sqlx::Error> {
    let rows = ask(connection, "SELECT CAST(connection_id() AS CHAR)".into()).await?;
    rows.first().map_or(Ok(String::new()), |row| row.try_get(0))
}

/// Sees one server thread behind two connections, if a proxy shares it out by transaction.
async fn pooler(
    report: &mut Report,
    options: &MySqlConnectOptions,
    connection: &mut MySqlConnection,
) {
    let compare = async {
        let mut other = MySqlConnection::connect_with(options).await?;
        let alone = connection_id(connection).await?;
        tell(&mut other, "START TRANSACTION").await?;
        let shared = connection_id(&mut other).await? == alone;
        let moved = connection_id(connection).await? != alone;
        tell(&mut other, "ROLLBACK").await?;
        Ok::<bool, sqlx::Error>(shared || moved)
    };
    match compare.await {
        Ok(false) => report.ok("pooler", "none that shares server threads was seen"),
        Ok(true) => report.fail(
            "pooler",
            "server threads are shared out by transaction",
            "the sink sets `autocommit` and its bounds on the session: connect without the proxy",
        ),
        Err(error) => report.fail("pooler", words(&error), "let the user have two connections"),
    }
}

/// Sees an idle transaction ended by the server: this is what bounds a paused owner.
async fn idle_transaction(
    report: &mut Report,
    options: &MySqlConnectOptions,
    observer: &mut MySqlConnection,
    server: &Server,
) {
    const CHECK: &str = "idle transaction";
    const NEXT: &str = "a paused owner would keep the next one out: let the user set the bound, and name the server in \
                        the sink's setting `flavour` if a proxy answers for another one";
    let bound = server.idle_bound();
    let wait = async {
        let mut idle = MySqlConnection::connect_with(options).await?;
        tell(&mut idle, &format!("SET SESSION {bound} = 1; START TRANSACTION; SELECT 1")).await?;
        let id = connection_id(&mut idle).await?;
        let is_there = format!("SELECT id FROM information_schema.processlist WHERE id = {id}");
        let started = Instant::now();
        while started.elapsed() < IDLE_SEEN {
            if ask(observer, is_there.clone()).await?.is_empty() {
                return Ok(Some(started.elapsed()));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok::<_, sqlx::Error>(None)
    };
    match wait.await {
        Ok(Some(after)) => {
            report.ok(CHECK, format!("ended after {} ms by {bound} of 1 s", after.as_millis()));
        }
        Ok(None) => report.fail(CHECK, format!("not ended by {bound} of 1 s"), NEXT),
        Err(error) => report.fail(CHECK, words(&error), NEXT),
    }
}

async fn try_out(
    report: &mut Report,
    options: MySqlConnectOptions,
    connection: &mut MySqlConnection,
    table: &str,
) {
    let settings =
        MysqlSettings { table: table.to_owned(), connections_max: 2, ..Default::default() };
    let sink = match MysqlSink::connect(options, settings).await {
        Ok(sink) => sink,
        Err(error) => return report.fail("trial", error.to_string(), "see the message"),
    };
    let resource = trial::resource();
    let write = async |writer: &mut MysqlWriter, next| -> Result<(), SinkError> {
        writer.begin().await?.commit(next).await
    };
    trial::run(report, &sink, &resource, write).await;
    let delete = format!("DELETE FROM {table} WHERE resource = {}", literal(resource.as_str()));
    match tell(connection, &delete).await {
        Ok(()) => report.ok("clean-up", "the trial's row is gone"),
        Err(error) => report.warn(
            "clean-up",
            words(&error),
            format!("have someone delete the row {resource} from {table}"),
        ),
    }
}
