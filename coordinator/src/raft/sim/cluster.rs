//! Three nodes of one run: started, felled and started again.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use openraft::AsyncRuntime as _;
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft_rt_sim::SimRuntime;

use super::super::settings::{RaftSettings, RaftTuning, Start};
use super::super::wire::Wire;
use super::super::{LOG_FOLDER, SNAPSHOT_FOLDER};
use super::changes;
use super::effects::Disk;
use super::failure::Failure;
use super::log::Wal;
use super::machine::Replica;
use super::network::{Lines, Up};
use super::oracle::{Oracle, Watched};
use super::snapshot::SnapshotStore;
use super::types::{NodeAddresses, NodeId};
use super::{Library, Plan, Rng};

pub(super) const NODES: [NodeId; 3] = [NodeId(1), NodeId(2), NodeId(3)];

/// How long a node that falls may take to end its tasks, in simulated time.
const END_WAIT: Duration = Duration::from_secs(5);

/// What runs of one node.
struct Running {
    disk: Disk,
    wal: Wal,
}

/// See the module.
pub(super) struct Cluster {
    pub(super) lines: Lines,
    pub(super) oracle: Oracle,
    pub(super) rng: Rng,
    plan: Plan,
    folder: PathBuf,
    running: BTreeMap<NodeId, Running>,
    starts: u64,
    wires: BTreeMap<NodeId, Wire>,
}

fn addresses(node: NodeId) -> NodeAddresses {
    NodeAddresses {
        raft_address: format!("node-{node}:7401"),
        client_address: format!("node-{node}:7400"),
    }
}

fn members() -> BTreeMap<NodeId, NodeAddresses> {
    NODES.into_iter().map(|node| (node, addresses(node))).collect()
}

impl Cluster {
    /// Founds the cluster: every node has started.
    pub(super) async fn found(plan: Plan, folder: PathBuf, oracle: Oracle) -> Self {
        let mut rng = Rng::new(plan.seed);
        let lines = Lines::new(rng.fork());
        let mut cluster = Self {
            lines,
            oracle,
            rng,
            plan,
            folder,
            running: BTreeMap::new(),
            starts: 0,
            wires: BTreeMap::new(),
        };
        for node in NODES {
            let wire = Wire::new(&cluster.settings(node));
            cluster.wires.insert(node, wire);
        }
        for node in NODES {
            cluster.start(node).await;
        }
        let first = cluster.lines.node(NODES[0]).expect("it has just started");
        first.library.initialize(members()).await.expect("an empty cluster");
        cluster
    }

    fn settings(&self, node: NodeId) -> RaftSettings {
        let tuning = RaftTuning {
            heartbeat_interval: Duration::from_millis(50),
            election_timeout_min: Duration::from_millis(200),
            election_timeout_max: Duration::from_millis(400),
            snapshot_timeout: Duration::from_secs(2),
            wal_chunk_bytes: 32 * 1024,
            entries_kept: 20,
            ..RaftTuning::default()
        };
        RaftSettings {
            node,
            cluster: "sim".to_owned(),
            folder: self.folder.join(format!("node-{node}")),
            listen: ([127, 0, 0, 1], 0).into(),
            addresses: addresses(node),
            start: Start::Existing,
            tuning,
        }
    }

    pub(super) fn is_up(&self, node: NodeId) -> bool {
        self.running.contains_key(&node)
    }

    /// Opens a node's folder and lets it take part.
    pub(super) async fn start(&mut self, node: NodeId) {
        self.starts += 1;
        let start = self.starts;
        let settings = self.settings(node);
        let config = settings.check().expect("settings of this simulation");
        let log_folder = settings.folder.join(LOG_FOLDER);
        std::fs::create_dir_all(&log_folder).expect("the folder of this run");
        let disk = Disk::insert(&log_folder, self.rng.fork(), self.plan.acknowledges_early);
        let failure = Failure::default();
        let snapshots = SnapshotStore::open(&settings.folder.join(SNAPSHOT_FOLDER));
        let machine = Watched::new(node, self.oracle.clone());
        let opened = snapshots
            .and_then(|snapshots| Replica::open(machine, snapshots, failure.clone()))
            .and_then(|replica| {
                let wal = Wal::open(&log_folder, settings.tuning.wal_chunk_bytes, failure)?;
                Ok((wal, replica))
            });
        let (wal, replica) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.oracle.fail(&format!("node {node} does not open its folder: {error}"));
                return;
            }
        };
        let network = self.lines.of(node, start, &self.wires);
        let library = Library::new(node, config, network, wal.clone(), replica.clone()).await;
        let library = match library {
            Ok(library) => library,
            Err(error) => {
                self.oracle.fail(&format!("node {node} does not start: {error}"));
                return;
            }
        };
        self.oracle.say(&format!("node {node} starts"));
        self.lines.connect(node, Up { start, library: library.clone(), replica });
        SimRuntime::spawn(observe(library, node, start, self.lines.clone(), self.oracle.clone()));
        self.running.insert(node, Running { disk, wal });
    }

    /// The node is gone at once, with everything that it had not synced.
    pub(super) async fn fell(&mut self, node: NodeId) {
        let Some(Running { disk, wal }) = self.running.remove(&node) else { return };
        disk.fall();
        let up = self.lines.disconnect(node);
        wal.close();
        if let Some(up) = up
            && SimRuntime::timeout(END_WAIT, up.library.shutdown()).await.is_err()
        {
            self.oracle.fail(&format!("the tasks of node {node} do not end"));
        }
        let lost = disk.lose();
        self.oracle.count(|counts| {
            counts.falls += 1;
            counts.bytes_lost += lost;
        });
        self.oracle.say(&format!("node {node} has fallen, {lost} bytes are lost"));
    }

    /// Syncs of a node take up to so much longer.
    pub(super) fn stall(&self, node: NodeId, stall_ms: u64) {
        if let Some(running) = self.running.get(&node) {
            running.disk.stall(stall_ms);
        }
    }

    /// The node that leads the newest term, as far as any node that runs knows.
    pub(super) fn leader(&self) -> Option<NodeId> {
        let metrics = self.running.keys().filter_map(|node| {
            let metrics = self.lines.node(*node)?.library.metrics().borrow_watched().clone();
            metrics.state.is_leader().then_some((metrics.current_term, *node))
        });
        metrics.max().map(|(_, node)| node)
    }

    /// Looks at the machine of a node that runs.
    pub(super) fn look<T>(&self, node: NodeId, look: impl FnOnce(&Watched) -> T) -> Option<T> {
        self.lines.node(node).map(|up| up.replica.read(look))
    }

    /// What each node takes for the membership; nothing for one that is down.
    pub(super) fn memberships(&self) -> Vec<Option<String>> {
        let membership = |node: &NodeId| {
            let metrics = self.lines.node(*node)?.library.metrics().borrow_watched().clone();
            Some(metrics.membership_config.to_string())
        };
        NODES.iter().map(membership).collect()
    }

    /// What each node that runs tells of itself.
    pub(super) fn told(&self) -> Vec<String> {
        let told = |node: &NodeId| {
            let metrics = self.lines.node(*node)?.library.metrics().borrow_watched().clone();
            Some(format!("node {node} says {metrics}"))
        };
        NODES.iter().filter_map(told).collect()
    }

    /// Last index applied on each node; nothing for one that is down.
    pub(super) fn applied(&self) -> Vec<Option<u64>> {
        let applied = |node: &NodeId| Some(self.lines.node(*node)?.replica.applied().borrow().0);
        NODES.iter().map(applied).collect()
    }
}

/// Tells the oracle of every term that the node leads, and of every membership that it takes for committed.
async fn observe(library: Library, node: NodeId, start: u64, lines: Lines, oracle: Oracle) {
    let mut metrics = library.metrics();
    drop(library);
    loop {
        let now = metrics.borrow_watched().clone();
        if !lines.runs(node, start) {
            return;
        }
        changes::check(&now, node, &oracle);
        if now.state.is_leader() && now.current_leader == Some(node) {
            oracle.leads(node, now.current_term);
        }
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// What a client asks nodes by. Clones share the lines.
#[derive(Clone)]
pub(super) struct Doors {
    pub(super) lines: Lines,
    pub(super) oracle: Oracle,
}

impl Doors {
    pub(super) fn new(cluster: &Cluster) -> Arc<Self> {
        Arc::new(Self { lines: cluster.lines.clone(), oracle: cluster.oracle.clone() })
    }
}
