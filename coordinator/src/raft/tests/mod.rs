//! Nodes that talk over loopback, with a toy machine and real folders.

mod cluster;
mod disk;
mod founding;
mod frozen;
mod members;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use tempfile::TempDir;
use tokio::net::TcpListener;

use super::*;

/// Limit of every wait; a test that reaches it has failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Keeps all payloads in order. `fatal` stops the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Toy(Vec<Bytes>);

impl Machine for Toy {
    type Reply = usize;

    fn apply(&mut self, _at: EntryContext, payload: &Bytes) -> Result<usize, Fatal> {
        match &payload[..] {
            b"fatal" => Err(Fatal("the toy broke".to_owned())),
            b"panic" => panic!("the toy panicked"),
            _ => {
                self.0.push(payload.clone());
                Ok(self.0.len())
            }
        }
    }

    fn snapshot(&self) -> Capture {
        let state = self.0.clone();
        Box::new(move || {
            postcard::to_stdvec(&state.iter().map(|item| item.to_vec()).collect::<Vec<_>>())
                .unwrap()
        })
    }

    fn restore(&mut self, bytes: &[u8]) -> Result<(), Fatal> {
        let state: Vec<Vec<u8>> =
            postcard::from_bytes(bytes).map_err(|error| Fatal(error.to_string()))?;
        self.0 = state.into_iter().map(Bytes::from).collect();
        Ok(())
    }
}

fn tuning() -> RaftTuning {
    RaftTuning {
        heartbeat_interval: Duration::from_millis(50),
        election_timeout_min: Duration::from_millis(200),
        election_timeout_max: Duration::from_millis(400),
        propose_timeout: Duration::from_secs(2),
        entries_kept: 0,
        ..RaftTuning::default()
    }
}

/// Settings of nodes 1 to n on free ports, and listeners bound to them.
struct Plan {
    root: TempDir,
    settings: Vec<RaftSettings>,
    listeners: Vec<Option<TcpListener>>,
}

impl Plan {
    async fn new(nodes: u64) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut listeners = Vec::new();
        let mut members = BTreeMap::new();
        for id in 1..=nodes {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let raft_address = listener.local_addr().unwrap().to_string();
            let client_address = format!("client-of-{id}");
            members.insert(NodeId(id), NodeAddresses { raft_address, client_address });
            listeners.push(Some(listener));
        }
        let settings = members.iter().map(|(node, addresses)| RaftSettings {
            node: *node,
            cluster: "toys".to_owned(),
            folder: root.path().join(node.to_string()),
            listen: addresses.raft_address.parse().unwrap(),
            addresses: addresses.clone(),
            start: Start::Bootstrap { members: members.clone() },
            tuning: tuning(),
        });
        let settings = settings.collect();
        Self { root, settings, listeners }
    }

    fn tune(mut self, change: impl Fn(&mut RaftTuning)) -> Self {
        self.settings.iter_mut().for_each(|settings| change(&mut settings.tuning));
        self
    }

    async fn open(&mut self, at: usize) -> Result<RaftNode<Toy>, OpenError> {
        let settings = self.settings[at].clone();
        match self.listeners[at].take() {
            Some(listener) => RaftNode::open_on(listener, settings, Toy::default()).await,
            None => RaftNode::open(settings, Toy::default()).await,
        }
    }

    async fn start(mut self) -> Cluster {
        let settings = self.settings.clone();
        let listeners = self.listeners.iter_mut().map(|listener| listener.take().unwrap());
        let opened = join_all(settings.into_iter().zip(listeners).map(|(settings, listener)| {
            tokio::spawn(RaftNode::open_on(listener, settings, Toy::default()))
        }));
        let nodes = opened.await.into_iter().map(|node| Some(node.unwrap().unwrap())).collect();
        Cluster { plan: self, nodes }
    }
}

struct Cluster {
    plan: Plan,
    nodes: Vec<Option<RaftNode<Toy>>>,
}

impl Cluster {
    async fn of(nodes: u64) -> Self {
        Plan::new(nodes).await.start().await
    }

    fn node(&self, at: usize) -> &RaftNode<Toy> {
        self.nodes[at].as_ref().expect("the node runs")
    }

    fn running(&self) -> impl Iterator<Item = &RaftNode<Toy>> {
        self.nodes.iter().flatten()
    }

    /// Waits for a leader that has applied its first entry.
    async fn leader(&self) -> usize {
        wait("a leader", || self.nodes.iter().position(|node| node.as_ref().is_some_and(leads)))
            .await
    }

    /// Proposes on whichever node leads until one of them acknowledges.
    async fn write(&self, text: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < until, "{text} was never acknowledged");
            let node = self.node(self.leader().await);
            if node.propose(bytes(text), None).await.is_ok() {
                return;
            }
        }
    }

    /// Waits until all running nodes have applied the same `count` entries.
    async fn agree_on(&self, count: usize) -> Vec<Bytes> {
        let states = || self.running().map(state).collect::<Vec<_>>();
        wait("all nodes to agree", || {
            let states = states();
            let equal = states.iter().all(|state| *state == states[0] && state.len() == count);
            equal.then(|| states[0].clone())
        })
        .await
    }

    /// Ends a node without giving it the time to write anything more.
    async fn kill(&mut self, at: usize) {
        let node = self.nodes[at].take().expect("the node runs");
        node.0.wal.close();
        node.0.end(StopReason::Shutdown);
        drop(node.0.library.shutdown().await);
        node.0.listening.stop().await;
    }

    async fn restart(&mut self, at: usize) {
        self.nodes[at] = Some(self.plan.open(at).await.unwrap());
    }
}

fn leads(node: &RaftNode<Toy>) -> bool {
    node.leadership().borrow().is_me
}

fn state(node: &RaftNode<Toy>) -> Vec<Bytes> {
    node.with_machine(|toy| toy.0.clone())
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn texts(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("text {at}")).collect()
}

async fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < until, "waited too long for {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
