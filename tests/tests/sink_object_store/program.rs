//! `tenure sink check` and `tenure sink files` against stores that are right and wrong.

use std::process::{Command, Output};
use std::sync::Arc;

use serde_json::Value;
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::sink::conformance::grant;
use tenure_sdk::sink::{FencedSink, FencedWriter, Verified};
use tenure_sink_object_store::{ObjectStoreSettings, ObjectStoreSink, Swing};
use tenure_tests::process::tenure_bin;
use tenure_tests::servers::{S3Mock, require};

use crate::kit::PATIENCE;
use crate::s3::{BUCKET, Puts, S3Server, file_count};

/// Runs `tenure sink`, with the S3 server on `port` in its environment.
async fn sink(port: u16, arguments: &[&str]) -> Output {
    let mut command = Command::new(tenure_bin());
    command.arg("sink").args(arguments);
    for (name, value) in [
        ("AWS_ENDPOINT", format!("http://127.0.0.1:{port}").as_str()),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_SKIP_SIGNATURE", "true"),
    ] {
        command.env(name, value);
    }
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Exit code and findings of a check.
async fn check(port: u16, url: &str) -> (i32, Value) {
    let output = sink(port, &["check", url, "--output", "json"]).await;
    (output.status.code().unwrap(), json(&output))
}

fn verdict<'r>(report: &'r Value, check: &str) -> Option<&'r str> {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|found| found["check"] == check)?["verdict"].as_str()
}

#[tokio::test(flavor = "multi_thread")]
async fn atomic_s3_server_passes_the_check_and_keeps_no_trace_of_it() {
    let server = S3Server::start(Puts::Atomic).await;
    let (code, report) = check(server.port(), &format!("s3://{BUCKET}/billing")).await;
    assert_eq!((code, report["usable"].as_bool()), (0, Some(true)), "{report:#}");
    for name in ["conditional put", "stale write", "late registration", "published files"] {
        assert_eq!(verdict(&report, name), Some("ok"), "{name}");
    }
    assert_eq!(server.object_count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_servers_that_compare_and_write_in_two_steps_fail_the_check_by_name() {
    let server = S3Server::start(Puts::TwoSteps).await;
    let (code, report) = check(server.port(), &format!("s3://{BUCKET}")).await;
    assert_eq!((code, verdict(&report, "conditional put")), (1, Some("fail")), "{report:#}");
    assert_eq!(verdict(&report, "trial"), Some("skipped"));

    let started = tokio::task::spawn_blocking(S3Mock::start).await.unwrap();
    let Some(mock) = require(started) else { return };
    let (code, report) = check(mock.port(), &format!("s3://{}", S3Mock::BUCKET)).await;
    assert_eq!((code, verdict(&report, "conditional put")), (1, Some("fail")), "{report:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn local_folder_passes_the_check_and_one_that_is_not_there_is_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let (code, report) = check(0, &format!("file:{}", folder.path().display())).await;
    assert_eq!((code, report["usable"].as_bool()), (0, Some(true)), "{report:#}");
    assert_eq!(verdict(&report, "conditional put"), Some("ok"));
    assert_eq!(file_count(folder.path()), 0);
    let missing = folder.path().join("missing");
    let output = sink(0, &["check", &format!("file:{}", missing.display())]).await;
    assert_eq!(output.status.code(), Some(2));
    assert!(!missing.exists(), "a check makes no folder");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_not_there_and_bucket_that_is_missing_fail_with_the_next_step() {
    let server = S3Server::start(Puts::Atomic).await;
    let (code, report) = check(server.port(), "s3://nowhere").await;
    assert_eq!((code, verdict(&report, "connection")), (1, Some("fail")), "{report:#}");
    assert!(report["checks"][0]["next"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_those_that_were_published_and_no_others() {
    let server = S3Server::start(Puts::Atomic).await;
    let settings = ObjectStoreSettings { files_max: 4, ..ObjectStoreSettings::default() };
    let store = server.client(PATIENCE);
    let sink_of_service =
        ObjectStoreSink::new(Arc::clone(&store), Swing::Update, settings).unwrap();
    let owned = grant("ann", 0, Epoch::FIRST);
    let mut writer = sink_of_service.register(&owned).await.unwrap().writer;
    writer.resume(&Verified::without_coordinator(false)).await.unwrap();
    writer.initialise(NextOffset::ZERO).await.unwrap();
    for next in 1..=10 {
        let mut tx = writer.begin().await.unwrap();
        tx.put("published").await.unwrap();
        tx.commit(NextOffset::new(next).unwrap()).await.unwrap();
    }
    writer.begin().await.unwrap().put("given up").await.unwrap();

    let (url, resource) = (format!("s3://{BUCKET}"), owned.resource.to_string());
    let listed = sink(server.port(), &["files", &url, &resource, "--output", "json"]).await;
    let listed = json(&listed);
    let firsts: Vec<u64> = listed["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["first_offset"].as_u64().unwrap())
        .collect();
    assert_eq!((firsts, listed["next_offset"].as_u64()), ((0..10).collect(), Some(10)));
    let later = sink(server.port(), &["files", &url, &resource, "--from", "8"]).await;
    let later = String::from_utf8(later.stdout).unwrap();
    assert_eq!(later.lines().count(), 3, "a heading and two files: {later}");

    let unknown = sink(server.port(), &["files", &url, "group/topic/7"]).await;
    let message = String::from_utf8(unknown.stderr).unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    assert!(message.contains("never registered") && message.contains("next:"), "{message}");
}
