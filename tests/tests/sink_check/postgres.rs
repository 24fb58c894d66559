//! `tenure sink check postgres://…`.

use tenure_tests::servers::{Postgres, free_port, require};

use crate::{check, sink, text, verdict};

fn migrated(server: &Postgres) -> String {
    let database = server.new_database();
    server.sql(&database, &text(&sink(&["sql", "postgres"]).stdout));
    database
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
