//! `tenure sink`: the SQL that it prints, and what it finds in databases that are right and wrong.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

use std::process::{Command, Output};

use serde_json::Value;
use tenure_sink_sqlite::rusqlite::Connection;
use tenure_tests::process::tenure_bin;
use tenure_tests::servers::{Postgres, free_port, require};

fn sink(arguments: &[&str]) -> Output {
    Command::new(tenure_bin()).arg("sink").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Exit code and findings of a check.
fn check(url: &str) -> (i32, Value) {
    let output = sink(&["check", url, "--output", "json"]);
    let report = serde_json::from_slice(&output.stdout);
    let report =
        report.unwrap_or_else(|error| panic!("{error}: {output:?}, {}", text(&output.stderr)));
    (output.status.code().unwrap(), report)
}

/// Verdict of one check; `None`: it was not made.
fn verdict<'r>(report: &'r Value, check: &str) -> Option<&'r str> {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|found| found["check"] == check)?["verdict"].as_str()
}

fn migrated(server: &Postgres) -> String {
    let database = server.new_database();
    server.sql(&database, &text(&sink(&["sql", "postgres"]).stdout));
    database
}

#[test]
fn printed_migrations_are_those_of_the_sinks() {
    for (dialect, migrate) in [
        ("postgres", tenure_sink_postgres::sql::MIGRATE),
        ("mysql", tenure_sink_mysql::sql::MIGRATE),
        ("sqlite", tenure_sink_sqlite::sql::MIGRATE),
    ] {
        assert_eq!(text(&sink(&["sql", dialect]).stdout), format!("{migrate};\n"));
        let named = text(&sink(&["sql", dialect, "--table", "fences"]).stdout);
        assert_eq!(named, format!("{};\n", migrate.replace("tenure_fence", "fences")));
    }
    let guarded = sink(&["sql", "postgres", "--guard", "bill"]);
    let guard = tenure_sink_postgres::sql::guard("tenure_fence", "bill");
    assert!(text(&guarded.stdout).ends_with(&format!("{guard}\n")));
}

#[test]
fn what_is_no_name_or_no_database_is_wrong_usage_and_names_the_next_step() {
    for (arguments, said) in [
        (&["sql", "postgres", "--table", "a; DROP TABLE b"][..], "is not `table`"),
        (&["sql", "sqlite", "--guard", "bill"][..], "--guard is for postgres"),
        (&["check", "nonsense"][..], "postgres://USER@HOST/DATABASE or sqlite:PATH"),
        (&["check", "kafka://127.0.0.1"][..], "this build has no kafka driver"),
        (&["check", "postgres://h:port/x"][..], "postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
        (&["check", "sqlite:"][..], "give the path of a file"),
    ] {
        let output = sink(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(said), "{arguments:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "");
    }
}

#[test]
fn migrated_sqlite_file_passes_and_keeps_no_trace_of_the_trial() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.db");
    let url = format!("sqlite:{}", path.display());
    let (code, report) = check(&url);
    assert_eq!((code, verdict(&report, "file")), (1, Some("fail")));
    assert!(!path.exists(), "a check makes no file");

    let file = Connection::open(&path).unwrap();
    file.execute_batch("CREATE TABLE tenure_fence (resource TEXT)").unwrap();
    let (code, report) = check(&url);
    assert_eq!((code, verdict(&report, "fence table")), (1, Some("fail")));

    file.execute_batch("DROP TABLE tenure_fence").unwrap();
    file.execute_batch(&text(&sink(&["sql", "sqlite"]).stdout)).unwrap();
    let (code, report) = check(&url);
    assert_eq!((code, verdict(&report, "trial")), (0, Some("skipped")), "not WAL yet");
    file.execute_batch("PRAGMA journal_mode = WAL").unwrap();
    let (code, report) = check(&url);
    assert_eq!((code, report["usable"].as_bool()), (0, Some(true)));
    assert_eq!(verdict(&report, "stale write"), Some("ok"));
    let rows: i64 =
        file.query_row("SELECT count(*) FROM tenure_fence", [], |row| row.get(0)).unwrap();
    assert_eq!(rows, 0);
}

#[test]
fn migrated_postgres_passes_and_keeps_no_trace_of_the_trial() {
    let Some(server) = require(Postgres::shared()) else { return };
    let database = migrated(server);
    let (code, report) = check(&server.url_of(&database, server.port()));
    assert_eq!((code, report["usable"].as_bool()), (0, Some(true)));
    for name in ["bounds", "idle transaction", "stale write", "late registration", "clean-up"] {
        assert_eq!(verdict(&report, name), Some("ok"), "{name}");
    }
    assert_eq!(server.sql(&database, "SELECT count(*) FROM tenure_fence"), "0");
}

#[test]
fn each_fault_of_a_postgres_is_found_at_the_check_that_is_named_after_it() {
    let Some(server) = require(Postgres::shared()) else { return };
    for (fault, name, expected) in [
        ("DROP TABLE tenure_fence", "fence table", "fail"),
        ("ALTER TABLE tenure_fence DROP COLUMN sequence", "fence table", "fail"),
        ("ALTER TABLE tenure_fence SET UNLOGGED", "fence table", "fail"),
        ("ALTER TABLE tenure_fence DROP CONSTRAINT tenure_fence_pkey", "fence table", "fail"),
        ("ALTER TABLE tenure_fence ENABLE ROW LEVEL SECURITY", "row security", "fail"),
        (
            "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
             CREATE TRIGGER lost BEFORE UPDATE ON tenure_fence FOR EACH ROW EXECUTE FUNCTION nothing()",
            "triggers",
            "warn",
        ),
    ] {
        let database = migrated(server);
        server.sql(&database, fault);
        let (code, report) = check(&server.url_of(&database, server.port()));
        assert_eq!((code, verdict(&report, name)), (1, Some(expected)), "{fault}");
        let left = server.sql(
            &database,
            "SELECT count(*) FROM pg_tables WHERE tablename = 'tenure_fence'",
        );
        if left == "1" {
            assert_eq!(server.sql(&database, "SELECT count(*) FROM tenure_fence"), "0");
        }
    }
}

#[test]
fn settings_that_are_a_risk_are_warnings_and_do_not_fail_the_check() {
    let Some(server) = require(Postgres::shared()) else { return };
    let database = migrated(server);
    server.sql(
        &database,
        &format!(
            "ALTER DATABASE {database} SET default_transaction_read_only = on;
             ALTER DATABASE {database} SET default_transaction_isolation = 'serializable';
             ALTER DATABASE {database} SET synchronous_commit = off"
        ),
    );
    let (code, report) = check(&server.url_of(&database, server.port()));
    assert_eq!((code, verdict(&report, "writable")), (0, Some("warn")));
    assert_eq!(verdict(&report, "isolation"), Some("ok"));
    assert_eq!(verdict(&report, "stale write"), Some("ok"));
}

#[test]
fn role_without_rights_and_server_that_is_not_there_fail_with_the_next_step() {
    let Some(server) = require(Postgres::shared()) else { return };
    let database = migrated(server);
    let role = tenure_tests::servers::unique_name("reader");
    server.sql(
        &database,
        &format!("CREATE ROLE {role} LOGIN; GRANT SELECT ON tenure_fence TO {role}"),
    );
    let url = format!("postgres://{role}@127.0.0.1:{}/{database}", server.port());
    let (code, report) = check(&url);
    assert_eq!((code, verdict(&report, "rights")), (1, Some("fail")));

    let (code, report) = check(&server.url_of(&database, free_port()));
    assert_eq!((code, verdict(&report, "connection")), (1, Some("fail")));
    assert!(report["checks"][0]["next"].is_string());
}
