//! Service `Offsets`.

use tenure_core::{Command, Rejection, Reply, State};
use tenure_model::{ErrorCode, GroupId, Partition};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::v1;
use tonic::{Request, Response, Status};

use super::refusal::Refusal;
use super::{Services, edge};

#[tonic::async_trait]
impl v1::offsets_server::Offsets for Services {
    async fn commit(
        &self,
        request: Request<v1::CommitRequest>,
    ) -> Result<Response<v1::CommitResponse>, Status> {
        let commit = edge::commit(request.into_inner()).map_err(Refusal::from)?;
        self.at_leader().await?;
        let proposed = self.0.proposer.propose(Command::CommitOffsets(commit)).await;
        let verdict = proposed.map_err(Refusal::from)?;
        let verdicts = match verdict.result().map_err(Refusal::from)? {
            Reply::Verdicts(verdicts) => verdicts,
            Reply::Joined { .. } | Reply::Done | Reply::Operated { .. } => {
                return Err(unexpected("commit").into());
            }
        };
        let verdicts = verdicts.iter().map(|verdict| v1::CommitVerdict {
            error: verdict.as_ref().err().map(|rejection| Refusal::from(rejection).to_wire()),
        });
        let verdicts = verdicts.collect();
        Ok(Response::new(v1::CommitResponse { verdicts, index: verdict.index.0 }))
    }

    async fn rewind(
        &self,
        request: Request<v1::RewindRequest>,
    ) -> Result<Response<v1::RewindResponse>, Status> {
        let rewind = edge::rewind(request.into_inner()).map_err(Refusal::from)?;
        self.at_leader().await?;
        let proposed = self.0.proposer.propose(Command::RewindOffset(rewind)).await;
        let verdict = proposed.map_err(Refusal::from)?;
        verdict.result().map_err(Refusal::from)?;
        Ok(Response::new(v1::RewindResponse { index: verdict.index.0 }))
    }

    async fn fetch(
        &self,
        request: Request<v1::FetchRequest>,
    ) -> Result<Response<v1::FetchResponse>, Status> {
        let (group, partitions) = edge::fetch(request.get_ref()).map_err(Refusal::from)?;
        self.at_leader().await?;
        self.linearize().await?;
        let fetched =
            self.0.raft.with_machine(|machine| fetch(machine.state(), &group, &partitions));
        Ok(Response::new(fetched.map_err(Refusal::from)?))
    }
}

/// A bug in this node: the state answered another question.
pub(super) fn unexpected(what: &'static str) -> Refusal {
    tracing::error!(what, "the state answered another question");
    Refusal::new(ErrorCode::Internal, format!("the node mixed up the answer to a {what}"))
}

fn fetch(
    state: &State,
    group: &GroupId,
    partitions: &[Partition],
) -> Result<v1::FetchResponse, Rejection> {
    let found = state.group(group)?;
    let all: Vec<Partition>;
    let partitions = if partitions.is_empty() {
        all = found.partitions.keys().copied().collect();
        &all
    } else {
        partitions
    };
    let offset = |partition: &Partition| {
        let committed = state.committed(group, *partition)?;
        let topic = found.topics.get(&partition.topic_id);
        Ok(v1::CommittedOffset {
            partition: Some(partition_to_wire(*partition)),
            topic: topic.map_or_else(String::new, |topic| topic.name.to_string()),
            next_offset: committed.map(|committed| committed.next_offset.get()),
            epoch: committed.map_or(0, |committed| committed.epoch.get()),
            metadata: committed.map_or_else(Vec::new, |committed| committed.metadata.clone()),
        })
    };
    let offsets = partitions.iter().map(offset).collect::<Result<_, Rejection>>()?;
    Ok(v1::FetchResponse { offsets, index: state.applied.0 })
}
