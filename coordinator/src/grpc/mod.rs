//! The services that members, operators and observers call.

mod cluster;
mod coded;
pub mod edge;
mod leases;
mod membership;
mod offsets;
mod operator;
mod ownership;
pub mod refusal;
mod signing;
mod watching;

pub use membership::judge;
pub use ownership::verify;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tenure_model::limits::{REQUEST_BYTES_MAX, WATCHES_MAX};
use tenure_model::{Clock, Index};
use tenure_proto::v1::cluster_server::ClusterServer;
use tenure_proto::v1::leases_server::LeasesServer;
use tenure_proto::v1::membership_server::MembershipServer;
use tenure_proto::v1::offsets_server::OffsetsServer;
use tenure_proto::v1::operator_server::OperatorServer;
use tenure_proto::v1::ownership_server::OwnershipServer;
use tokio::sync::{Semaphore, watch};
use tonic::service::Routes;

use crate::driver::DriverHandle;
use crate::driver::proposer::Proposer;
use crate::machine::GroupMachine;
use crate::raft::{NodeId, ProposeError, RaftNode};
use crate::settings::NodeSettings;
use crate::versions::Reports;
use coded::Coded;
use refusal::Refusal;
pub(crate) use signing::Signer;

/// How long a call waits for a raft leader that was elected to have applied its first entry.
const FIRST_ENTRY_WAIT: Duration = Duration::from_secs(2);

/// What every service needs. Clones share it.
#[derive(Clone)]
pub(crate) struct Services(Arc<Shared>);

struct Shared {
    raft: RaftNode<GroupMachine>,
    proposer: Proposer,
    driver: DriverHandle,
    clock: Arc<dyn Clock>,
    settings: Arc<NodeSettings>,
    signer: Arc<Signer>,
    sessions: AtomicU64,
    /// One permit per watch.
    watches: Arc<Semaphore>,
    /// Turns true when the node stops.
    closing: watch::Receiver<bool>,
    /// What the nodes last said of themselves, while this one leads.
    reports: watch::Receiver<Reports>,
}

impl Services {
    #[allow(clippy::too_many_arguments, reason = "called once, with the parts of a node")]
    pub(crate) fn new(
        raft: RaftNode<GroupMachine>,
        proposer: Proposer,
        driver: DriverHandle,
        clock: Arc<dyn Clock>,
        settings: Arc<NodeSettings>,
        closing: watch::Receiver<bool>,
        signer: Arc<Signer>,
        reports: watch::Receiver<Reports>,
    ) -> Self {
        let sessions = AtomicU64::new(0);
        let watches = Arc::new(Semaphore::new(WATCHES_MAX));
        Self(Arc::new(Shared {
            raft,
            proposer,
            driver,
            clock,
            settings,
            signer,
            sessions,
            watches,
            closing,
            reports,
        }))
    }

    /// All services, with health and reflection.
    pub(crate) async fn routes(self) -> Result<Routes, tonic_reflection::server::Error> {
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<MembershipServer<Self>>().await;
        health.set_serving::<OffsetsServer<Self>>().await;
        health.set_serving::<OwnershipServer<Self>>().await;
        health.set_serving::<OperatorServer<Self>>().await;
        health.set_serving::<LeasesServer<Self>>().await;
        health.set_serving::<ClusterServer<Self>>().await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(tenure_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()?;
        let membership =
            MembershipServer::new(self.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
        let offsets = OffsetsServer::new(self.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
        let ownership =
            OwnershipServer::new(self.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
        let leases = LeasesServer::new(self.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
        let operator =
            OperatorServer::new(self.clone()).max_decoding_message_size(REQUEST_BYTES_MAX);
        let cluster = ClusterServer::new(self).max_decoding_message_size(REQUEST_BYTES_MAX);
        Ok(Routes::new(health_service)
            .add_service(reflection)
            .add_service(Coded(membership))
            .add_service(Coded(offsets))
            .add_service(Coded(ownership))
            .add_service(Coded(leases))
            .add_service(Coded(operator))
            .add_service(Coded(cluster)))
    }

    /// Passes only at the raft leader; one that was just elected is waited for.
    async fn at_leader(&self) -> Result<(), Refusal> {
        let mut leadership = self.0.raft.leadership();
        let me = NodeId(self.0.settings.node);
        let settled = leadership.wait_for(|now| now.is_me || now.leader != Some(me));
        let now = match tokio::time::timeout(FIRST_ENTRY_WAIT, settled).await {
            Ok(Ok(now)) => now.clone(),
            Ok(Err(_closed)) => return Err(ProposeError::Stopped.into()),
            Err(_elapsed) => return Err(Refusal::not_leader(None)),
        };
        if now.is_me {
            Ok(())
        } else {
            Err(Refusal::not_leader(now.leader_client_address.as_deref()))
        }
    }

    /// Everything committed by now is applied on this node, which leads.
    async fn linearize(&self) -> Result<Index, Refusal> {
        let limit = Duration::from_millis(self.0.settings.raft.propose_timeout_ms);
        Ok(self.0.raft.linearize(limit).await?)
    }
}
