//! The raft library on simulated time. Everything else about it is as in production.

use bytes::Bytes;
use openraft::impls::leader_id_std;
use openraft::type_config::alias;

pub(crate) use super::super::types::{Answer, NodeAddresses, NodeId, Payload};

openraft::declare_raft_types!(
    /// As [`super::super::types::TypeConfig`], on another runtime.
    pub(crate) TypeConfig:
        D = Payload,
        R = Answer,
        NodeId = NodeId,
        Node = NodeAddresses,
        LeaderId = leader_id_std::LeaderId<u64, NodeId>,
        AsyncRuntime = openraft_rt_sim::SimRuntime,
);

pub(crate) type CommittedLeader = alias::CommittedLeaderIdOf<TypeConfig>;
pub(crate) type Entry = alias::EntryOf<TypeConfig>;
pub(crate) type LogId = alias::LogIdOf<TypeConfig>;
pub(crate) type Membership = openraft::Membership<NodeId, NodeAddresses>;
pub(crate) type SnapshotMeta = alias::SnapshotMetaOf<TypeConfig>;
pub(crate) type Snapshot = alias::SnapshotOf<TypeConfig, Bytes>;
pub(crate) type StoredMembership = alias::StoredMembershipOf<TypeConfig>;
pub(crate) type Vote = alias::VoteOf<TypeConfig>;
