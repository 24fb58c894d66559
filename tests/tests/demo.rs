//! The demo as the README tells it, and its negative control.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

use std::process::{Command, Output};

use serde_json::Value;
use tenure_tests::process::tenure_bin;

fn demo(flags: &[&str]) -> (Output, Value) {
    let output = Command::new(tenure_bin()).args(["demo", "--json"]).args(flags).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = text.lines().last().unwrap_or_default();
    let json = serde_json::from_str(last).unwrap_or_else(|error| {
        panic!("no JSON at the end: {error}\n{text}\n{}", String::from_utf8_lossy(&output.stderr))
    });
    (output, json)
}

#[test]
fn demo_loses_nothing_and_every_stale_owner_is_refused() {
    let (output, json) = demo(&[]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}");
    for zero in ["lost", "duplicated", "out_of_order", "accepted_late_commits"] {
        assert_eq!(json[zero], 0, "{zero}: {told}");
    }
    for seen in ["refused_sink_writes", "refused_offset_commits", "refused_locally", "moves"] {
        assert!(json[seen].as_u64().unwrap() > 0, "{seen}: {told}");
    }
    assert!(json["unowned_ms"]["p50"].as_f64().unwrap() > 0.0, "{told}");
    assert!(json["seconds"].as_f64().unwrap() < 90.0, "{told}");
    assert_eq!(json["produced"], json["copied"]);
}

#[test]
fn demo_without_fencing_shows_damage_and_says_so() {
    let (output, json) = demo(&["--no-fencing"]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(json["duplicated"].as_u64().unwrap() > 0, "{told}");
    assert_eq!(json["refused_sink_writes"], 0, "{told}");
}

#[test]
fn demo_keeps_its_files_where_it_is_told_and_refuses_a_folder_that_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mine"), "x").unwrap();
    let output =
        Command::new(tenure_bin()).args(["demo", "--keep"]).arg(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("give --keep a new or an empty folder"), "{error}");
}
