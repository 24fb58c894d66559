//! Coordinator processes: started with settings files of their own, killed, and started again from their folders.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tenure_proto::v1;
use tenure_sdk::session::{CallError, CoordinatorClient, Repeat};

use crate::process::{Process, tenure_bin};
use crate::servers::{free_port, wait_until};

/// Longest wait for the nodes to agree on a raft leader, on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest single call.
const CALL: Duration = Duration::from_secs(10);

/// Coordinator nodes 1 to n, as processes of the program `tenure`. They end with this value.
#[derive(Debug)]
pub struct Cluster {
    // Before the folder, so that no node writes into it while it is removed.
    nodes: BTreeMap<u64, Process>,
    folder: TempDir,
    addresses: Vec<String>,
    client: CoordinatorClient,
}

impl Cluster {
    /// Starts `count` nodes and waits until they have a raft leader.
    ///
    /// # Panics
    ///
    /// When they do not start; the text has what they wrote.
    #[must_use]
    pub fn start(count: u64) -> Self {
        Self::start_with(count, SHORT_LENGTHS)
    }

    /// As [`Cluster::start`], with `settings` (TOML tables) instead of the short lengths of the tests.
    ///
    /// # Panics
    ///
    /// As [`Cluster::start`].
    #[must_use]
    pub fn start_with(count: u64, settings: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("tenure-nodes-").tempdir().expect("a folder");
        let ports: Vec<(u16, u16)> = (0..count).map(|_| (free_port(), free_port())).collect();
        let addresses = ports.iter().map(|(client, _)| format!("127.0.0.1:{client}")).collect();
        let client = CoordinatorClient::new(Vec::clone(&addresses));
        let mut cluster = Self { nodes: BTreeMap::new(), folder, addresses, client };
        for node in 1..=count {
            let text = node_settings(node, &ports, &cluster.folder_of(node), settings);
            std::fs::write(cluster.file(node), text).expect("the settings are written");
            cluster.run(node);
        }
        assert!(
            wait_until(START_TIMEOUT, || cluster.describe_cluster().is_ok()),
            "no raft leader:\n{}",
            cluster.output()
        );
        cluster
    }

    /// Starts a node that was killed again, with the folder that it left.
    pub fn run(&mut self, node: u64) {
        let mut command = Command::new(tenure_bin());
        command.arg("serve").arg("--config").arg(self.file(node));
        self.nodes.insert(node, Process::spawn(&format!("node-{node}"), &mut command));
    }

    /// Ends a node with SIGKILL.
    ///
    /// # Panics
    ///
    /// When it does not run.
    pub fn kill(&mut self, node: u64) {
        self.nodes.remove(&node).expect("the node runs").kill();
    }

    /// Ids of the nodes that run.
    #[must_use]
    pub fn running(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    /// Process id of a node that runs.
    #[must_use]
    pub fn pid(&self, node: u64) -> Option<u32> {
        self.nodes.get(&node).map(Process::pid)
    }

    /// The process of a node that runs.
    #[must_use]
    pub fn process(&self, node: u64) -> Option<&Process> {
        self.nodes.get(&node)
    }

    /// Where the nodes have their folders.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// `host:port` of each node, for members.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Client for all nodes. Its calls are futures: run them with [`block_on`].
    #[must_use]
    pub const fn client(&self) -> &CoordinatorClient {
        &self.client
    }

    /// Id of the raft leader, and its term.
    ///
    /// # Panics
    ///
    /// When there is none in time.
    #[must_use]
    pub fn raft_leader(&self) -> (u64, u64) {
        let start = Instant::now();
        loop {
            match self.describe_cluster() {
                Ok(cluster) if self.nodes.contains_key(&cluster.leader) => {
                    return (cluster.leader, cluster.term);
                }
                other => assert!(
                    start.elapsed() < START_TIMEOUT,
                    "no raft leader: {other:?}\n{}",
                    self.output()
                ),
            }
        }
    }

    /// One group as the raft leader sees it.
    ///
    /// # Errors
    ///
    /// As of the call.
    pub fn describe(&self, group: &str) -> Result<v1::DescribeGroupResponse, CallError> {
        let request = v1::DescribeGroupRequest { group: group.to_owned() };
        block_on(self.client.call(Repeat::Safe, CALL, |channel| {
            let request = request.clone();
            async move {
                let mut client = v1::ownership_client::OwnershipClient::new(channel);
                Ok(client.describe_group(request).await?.into_inner())
            }
        }))
    }

    fn describe_cluster(&self) -> Result<v1::DescribeClusterResponse, CallError> {
        block_on(self.client.call(Repeat::Safe, CALL, |channel| async move {
            let mut client = v1::ownership_client::OwnershipClient::new(channel);
            Ok(client.describe_cluster(v1::DescribeClusterRequest {}).await?.into_inner())
        }))
    }

    /// The last lines of every node that runs.
    #[must_use]
    pub fn output(&self) -> String {
        let mut text = String::new();
        for process in self.nodes.values() {
            writeln!(text, "--- {}\n{}", process.name(), process.tail())
                .expect("a string takes all");
        }
        text
    }

    fn folder_of(&self, node: u64) -> PathBuf {
        self.folder.path().join(format!("node-{node}"))
    }

    fn file(&self, node: u64) -> PathBuf {
        self.folder.path().join(format!("node-{node}.toml"))
    }
}

/// Runs a future of the SDK's clients to its end, on a runtime that all callers share.
///
/// # Panics
///
/// Inside a runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    use std::sync::LazyLock;
    use tokio::runtime::{Builder, Runtime};
    // Connections live in the runtime that made them: it has to outlive each call.
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
    });
    RUNTIME.block_on(future)
}

/// Lengths that make tests quick.
const SHORT_LENGTHS: &str = "
[lease]
ttl_ms = 2000
heartbeat_interval_ms = 600
clock_drift_max_ms = 100

[deadlines]
# Tests stop many members at a time.
vanished_share_percent = 100
hold_ms = 200
hold_max_ms = 2000
";

fn node_settings(node: u64, ports: &[(u16, u16)], folder: &Path, settings: &str) -> String {
    let own = ports[usize::try_from(node - 1).expect("a small number")];
    let mut text = format!(
        "node = {node}
cluster = \"tests\"
data_dir = {folder:?}
client_listen = \"127.0.0.1:{}\"
raft_listen = \"127.0.0.1:{}\"
start = \"bootstrap\"
{settings}",
        own.0, own.1
    );
    for (peer, (client, raft)) in (1_u64..).zip(ports) {
        write!(
            text,
            "
[[peers]]
node = {peer}
client_address = \"127.0.0.1:{client}\"
raft_address = \"127.0.0.1:{raft}\"
"
        )
        .expect("a string takes all");
    }
    text
}
