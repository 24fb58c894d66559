//! Three nodes in this process, each with its own folder.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use tenure_coordinator::raft::{NodeAddresses, NodeId};
use tenure_coordinator::settings::{Peer, StartMode};
use tenure_coordinator::{Node, NodeSettings};
use tenure_proto::v1;
use tenure_proto::v1::ownership_client::OwnershipClient;
use tenure_tests::servers::free_port;
use tokio::time::{Instant, sleep, timeout};
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// No condition of these tests takes longer on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than any of these tests: nothing falls due by itself.
const NEVER_MS: u64 = 3_600_000;

/// Client addresses of the nodes that run.
pub(crate) type Addresses = Arc<Mutex<Vec<SocketAddr>>>;

pub(crate) struct Rig {
    settings: Vec<NodeSettings>,
    nodes: Vec<Option<Node>>,
    addresses: Addresses,
    _folder: TempDir,
}

impl Rig {
    pub(crate) async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let starts = settings.iter().map(|settings| Node::start(settings.clone()));
        // The first that fails says why; the others would wait for it.
        let started = timeout(PATIENCE, futures::future::try_join_all(starts)).await.unwrap();
        let nodes = started.unwrap().into_iter().map(Some).collect();
        let rig = Self { settings, nodes, addresses: Arc::default(), _folder: folder };
        rig.note_addresses();
        rig.leader().await;
        rig
    }

    fn note_addresses(&self) {
        *self.addresses.lock().unwrap() = self.running().map(Node::client_address).collect();
    }

    pub(crate) fn addresses(&self) -> Addresses {
        Arc::clone(&self.addresses)
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().flatten()
    }

    pub(crate) fn node(&self, at: usize) -> &Node {
        self.nodes[at].as_ref().unwrap()
    }

    /// Position of the raft leader.
    pub(crate) async fn leader(&self) -> usize {
        until("a raft leader", || async {
            self.nodes.iter().position(|node| {
                node.as_ref().is_some_and(|node| node.raft().leadership().borrow().is_me)
            })
        })
        .await
    }

    pub(crate) async fn a_follower(&self) -> usize {
        let leader = self.leader().await;
        (0..self.nodes.len()).find(|at| *at != leader && self.nodes[*at].is_some()).unwrap()
    }

    /// The raft leader hands over to another node.
    pub(crate) async fn hand_over(&self, from: usize) {
        self.node(from).raft().transfer_leadership(None, PATIENCE).await.unwrap();
        assert_ne!(self.leader().await, from);
    }

    pub(crate) async fn stop(&mut self, at: usize) {
        let node = self.nodes[at].take().unwrap();
        self.note_addresses();
        node.stop().await;
    }

    pub(crate) async fn restart(&mut self, at: usize) {
        let started = timeout(PATIENCE, Node::start(self.settings[at].clone())).await.unwrap();
        self.nodes[at] = Some(started.unwrap());
        self.note_addresses();
    }

    /// The folder of a node that stands still is gone.
    pub(crate) fn wipe(&self, at: usize) {
        assert!(self.nodes[at].is_none());
        std::fs::remove_dir_all(&self.settings[at].data_dir).unwrap();
    }

    /// A node that was wiped comes back as the documents say: its old id is removed, and it is added under a new one.
    pub(crate) async fn rejoin(&mut self, at: usize) {
        let old = NodeId(self.settings[at].node);
        let leader = self.leader().await;
        self.node(leader).raft().remove(old, PATIENCE).await.unwrap();
        let settings = &mut self.settings[at];
        settings.node = 100 + old.0;
        settings.start = StartMode::Join;
        for peer in settings.peers.iter_mut().filter(|peer| peer.node == old.0) {
            peer.node = settings.node;
        }
        let (new, addresses) = (
            NodeId(settings.node),
            NodeAddresses {
                raft_address: settings.raft_listen.to_string(),
                client_address: settings.client_listen.to_string(),
            },
        );
        self.restart(at).await;
        let leader = self.node(self.leader().await).raft();
        leader.add_learner(new, addresses, PATIENCE).await.unwrap();
        leader.promote(new, PATIENCE).await.unwrap();
    }

    pub(crate) async fn write_snapshots(&self) {
        for node in self.running() {
            node.raft().write_snapshot().await;
        }
    }

    /// Waits until all nodes have the same state.
    pub(crate) async fn until_level(&self) {
        until("all nodes to be level", || async {
            let states: Vec<_> = self
                .running()
                .map(|node| node.raft().with_machine(|machine| machine.state().clone()))
                .collect();
            states.windows(2).all(|pair| pair[0] == pair[1]).then_some(())
        })
        .await;
    }

    pub(crate) async fn stop_all(self) {
        futures::future::join_all(self.running().map(Node::stop)).await;
    }
}

fn settings(folder: &Path) -> Vec<NodeSettings> {
    let address = || SocketAddr::from(([127, 0, 0, 1], free_port()));
    let addresses: Vec<_> = (0..3).map(|_| (address(), address())).collect();
    let peers: Vec<Peer> = (1..)
        .zip(&addresses)
        .map(|(node, (client, raft))| Peer {
            node,
            raft_address: raft.to_string(),
            client_address: client.to_string(),
        })
        .collect();
    (1..)
        .zip(addresses)
        .map(|(node, (client, raft))| {
            let mut settings = NodeSettings {
                node,
                data_dir: folder.join(format!("node-{node}")),
                client_listen: client,
                raft_listen: raft,
                peers: peers.clone(),
                start: StartMode::Bootstrap,
                ..NodeSettings::dev()
            };
            // An entry that is slow on a busy machine is still known to be done.
            settings.raft.propose_timeout_ms = 15_000;
            let deadlines = &mut settings.deadlines;
            deadlines.settle_ms = NEVER_MS;
            deadlines.settle_max_ms = NEVER_MS;
            deadlines.drain_deadline_ms = NEVER_MS;
            deadlines.acquire_deadline_ms = NEVER_MS;
            settings
        })
        .collect()
}

/// Waits until `look` finds something.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut look: impl FnMut() -> F,
) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < end, "not in time: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn client(address: SocketAddr) -> OwnershipClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    OwnershipClient::new(until("a connection", || async { endpoint.connect().await.ok() }).await)
}

/// Begins a watch; on a machine that is full an election may come between.
pub(crate) async fn watching(
    client: &OwnershipClient<Channel>,
    request: v1::WatchRequest,
) -> Streaming<v1::WatchResponse> {
    let begin = || {
        let (mut client, request) = (client.clone(), request.clone());
        async move { client.watch(request).await.ok() }
    };
    until("a watch", begin).await.into_inner()
}
