//! The bench program in small: that each scenario works and what its last line says, not how fast anything is.

use std::process::Command;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use tenure_tests::process::tenure_bin;
use tenure_tests::tier::has_time;

/// Each starts nodes and ends with an error when their raft leader changes: not beside each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs one scenario, and gives its metrics. Those named are there; a missed bound is no failure here.
fn metrics(scenario: &str, names: &[&str]) -> Value {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args([scenario, "--small", "--json"])
        .env("TENURE_BIN", tenure_bin())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let all = || format!("{text}{}", String::from_utf8_lossy(&output.stderr));
    let last = text.lines().last().unwrap_or_default();
    let json: Value = serde_json::from_str(last).unwrap_or_else(|_| panic!("{}", all()));
    assert_eq!(json["scenario"], scenario);
    assert!(json["setup"]["machine"].is_object(), "{json}");
    for name in names {
        assert!(json["metrics"][name].as_f64() >= Some(0.0), "{name} is missing in {json}");
    }
    json["metrics"].clone()
}

fn is_above_0(metrics: &Value, name: &str) {
    assert!(metrics[name].as_f64() > Some(0.0), "{name}: {metrics}");
}

#[test]
fn bench_of_commits_says_rates_and_times() {
    if !has_time() {
        return;
    }
    let metrics =
        metrics("commits", &["rate_per_s", "p50_ms", "p99_ms", "lone_p50_ms", "fdatasync_p50_ms"]);
    is_above_0(&metrics, "rate_per_s");
    is_above_0(&metrics, "requests_per_entry");
    is_above_0(&metrics, "nodes_cpu_us_per_partition");
    assert!(metrics["p50_ms"].as_f64() <= metrics["p99_ms"].as_f64(), "{metrics}");
}

#[test]
fn bench_of_heartbeats_says_rates_and_times() {
    if !has_time() {
        return;
    }
    let metrics = metrics("heartbeats", &["rate_per_s", "p50_ms", "p99_ms", "fdatasync_p50_ms"]);
    is_above_0(&metrics, "rate_per_s");
    is_above_0(&metrics, "nodes_cpu_us_per_heartbeat");
}

#[test]
fn bench_of_failover_says_gaps() {
    if !has_time() {
        return;
    }
    let metrics = metrics("failover", &["gap_p50_ms", "gap_max_ms", "transfer_gap_max_ms"]);
    is_above_0(&metrics, "gap_p50_ms");
    assert!(metrics["gap_p50_ms"].as_f64() <= metrics["gap_max_ms"].as_f64(), "{metrics}");
}

#[test]
fn bench_of_recovery_says_how_long_and_how_large() {
    if !has_time() {
        return;
    }
    let metrics = metrics("recovery", &["reload_s", "rss_mib"]);
    is_above_0(&metrics, "reload_s");
    is_above_0(&metrics, "rss_mib");
}

#[test]
fn bench_of_a_full_machine_counts_elections() {
    if !has_time() {
        return;
    }
    metrics("steady", &["elections", "p50_ms", "p99_ms"]);
}
