//! Voters that become learners and voters again, and what a node keeps of a change that it could not commit.

use std::collections::BTreeSet;
use std::time::Duration;

use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::{AsyncRuntime as _, ChangeMembers, Instant as _, ServerState};
use openraft_rt_sim::{SimInstant, SimRuntime};
use tenure_model::Timestamp;

use super::clients::{self, Outcome};
use super::cluster::{Cluster, Doors, NODES};
use super::oracle::Oracle;
use super::types::NodeId;
use super::{Library, Plan};
use crate::stored::encode_batch;

/// How long a change is waited for; one that takes longer may still happen.
const PATIENCE: Duration = Duration::from_millis(600);

/// Longest wait of a script for one of its steps, in simulated time.
const STEP_MAX: Duration = Duration::from_secs(20);

type Metrics = openraft::RaftMetrics<super::TypeConfig>;

fn metrics(library: &Library) -> Metrics {
    library.metrics().borrow_watched().clone()
}

/// Lets the raft leader take a node's vote, or give it one. Nobody's own, as in production.
pub(super) async fn change(cluster: &Cluster, node: NodeId) {
    let leader = cluster.leader().filter(|leader| *leader != node);
    let Some(up) = leader.and_then(|leader| cluster.lines.node(leader)) else { return };
    let is_voter = up.library.voter_ids().any(|voter| voter == node);
    let nodes = BTreeSet::from([node]);
    let (change, what) = if is_voter {
        (ChangeMembers::RemoveVoters(nodes), "votes no more")
    } else {
        (ChangeMembers::AddVoterIds(nodes), "votes")
    };
    cluster.oracle.say(&format!("node {node} {what}, if it can be"));
    let changing = Box::pin(up.library.change_membership(change, true));
    if let Ok(Ok(_)) = SimRuntime::timeout(PATIENCE, changing).await {
        cluster.oracle.count(|counts| counts.changes += 1);
    }
}

/// What must hold of memberships in whatever a node tells of itself.
pub(super) fn check(now: &Metrics, node: NodeId, oracle: &Oracle) {
    let (effective, committed) = (&now.membership_config, &now.committed_membership_config);
    if let Some(id) = committed.log_id().as_ref() {
        oracle.membership(node, id.index, &format!("{:?}", committed.membership()));
    }
    let applied = now.last_applied.as_ref().map(|id| id.index);
    let is_past = effective.log_id().as_ref().map(|id| id.index) <= applied;
    if is_past && effective.log_id() != committed.log_id() {
        oracle.fail(&format!(
            "node {node} has applied {applied:?} and keeps the membership {effective}, which is not the committed {committed}"
        ));
    }
}

/// Lets simulated time pass until `look` finds something.
async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = SimInstant::now() + STEP_MAX;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(SimInstant::now() < end, "not in time: {what}");
        SimRuntime::sleep(Duration::from_millis(2)).await;
    }
}

/// Has `count` commands committed at the raft leader `library`.
async fn write(library: &Library, from: u64, count: u64) {
    for number in from..from + count {
        let payload = encode_batch(Timestamp(number), &[clients::raise_floor(number)]);
        match clients::propose(library, payload).await {
            Outcome::Done(_) => {}
            Outcome::Elsewhere(_) | Outcome::Unknown => panic!("nothing disturbs the raft leader"),
        }
    }
}

/// Entries that the old leader has and nobody else: its change lies behind the one that is committed meanwhile.
const UNCOMMITTED: u64 = 12;

/// More than a node keeps behind its snapshot, so that the old leader can only be sent the snapshot.
const WRITTEN_MEANWHILE: u64 = 60;

/// How long nobody leads while the learner is watched: many election timeouts.
const WITHOUT_LEADER: Duration = Duration::from_secs(8);

/// The script of the report: see the test.
async fn leave_uncommitted(plan: Plan, folder: std::path::PathBuf, oracle: Oracle) {
    let mut cluster = Cluster::found(plan, folder, oracle.clone()).await;
    let doors = Doors::new(&cluster);
    let mut rng = cluster.rng.fork();
    let prepared = clients::insist(&doors, &clients::prepare(), &mut rng).await;
    assert!(prepared.iter().all(|applied| applied.result.is_ok()), "{prepared:?}");
    let library = |cluster: &Cluster, node| cluster.lines.node(node).expect("it runs").library;

    let old = until("a raft leader", || cluster.leader()).await;
    let others: Vec<NodeId> = NODES.into_iter().filter(|node| *node != old).collect();
    let before = metrics(&library(&cluster, old)).last_log_index;
    for other in &others {
        cluster.lines.cut(old, *other);
        cluster.lines.cut(*other, old);
    }
    let phantom = append_alone(&library(&cluster, old), others[1], before).await;

    let is_new = |leader: &NodeId| *leader != old;
    let new = until("another raft leader", || cluster.leader().filter(is_new)).await;
    let leader = library(&cluster, new);
    while leader.voter_ids().any(|voter| voter == old) {
        change(&cluster, old).await;
        SimRuntime::sleep(Duration::from_millis(5)).await;
    }
    let is_settled = || {
        let now = metrics(&leader);
        let is_joint = now.membership_config.membership().get_joint_config().len() > 1;
        let is_committed =
            now.committed_membership_config.log_id() == now.membership_config.log_id();
        (is_committed && !is_joint).then(|| now.membership_config.clone())
    };
    let real = until("the change to be committed", is_settled).await;
    let index = real.log_id().as_ref().map_or(0, |id| id.index);
    assert!(index < phantom, "the change that is to go, at {phantom}, is behind {index}");
    write(&leader, 1, WRITTEN_MEANWHILE).await;
    for other in &others {
        let library = library(&cluster, *other);
        until("the log to be there", || {
            (metrics(&library).last_applied >= metrics(&leader).last_applied).then_some(())
        })
        .await;
        library.trigger().snapshot().await.expect("it runs");
        let is_purged = || metrics(&library).purged.is_some_and(|id| id.index >= phantom);
        until("the log to be purged", || is_purged().then_some(())).await;
    }

    let restores = oracle.counts().restores;
    cluster.lines.heal();
    let caught_up = || {
        let now = metrics(&library(&cluster, old)).last_applied;
        (now >= metrics(&leader).last_applied).then_some(())
    };
    until("the old leader to have everything", caught_up).await;
    assert!(oracle.counts().restores > restores, "it was sent a snapshot");
    // Nobody leads: whoever believes to vote asks for votes.
    cluster.fell(new).await;
    for restarts in [false, true] {
        if restarts {
            cluster.fell(old).await;
            cluster.start(old).await;
        }
        let library = library(&cluster, old);
        let is_known = || metrics(&library).membership_config.log_id().is_some();
        until("its disk to be read", || is_known().then_some(())).await;
        let end = SimInstant::now() + WITHOUT_LEADER;
        while SimInstant::now() < end {
            let now = metrics(&library);
            assert_eq!(now.membership_config, real, "after a restart: {restarts}");
            assert_eq!(now.state, ServerState::Learner, "after a restart: {restarts}");
            SimRuntime::sleep(Duration::from_millis(20)).await;
        }
    }
    cluster.start(new).await;
    super::settle(&cluster, &doors, &mut rng).await;
    for node in NODES {
        cluster.fell(node).await;
    }
}

/// Lets a raft leader that reaches nobody append entries and then the removal of `other`'s vote; gives its index.
async fn append_alone(library: &Library, other: NodeId, before: Option<u64>) -> u64 {
    for number in 0..UNCOMMITTED {
        let library = library.clone();
        let payload = encode_batch(Timestamp(number), &[clients::raise_floor(1_000 + number)]);
        SimRuntime::spawn(async move {
            // Nobody answers it.
            drop(clients::propose(&library, payload).await);
        });
    }
    let wanted = before.map(|index| index + UNCOMMITTED);
    let is_there = || (metrics(library).last_log_index >= wanted).then_some(());
    until("entries of the lone raft leader", is_there).await;
    let changed = library.clone();
    SimRuntime::spawn(async move {
        let change = ChangeMembers::RemoveVoters(BTreeSet::from([other]));
        drop(
            SimRuntime::timeout(STEP_MAX, Box::pin(changed.change_membership(change, true))).await,
        );
    });
    let appended = || {
        let now = metrics(library);
        let effective = now.membership_config.log_id().as_ref().map(|id| id.index);
        let committed = now.committed_membership_config.log_id().as_ref().map(|id| id.index);
        effective.filter(|_| effective > committed)
    };
    until("a change of the lone raft leader", appended).await
}

#[test]
fn membership_that_was_never_committed_is_gone_with_the_snapshot_and_a_learner_asks_for_no_votes_t01()
 {
    // Each with other delays.
    let runs = (super::seed_count() / 2).clamp(2, 30);
    for seed in (0..runs).map(|run| super::first_seed().wrapping_add(run)) {
        let plan = Plan { seed, acknowledges_early: false };
        let found = super::run_as(plan, leave_uncommitted);
        super::show(seed, &found);
        assert_eq!(found.violation, None, "seed {seed}");
    }
}
