//! Types that fill in the raft library.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use openraft::impls::leader_id_std;
use openraft::type_config::alias;
use serde::de::{Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

openraft::declare_raft_types!(
    /// How this project uses the raft library.
    ///
    /// One leader per term (`leader_id_std`): everything that a leader keeps is keyed by the term alone.
    pub(crate) TypeConfig:
        D = Payload,
        R = Answer,
        NodeId = NodeId,
        Node = NodeAddresses,
        LeaderId = leader_id_std::LeaderId<u64, NodeId>,
);

pub(crate) type CommittedLeader = alias::CommittedLeaderIdOf<TypeConfig>;
pub(crate) type Entry = alias::EntryOf<TypeConfig>;
pub(crate) type LogId = alias::LogIdOf<TypeConfig>;
pub(crate) type Membership = openraft::Membership<NodeId, NodeAddresses>;
pub(crate) type Metrics = openraft::RaftMetrics<TypeConfig>;
pub(crate) type SnapshotMeta = alias::SnapshotMetaOf<TypeConfig>;
pub(crate) type Snapshot = alias::SnapshotOf<TypeConfig, Bytes>;
pub(crate) type StoredMembership = alias::StoredMembershipOf<TypeConfig>;
pub(crate) type Vote = alias::VoteOf<TypeConfig>;

/// Id of one coordinator node. Never given to a second node, also not after the first is gone for good.
///
/// At most 2^63 − 1.
#[derive(
    Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Where a node can be reached, as `host:port`. Names are resolved anew for every connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NodeAddresses {
    /// For the other nodes of the cluster.
    pub raft_address: String,
    /// For members and operators.
    pub client_address: String,
}

impl fmt::Display for NodeAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "raft {}, clients {}", self.raft_address, self.client_address)
    }
}

/// Opaque bytes of one entry. Cheap to clone, which the raft library does about five times per entry.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Payload(pub(crate) Bytes);

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl Serialize for Payload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Raw;

        impl Visitor<'_> for Raw {
            type Value = Payload;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Payload, E> {
                Ok(Payload(Bytes::copy_from_slice(bytes)))
            }

            fn visit_byte_buf<E>(self, bytes: Vec<u8>) -> Result<Payload, E> {
                Ok(Payload(bytes.into()))
            }
        }

        deserializer.deserialize_byte_buf(Raw)
    }
}

/// What a machine answered to one entry, on the node that proposed it; nothing for entries that carry no payload.
///
/// Erased because the raft library wants one type for all machines. Never written or sent: the raft library asks
/// for serde on it, and gets nothing in both directions.
#[derive(Clone, Default)]
pub(crate) struct Answer(Option<Arc<dyn Any + Send + Sync>>);

impl Answer {
    pub(crate) fn new<R: Send + Sync + 'static>(reply: R) -> Self {
        Self(Some(Arc::new(reply)))
    }

    pub(crate) fn get<R: Clone + 'static>(&self) -> Option<R> {
        self.0.as_ref()?.downcast_ref().cloned()
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "an answer" } else { "no answer" })
    }
}

impl Serialize for Answer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit()
    }
}

impl<'de> Deserialize<'de> for Answer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <()>::deserialize(deserializer).map(|()| Self(None))
    }
}
