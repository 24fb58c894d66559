//! Service `Ownership`.

use std::time::Duration;

use tenure_core::history::Past;
use tenure_core::{Rejection, State};
use tenure_model::{Epoch, ErrorCode, GroupId, Home, Index, MemberId, Partition, Timestamp};
use tenure_proto::convert::{name, partition};
use tenure_proto::v1;
use tenure_proto::v1::history_request::At;
use tonic::{Request, Response, Status};

use super::refusal::Refusal;
use super::{Services, edge, watching};
use crate::raft::ProposeError;
use crate::{past, view};

#[tonic::async_trait]
impl v1::ownership_server::Ownership for Services {
    async fn list_groups(
        &self,
        _request: Request<v1::ListGroupsRequest>,
    ) -> Result<Response<v1::ListGroupsResponse>, Status> {
        self.catch_up_if_leader().await?;
        let heard = self.heard();
        let listed = self.0.raft.with_machine(|machine| view::list_groups(machine.state(), heard));
        Ok(Response::new(listed))
    }

    async fn describe_group(
        &self,
        request: Request<v1::DescribeGroupRequest>,
    ) -> Result<Response<v1::DescribeGroupResponse>, Status> {
        let id: GroupId = name("group", &request.get_ref().group).map_err(Refusal::from)?;
        self.catch_up_if_leader().await?;
        let heard = self.heard();
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

    type WatchStream = watching::WatchStream;

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let wire = request.get_ref();
        let group = match wire.group.as_str() {
            "" => None,
            text => Some(name("group", text).map_err(Refusal::from)?),
        };
        Ok(Response::new(self.open_watch(group, Index(wire.from_revision)).await?))
    }

    async fn history(
        &self,
        request: Request<v1::HistoryRequest>,
    ) -> Result<Response<v1::HistoryResponse>, Status> {
        let wire = request.get_ref();
        let id: GroupId = name("group", &wire.group).map_err(Refusal::from)?;
        let partition = partition("partition", wire.partition.as_ref()).map_err(Refusal::from)?;
        let past = wire.at.map(|at| match at {
            At::Revision(revision) => Past::Revision(Index(revision)),
            At::TimeUnixMs(time) => Past::Time(Timestamp(time)),
        });
        self.catch_up_if_leader().await?;
        if let Some(Past::Revision(revision)) = past {
            self.reach(revision).await?;
        }
        Ok(Response::new(self.0.raft.with_machine(|machine| {
            let state = machine.state();
            let found = state.partition(&id, partition).map_err(Refusal::from)?;
            past::history(state, &id, partition, found, past).map_err(Refusal::forgotten)
        })?))
    }

    async fn signing_keys(
        &self,
        _request: Request<v1::SigningKeysRequest>,
    ) -> Result<Response<v1::SigningKeysResponse>, Status> {
        let keys = self.0.signer.public_key().into_iter().collect();
        Ok(Response::new(v1::SigningKeysResponse { keys }))
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
    /// What this node heard of members, if it leads.
    fn heard(&self) -> view::Heard<'_> {
        view::Heard {
            beats: self.0.driver.beats(),
            now: self.0.clock.now(),
            not_advancing_ms: self.0.settings.deadlines.not_advancing_ms,
        }
    }

    /// The raft leader answers with everything committed; another node with what it has, and its revision.
    pub(super) async fn catch_up_if_leader(&self) -> Result<(), Refusal> {
        let is_me = self.0.raft.leadership().borrow().is_me;
        if is_me {
            self.linearize().await?;
        }
        Ok(())
    }
}

impl Services {
    /// Goes on once this node has applied `revision`. The raft leader, which has just caught up, answers at once;
    /// another node waits as long as a proposal may take, and then refers to the leader.
    pub(super) async fn reach(&self, revision: Index) -> Result<(), Refusal> {
        let mut applied = self.0.raft.applied();
        let leads = self.0.raft.leadership().borrow().is_me;
        if !leads {
            let limit = Duration::from_millis(self.0.settings.raft.propose_timeout_ms);
            let reached = applied.wait_for(|applied| *applied >= revision);
            let reached = tokio::time::timeout(limit, reached).await.map(|reached| reached.is_ok());
            match reached {
                Ok(true) => return Ok(()),
                Ok(false) => return Err(ProposeError::Stopped.into()),
                Err(_elapsed) => self.at_leader().await?,
            }
        }
        let stands_at = *applied.borrow();
        if stands_at >= revision {
            return Ok(());
        }
        Err(Refusal::new(
            ErrorCode::InvalidArgument,
            format!(
                "revision {revision} is ahead of the cluster, which stands at {stands_at}: list the groups and go on \
                 after the revision of the list; a cluster that was founded anew counts from the start"
            ),
        ))
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
