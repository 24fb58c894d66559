//! Service `Ownership`.

use tenure_core::{Rejection, State};
use tenure_model::{Epoch, GroupId, Home, MemberId, Partition};
use tenure_proto::convert::name;
use tenure_proto::v1;
use tonic::{Request, Response, Status};

use super::refusal::Refusal;
use super::{Services, edge};
use crate::view;

#[tonic::async_trait]
impl v1::ownership_server::Ownership for Services {
    async fn list_groups(
        &self,
        _request: Request<v1::ListGroupsRequest>,
    ) -> Result<Response<v1::ListGroupsResponse>, Status> {
        self.catch_up_if_leader().await?;
        let listed = self.0.raft.with_machine(|machine| view::list_groups(machine.state()));
        Ok(Response::new(listed))
    }

    async fn describe_group(
        &self,
        request: Request<v1::DescribeGroupRequest>,
    ) -> Result<Response<v1::DescribeGroupResponse>, Status> {
        let id: GroupId = name("group", &request.get_ref().group).map_err(Refusal::from)?;
        self.catch_up_if_leader().await?;
        let heard = view::Heard { beats: self.0.driver.beats(), now: self.0.clock.now() };
        let described = self.0.raft.with_machine(|machine| {
            let state = machine.state();
            let group = state.group(&id)?;
            Ok::<_, Rejection>(view::describe_group(state, &id, group, heard))
        });
        Ok(Response::new(described.map_err(Refusal::from)?))
    }

    async fn verify(
        &self,
        request: Request<v1::VerifyRequest>,
    ) -> Result<Response<v1::VerifyResponse>, Status> {
        let (group, member, grants) = edge::verify(request.get_ref()).map_err(Refusal::from)?;
        self.at_leader().await?;
        self.linearize().await?;
        let verified =
            self.0.raft.with_machine(|machine| verify(machine.state(), &group, &member, &grants));
        Ok(Response::new(verified.map_err(Refusal::from)?))
    }

    async fn describe_cluster(
        &self,
        _request: Request<v1::DescribeClusterRequest>,
    ) -> Result<Response<v1::DescribeClusterResponse>, Status> {
        let status = self.0.raft.status();
        let nodes = status.nodes.iter().map(|node| v1::NodeInfo {
            node: node.node.0,
            client_address: node.addresses.client_address.clone(),
            raft_address: node.addresses.raft_address.clone(),
            voter: node.is_voter,
        });
        Ok(Response::new(v1::DescribeClusterResponse {
            cluster: self.0.settings.cluster.clone(),
            node: status.node.0,
            leader: status.leader.map_or(0, |leader| leader.0),
            term: status.term.0,
            applied: status.applied.map_or(0, |index| index.0),
            nodes: nodes.collect(),
        }))
    }
}

impl Services {
    /// The raft leader answers with everything committed; another node with what it has, and its revision.
    async fn catch_up_if_leader(&self) -> Result<(), Refusal> {
        let is_me = self.0.raft.leadership().borrow().is_me;
        if is_me {
            self.linearize().await?;
        }
        Ok(())
    }
}

/// Verdicts on grants that `member` believes to hold.
pub fn verify(
    state: &State,
    group: &GroupId,
    member: &MemberId,
    grants: &[(Partition, Epoch)],
) -> Result<v1::VerifyResponse, Rejection> {
    let known = state.group(group)?;
    let home = known.settings.home;
    let verdicts = grants.iter().map(|(partition, epoch)| {
        match state.check_owner(group, member, *partition, *epoch) {
            Ok(found) => v1::VerifyVerdict {
                error: None,
                next_offset: match home {
                    Home::Coordinator => {
                        found.committed.as_ref().map(|committed| committed.next_offset.get())
                    }
                    Home::Sink | Home::KafkaTransaction => None,
                },
                home_initialised: found.home_initialised,
                starts_at_earliest: known.starts_at_earliest(*partition),
            },
            Err(rejection) => v1::VerifyVerdict {
                error: Some(Refusal::from(rejection).to_wire()),
                ..v1::VerifyVerdict::default()
            },
        }
    });
    Ok(v1::VerifyResponse { verdicts: verdicts.collect(), index: state.applied.0 })
}
