//! How long a partition stays without an owner after its owner crashed.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::{BenchError, Bound, Measured, Options, Scenario};
use crate::cluster::Cluster;
use crate::effects::{Database, EFFECTS};
use crate::feed::{Feed, Rate};
use crate::process::{Process, beside_this};
use crate::proxy::{Direction, Proxy};
use crate::servers::{Kafka, Postgres, unique_name, wait_until};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "takeover",
    about: "an owner killed, stopped or cut off: from there to the next owner's first effect",
    run,
};

const PARTITIONS: u16 = 6;
const TTL_MS: u64 = 1500;
const ROUNDS: u32 = 3;
const RATE: Rate = Rate { pause: Duration::from_millis(10), records: 1 };

const FENCE_MAX_MS: f64 = 1_000.0;
/// Beyond the ttl.
const LEASE_BEYOND_MS: f64 = 500.0;

const STEP_MAX: Duration = Duration::from_secs(40);

/// How an owner is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// SIGKILL: its connections are closed by the kernel.
    Killed,
    /// SIGSTOP: its connections stay open.
    Stopped,
    /// Nothing gets through to the coordinator any more, or back; its connections stay open.
    CutOff,
}

fn run(options: &Options) -> Result<Measured, BenchError> {
    let rounds = options.rounds.unwrap_or(if options.is_small { 1 } else { ROUNDS });
    let (kafka, postgres) = (Kafka::start()?, Postgres::start()?);
    let cluster = Cluster::start(1);
    let mut measured = Measured::default();
    measured.setup("partitions", PARTITIONS);
    measured.setup("ttl_ms", TTL_MS);
    measured.setup("rounds", rounds);
    measured.setup("gap", "the fault to the next owner's first row of the slowest partition");
    let rig = Rig { kafka: &kafka, postgres: &postgres, cluster: &cluster, rounds };
    let fence = rig.measure("fence", Loss::Killed)?;
    let killed = rig.measure("lease", Loss::Killed)?;
    let stopped = rig.measure("lease", Loss::Stopped)?;
    let cut_off = rig.measure("lease", Loss::CutOff)?;
    let lease = killed.max(stopped).max(cut_off);
    measured.metric("lease_killed_ms_max", killed);
    measured.metric("lease_stopped_ms_max", stopped);
    measured.metric("lease_cut_off_ms_max", cut_off);
    measured.bounded("fence_ms_max", fence, Bound::AtMost(FENCE_MAX_MS));
    let most = Bound::AtMost(TTL_MS as f64 + LEASE_BEYOND_MS);
    measured.bounded("lease_ms_max", lease, most);
    Ok(measured)
}

struct Rig<'a> {
    kafka: &'a Kafka,
    postgres: &'a Postgres,
    cluster: &'a Cluster,
    rounds: u32,
}

impl Rig<'_> {
    /// The longest gap of any partition in all rounds, in milliseconds.
    fn measure(&self, takeover: &str, loss: Loss) -> Result<f64, BenchError> {
        let mut longest = 0.0_f64;
        for _ in 0..self.rounds {
            longest = longest.max(self.round(takeover, loss)?);
        }
        Ok(longest)
    }

    fn round(&self, takeover: &str, loss: Loss) -> Result<f64, BenchError> {
        let name = self.postgres.new_database();
        // The moment of each row by the one clock of the database.
        let tables = format!(
            "{}; {EFFECTS}; ALTER TABLE effects ADD at timestamptz NOT NULL DEFAULT clock_timestamp()",
            tenure_sink_postgres::sql::MIGRATE
        );
        self.postgres.sql(&name, &tables);
        let url = self.postgres.url_of(&name, self.postgres.port());
        let database = Database::connect(&url);
        let topic = self.kafka.new_topic("takeover", PARTITIONS);
        let group = unique_name("takeover");
        let coordinator = self.cluster.addresses()[0].clone();
        let proxy = Proxy::start(coordinator.parse()?);
        let worker = |name: &str, address: &str| {
            let mut command = Command::new(beside_this("zombie-worker"));
            command.args(["--name", name, "--group", &group, "--topic", &topic]);
            command.args(["--postgres", &url, "--kafka", self.kafka.bootstrap()]);
            command.args(["--coordinators", address, "--ttl-ms", &TTL_MS.to_string()]);
            command.args(["--offsets", "sink", "--takeover", takeover, "--batch-wait-ms", "0"]);
            Process::spawn(name, &mut command)
        };
        let feed = Feed::start(self.kafka, &topic, PARTITIONS.into(), RATE);
        let mut lost = worker("lost", &proxy.address().to_string());
        let mut heir = worker("heir", &coordinator);
        let share = i64::from(PARTITIONS) / 2;
        let owned = "SELECT count(DISTINCT part) FROM effects WHERE worker =";
        let is_shared = || {
            let recent = "AND at > clock_timestamp() - interval '300 ms'";
            ["lost", "heir"].iter().all(|worker| {
                database.number(&format!("{owned} '{worker}' {recent}")) == Some(share)
            })
        };
        if !wait_until(STEP_MAX, is_shared) {
            return Err(format!("not shared:\n{}\n{}", lost.tail(), heir.tail()).into());
        }
        // Not in step with heartbeats.
        let wait_ms = u64::from(rand::random::<u16>()) % (TTL_MS / 3);
        thread::sleep(Duration::from_millis(wait_ms));
        // By the clock that stamps the rows.
        let hit_us = database
            .number("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
            .ok_or("the database has no clock")?;
        match loss {
            Loss::Killed => drop(lost.kill()),
            Loss::Stopped => lost.pause(),
            Loss::CutOff => {
                proxy.hold(Direction::ToServer);
                proxy.hold(Direction::ToClient);
            }
        }
        let hit = Instant::now();
        let taken = || {
            database.number(
                "SELECT count(*) FROM (SELECT part FROM effects GROUP BY part \
                 HAVING max(id) FILTER (WHERE worker = 'heir') > max(id) FILTER (WHERE worker = 'lost') \
                 OR max(id) FILTER (WHERE worker = 'lost') IS NULL) AS taken",
            ) == Some(i64::from(PARTITIONS))
        };
        if !wait_until(STEP_MAX, taken) {
            let waited = hit.elapsed();
            return Err(format!("not taken over within {waited:?}:\n{}", heir.tail()).into());
        }
        let _records = feed.end();
        let taken_us = database.number(
            "SELECT max(taken)::bigint FROM (SELECT extract(epoch FROM \
             min(at) FILTER (WHERE worker = 'heir' AND id > last)) * 1000000 AS taken \
             FROM effects JOIN (SELECT part AS p, max(id) AS last FROM effects \
             WHERE worker = 'lost' GROUP BY part) AS lasts ON p = part GROUP BY part) AS parts",
        );
        heir.terminate();
        let ended = heir.wait(STEP_MAX);
        if !ended.is_some_and(|status| status.success()) {
            return Err(format!("the heir ended with {ended:?}:\n{}", heir.tail()).into());
        }
        let gap_us = taken_us.ok_or("no partition was taken over")? - hit_us;
        Ok(gap_us as f64 / 1_000.0)
    }
}
