//! Service `Cluster`. Changes are done at the raft leader, one at a time; each may be repeated.

use std::time::Duration;

use tenure_model::Index;
use tenure_proto::v1;
use tonic::{Request, Response, Status};

use super::refusal::Refusal;
use super::{Services, edge};
use crate::lost;
use crate::raft::{ChangeError, NodeAddresses, NodeId, NodeStatus, RaftStatus};

/// How long a change may take until it is answered. Below the patience of a client, so that it hears the reason.
const CHANGE_LIMIT: Duration = Duration::from_millis(2_500);

#[tonic::async_trait]
impl v1::cluster_server::Cluster for Services {
    async fn add_learner(
        &self,
        request: Request<v1::AddLearnerRequest>,
    ) -> Result<Response<v1::ClusterChangeResponse>, Status> {
        let wire = request.get_ref();
        let asked = edge::cluster_change(wire.change.as_ref()).map_err(Refusal::from)?;
        let node = edge::node("node", wire.node).map_err(Refusal::from)?;
        let addresses = addresses(wire).map_err(Refusal::from)?;
        self.at_leader().await?;
        let done = self.0.raft.add_learner(node, addresses, CHANGE_LIMIT).await;
        Ok(changed("add-learner", node, &asked, done)?)
    }

    async fn promote(
        &self,
        request: Request<v1::PromoteRequest>,
    ) -> Result<Response<v1::ClusterChangeResponse>, Status> {
        let wire = request.get_ref();
        let asked = edge::cluster_change(wire.change.as_ref()).map_err(Refusal::from)?;
        let node = edge::node("node", wire.node).map_err(Refusal::from)?;
        self.at_leader().await?;
        let done = self.0.raft.promote(node, CHANGE_LIMIT).await;
        Ok(changed("promote", node, &asked, done)?)
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveRequest>,
    ) -> Result<Response<v1::ClusterChangeResponse>, Status> {
        let wire = request.get_ref();
        let asked = edge::cluster_change(wire.change.as_ref()).map_err(Refusal::from)?;
        let node = edge::node("node", wire.node).map_err(Refusal::from)?;
        self.at_leader().await?;
        let done = self.0.raft.remove(node, CHANGE_LIMIT).await;
        Ok(changed("remove", node, &asked, done)?)
    }

    async fn transfer_leader(
        &self,
        request: Request<v1::TransferLeaderRequest>,
    ) -> Result<Response<v1::TransferLeaderResponse>, Status> {
        let wire = request.get_ref();
        let asked = edge::cluster_change(wire.change.as_ref()).map_err(Refusal::from)?;
        let to = match wire.to {
            0 => None,
            to => Some(edge::node("to", to).map_err(Refusal::from)?),
        };
        self.at_leader().await?;
        let leader = self.0.raft.transfer_leadership(to, CHANGE_LIMIT).await;
        let leader = leader.map_err(Refusal::from)?;
        let edge::ClusterChange { actor, reason } = asked;
        tracing::info!(action = "transfer", node = %leader, actor, reason, "cluster changed");
        Ok(Response::new(v1::TransferLeaderResponse { leader: leader.0 }))
    }

    async fn status(
        &self,
        request: Request<v1::ClusterStatusRequest>,
    ) -> Result<Response<v1::ClusterStatusResponse>, Status> {
        if !request.get_ref().local {
            self.at_leader().await?;
        }
        let raft = &self.0.raft;
        let mut wire = status_to_wire(self.0.settings.cluster.clone(), &raft.status());
        raft.with_machine(|machine| {
            wire.feature_level = machine.state().level.0;
            wire.digest_agreed = machine.digests().agreed().0;
            wire.epoch_counter = machine.state().epoch_counter;
            wire.epoch_seen = lost::highest(machine.state()).map_or(0, |(_, _, epoch)| epoch.get());
        });
        let reports = self.0.reports.borrow();
        for node in &mut wire.nodes {
            if let Some(report) = reports.get(&NodeId(node.node)) {
                node.supported_level = Some(report.supported.0);
                node.version = Some(report.version.clone());
            }
        }
        drop(reports);
        Ok(Response::new(wire))
    }
}

fn addresses(
    wire: &v1::AddLearnerRequest,
) -> Result<NodeAddresses, tenure_proto::convert::Malformed> {
    if wire.raft_address == wire.client_address {
        let problem = "is also the client_address: nodes and members are heard on two ports";
        return Err(tenure_proto::convert::Malformed::new("raft_address", problem));
    }
    Ok(NodeAddresses {
        raft_address: edge::address("raft_address", &wire.raft_address)?,
        client_address: edge::address("client_address", &wire.client_address)?,
    })
}

fn changed(
    action: &'static str,
    node: NodeId,
    asked: &edge::ClusterChange,
    done: Result<Index, ChangeError>,
) -> Result<Response<v1::ClusterChangeResponse>, Refusal> {
    let edge::ClusterChange { actor, reason } = asked;
    let index = done.inspect_err(|error| {
        tracing::info!(action, %node, actor, reason, %error, "change of the cluster not done");
    })?;
    tracing::info!(action, %node, actor, reason, %index, "cluster changed");
    Ok(Response::new(v1::ClusterChangeResponse { index: index.0 }))
}

fn status_to_wire(cluster: String, status: &RaftStatus) -> v1::ClusterStatusResponse {
    let number = |index: Option<Index>| index.map_or(0, |index| index.0);
    let leads = status.leader == Some(status.node);
    v1::ClusterStatusResponse {
        cluster,
        node: status.node.0,
        leader: status.leader.map_or(0, |leader| leader.0),
        term: status.term.0,
        last_log: number(status.last_log),
        committed: number(status.committed),
        applied: number(status.applied),
        snapshot: number(status.snapshot),
        wal_bytes: status.wal_bytes,
        quorum_acked_ago_ms: status.quorum_acked_ago.map(millis),
        changing: status.is_changing,
        nodes: status
            .nodes
            .iter()
            .map(|node| node_to_wire(node, leads.then_some(number(status.last_log))))
            .collect(),
        feature_level: 0,
        digest_agreed: 0,
        epoch_counter: 0,
        epoch_seen: 0,
    }
}

/// `last_log` is that of this node if it leads.
fn node_to_wire(node: &NodeStatus, last_log: Option<u64>) -> v1::ClusterNode {
    let matched = node.matched.map_or(0, |index| index.0);
    v1::ClusterNode {
        node: node.node.0,
        raft_address: node.addresses.raft_address.clone(),
        client_address: node.addresses.client_address.clone(),
        voter: node.is_voter,
        last_log: last_log.map(|_| matched),
        lag: last_log.map(|last| last.saturating_sub(matched)),
        acked_ago_ms: node.acked_ago.map(millis),
        supported_level: None,
        version: None,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
