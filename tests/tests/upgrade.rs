//! Three nodes upgraded one by one, under load, to a build with one changed rule.
//!
//! The old nodes are processes of the program, the new ones run in this process: cargo built it with the feature
//! `next-level`, so both are what two releases would be. The nodes compare their states many times a second, and one
//! that differs stops.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_coordinator::raft::StopReason;
use tenure_coordinator::settings::StartMode;
use tenure_coordinator::{Node, NodeSettings, StartError};
use tenure_core::level::{GATE_REMOVED, NEWEST};
use tenure_model::FeatureLevel;
use tenure_tests::cluster::{Cluster, SHORT_LENGTHS, block_on};
use tenure_tests::figures::tell;
use tenure_tests::load::{Load, Shape};
use tenure_tests::servers::wait_until;

const PATIENCE: Duration = Duration::from_secs(60);

/// States compared about ten times a second.
const RAFT: &str = "[raft]
heartbeat_interval_ms = 100
election_timeout_min_ms = 500
election_timeout_max_ms = 1000
digest_interval_ms = 50";

/// Comparisons that each mix of versions has to pass.
const COMPARISONS: usize = 10;

/// The gate is one for the whole process: one test at a time.
fn gate(is_removed: bool) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    GATE_REMOVED.store(is_removed, Ordering::Relaxed);
    turn
}

/// Old nodes as processes, new ones in this one.
struct Mixed {
    cluster: Cluster,
    new: BTreeMap<u64, Node>,
}

impl Mixed {
    fn start() -> Self {
        let settings = format!("{SHORT_LENGTHS}\n{RAFT}\n");
        Self { cluster: Cluster::start_with(3, &settings), new: BTreeMap::new() }
    }

    /// Stops the old node and starts the new one on its folder, as `docs/operations.md` says.
    fn upgrade(&mut self, node: u64) -> Result<(), StartError> {
        if self.leader() == node {
            self.cluster.change(&["transfer"]);
        }
        self.cluster.terminate(node);
        let text = std::fs::read_to_string(self.cluster.file(node)).unwrap();
        let settings = NodeSettings::from_toml(&text).unwrap();
        let started = block_on(async { tokio::spawn(Node::start(settings)).await.unwrap() });
        self.new.insert(node, started?);
        Ok(())
    }

    fn leader(&self) -> u64 {
        let mut leader = 0;
        let found = wait_until(PATIENCE, || {
            leader = self.cluster.status().map_or(0, |status| status.leader);
            leader != 0
        });
        assert!(found, "{}", self.cluster.output());
        leader
    }

    fn level(&self) -> FeatureLevel {
        FeatureLevel(self.cluster.status().unwrap().feature_level)
    }

    /// Waits until the raft leader was compared so many times more, which all others were with it.
    fn compare(&self, count: usize) {
        let mut seen = std::collections::BTreeSet::new();
        let compared = wait_until(PATIENCE, || {
            seen.extend(self.cluster.status().ok().map(|status| status.digest_agreed));
            seen.len() > count
        });
        assert!(compared, "{seen:?}\n{}", self.cluster.output());
    }

    fn assert_all_run(&self) {
        for node in self.cluster.running() {
            let output = self.cluster.node(node).tail();
            assert!(!output.contains("the node stopped"), "{output}");
        }
        for node in self.new.values() {
            let stopped =
                block_on(async { tokio::time::timeout(Duration::ZERO, node.stopped()).await });
            assert!(stopped.is_err(), "{stopped:?}");
        }
    }

    fn stop(self) {
        for node in self.new.values() {
            block_on(node.stop());
        }
    }
}

/// Whether an offset that was committed last without metadata still has some: the changed rule, as seen from outside.
fn keeps_metadata(cluster: &Cluster, load: &Load) -> bool {
    let mut offsets = 0;
    let mut without = 0;
    for _ in 0..20 {
        let fetched = block_on(cluster.client().fetch(load.group(), &[], Duration::from_secs(10)));
        for offset in fetched.unwrap() {
            offsets += 1;
            without += usize::from(offset.metadata.is_empty());
        }
        load.wait_for_more(3);
    }
    assert!(offsets > 0);
    without == 0
}

#[test]
fn nodes_upgraded_one_by_one_under_load_have_equal_states_and_change_the_rule_when_the_last_one_is_up()
 {
    let _turn = gate(false);
    assert_eq!(NEWEST, FeatureLevel(2), "this is a build with the next level");
    let mut nodes = Mixed::start();
    let load = Load::start(nodes.cluster.addresses(), Shape { ttl_ms: 10_000, ..Shape::default() });
    let before = load.report();
    nodes.compare(COMPARISONS);
    for node in 1..=3 {
        assert_eq!(nodes.level(), FeatureLevel(1), "an old node still runs");
        assert!(!keeps_metadata(&nodes.cluster, &load));
        nodes.upgrade(node).unwrap();
        nodes.cluster.wait_until_level();
        nodes.compare(COMPARISONS);
        nodes.assert_all_run();
        tell(format_args!("node {node} upgraded, raft leader {}", nodes.leader()));
    }
    assert!(wait_until(PATIENCE, || nodes.level() == FeatureLevel(2)), "all nodes know it");
    // Three commits, and each partition has had one with metadata under the new rule.
    load.wait_for_more(30);
    assert!(keeps_metadata(&nodes.cluster, &load));
    nodes.compare(COMPARISONS);
    nodes.assert_all_run();

    // There is no way back: an old node does not know the rules any more.
    let last = nodes.new.remove(&3).unwrap();
    block_on(last.shutdown());
    drop(last);
    nodes.cluster.run(3);
    let (code, output) = nodes.cluster.wait_for_end(3);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("feature level 2, this version knows up to 1"), "{output}");
    let report = load.finish();
    assert!(report.complaints.is_empty(), "{:#?}", report.complaints);
    assert_eq!(report.epochs, before.epochs, "nothing has moved");
    tell(format_args!("{} acknowledged commits", report.acknowledged_at.len()));
    nodes.stop();
}

#[test]
fn changed_rule_without_its_gate_makes_the_states_differ_and_the_one_node_that_differs_stops() {
    let _turn = gate(true);
    let mut nodes = Mixed::start();
    let load = Load::start(nodes.cluster.addresses(), Shape { ttl_ms: 10_000, ..Shape::default() });
    nodes.compare(2);
    // Also as the raft leader it is the one that stops: the majority is right.
    let leader = nodes.leader();
    let reason = match nodes.upgrade(leader) {
        // It met a comparison in its log.
        Err(refused) => refused.to_string(),
        Ok(()) => {
            let stopped = nodes.new[&leader].stopped();
            let stopped = block_on(async { tokio::time::timeout(PATIENCE, stopped).await });
            let StopReason::Failed(reason) = stopped.expect("it stops") else {
                panic!("it failed")
            };
            reason
        }
    };
    tell(&reason);
    assert!(reason.contains("is not that of the majority: digest"), "{reason}");
    load.wait_for_more(30);
    for node in nodes.cluster.running() {
        assert!(!nodes.cluster.node(node).tail().contains("the node stopped"), "node {node}");
    }
    drop(load.finish());
    nodes.stop();
}

#[test]
fn cluster_founded_by_new_nodes_is_at_their_level_at_once() {
    let _turn = gate(false);
    let folder = tempfile::tempdir().unwrap();
    let settings = NodeSettings {
        data_dir: folder.path().join("node"),
        start: StartMode::Bootstrap,
        ..NodeSettings::dev()
    };
    block_on(async {
        let node = Node::start(settings).await.unwrap();
        let raised = async {
            while node.raft().with_machine(|machine| machine.state().level) < NEWEST {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(PATIENCE, raised).await.unwrap();
        node.stop().await;
    });
}
