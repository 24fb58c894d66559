//! The envelope of everything that goes between nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tenure_proto::raft::Packet;
use tonic::Status;

use super::identity::{Identity, Stage};
use super::settings::{RaftSettings, Start};
use super::types::{NodeAddresses, NodeId};

/// Version of the bodies.
const FORMAT: u32 = 1;

/// Largest message between nodes, in bytes: one entry of the largest size fits.
pub(crate) const MESSAGE_BYTES_MAX: usize = 72 * 1024 * 1024;

/// Packs and checks packets for one node.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    cluster: Arc<str>,
    me: NodeId,
}

impl Wire {
    pub(crate) fn new(settings: &RaftSettings) -> Self {
        Self { cluster: settings.cluster.as_str().into(), me: settings.node }
    }

    pub(crate) fn me(&self) -> NodeId {
        self.me
    }

    pub(crate) fn packet(&self, to: NodeId, body: bytes::Bytes) -> Packet {
        Packet {
            format: FORMAT,
            cluster: self.cluster.to_string(),
            from: self.me.0,
            to: to.0,
            body,
        }
    }

    pub(crate) fn pack<T: Serialize>(&self, to: NodeId, value: &T) -> Result<Packet, Status> {
        match postcard::to_stdvec(value) {
            Ok(body) => Ok(self.packet(to, body.into())),
            Err(error) => Err(Status::internal(format!("cannot encode: {error}"))),
        }
    }

    /// Refuses a packet of another format or cluster, or for another node.
    pub(crate) fn check(&self, packet: &Packet) -> Result<NodeId, Status> {
        let Packet { format, cluster, from, to, body: _ } = packet;
        if *format != FORMAT {
            let text = format!("packet has format {format}, node {} knows {FORMAT}", self.me);
            return Err(Status::failed_precondition(text));
        }
        if cluster.as_str() != &*self.cluster {
            let text = format!(
                "packet is for cluster {cluster:?}, node {} is in {:?}",
                self.me, self.cluster
            );
            return Err(Status::failed_precondition(text));
        }
        if *to != self.me.0 {
            let text = format!("packet is for node {to}, this is node {}", self.me);
            return Err(Status::failed_precondition(text));
        }
        Ok(NodeId(*from))
    }

    pub(crate) fn unpack<T: DeserializeOwned>(
        &self,
        packet: &Packet,
    ) -> Result<(NodeId, T), Status> {
        let from = self.check(packet)?;
        match postcard::from_bytes(&packet.body) {
            Ok(value) => Ok((from, value)),
            Err(error) => Err(Status::invalid_argument(format!("cannot decode the body: {error}"))),
        }
    }
}

/// What a node says of itself when asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduction {
    pub(crate) incarnation: String,
    pub(crate) stage: Stage,
    /// Incarnation of each founder; empty if unknown.
    pub(crate) founders: BTreeMap<String, String>,
    /// The nodes that it was told to found a cluster with; empty otherwise.
    pub(crate) members: BTreeMap<NodeId, NodeAddresses>,
    /// Voters of the newest membership in its log.
    pub(crate) voters: BTreeSet<NodeId>,
}

impl Introduction {
    pub(crate) fn new(identity: &Identity, start: &Start) -> Self {
        let members = match start {
            Start::Bootstrap { members } => members.clone(),
            Start::Existing | Start::Join { .. } => BTreeMap::new(),
        };
        Self {
            incarnation: identity.incarnation.clone(),
            stage: identity.stage,
            founders: identity.founders.clone(),
            members,
            voters: BTreeSet::new(),
        }
    }
}
