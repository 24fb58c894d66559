//! `tenure sink check mysql://…`, on MariaDB.

use tenure_tests::servers::{MariaDb, free_port, require};

use crate::{check, sink, text, verdict};

fn migrated(server: &MariaDb) -> String {
    let database = server.new_database();
    server.sql(&database, &text(&sink(&["sql", "mysql"]).stdout));
    database
}

fn url(database: &str, port: u16) -> String {
    format!("mysql://root@127.0.0.1:{port}/{database}")
}

#[test]
fn migrated_mariadb_passes_and_keeps_no_trace_of_the_trial() {
    let Some(server) = require(MariaDb::shared()) else { return };
    let database = migrated(server);
    let (code, report) = check(&url(&database, server.port()));
    assert_eq!((code, report["usable"].as_bool()), (0, Some(true)), "{report:#}");
    for name in [
        "writable",
        "isolation",
        "durable",
        "pooler",
        "idle transaction",
        "fence table",
        "stale write",
        "late registration",
        "clean-up",
    ] {
        assert_eq!(verdict(&report, name), Some("ok"), "{name}: {report:#}");
    }
    assert_eq!(server.sql(&database, "SELECT count(*) FROM tenure_fence"), "0");
}

#[test]
fn each_fault_of_a_mariadb_is_found_at_the_check_that_is_named_after_it() {
    let Some(server) = require(MariaDb::shared()) else { return };
    for (fault, name) in [
        ("DROP TABLE tenure_fence", "fence table"),
        ("ALTER TABLE tenure_fence DROP COLUMN sequence", "fence table"),
        ("ALTER TABLE tenure_fence ENGINE = Aria", "fence table"),
        ("ALTER TABLE tenure_fence DROP PRIMARY KEY", "fence table"),
        ("ALTER TABLE tenure_fence MODIFY resource VARCHAR(512) NOT NULL", "fence table"),
        (
            "CREATE TRIGGER lost BEFORE UPDATE ON tenure_fence FOR EACH ROW SET NEW.epoch = OLD.epoch",
            "take-over",
        ),
    ] {
        let database = migrated(server);
        server.sql(&database, fault);
        let (code, report) = check(&url(&database, server.port()));
        let found = verdict(&report, name);
        assert_eq!((code, found), (1, Some("fail")), "{fault}: {report:#}");
    }
}

#[test]
fn trigger_on_the_fence_table_is_a_warning() {
    let Some(server) = require(MariaDb::shared()) else { return };
    let database = migrated(server);
    server.sql(
        &database,
        "CREATE TRIGGER looks BEFORE UPDATE ON tenure_fence FOR EACH ROW SET @seen = NEW.epoch",
    );
    let (code, report) = check(&url(&database, server.port()));
    assert_eq!((code, verdict(&report, "triggers")), (0, Some("warn")), "{report:#}");
}

#[test]
fn read_only_server_and_lazy_log_are_found() {
    // Settings of the whole server: one of its own.
    let Some(server) = require(MariaDb::start()) else { return };
    let database = migrated(&server);
    server.sql(&database, "SET GLOBAL innodb_flush_log_at_trx_commit = 2");
    let (code, report) = check(&url(&database, server.port()));
    assert_eq!((code, verdict(&report, "durable")), (0, Some("warn")), "{report:#}");
    server.sql(&database, "SET GLOBAL read_only = 1");
    let (code, report) = check(&url(&database, server.port()));
    assert_eq!((code, verdict(&report, "writable")), (1, Some("fail")), "{report:#}");
}

#[test]
fn server_that_is_not_there_fails_with_the_next_step() {
    let (code, report) = check(&url("billing", free_port()));
    assert_eq!((code, verdict(&report, "connection")), (1, Some("fail")));
    assert!(report["checks"][0]["next"].is_string());
}
