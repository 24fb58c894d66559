//! `tenure lock`: one command at a time, with an epoch, stopped before the lock may be another's.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tenure_tests::process::{Process, tenure_bin};
use tenure_tests::servers::wait_until;

use super::{Dev, LONGEST, said};

const TTL_MS: &str = "1500";

fn lock(dev: &Dev, options: &[&str], command: &[&str]) -> Command {
    let mut lock = Command::new(tenure_bin());
    lock.args(["lock", "nightly", "--ttl-ms", TTL_MS, "--coordinators", &dev.address])
        .args(options)
        .arg("--")
        .args(command)
        .stdin(Stdio::null());
    lock
}

#[test]
fn command_runs_with_an_epoch_that_rises_and_gives_its_exit_code() {
    let dev = Dev::start();
    let mut epochs = Vec::new();
    for _ in 0..2 {
        let output = lock(&dev, &[], &["sh", "-c", "echo $TENURE_LOCK $TENURE_EPOCH; exit 7"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(7), "{}", said(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        let epoch = text.trim().strip_prefix("nightly ").unwrap().parse::<u64>().unwrap();
        epochs.push(epoch);
    }
    assert!(epochs[0] < epochs[1], "{epochs:?}");
    let missing = lock(&dev, &[], &["/no/such/command"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(127), "{}", said(&missing));
}

#[test]
fn second_command_waits_for_the_first_and_gives_up_in_time() {
    let dev = Dev::start();
    let folder = TempDir::new().unwrap();
    let end = folder.path().join("end");
    let script = format!("echo begun; while [ ! -e {} ]; do sleep 0.05; done", end.display());
    let first = Process::spawn("first", &mut lock(&dev, &[], &["sh", "-c", &script]));
    first.wait_for_line(|line| line == "begun", LONGEST).unwrap();
    let late = lock(&dev, &["--wait-ms", "800"], &["echo", "second"]).output().unwrap();
    assert_eq!(late.status.code(), Some(75), "{}", said(&late));
    assert!(late.stdout.is_empty(), "it must not have begun: {}", said(&late));
    let second = Process::spawn("second", &mut lock(&dev, &[], &["echo", "second"]));
    assert!(!wait_until(Duration::from_millis(600), || second
        .lines()
        .iter()
        .any(|l| l == "second")));
    std::fs::write(&end, "").unwrap();
    second.wait_for_line(|line| line == "second", LONGEST).unwrap();
}

#[test]
fn command_is_stopped_before_the_lock_of_a_coordinator_that_is_gone_may_be_anothers() {
    let dev = Dev::start();
    // It does not mind SIGTERM, and so does the child that it leaves behind.
    let script =
        "trap '' TERM; (while :; do sleep 0.05; done) & echo begun; while :; do sleep 0.05; done";
    let mut run = Process::spawn("stubborn", &mut lock(&dev, &[], &["sh", "-c", script]));
    run.wait_for_line(|line| line == "begun", LONGEST).unwrap();
    let paused = Instant::now();
    dev.node.pause();
    let line = run.wait_for_line(|line| line.contains("the command was stopped"), LONGEST).unwrap();
    // The lease: the ttl, counted from the last heartbeat that was answered, less the drift.
    let within = Duration::from_millis(1500);
    assert!(
        paused.elapsed() < within,
        "stopped {:?} after the coordinator: {line}",
        paused.elapsed()
    );
    dev.node.resume();
    assert_eq!(run.wait(LONGEST).and_then(|status| status.code()), Some(79), "{}", run.tail());
}

#[test]
fn signal_to_the_lock_reaches_the_command() {
    let dev = Dev::start();
    let script = "trap 'echo told; exit 3' TERM; echo begun; while :; do sleep 0.05; done";
    let mut run = Process::spawn("polite", &mut lock(&dev, &[], &["sh", "-c", script]));
    run.wait_for_line(|line| line == "begun", LONGEST).unwrap();
    run.terminate();
    run.wait_for_line(|line| line == "told", LONGEST).unwrap();
    assert_eq!(run.wait(LONGEST).and_then(|status| status.code()), Some(3));
}
