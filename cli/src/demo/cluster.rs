//! Three coordinator processes.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tenure_coordinator::settings::{NodeSettings, Peer, RaftLengths, StartMode};
use tenure_proto::v1;
use tenure_sdk::session::{CallError, CoordinatorClient, Repeat};
use tokio::sync::mpsc;
use tonic::transport::Channel;

use super::processes::Process;

const NODES: u64 = 3;

/// Longest wait for one call.
const CALL: Duration = Duration::from_secs(10);

/// The coordinators, and a client for them.
pub(crate) struct Cluster {
    nodes: Vec<(u64, Process)>,
    pub(crate) addresses: Vec<String>,
    pub(crate) client: CoordinatorClient,
}

type Ownership = v1::ownership_client::OwnershipClient<Channel>;
type Operator = v1::operator_client::OperatorClient<Channel>;

impl Cluster {
    /// Writes three settings files into `folder` and starts a node with each.
    pub(crate) fn start(
        folder: &Path,
        events: &mpsc::UnboundedSender<(String, Value)>,
    ) -> Result<Self, String> {
        let ports = free_ports(2 * usize::try_from(NODES).unwrap_or(3))?;
        let address = |at: usize| format!("127.0.0.1:{}", ports[at]);
        let peers: Vec<Peer> = (1..=NODES)
            .zip(0..)
            .map(|(node, at)| Peer {
                node,
                client_address: address(2 * at),
                raft_address: address(2 * at + 1),
            })
            .collect();
        let mut nodes = Vec::new();
        for peer in &peers {
            let parse = |text: &str| text.parse().map_err(|error| format!("{text}: {error}"));
            let settings = NodeSettings {
                node: peer.node,
                cluster: "demo".to_owned(),
                data_dir: folder.join(format!("node-{}", peer.node)),
                client_listen: parse(&peer.client_address)?,
                raft_listen: parse(&peer.raft_address)?,
                peers: peers.clone(),
                start: StartMode::Bootstrap,
                // The story's leases are short, and an election should fit into one.
                raft: RaftLengths {
                    heartbeat_interval_ms: 100,
                    election_timeout_min_ms: 400,
                    election_timeout_max_ms: 800,
                    ..RaftLengths::default()
                },
                ..NodeSettings::default()
            };
            let file = folder.join(format!("node-{}.toml", peer.node));
            let text = toml::to_string(&settings).map_err(|error| error.to_string())?;
            std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
            let name = format!("node-{}", peer.node);
            let arguments = ["serve".to_owned(), "--config".to_owned(), file.display().to_string()];
            let log = folder.join(format!("{name}.log"));
            let process = Process::start(&name, &arguments, &log, events.clone())
                .map_err(|error| format!("{name} did not start: {error}"))?;
            nodes.push((peer.node, process));
        }
        let addresses: Vec<String> = peers.into_iter().map(|peer| peer.client_address).collect();
        let client = CoordinatorClient::new(addresses.clone());
        Ok(Self { nodes, addresses, client })
    }

    /// Asks for the raft leader's node id; waits for an election. Any node answers, so one that has no raft leader yet
    /// is asked again.
    pub(crate) async fn raft_leader(&self) -> Result<u64, String> {
        let asked = Instant::now();
        while asked.elapsed() < CALL {
            let answer = self
                .client
                .call(Repeat::Safe, CALL, |channel| async move {
                    let mut client = Ownership::new(channel);
                    Ok(client.describe_cluster(v1::DescribeClusterRequest {}).await?.into_inner())
                })
                .await
                .map_err(|error| error.to_string())?;
            if answer.leader != 0 && self.is_running(answer.leader) {
                return Ok(answer.leader);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Err("no raft leader was elected".to_owned())
    }

    /// A node that was killed is remembered as raft leader by the others until their next election.
    fn is_running(&self, node: u64) -> bool {
        self.nodes.iter().any(|(id, _)| *id == node)
    }

    /// Ends a node with SIGKILL.
    pub(crate) async fn kill(&mut self, node: u64) -> Result<(), String> {
        let at = self
            .nodes
            .iter()
            .position(|(id, _)| *id == node)
            .ok_or_else(|| format!("there is no node {node}"))?;
        let (_, mut process) = self.nodes.swap_remove(at);
        process.kill().await.map_err(|error| format!("{} is not killed: {error}", process.name))
    }

    pub(crate) async fn describe(
        &self,
        group: &str,
    ) -> Result<v1::DescribeGroupResponse, CallError> {
        let request = v1::DescribeGroupRequest { group: group.to_owned() };
        self.client
            .call(Repeat::Safe, CALL, |channel| {
                let request = request.clone();
                async move { Ok(Ownership::new(channel).describe_group(request).await?.into_inner()) }
            })
            .await
    }

    /// Moves one partition by hand.
    pub(crate) async fn move_partition(
        &self,
        group: &str,
        partition: v1::Partition,
        to: &str,
    ) -> Result<v1::OperatorResponse, CallError> {
        let context = v1::OperatorContext {
            request_id: format!("demo-{:016x}", rand::random::<u64>()),
            reason: "the demo moves a partition by hand".to_owned(),
            actor: "demo".to_owned(),
            dry_run: false,
        };
        let request = v1::MoveRequest {
            context: Some(context),
            group: group.to_owned(),
            partition: Some(partition),
            to_member: to.to_owned(),
        };
        self.client
            .call(Repeat::Safe, CALL, |channel| {
                let request = request.clone();
                async move { Ok(Operator::new(channel).r#move(request).await?.into_inner()) }
            })
            .await
    }
}

/// How often a port is tried before giving up.
const PORT_TRIES: usize = 1_000;

/// Ports that are free now, below those that outgoing connections take meanwhile. They are given back before the nodes
/// take them: another process may be quicker, and the node then says so.
fn free_ports(count: usize) -> Result<Vec<u16>, String> {
    let tries = (0..PORT_TRIES).map(|_| 10_000 + rand::random::<u16>() % 20_000);
    let listeners: Vec<TcpListener> =
        tries.filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok()).take(count).collect();
    if listeners.len() < count {
        return Err("no free port on 127.0.0.1".to_owned());
    }
    listeners
        .iter()
        .map(|listener| listener.local_addr().map(|address| address.port()))
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())
}
