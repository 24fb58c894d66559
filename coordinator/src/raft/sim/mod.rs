//! The raft library on simulated time, over our log, our snapshots and our machine, on disks that forget.
//!
//! Log, machine, snapshots and stored forms are the files of production, compiled once more against [`types`] (another
//! runtime) and [`effects`] (another disk): a type parameter would run through every type of the layer for the tests'
//! sake alone. What is not here: gRPC between nodes (the envelope is), founding, and proposals' retries.
//!
//! One run: three nodes, falls with the loss of what was not synced, lines that break one way, stalled disks, snapshots,
//! leaders that hand over and voters that come and go; then everything heals, and the cluster must work again within [`HEALED_WITHIN`].

#![allow(clippy::duplicate_mod, reason = "production's files on another runtime, see above")]

#[path = "../failure.rs"]
#[allow(dead_code, reason = "a run stops at what the oracle says first")]
mod failure;
#[path = "../log.rs"]
#[allow(dead_code, reason = "the node's own numbers are not looked at here")]
mod log;
#[path = "../machine.rs"]
#[allow(dead_code, unreachable_pub, reason = "what is public there has other callers")]
mod machine;
#[path = "../snapshot.rs"]
#[allow(dead_code, reason = "the node's own folders are not looked at here")]
mod snapshot;
#[path = "../stored.rs"]
#[allow(dead_code, reason = "snapshots are announced over gRPC alone")]
mod stored;

mod changes;
mod clients;
mod cluster;
mod effects;
mod network;
mod oracle;
mod types;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use openraft::{AsyncRuntime as _, Instant as _};
use openraft_rt_sim::{SimInstant, SimRuntime};

use clients::Outcome;
use cluster::{Cluster, Doors, NODES};
use machine::Replica;
use oracle::{Counts, Oracle, Watched};
use types::TypeConfig;

type Library = openraft::Raft<TypeConfig, Replica<Watched>>;

/// How long faults go on, in simulated time.
const FAULTS: Duration = Duration::from_secs(6);

/// Within which time after the last fault every node has everything, in simulated time.
const HEALED_WITHIN: Duration = Duration::from_secs(10);

/// What one run is made of.
#[derive(Clone, Copy, Debug)]
struct Plan {
    seed: u64,
    /// A protection removed: entries and votes are acknowledged before they are synced.
    acknowledges_early: bool,
}

/// What became of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    /// The same for the same seed.
    trace: u64,
    counts: Counts,
    violation: Option<String>,
}

/// SplitMix64.
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    const fn new(seed: u64) -> Self {
        Self(seed ^ 0x6a09_e667_f3bc_c908)
    }

    const fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    const fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.draw() % (most - least + 1)
    }

    const fn chance(&mut self, percent: u64) -> bool {
        self.draw() % 100 < percent
    }

    fn position(&mut self, len: usize) -> usize {
        usize::try_from(self.draw() % len as u64).expect("below a usize")
    }

    /// Another source, of its own.
    const fn fork(&mut self) -> Self {
        Self::new(self.draw())
    }
}

fn run(plan: Plan) -> Run {
    run_as(plan, play)
}

/// Runs `script`, which plays all of it.
fn run_as<F: Future<Output = ()>>(
    plan: Plan,
    script: impl FnOnce(Plan, PathBuf, Oracle) -> F,
) -> Run {
    // Memory where there is some: the disk's own speed would only cost time.
    let shm = std::path::Path::new("/dev/shm");
    let folder = if shm.is_dir() { tempfile::tempdir_in(shm) } else { tempfile::tempdir() };
    let folder = folder.expect("a folder for this run");
    let oracle = Oracle::default();
    let mut runtime = SimRuntime::with_seed(plan.seed);
    runtime.block_on(script(plan, folder.path().to_owned(), oracle.clone()));
    // Tasks that are left own the log; they go before its folder.
    drop(runtime);
    effects::Disk::forget_all();
    Run { trace: oracle.trace(), counts: oracle.counts(), violation: oracle.violation() }
}

async fn play(plan: Plan, folder: PathBuf, oracle: Oracle) {
    let mut cluster = Cluster::found(plan, folder, oracle.clone()).await;
    let doors = Doors::new(&cluster);
    let mut rng = cluster.rng.fork();
    let prepared = clients::insist(&doors, &clients::prepare(), &mut rng).await;
    assert!(prepared.iter().all(|applied| applied.result.is_ok()), "{prepared:?}");
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for client in 0..clients::CLIENTS {
        let work = clients::work(doors.clone(), client, rng.fork(), stop.clone());
        tasks.push(SimRuntime::spawn(work));
    }
    tasks.push(SimRuntime::spawn(clients::read(doors.clone(), rng.fork(), stop.clone())));

    let end = SimInstant::now() + FAULTS;
    let mut count = 0;
    while SimInstant::now() < end && oracle.violation().is_none() {
        SimRuntime::sleep(Duration::from_millis(rng.within(50, 900))).await;
        count += 1;
        fault(&mut cluster, &mut rng, count).await;
    }
    heal(&mut cluster, &mut rng).await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        if task.await.is_err() {
            oracle.fail("a client panicked");
        }
    }
    if oracle.violation().is_none() {
        settle(&cluster, &doors, &mut rng).await;
    }
    for node in NODES {
        cluster.fell(node).await;
    }
}

/// One thing that goes wrong, or right again.
async fn fault(cluster: &mut Cluster, rng: &mut Rng, count: u64) {
    let node = NODES[rng.position(NODES.len())];
    match rng.within(0, 13) {
        0..=2 => cluster.fell(node).await,
        3 | 4 => {
            if let Some(leader) = cluster.leader() {
                cluster.fell(leader).await;
            }
        }
        5 if rng.chance(50) => {
            for node in NODES {
                cluster.fell(node).await;
            }
        }
        5 | 6 => {
            let other = NODES[rng.position(NODES.len())];
            cluster.oracle.say(&format!("line {node} to {other} is cut"));
            cluster.oracle.count(|counts| counts.cuts += 1);
            cluster.lines.cut(node, other);
        }
        7 => {
            cluster.oracle.say(&format!("node {node} is alone"));
            cluster.oracle.count(|counts| counts.cuts += 1);
            for other in NODES {
                cluster.lines.cut(node, other);
                cluster.lines.cut(other, node);
            }
        }
        8 => {
            cluster.oracle.say("all lines are whole");
            cluster.lines.heal();
        }
        9 => cluster.stall(node, rng.within(0, 700)),
        10 => {
            if let Some(up) = cluster.lines.node(node) {
                // One that falls at this moment writes none.
                let _asked = up.library.trigger().snapshot().await;
            }
        }
        11 | 12 => changes::change(cluster, node).await,
        _ => {
            if let Some(leader) = cluster.leader()
                && let Some(up) = cluster.lines.node(leader)
            {
                // As in production: another voter, or nobody. A raft leader that alone has a vote would wait for
                // itself or for a learner for ever.
                if leader != node && up.library.voter_ids().any(|voter| voter == node) {
                    let _asked = up.library.trigger().transfer_leader(node).await;
                }
                let payload = crate::stored::encode_batch(
                    tenure_model::Timestamp(count),
                    &[clients::raise_floor(count)],
                );
                match clients::propose(&up.library, payload).await {
                    Outcome::Done(_) | Outcome::Elsewhere(_) | Outcome::Unknown => {}
                }
            }
        }
    }
    // What has fallen comes back before long.
    for node in NODES {
        if !cluster.is_up(node) && rng.chance(45) {
            cluster.start(node).await;
        }
    }
    if rng.chance(20) {
        cluster.lines.heal();
    }
}

async fn heal(cluster: &mut Cluster, rng: &mut Rng) {
    cluster.oracle.say("everything heals");
    cluster.lines.heal();
    for node in NODES {
        if !cluster.is_up(node) {
            cluster.start(node).await;
        }
        cluster.stall(node, 0);
    }
    SimRuntime::sleep(Duration::from_millis(rng.within(500, 1_500))).await;
}

/// Everything works again, and nothing that was promised is missing anywhere.
async fn settle(cluster: &Cluster, doors: &Doors, rng: &mut Rng) {
    let oracle = &cluster.oracle;
    let command = [clients::raise_floor(1_000_000)];
    let last = clients::insist(doors, &command, rng);
    if SimRuntime::timeout(HEALED_WITHIN, last).await.is_err() {
        for told in cluster.told() {
            oracle.say(&told);
        }
        return oracle.fail("no entry is committed after everything has healed");
    }
    let end = SimInstant::now() + HEALED_WITHIN;
    loop {
        let applied = cluster.applied();
        let memberships = cluster.memberships();
        if applied.iter().all(|index| index.is_some() && *index == applied[0])
            && memberships.iter().all(|membership| *membership == memberships[0])
        {
            break;
        }
        if SimInstant::now() >= end {
            return oracle
                .fail(&format!("replicas do not become equal: {applied:?}, {memberships:?}"));
        }
        SimRuntime::sleep(Duration::from_millis(20)).await;
    }
    let promises = oracle.promises();
    let mut states = Vec::new();
    for node in NODES {
        let look = |watched: &Watched| {
            let who = format!("node {node} at the end");
            oracle.check_kept(&who, &promises, &watched.inner, &clients::group());
            crate::stored::encode_snapshot(watched.inner.state())
        };
        states.extend(cluster.look(node, look));
    }
    if states.len() != NODES.len() || states.iter().any(|state| *state != states[0]) {
        oracle.fail("the states of the replicas differ at the end");
    }
}

/// Runs per test: `TENURE_SEEDS`, or the tier's share.
fn seed_count() -> u64 {
    number("TENURE_SEEDS").unwrap_or_else(|| match std::env::var("TENURE_TEST_TIER").as_deref() {
        Ok("full") => 300,
        Ok("fast") => 4,
        Ok(_) | Err(_) => 24,
    })
}

/// The seed to begin at: `TENURE_RAFT_SEED` repeats one run; full runs go on where `TENURE_SEED` says.
fn first_seed() -> u64 {
    let is_full = std::env::var("TENURE_TEST_TIER").is_ok_and(|tier| tier == "full");
    let drawn = number("TENURE_SEED").filter(|_| is_full).map(|seed| seed.wrapping_mul(1_000));
    number("TENURE_RAFT_SEED").or(drawn).unwrap_or(0)
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[allow(clippy::print_stderr, reason = "cargo shows it with a failure, or when asked to")]
fn show(seed: u64, run: &Run) {
    eprintln!("seed {seed} trace {:016x} {:?}", run.trace, run.counts);
}

mod runs {
    use super::*;

    fn replay(seed: u64) -> String {
        format!(
            "TENURE_RAFT_SEED={seed} TENURE_SEEDS=1 cargo test -p tenure-coordinator --lib raft::sim::runs -- --nocapture"
        )
    }

    #[test]
    fn acknowledged_writes_survive_falls_cuts_and_lost_syncs() {
        let mut total = Counts::default();
        for seed in (0..seed_count()).map(|run| first_seed().wrapping_add(run)) {
            let found = run(Plan { seed, acknowledges_early: false });
            show(seed, &found);
            if let Some(violation) = found.violation {
                panic!("seed {seed}: {violation}\nagain: {}", replay(seed));
            }
            total.add(found.counts);
        }
        assert!(total.acknowledged > 0 && total.falls > 0 && total.bytes_lost > 0, "{total:?}");
        assert!(total.reads > 0 && total.leaders > 0 && total.changes > 0, "{total:?}");
    }

    #[test]
    fn same_seed_twice_is_the_same_run() {
        let plan = Plan { seed: first_seed(), acknowledges_early: false };
        assert_eq!(run(plan), run(plan), "seed {}", plan.seed);
    }
}

/// A protection removed must show.
mod controls {
    use super::*;

    #[test]
    fn acknowledging_before_the_sync_is_found() {
        let found = (0..200).find(|run| {
            let seed = first_seed().wrapping_add(*run);
            super::run(Plan { seed, acknowledges_early: true }).violation.is_some()
        });
        let runs =
            found.expect("writes acknowledged before the sync get lost within 200 seeds") + 1;
        tell_control("ack before fsync", runs);
    }

    #[allow(clippy::print_stderr, reason = "cargo shows it with a failure, or when asked to")]
    fn tell_control(protection: &str, runs: u64) {
        eprintln!("without {protection}: found in run {runs}");
    }
}
