//! Coordinator processes: started with settings files of their own, killed, and started again from their folders.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tenure_proto::v1;
use tenure_sdk::session::{CallError, CoordinatorClient, Repeat};

use crate::process::{Process, tenure_bin};
use crate::proxy::Proxy;
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
    settings: String,
    /// Client and raft port of each node. A node that replaces another takes over its ports.
    ports: BTreeMap<u64, (u16, u16)>,
    addresses: Vec<String>,
    client: CoordinatorClient,
    proxies: BTreeMap<u64, Proxy>,
}

/// Lengths that make tests quick.
pub const SHORT_LENGTHS: &str = "
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
        Self::start_nodes(count, settings, false)
    }

    /// As [`Cluster::start_with`]; the nodes reach each other through proxies, see [`Cluster::proxy`].
    ///
    /// # Panics
    ///
    /// As [`Cluster::start`].
    #[must_use]
    pub fn start_proxied(count: u64, settings: &str) -> Self {
        Self::start_nodes(count, settings, true)
    }

    fn start_nodes(count: u64, settings: &str, proxied: bool) -> Self {
        let folder = tempfile::Builder::new().prefix("tenure-nodes-").tempdir().expect("a folder");
        let ports: BTreeMap<u64, (u16, u16)> =
            (1..=count).map(|node| (node, (free_port(), free_port()))).collect();
        let addresses = ports.values().map(|(client, _)| format!("127.0.0.1:{client}")).collect();
        let client = CoordinatorClient::new(Vec::clone(&addresses));
        let proxies = ports
            .iter()
            .filter(|_| proxied)
            .map(|(node, (_, raft))| (*node, Proxy::to_port(*raft)))
            .collect();
        let (nodes, settings) = (BTreeMap::new(), settings.to_owned());
        let mut cluster = Self { nodes, folder, settings, ports, addresses, client, proxies };
        for node in 1..=count {
            cluster.write_settings(node, "bootstrap");
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

    /// The process of a node.
    ///
    /// # Panics
    ///
    /// When it does not run.
    #[must_use]
    pub fn node(&self, node: u64) -> &Process {
        self.nodes.get(&node).expect("the node runs")
    }

    /// Waits for the end of a node that ends by itself; gives its exit code and all that it wrote.
    ///
    /// # Panics
    ///
    /// When it does not run, or does not end in time.
    pub fn wait_for_end(&mut self, node: u64) -> (Option<i32>, String) {
        let mut process = self.nodes.remove(&node).expect("the node runs");
        let Some(status) = process.wait(START_TIMEOUT) else {
            panic!("node {node} does not end:\n{}", process.tail());
        };
        (status.code(), process.lines().join("\n"))
    }

    /// Asks a node to end, and waits until it has.
    ///
    /// # Panics
    ///
    /// When it does not run, or does not end in time.
    pub fn terminate(&mut self, node: u64) {
        self.node(node).terminate();
        let (code, output) = self.wait_for_end(node);
        assert_eq!(code, Some(0), "{output}");
    }

    /// Runs a node under a limit for the size of each of its files.
    pub fn run_with_file_limit(&mut self, node: u64, kib: u32) {
        let mut command = Command::new("bash");
        // Without the trap the signal would end the program before the write fails.
        command
            .args(["-c", r#"trap "" XFSZ; ulimit -f "$1"; shift; exec "$@""#, "limited"])
            .arg(kib.to_string())
            .arg(tenure_bin())
            .arg("serve")
            .arg("--config")
            .arg(self.file(node));
        self.nodes.insert(node, Process::spawn(&format!("node-{node}"), &mut command));
    }

    /// Starts a node with an empty folder that waits to be added, at the ports of one that is gone.
    pub fn join(&mut self, node: u64, at_ports_of: u64) {
        let ports = self.ports.remove(&at_ports_of).expect("a node that was here");
        self.ports.insert(node, ports);
        self.write_settings(node, "join");
        self.run(node);
    }

    /// Removes what a node that was killed left behind.
    ///
    /// # Panics
    ///
    /// When the folder cannot be removed.
    pub fn wipe(&self, node: u64) {
        std::fs::remove_dir_all(self.folder_of(node)).expect("the folder can be removed");
    }

    /// `host:port` of one node, for members.
    #[must_use]
    pub fn client_address(&self, node: u64) -> String {
        format!("127.0.0.1:{}", self.ports[&node].0)
    }

    /// `host:port` of one node, for the other nodes.
    #[must_use]
    pub fn raft_address(&self, node: u64) -> String {
        let port = self.proxies.get(&node).map_or(self.ports[&node].1, Proxy::port);
        format!("127.0.0.1:{port}")
    }

    /// What stands between the other nodes and this one.
    ///
    /// # Panics
    ///
    /// When the cluster has none.
    #[must_use]
    pub fn proxy(&self, node: u64) -> &Proxy {
        self.proxies.get(&node).expect("the cluster is proxied")
    }

    /// Runs the program `tenure` against all nodes.
    ///
    /// # Panics
    ///
    /// When the program does not start.
    #[must_use]
    pub fn tenure(&self, arguments: &[&str]) -> Output {
        Command::new(tenure_bin())
            .args(arguments)
            .args(["--coordinators", &self.addresses.join(",")])
            .env("TENURE_ACTOR", "test")
            .output()
            .expect("the program starts")
    }

    /// Runs `tenure cluster …` until it is done; what is refused for now is repeated, as the documents say.
    ///
    /// # Panics
    ///
    /// When it is not done in time.
    pub fn change(&self, arguments: &[&str]) {
        let all = [&["cluster"], arguments, &["--reason", "test"]].concat();
        let mut last = String::new();
        let done = wait_until(START_TIMEOUT, || {
            let output = self.tenure(&all);
            last = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            output.status.success()
        });
        assert!(done, "{all:?}: {last}\n{}", self.output());
    }

    /// What the raft leader says of the nodes.
    ///
    /// # Errors
    ///
    /// As of the call.
    pub fn status(&self) -> Result<v1::ClusterStatusResponse, CallError> {
        block_on(self.client.call(Repeat::Safe, CALL, |channel| async move {
            let mut client = v1::cluster_client::ClusterClient::new(channel);
            Ok(client.status(v1::ClusterStatusRequest { local: false }).await?.into_inner())
        }))
    }

    /// Waits until every node answers the raft leader and has its log.
    ///
    /// # Panics
    ///
    /// When they are not in time.
    pub fn wait_until_level(&self) {
        let behind = |node: &v1::ClusterNode| {
            node.lag.is_none_or(|lag| lag > 100) || node.supported_level.is_none()
        };
        let mut last = None;
        let level = wait_until(START_TIMEOUT, || {
            last = self.status().ok();
            last.as_ref().is_some_and(|status| !status.changing && !status.nodes.iter().any(behind))
        });
        assert!(level, "the nodes are not level: {last:#?}\n{}", self.output());
    }

    /// Settings file of a node.
    #[must_use]
    pub fn file(&self, node: u64) -> PathBuf {
        self.folder.path().join(format!("node-{node}.toml"))
    }

    /// Data folder of a node.
    #[must_use]
    pub fn folder_of(&self, node: u64) -> PathBuf {
        self.folder.path().join(format!("node-{node}"))
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

    /// All grants of a partition that are remembered, oldest first.
    ///
    /// # Errors
    ///
    /// When no node answers in time, or the partition is not known.
    pub fn history(
        &self,
        group: &str,
        partition: &v1::Partition,
    ) -> Result<Vec<v1::GrantRecord>, CallError> {
        let (group, partition) = (group.to_owned(), Some(partition.clone()));
        let request = v1::HistoryRequest { group, partition, at: None };
        block_on(self.client.call(Repeat::Safe, CALL, |channel| {
            let request = request.clone();
            async move {
                let mut client = v1::ownership_client::OwnershipClient::new(channel);
                Ok(client.history(request).await?.into_inner().grants)
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

    fn write_settings(&self, node: u64, start: &str) {
        std::fs::write(self.file(node), self.text(node, start)).expect("the settings are written");
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

impl Cluster {
    fn text(&self, node: u64, start: &str) -> String {
        let (client, raft) = self.ports[&node];
        let folder = self.folder_of(node);
        let settings = &self.settings;
        let mut text = format!(
            "node = {node}
cluster = \"tests\"
data_dir = {folder:?}
client_listen = \"127.0.0.1:{client}\"
raft_listen = \"127.0.0.1:{raft}\"
start = \"{start}\"
{settings}"
        );
        for peer in self.ports.keys() {
            write!(
                text,
                "
[[peers]]
node = {peer}
client_address = \"{}\"
raft_address = \"{}\"
",
                self.client_address(*peer),
                self.raft_address(*peer)
            )
            .expect("a string takes all");
        }
        text
    }
}
