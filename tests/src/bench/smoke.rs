//! Each scenario in small: that it works and what it says, not how fast anything is.

use serde_json::json;

use super::{Measured, Options, SCENARIOS, Scenario, text};

fn small(name: &str) -> (&'static Scenario, Measured) {
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).unwrap();
    let options = Options { is_small: true, ..Options::default() };
    (scenario, (scenario.run)(&options).unwrap_or_else(|error| panic!("{name}: {error}")))
}

/// Runs it, and gives its metrics; those named must be there and above 0.
fn check(name: &str, metrics: &[&str]) -> serde_json::Value {
    let (scenario, measured) = small(name);
    let json = measured.json(scenario);
    assert_eq!(json["scenario"], name);
    assert_eq!(json["setup"]["nodes"], json!(3));
    for metric in metrics {
        let value = json["metrics"][metric].as_f64();
        assert!(value > Some(0.0), "{metric}: {value:?}\n{}", text(scenario, &measured));
    }
    json["metrics"].clone()
}

#[test]
fn commits_are_answered_counted_and_still_there_afterwards() {
    let metrics = check(
        "commits",
        &[
            "rate_per_s",
            "p50_ms",
            "p99_ms",
            "lone_p50_ms",
            "fdatasync_p50_ms",
            "requests_per_entry",
        ],
    );
    let [p50, p99] = ["p50_ms", "p99_ms"].map(|name| metrics[name].as_f64());
    assert!(p50 <= p99, "{metrics}");
}

#[test]
fn heartbeats_are_answered_within_a_few_confirmations() {
    let metrics = check("heartbeats", &["rate_per_s", "p50_ms", "p99_ms"]);
    // One confirmation begins every few milliseconds; a tick of the driver's deadlines takes 20.
    assert!(metrics["p50_ms"].as_f64() < Some(500.0), "{metrics}");
}

#[test]
fn commits_go_on_after_a_kill_and_a_transfer_and_none_is_lost() {
    let metrics = check("failover", &["gap_p50_ms", "gap_max_ms", "transfer_gap_max_ms"]);
    let [kill, transfer] = ["gap_p50_ms", "transfer_gap_max_ms"].map(|name| metrics[name].as_f64());
    assert!(transfer < kill, "a transfer waits for no election: {metrics}");
}

#[test]
fn node_that_was_killed_comes_back_with_everything() {
    check("recovery", &["reload_s", "rss_mib"]);
}
