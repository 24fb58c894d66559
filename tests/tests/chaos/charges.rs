//! An effect outside of any fenced transaction, and its owner killed between it and the commit.

use std::process::Command;
use std::time::Duration;

use tenure_sink_postgres::sql;
use tenure_tests::cluster::Cluster;
use tenure_tests::effects::{CHARGES, Database, EFFECTS};
use tenure_tests::figures::tell;
use tenure_tests::process::Process;
use tenure_tests::servers::{unique_name, wait_until};
use tenure_tests::zombie::{Line, What, payload};

use crate::parts;

const RECORDS: u64 = 200;
const TTL_MS: u64 = 1500;
const STEP_MAX: Duration = Duration::from_secs(60);

#[test]
fn effect_under_an_idempotency_key_happens_once_when_its_owner_is_killed_before_the_commit() {
    let Some((postgres, kafka)) = parts() else { return };
    let cluster = Cluster::start(1);
    let name = postgres.new_database();
    postgres.sql(&name, &format!("{}; {EFFECTS}; {CHARGES}", sql::MIGRATE));
    let url = postgres.url_of(&name, postgres.port());
    let topic = kafka.new_topic("charges", 1);
    let payloads: Vec<String> = (0..RECORDS).map(|offset| payload(0, offset)).collect();
    kafka.produce(&topic, 0, &payloads);
    let group = unique_name("charges");
    let worker = |name: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zombie-worker"));
        command.args(["--name", name, "--group", &group, "--topic", &topic, "--postgres", &url]);
        command.args(["--kafka", kafka.bootstrap(), "--ttl-ms", &TTL_MS.to_string()]);
        command.args(["--coordinators", &cluster.addresses().join(","), "--charges"]);
        command.args(["--offsets", "coordinator", "--replays"]).args(more);
        Process::spawn(name, &mut command)
    };
    // It stops itself with the effect done and its offset not committed; there it is killed.
    let mut first = worker("first", &["--point", "before-offset-commit", "--stops", "1"]);
    let is_stopping = |line: &str| Line::read(line).is_some_and(|line| line.what == What::Stopping);
    let stopped = first.wait_for_line(is_stopping, STEP_MAX).unwrap_or_else(|e| panic!("{e}"));
    first.kill();
    let stopped = Line::read(&stopped).unwrap();

    let mut second = worker("second", &[]);
    let database = Database::connect(&url);
    let wanted = i64::try_from(RECORDS).unwrap();
    let is_done =
        || database.number("SELECT count(DISTINCT at_offset) FROM effects") == Some(wanted);
    assert!(wait_until(STEP_MAX, is_done), "{}\n{}", second.tail(), cluster.output());
    second.terminate();
    assert!(second.wait(STEP_MAX).is_some_and(|status| status.success()), "{}", second.tail());

    let count = |query: &str| database.number(query).unwrap_or(0);
    let (charges, attempts) =
        (count("SELECT count(*) FROM charges"), count("SELECT count(*) FROM attempts"));
    let by_both = count(
        "SELECT count(*) FROM (SELECT at_offset FROM effects GROUP BY at_offset \
         HAVING count(DISTINCT worker) = 2) AS twice",
    );
    tell(format_args!(
        "killed at offset {}: {charges} charges, {attempts} attempts, {by_both} records done by both owners",
        stopped.next
    ));
    assert!(by_both > 0, "the second owner did nothing again: the first had committed");
    assert_eq!(charges, wanted);
    assert_eq!(attempts, wanted + by_both);
}
