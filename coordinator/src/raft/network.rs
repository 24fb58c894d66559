//! The client side: what this node asks of the others.
//!
//! Each peer has three connections, so that a snapshot or a large append never delays a heartbeat or a vote. Both
//! ends send HTTP/2 pings; without them a connection that died silently would be reused for ever. A broken
//! connection is made anew on the next call, with the name resolved again.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use openraft::errors::{
    NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable,
};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::{OptionalSend, RPCTypes};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tenure_proto::raft::Packet;
use tenure_proto::raft::raft_client::RaftClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use super::settings::RaftTuning;
use super::stored::SnapshotAnnouncement;
use super::types::{NodeAddresses, NodeId, Snapshot, TypeConfig, Vote};
use super::wire::{Introduction, MESSAGE_BYTES_MAX, Wire};

/// Piece of a snapshot in one packet.
const SNAPSHOT_CHUNK_BYTES: usize = 1024 * 1024;
/// HTTP/2 window: a snapshot must not crawl over a long line.
pub(crate) const WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// Which connection to a peer a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    Entries,
    Liveness,
    Snapshot,
}

#[derive(Clone, Copy, Debug)]
enum Method {
    Identify,
    Append,
    Vote,
    PreVote,
    TransferLeader,
    Ask,
}

/// Makes a connection of an endpoint at the first call over it, in place of TCP: the seam for simulations.
#[doc(hidden)]
pub type Dial = Arc<dyn Fn(Endpoint) -> Channel + Send + Sync>;

/// Connections to the other nodes. Clones share them.
#[derive(Clone)]
pub(crate) struct Network {
    wire: Wire,
    tuning: RaftTuning,
    /// One connection for each address and lane; as many as the cluster ever had addresses.
    channels: Arc<Mutex<BTreeMap<(String, Lane), Channel>>>,
    /// Where each node is found now. The raft library keeps its clients when only an address changes.
    addresses: Arc<Mutex<BTreeMap<NodeId, String>>>,
    dial: Option<Dial>,
}

impl Network {
    pub(crate) fn new(wire: Wire, tuning: RaftTuning) -> Self {
        let (channels, addresses) = Default::default();
        Self { wire, tuning, channels, addresses, dial: None }
    }

    pub(crate) fn dialling(self, dial: Option<Dial>) -> Self {
        Self { dial, ..self }
    }

    /// All calls to `node` go to `address` from now on.
    pub(crate) fn found_at(&self, node: NodeId, address: &str) {
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        addresses.insert(node, address.to_owned());
    }

    fn address_of(&self, node: NodeId) -> String {
        let addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        addresses.get(&node).cloned().unwrap_or_default()
    }

    /// Asks a node who it is.
    pub(crate) async fn identify(
        &self,
        node: NodeId,
        address: &str,
    ) -> Result<Introduction, Status> {
        let packet = self.wire.pack(node, &())?;
        let call = self.send(Method::Identify, Lane::Liveness, address, packet);
        let timeout = self.tuning.connect_timeout * 2;
        let answer = tokio::time::timeout(timeout, call).await;
        let answer = answer.map_err(|_elapsed| Status::deadline_exceeded("no answer"))??;
        self.unpack(node, &answer)
    }

    /// Asks a node's machine; the bodies are the machine's.
    pub(crate) async fn ask(
        &self,
        node: NodeId,
        address: &str,
        question: Bytes,
    ) -> Result<Bytes, Status> {
        let packet = self.wire.packet(node, question);
        let answer = self.send(Method::Ask, Lane::Liveness, address, packet).await?;
        let from = self.wire.check(&answer)?;
        if from == node { Ok(answer.body) } else { Err(wrong_node(from, node)) }
    }

    fn peer(&self, target: NodeId, node: &NodeAddresses, lane: Lane) -> Peer {
        self.found_at(target, &node.raft_address);
        Peer { network: self.clone(), target, lane, refused: false }
    }

    fn client(&self, address: &str, lane: Lane) -> Result<RaftClient<Channel>, Status> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (address.to_owned(), lane);
        let channel = match channels.get(&key) {
            Some(channel) => channel.clone(),
            None => {
                let endpoint = self.endpoint(address)?;
                let channel = match &self.dial {
                    None => endpoint.connect_lazy(),
                    Some(dial) => dial(endpoint),
                };
                channels.insert(key, channel.clone());
                channel
            }
        };
        Ok(RaftClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX))
    }

    fn endpoint(&self, address: &str) -> Result<Endpoint, Status> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| {
            Status::invalid_argument(format!("{address} is no address: {error}"))
        })?;
        Ok(endpoint
            .connect_timeout(self.tuning.connect_timeout)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(self.tuning.keepalive)
            .keep_alive_timeout(self.tuning.keepalive)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES))
    }

    async fn send(
        &self,
        method: Method,
        lane: Lane,
        address: &str,
        packet: Packet,
    ) -> Result<Packet, Status> {
        let mut client = self.client(address, lane)?;
        let answer = match method {
            Method::Identify => client.identify(packet).await,
            Method::Append => client.append(packet).await,
            Method::Vote => client.vote(packet).await,
            Method::PreVote => client.pre_vote(packet).await,
            Method::TransferLeader => client.transfer_leader(packet).await,
            Method::Ask => client.ask(packet).await,
        };
        answer.map(Response::into_inner)
    }

    fn unpack<T: DeserializeOwned>(&self, node: NodeId, packet: &Packet) -> Result<T, Status> {
        let (from, value) = self.wire.unpack(packet)?;
        if from != node {
            return Err(wrong_node(from, node));
        }
        Ok(value)
    }
}

fn wrong_node(from: NodeId, node: NodeId) -> Status {
    Status::failed_precondition(format!("node {from} answered for node {node}"))
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Peer;

    async fn new_client(&mut self, target: NodeId, node: &NodeAddresses) -> Peer {
        self.peer(target, node, Lane::Entries)
    }

    async fn new_heartbeat_client(&mut self, target: NodeId, node: &NodeAddresses) -> Peer {
        self.peer(target, node, Lane::Liveness)
    }

    async fn new_snapshot_client(&mut self, target: NodeId, node: &NodeAddresses) -> Peer {
        self.peer(target, node, Lane::Snapshot)
    }
}

/// One peer, for one task of the raft library.
pub(crate) struct Peer {
    network: Network,
    target: NodeId,
    lane: Lane,
    /// Whether the peer's refusal was logged; it would repeat with every heartbeat.
    refused: bool,
}

impl Peer {
    async fn call<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        method: Method,
        lane: Lane,
        request: &Q,
        limit: Duration,
    ) -> Result<A, RPCError<TypeConfig>> {
        let called = async {
            let packet = self.network.wire.pack(self.target, request)?;
            let address = self.network.address_of(self.target);
            let answer = self.network.send(method, lane, &address, packet).await?;
            self.network.unpack(self.target, &answer)
        };
        match tokio::time::timeout(limit, called).await {
            Ok(Ok(answer)) => {
                self.refused = false;
                Ok(answer)
            }
            Ok(Err(status)) => Err(self.failed(&status)),
            Err(_elapsed) => Err(RPCError::Timeout(self.timeout(action(method), limit))),
        }
    }

    fn timeout(&self, action: RPCTypes, timeout: Duration) -> Timeout<TypeConfig> {
        Timeout { action, id: self.network.wire.me(), target: self.target, timeout }
    }

    fn failed(&mut self, status: &Status) -> RPCError<TypeConfig> {
        if status.code() == Code::FailedPrecondition && !self.refused {
            self.refused = true;
            let address = self.network.address_of(self.target);
            tracing::warn!(peer = %self.target, address, reason = status.message(), "peer refuses this node");
        }
        if matches!(status.code(), Code::Unavailable | Code::FailedPrecondition) {
            RPCError::Unreachable(Unreachable::new(status))
        } else {
            RPCError::Network(NetworkError::new(status))
        }
    }

    async fn send_snapshot(&self, vote: Vote, snapshot: Snapshot) -> Result<Packet, Status> {
        let Snapshot { meta, snapshot: body } = snapshot;
        let wire = self.network.wire.clone();
        let first = wire.pack(self.target, &SnapshotAnnouncement::new(vote, &meta, &body))?;
        let target = self.target;
        let chunks = std::iter::successors(split(body), |(_, rest)| split(rest.clone()))
            .map(move |(chunk, _)| wire.packet(target, chunk));
        let packets = tokio_stream::iter(std::iter::once(first).chain(chunks));
        let mut client =
            self.network.client(&self.network.address_of(self.target), Lane::Snapshot)?;
        client.install_snapshot(packets).await.map(Response::into_inner)
    }
}

/// Cuts the first chunk off; nothing when nothing is left.
fn split(mut body: Bytes) -> Option<(Bytes, Bytes)> {
    if body.is_empty() {
        return None;
    }
    let chunk = body.split_to(body.len().min(SNAPSHOT_CHUNK_BYTES));
    Some((chunk, body))
}

/// The raft library's name of a call, for its error messages.
const fn action(method: Method) -> RPCTypes {
    match method {
        Method::Append => RPCTypes::AppendEntries,
        Method::Identify | Method::Vote | Method::PreVote | Method::Ask => RPCTypes::Vote,
        Method::TransferLeader => RPCTypes::TransferLeader,
    }
}

impl RaftNetworkV2<TypeConfig> for Peer {
    type SnapshotData = Bytes;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        // The library allows less than one heartbeat interval, also for entries. Large ones would never get through, and on
        // a machine that is full no answer to a heartbeat would count; that the peer is gone is seen by the pings.
        let tuning = &self.network.tuning;
        let limit = match self.lane {
            Lane::Entries => tuning.append_timeout,
            Lane::Liveness => tuning.election_timeout_max.max(option.soft_ttl()),
            Lane::Snapshot => option.soft_ttl(),
        };
        self.call(Method::Append, self.lane, &rpc, limit).await
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(Method::Vote, Lane::Liveness, &rpc, option.soft_ttl()).await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(Method::PreVote, Lane::Liveness, &rpc, option.soft_ttl()).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let limit = option.soft_ttl();
        tracing::info!(peer = %self.target, size_bytes = snapshot.snapshot.len(), "sending a snapshot");
        let sent = tokio::select! {
            closed = cancel => return Err(StreamingError::Closed(closed)),
            sent = tokio::time::timeout(limit, self.send_snapshot(vote, snapshot)) => sent,
        };
        match sent {
            Ok(Ok(answer)) => {
                let unpacked = self.network.unpack(self.target, &answer);
                unpacked.map_err(|status| self.failed(&status).into())
            }
            Ok(Err(status)) => Err(self.failed(&status).into()),
            Err(_elapsed) => {
                Err(StreamingError::Timeout(self.timeout(RPCTypes::InstallSnapshot, limit)))
            }
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(Method::TransferLeader, Lane::Liveness, &request, option.soft_ttl()).await
    }
}
