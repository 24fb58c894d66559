//! One run: records keep coming, workers are disturbed by a schedule, and the database is audited.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tenure_sink_postgres::sql;
use tenure_tests::cluster::Cluster;
use tenure_tests::effects::{Audit, CHARGES, Database, EFFECTS, HISTORY};
use tenure_tests::feed::{Feed, Rate};
use tenure_tests::figures::tell;
use tenure_tests::servers::{Kafka, Postgres, unique_name, wait_until};
use tenure_tests::tier;
use tenure_tests::zombie::OFFSET_TABLE;

use crate::crew::{Crew, Hit};
use crate::schedule::{Kind, schedule};

pub(crate) const PARTITIONS: u16 = 24;
const WORKERS: usize = 3;
const TTL_MS: u64 = 1500;

/// Longest wait for the rest to be copied once nobody is disturbed any more.
const REST_MAX: Duration = Duration::from_secs(180);

/// What a run is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// For people.
    pub(crate) name: &'static str,
    pub(crate) nodes: u64,
    pub(crate) seconds: u64,
    /// Records of all partitions together.
    pub(crate) records: u64,
    pub(crate) acts: Kind,
    /// What the workers are told beside the usual.
    pub(crate) options: &'static [&'static str],
    pub(crate) home: Home,
    /// Whether everything must come through; without the epoch check nothing is promised.
    pub(crate) must_end: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    Sink,
    Coordinator,
}

/// What a run has left.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) audit: Audit,
    /// Processes that were stopped or killed.
    pub(crate) hits: Vec<Hit>,
    /// Grants that their workers said they had lost.
    pub(crate) lost_grants: BTreeSet<(u32, u64)>,
    /// Rows that came again, with the process that wrote them before.
    pub(crate) again: Vec<Again>,
    /// Rows at or before the one before them, of one grant.
    pub(crate) out_of_order_in_a_grant: i64,
    pub(crate) charges: i64,
    pub(crate) attempts: i64,
    /// What was done, for people.
    pub(crate) acts: String,
}

/// A row that was written once more, by another grant.
#[derive(Clone, Debug)]
pub(crate) struct Again {
    pub(crate) partition: u32,
    pub(crate) offset: u64,
    pub(crate) first_worker: String,
    pub(crate) first_epoch: u64,
    pub(crate) is_same_epoch: bool,
}

impl Outcome {
    /// Rows that came again although nothing explains it: their first writer was neither stopped nor killed nor lost
    /// its lease, or had committed them before.
    pub(crate) fn unexplained(&self) -> Vec<&Again> {
        let tails: BTreeMap<&str, Vec<&BTreeMap<u32, u64>>> =
            self.hits.iter().fold(BTreeMap::new(), |mut tails, hit| {
                tails.entry(hit.worker.as_str()).or_default().push(&hit.committed);
                tails
            });
        let is_in_a_tail = |again: &&Again| {
            let hits = tails.get(again.first_worker.as_str());
            hits.into_iter().flatten().any(|committed| {
                again.offset >= committed.get(&again.partition).copied().unwrap_or(0)
            })
        };
        let is_of_a_lost_grant =
            |again: &&Again| self.lost_grants.contains(&(again.partition, again.first_epoch));
        let unexplained = |again: &&Again| {
            again.is_same_epoch || !(is_in_a_tail(again) || is_of_a_lost_grant(again))
        };
        self.again.iter().filter(unexplained).collect()
    }

    fn figures(&self) -> String {
        let Audit { produced, lost, duplicated, out_of_order, .. } = self.audit;
        let impaired: BTreeSet<&str> = self.hits.iter().map(|hit| hit.worker.as_str()).collect();
        format!(
            "{produced} records, {lost} lost, {duplicated} duplicated, {out_of_order} out of order; {} stops and kills \
             of {} processes, {} grants lost; {} charges, {} attempts",
            self.hits.len(),
            impaired.len(),
            self.lost_grants.len(),
            self.charges,
            self.attempts,
        )
    }
}

/// Runs a plan, one at a time in this process: two at once would make the machine too slow for the short ttl.
pub(crate) fn run(postgres: &Postgres, kafka: &Kafka, plan: Plan) -> Outcome {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = tier::seed();
    let acts = schedule(seed, plan.seconds, WORKERS, plan.acts);
    let planned: Vec<String> =
        acts.iter().map(|(second, act)| format!("{second}s {act}")).collect();
    tell(format_args!("chaos, {}: seed {seed}, schedule: {}", plan.name, planned.join("; ")));
    let cluster = Cluster::start(plan.nodes);
    let name = postgres.new_database();
    let tables = format!("{}; {EFFECTS}; {CHARGES}; {OFFSET_TABLE}; {HISTORY}", sql::MIGRATE);
    postgres.sql(&name, &tables);
    let url = postgres.url_of(&name, postgres.port());
    let topic = kafka.new_topic("chaos", PARTITIONS);
    let group = unique_name("chaos");
    let worker = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zombie-worker"));
        command.args(["--name", name, "--group", &group, "--topic", &topic, "--postgres", &url]);
        command.args(["--kafka", kafka.bootstrap(), "--ttl-ms", &TTL_MS.to_string()]);
        command.args(["--coordinators", &cluster.addresses().join(",")]);
        command.args(["--batch-records", "500", "--batch-wait-ms", "20", "--connections", "10"]);
        command.args([
            "--offsets",
            match plan.home {
                Home::Sink => "sink",
                Home::Coordinator => "coordinator",
            },
        ]);
        command.args(plan.options);
        command.env("RUST_LOG", "warn,tenure_sdk=info");
        command
    };
    let crew = Crew::start(&cluster, &group, WORKERS, worker);
    let outcome = disturb(crew, kafka, &topic, &Database::connect(&url), plan, &acts);
    let outcome = outcome.unwrap_or_else(|error| panic!("{}, seed {seed}: {error}", plan.name));
    tell(format_args!("chaos, {}, seed {seed}: {}", plan.name, outcome.figures()));
    outcome
}

fn disturb(
    mut crew: Crew<'_>,
    kafka: &Kafka,
    topic: &str,
    database: &Database,
    plan: Plan,
    acts: &[(u64, crate::schedule::Act)],
) -> Result<Outcome, String> {
    const PAUSE: Duration = Duration::from_millis(50);
    let rounds = plan.seconds * 1000 / u64::try_from(PAUSE.as_millis()).expect("a short pause");
    let records = plan.records.div_ceil(rounds * u64::from(PARTITIONS)).max(1);
    let rate = Rate { pause: PAUSE, records };
    let feed = Feed::start(kafka, topic, PARTITIONS.into(), rate);
    let acts = crew.follow(acts).map_err(|error| format!("{error}\n{}", crew.output()))?;
    let produced = feed.end();
    let wanted = i64::try_from(u64::from(PARTITIONS) * produced).expect("far below 2^63");
    let has_all = || {
        // Cheap first: counting what differs reads all rows.
        database.number("SELECT count(*) FROM effects") >= Some(wanted)
            && database.number("SELECT count(DISTINCT (part, at_offset)) FROM effects")
                == Some(wanted)
            && (plan.home == Home::Sink
                || crew.committed().values().filter(|next| **next >= produced).count()
                    == usize::from(PARTITIONS))
    };
    let rest_max = if plan.must_end { REST_MAX } else { Duration::from_secs(20) };
    if !wait_until(rest_max, || {
        std::thread::sleep(Duration::from_millis(300));
        has_all()
    }) && plan.must_end
    {
        let seen = database.number("SELECT count(DISTINCT (part, at_offset)) FROM effects");
        return Err(format!(
            "{seen:?} of {wanted} records came through; {acts}\n{}",
            crew.output()
        ));
    }
    let ended = crew.end_all();
    if plan.must_end {
        ended?;
    }
    let count = |query: &str| database.number(query).unwrap_or(0);
    Ok(Outcome {
        audit: Audit::of(database, PARTITIONS.into(), produced),
        again: again(database),
        out_of_order_in_a_grant: count(
            "SELECT count(*) FROM (SELECT at_offset, lag(at_offset) OVER \
             (PARTITION BY part, epoch ORDER BY id) AS before FROM effects) AS steps \
             WHERE at_offset <= before",
        ),
        charges: count("SELECT count(*) FROM charges"),
        attempts: count("SELECT count(*) FROM attempts"),
        hits: crew.hits.clone(),
        lost_grants: crew.lost.clone(),
        acts,
    })
}

fn again(database: &Database) -> Vec<Again> {
    let rows = database.rows(
        "SELECT part, at_offset, first_worker, first_epoch, epoch = first_epoch FROM (\
         SELECT part, at_offset, epoch, \
         lag(worker) OVER record AS first_worker, lag(epoch) OVER record AS first_epoch \
         FROM effects WINDOW record AS (PARTITION BY part, at_offset ORDER BY id)) AS rows \
         WHERE first_worker IS NOT NULL",
    );
    let again = rows.iter().map(|row| Again {
        partition: u32::try_from(row.get::<_, i32>(0)).expect("an index"),
        offset: u64::try_from(row.get::<_, i64>(1)).expect("an offset"),
        first_worker: row.get(2),
        first_epoch: u64::try_from(row.get::<_, i64>(3)).expect("an epoch"),
        is_same_epoch: row.get(4),
    });
    again.collect()
}
