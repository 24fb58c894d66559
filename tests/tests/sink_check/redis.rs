//! `tenure sink check redis://…`.

use tenure_tests::servers::{Redis, free_port, require};

use crate::{check, verdict};

fn url(port: u16) -> String {
    format!("redis://127.0.0.1:{port}")
}

#[test]
fn redis_passes_with_its_risks_named_and_keeps_no_trace_of_the_trial() {
    let Some(server) = require(Redis::start()) else { return };
    let (code, report) = check(&url(server.port()));
    assert_eq!((code, report["usable"].as_bool()), (0, Some(true)), "{report:#}");
    for name in ["primary", "cluster", "eviction", "stale write", "late registration", "clean-up"] {
        assert_eq!(verdict(&report, name), Some("ok"), "{name}: {report:#}");
    }
    assert_eq!(verdict(&report, "durable"), Some("warn"), "synced each second only");
    assert_eq!(server.call(&["DBSIZE"]), "0");
    server.call(&["CONFIG", "SET", "appendfsync", "always"]);
    let (_, report) = check(&url(server.port()));
    assert_eq!(verdict(&report, "durable"), Some("ok"));
}

#[test]
fn policy_that_may_drop_the_fence_fails_and_one_that_may_not_does_not() {
    let Some(server) = require(Redis::start()) else { return };
    for (policy, expected) in [("allkeys-lru", "fail"), ("volatile-ttl", "ok")] {
        server.call(&["CONFIG", "SET", "maxmemory-policy", policy]);
        let (code, report) = check(&url(server.port()));
        assert_eq!(verdict(&report, "eviction"), Some(expected), "{policy}");
        assert_eq!(code, i32::from(expected == "fail"), "{policy}");
    }
}

#[test]
fn replica_fails_and_its_primary_is_warned_about_it() {
    let Some(primary) = require(Redis::start()) else { return };
    let Some(replica) = require(Redis::start_replica(primary.port())) else { return };
    let (code, report) = check(&url(replica.port()));
    assert_eq!((code, verdict(&report, "primary")), (1, Some("fail")), "{report:#}");
    let (code, report) = check(&url(primary.port()));
    assert_eq!((code, verdict(&report, "replicas")), (0, Some("warn")), "{report:#}");
}

#[test]
fn server_that_is_not_there_fails_with_the_next_step() {
    let (code, report) = check(&url(free_port()));
    assert_eq!((code, verdict(&report, "connection")), (1, Some("fail")));
    assert!(report["checks"][0]["next"].is_string());
}
