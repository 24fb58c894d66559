//! The server side: what other nodes ask of this one.

use std::sync::{Arc, PoisonError, RwLock};

use bytes::{Bytes, BytesMut};
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::raft::SnapshotResponse;
use serde::Serialize;
use tenure_proto::raft::Packet;
use tenure_proto::raft::raft_server::{Raft as RaftRpc, RaftServer};
use tonic::{Request, Response, Status, Streaming};

use super::machine::{Machine, Replica};
use super::stored::SnapshotAnnouncement;
use super::types::{NodeId, Snapshot, TypeConfig};
use super::wire::{Introduction, MESSAGE_BYTES_MAX, Wire};

/// Most bytes that a snapshot's announcement may make this node reserve at once; the rest grows as it arrives.
const SNAPSHOT_RESERVED_BYTES_MAX: u64 = 64 * 1024 * 1024;

pub(crate) type Library<M> = openraft::Raft<TypeConfig, Replica<M>>;

/// What a node takes part with.
pub(crate) struct Part<M: Machine> {
    pub(crate) library: Library<M>,
    pub(crate) replica: Replica<M>,
}

/// Answers the other nodes. Clones share it.
pub(crate) struct Service<M: Machine> {
    wire: Wire,
    introduction: Arc<RwLock<Introduction>>,
    /// Nothing before the node may take part, and after it stopped.
    part: Arc<RwLock<Option<Part<M>>>>,
}

impl<M: Machine> Clone for Service<M> {
    fn clone(&self) -> Self {
        Self {
            wire: self.wire.clone(),
            introduction: self.introduction.clone(),
            part: self.part.clone(),
        }
    }
}

impl<M: Machine> Service<M> {
    pub(crate) fn new(wire: Wire, introduction: Introduction) -> Self {
        Self { wire, introduction: Arc::new(RwLock::new(introduction)), part: Arc::default() }
    }

    pub(crate) fn into_server(self) -> RaftServer<Self> {
        RaftServer::new(self)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    pub(crate) fn introduce_as(&self, introduction: Introduction) {
        *self.introduction.write().unwrap_or_else(PoisonError::into_inner) = introduction;
    }

    /// Takes part from now on; with nothing, no more.
    pub(crate) fn serve(&self, part: Option<Part<M>>) {
        *self.part.write().unwrap_or_else(PoisonError::into_inner) = part;
    }

    fn current(&self) -> Option<Library<M>> {
        let part = self.part.read().unwrap_or_else(PoisonError::into_inner);
        part.as_ref().map(|part| part.library.clone())
    }

    fn library(&self) -> Result<Library<M>, Status> {
        self.current().ok_or_else(|| self.missing())
    }

    fn missing(&self) -> Status {
        Status::unavailable(format!("node {} does not take part", self.wire.me()))
    }

    fn answer<T: Serialize>(&self, to: NodeId, value: &T) -> Result<Response<Packet>, Status> {
        self.wire.pack(to, value).map(Response::new)
    }
}

fn stopped(error: impl std::fmt::Display) -> Status {
    Status::unavailable(error.to_string())
}

#[tonic::async_trait]
impl<M: Machine> RaftRpc for Service<M> {
    async fn identify(&self, request: Request<Packet>) -> Result<Response<Packet>, Status> {
        let (from, ()) = self.wire.unpack(request.get_ref())?;
        let mut introduction =
            self.introduction.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(library) = self.current() {
            introduction.voters =
                library.metrics().borrow_watched().membership_config.voter_ids().collect();
        }
        self.answer(from, &introduction)
    }

    async fn append(&self, request: Request<Packet>) -> Result<Response<Packet>, Status> {
        let (from, rpc) = self.wire.unpack(request.get_ref())?;
        let reply = self.library()?.append_entries(rpc).await.map_err(stopped)?;
        self.answer(from, &reply)
    }

    async fn vote(&self, request: Request<Packet>) -> Result<Response<Packet>, Status> {
        let (from, rpc) = self.wire.unpack(request.get_ref())?;
        let reply = self.library()?.vote(rpc).await.map_err(stopped)?;
        self.answer(from, &reply)
    }

    async fn pre_vote(&self, request: Request<Packet>) -> Result<Response<Packet>, Status> {
        let (from, rpc) = self.wire.unpack(request.get_ref())?;
        let reply = self.library()?.pre_vote(rpc).await.map_err(stopped)?;
        self.answer(from, &reply)
    }

    async fn transfer_leader(&self, request: Request<Packet>) -> Result<Response<Packet>, Status> {
        let (from, rpc) = self.wire.unpack(request.get_ref())?;
        let reply = self.library()?.handle_transfer_leader(rpc).await.map_err(stopped)?;
        self.answer(from, &reply)
    }

    async fn ask(&self, request: Request<Packet>) -> Result<Response<Packet>, Status> {
        let from = self.wire.check(request.get_ref())?;
        let answer = {
            let part = self.part.read().unwrap_or_else(PoisonError::into_inner);
            part.as_ref()
                .map(|part| part.replica.read(|machine| machine.answer(&request.get_ref().body)))
        };
        let answer = answer.ok_or_else(|| self.missing())?;
        Ok(Response::new(self.wire.packet(from, answer.into())))
    }

    async fn install_snapshot(
        &self,
        request: Request<Streaming<Packet>>,
    ) -> Result<Response<Packet>, Status> {
        let library = self.library()?;
        let mut packets = request.into_inner();
        let first = packets
            .message()
            .await?
            .ok_or_else(|| Status::invalid_argument("no snapshot follows"))?;
        let (from, announcement): (NodeId, SnapshotAnnouncement) = self.wire.unpack(&first)?;
        let snapshot = self.receive(&announcement, &mut packets).await?;
        let meta = announcement
            .meta
            .into_meta()
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let snapshot = Snapshot { meta, snapshot };
        let reply: SnapshotResponse<TypeConfig> =
            library.install_full_snapshot(announcement.vote, snapshot).await.map_err(stopped)?;
        self.answer(from, &reply)
    }
}

impl<M: Machine> Service<M> {
    async fn receive(
        &self,
        announcement: &SnapshotAnnouncement,
        packets: &mut Streaming<Packet>,
    ) -> Result<Bytes, Status> {
        let size_bytes = announcement.size_bytes;
        let mut body =
            BytesMut::with_capacity(size_bytes.min(SNAPSHOT_RESERVED_BYTES_MAX) as usize);
        while let Some(packet) = packets.message().await? {
            self.wire.check(&packet)?;
            if (body.len() + packet.body.len()) as u64 > size_bytes {
                return Err(Status::invalid_argument("the snapshot is longer than announced"));
            }
            body.extend_from_slice(&packet.body);
        }
        if body.len() as u64 != size_bytes || crc32fast::hash(&body) != announcement.checksum {
            return Err(Status::data_loss("the snapshot is not what was announced"));
        }
        Ok(body.freeze())
    }
}
