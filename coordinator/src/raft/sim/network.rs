//! Calls between nodes, in the envelope of production, over lines that delay, break one way and lose answers.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::{Oneshot as _, OneshotSender as _};
use openraft::errors::{
    NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable,
};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::{AsyncRuntime as _, OptionalSend, RPCTypes};
use openraft_rt_sim::SimRuntime;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;

use super::super::wire::Wire;
use super::machine::Replica;
use super::oracle::Watched;
use super::types::{NodeAddresses, NodeId, Snapshot, TypeConfig, Vote};
use super::{Library, Rng};

/// The lines between all nodes. Clones share them.
#[derive(Clone)]
pub(super) struct Lines(Arc<Mutex<State>>);

struct State {
    rng: Rng,
    /// Nodes that run.
    up: BTreeMap<NodeId, Up>,
    /// Lines from one node to another that carry nothing.
    cut: BTreeSet<(NodeId, NodeId)>,
}

/// A node that runs.
#[derive(Clone)]
pub(super) struct Up {
    /// Number of its start.
    pub(super) start: u64,
    pub(super) library: Library,
    pub(super) replica: Replica<Watched>,
}

impl Lines {
    pub(super) fn new(rng: Rng) -> Self {
        let state = State { rng, up: BTreeMap::new(), cut: BTreeSet::new() };
        Self(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn connect(&self, node: NodeId, up: Up) {
        self.state().up.insert(node, up);
    }

    pub(super) fn disconnect(&self, node: NodeId) -> Option<Up> {
        self.state().up.remove(&node)
    }

    pub(super) fn node(&self, node: NodeId) -> Option<Up> {
        self.state().up.get(&node).cloned()
    }

    /// Whether that very start of the node runs.
    pub(super) fn runs(&self, node: NodeId, start: u64) -> bool {
        self.state().up.get(&node).is_some_and(|up| up.start == start)
    }

    pub(super) fn cut(&self, from: NodeId, to: NodeId) {
        self.state().cut.insert((from, to));
    }

    pub(super) fn heal(&self) {
        self.state().cut.clear();
    }

    /// How long one message takes: mostly short, now and then long.
    fn delay(&self) -> Duration {
        let rng = &mut self.state().rng;
        let most = if rng.chance(2) { 300_000 } else { 3_000 };
        Duration::from_micros(rng.within(100, most))
    }

    fn carries(&self, from: NodeId, to: NodeId) -> bool {
        !self.state().cut.contains(&(from, to))
    }

    /// The network of the node `me`, from one start to its fall.
    pub(super) fn of(&self, me: NodeId, start: u64, wires: &BTreeMap<NodeId, Wire>) -> Network {
        Network { lines: self.clone(), me, start, wires: wires.clone() }
    }
}

/// See [`Lines::of`].
#[derive(Clone)]
pub(super) struct Network {
    lines: Lines,
    me: NodeId,
    start: u64,
    wires: BTreeMap<NodeId, Wire>,
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Peer;

    async fn new_client(&mut self, target: NodeId, _node: &NodeAddresses) -> Peer {
        Peer { network: self.clone(), target }
    }
}

/// One other node.
pub(super) struct Peer {
    network: Network,
    target: NodeId,
}

/// Why nothing came back.
enum Lost {
    /// Silence.
    Silent,
    /// The other end said so.
    Refused(Status),
}

impl Peer {
    /// Sends a request and waits for the answer; a request on its way arrives although nobody waits any more.
    async fn call<Q, A, F, Run>(
        &self,
        action: RPCTypes,
        request: &Q,
        limit: Duration,
        run: Run,
    ) -> Result<A, RPCError<TypeConfig>>
    where
        Q: Serialize + DeserializeOwned + Send + 'static,
        A: Serialize + DeserializeOwned + Send + 'static,
        F: Future<Output = Result<A, Status>> + Send,
        Run: FnOnce(Library, Q) -> F + Send + 'static,
    {
        let Network { lines, me, start, wires } = self.network.clone();
        let target = self.target;
        let failed = |status: &Status| RPCError::Network(NetworkError::new(status));
        let packet = wires[&me].pack(target, request).map_err(|status| failed(&status))?;
        let (sender, receiver) =
            <SimRuntime as openraft::AsyncRuntime>::Oneshot::channel::<Result<A, Lost>>();
        SimRuntime::spawn(async move {
            let delivered = async {
                SimRuntime::sleep(lines.delay()).await;
                if !lines.carries(me, target) {
                    return Err(Lost::Silent);
                }
                let Some(Up { start: their_start, library, .. }) = lines.node(target) else {
                    return Err(Lost::Refused(Status::unavailable("nobody listens")));
                };
                let (_, request) = wires[&target].unpack(&packet).map_err(Lost::Refused)?;
                let answer = run(library, request).await.map_err(Lost::Refused)?;
                let packet = wires[&target].pack(me, &answer).map_err(Lost::Refused)?;
                SimRuntime::sleep(lines.delay()).await;
                let both_run = lines.runs(target, their_start) && lines.runs(me, start);
                if !both_run || !lines.carries(target, me) {
                    return Err(Lost::Silent);
                }
                wires[&me].unpack(&packet).map(|(_, answer)| answer).map_err(Lost::Refused)
            };
            let delivered = delivered.await;
            if !matches!(delivered, Err(Lost::Silent)) {
                // Whoever called may have given up.
                let _heard = sender.send(delivered);
            } else {
                // Nothing comes: the caller waits as long as it likes.
                SimRuntime::sleep(Duration::from_secs(3_600)).await;
                drop(sender);
            }
        });
        match SimRuntime::timeout(limit, receiver).await {
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(Lost::Refused(status)))) => {
                Err(RPCError::Unreachable(Unreachable::new(&status)))
            }
            Ok(Ok(Err(Lost::Silent)) | Err(_)) | Err(_) => {
                Err(RPCError::Timeout(Timeout { action, id: me, target, timeout: limit }))
            }
        }
    }
}

fn stopped(error: impl std::fmt::Display) -> Status {
    Status::unavailable(error.to_string())
}

impl RaftNetworkV2<TypeConfig> for Peer {
    type SnapshotData = Bytes;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(RPCTypes::AppendEntries, &rpc, option.soft_ttl(), |library, rpc| async move {
            library.append_entries(rpc).await.map_err(stopped)
        })
        .await
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(RPCTypes::Vote, &rpc, option.soft_ttl(), |library, rpc| async move {
            library.vote(rpc).await.map_err(stopped)
        })
        .await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(RPCTypes::Vote, &rpc, option.soft_ttl(), |library, rpc| async move {
            library.pre_vote(rpc).await.map_err(stopped)
        })
        .await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        _cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let limit = option.soft_ttl();
        let sent = (vote, snapshot.meta, snapshot.snapshot.to_vec());
        let run = |library: Library, (vote, meta, body): (Vote, _, Vec<u8>)| async move {
            let snapshot = Snapshot { meta, snapshot: Bytes::from(body) };
            library.install_full_snapshot(vote, snapshot).await.map_err(stopped)
        };
        Ok(self.call(RPCTypes::InstallSnapshot, &sent, limit, run).await?)
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        let run = |library: Library, request| async move {
            library.handle_transfer_leader(request).await.map_err(stopped)
        };
        self.call(RPCTypes::TransferLeader, &request, option.soft_ttl(), run).await
    }
}
