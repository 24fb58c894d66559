//! `tenure sink`: the SQL that it prints, and what it finds in databases that are right and wrong.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

mod kafka;
mod mysql;
mod postgres;
mod redis;

use std::process::{Command, Output};

use serde_json::Value;
use tenure_sink_sqlite::rusqlite::Connection;
use tenure_tests::process::tenure_bin;

pub(crate) fn sink(arguments: &[&str]) -> Output {
    Command::new(tenure_bin()).arg("sink").args(arguments).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Exit code and findings of a check.
pub(crate) fn check(url: &str) -> (i32, Value) {
    let output = sink(&["check", url, "--output", "json"]);
    let report = serde_json::from_slice(&output.stdout);
    let report =
        report.unwrap_or_else(|error| panic!("{error}: {output:?}, {}", text(&output.stderr)));
    (output.status.code().unwrap(), report)
}

/// Verdict of one check; `None`: it was not made.
pub(crate) fn verdict<'r>(report: &'r Value, check: &str) -> Option<&'r str> {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|found| found["check"] == check)?["verdict"].as_str()
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
        (&["check", "nonsense"][..], "give postgres://"),
        (&["check", "http://127.0.0.1/"][..], "conformance kit"),
        (&["check", "kafka://127.0.0.1"][..], "kafka://HOST:PORT,HOST:PORT/TOPIC"),
        (&["check", "mysql://root@127.0.0.1"][..], "names no database"),
        (&["check", "redis://h:port"][..], "redis://USER:PASSWORD@HOST:PORT"),
        (&["files", "nonsense", "a/b/0"][..], "s3://BUCKET/PREFIX or file:FOLDER"),
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
fn url_with_a_password_comes_from_a_file_or_the_environment_and_is_never_shown() {
    const SECRET: &str = "s3cret-that-nobody-sees";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("url");
    let run = |arguments: &[&str], variable: &str| {
        let mut command = Command::new(tenure_bin());
        command.args(["sink", "check", "--timeout-ms", "2000"]).args(arguments);
        command.env("TENURE_LOG", "trace").env("TENURE_SINK_URL", variable);
        let output = command.output().unwrap();
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(!said.contains(SECRET), "{arguments:?}: {said}");
        (output.status.code().unwrap(), said)
    };
    let port = tenure_tests::servers::free_port();
    for (url, code) in [
        (format!("postgres://ann:{SECRET}@127.0.0.1:{port}/d"), 1),
        (format!("postgres://ann:{SECRET}@127.0.0.1:port/d"), 2),
        (format!("mysql://ann:{SECRET}@127.0.0.1:{port}/d"), 1),
        (format!("mysql://ann:{SECRET}@127.0.0.1:{port}"), 2),
        (format!("redis://ann:{SECRET}@127.0.0.1:{port}"), 1),
        (format!("redis://ann:{SECRET}@127.0.0.1:port"), 2),
        (format!("gopher://ann:{SECRET}@127.0.0.1"), 2),
    ] {
        std::fs::write(&file, &url).unwrap();
        let from_file = run(&["--url-file", file.to_str().unwrap()], "nonsense");
        let from_variable = run(&[], &url);
        for (found, said) in [&from_file, &from_variable] {
            assert_eq!(*found, code, "{url}: {said}");
            assert!(!said.contains("`ps`"), "{said}");
        }
        let (found, said) = run(&[&url], "nonsense");
        assert_eq!(found, code, "{url}: {said}");
        for way in ["--url-file", "TENURE_SINK_URL", "`ps`"] {
            assert!(said.contains(way), "the warning lacks {way}: {said}");
        }
    }
    let (code, said) = run(&[], "");
    assert!(code == 2 && said.contains("TENURE_SINK_URL is empty"), "{said}");
    let none = sink(&["check"]);
    assert_eq!(none.status.code(), Some(2));
    assert!(text(&none.stderr).contains("--url-file FILE or TENURE_SINK_URL"), "{none:?}");
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
