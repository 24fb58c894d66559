//! Service `Operator`. A dry run computes what would happen and changes nothing.

use std::sync::Arc;

use tenure_core::command::{DrainMember, MovePartition, OperatorContext, RebalanceGroup};
use tenure_core::reply::PlannedMove;
use tenure_core::{Command, Context, Rejection, Reply, State};
use tenure_model::{ErrorCode, GroupId, Index, MemberId, Partition, Term};
use tenure_proto::convert::{epoch, name, partition, partition_to_wire};
use tenure_proto::v1;
use tonic::{Request, Response, Status};

use super::offsets::unexpected;
use super::refusal::Refusal;
use super::{Services, edge};
use crate::planning;

/// How often a rebalance is planned because the group moved on meanwhile.
const REBALANCE_ATTEMPTS: usize = 5;

type Answer = Result<Response<v1::OperatorResponse>, Status>;

#[tonic::async_trait]
impl v1::operator_server::Operator for Services {
    async fn r#move(&self, request: Request<v1::MoveRequest>) -> Answer {
        let wire = request.get_ref();
        let (operator, dry_run) = edge::operator(wire.context.as_ref()).map_err(Refusal::from)?;
        let wish = MovePartition {
            operator,
            group: name("group", &wire.group).map_err(Refusal::from)?,
            partition: partition("partition", wire.partition.as_ref()).map_err(Refusal::from)?,
            to: name("to_member", &wire.to_member).map_err(Refusal::from)?,
        };
        let group = wish.group.clone();
        Ok(self.operate(&group, Command::MovePartition(wish), dry_run).await?)
    }

    async fn rebalance(&self, request: Request<v1::RebalanceRequest>) -> Answer {
        let wire = request.get_ref();
        let (operator, dry_run) = edge::operator(wire.context.as_ref()).map_err(Refusal::from)?;
        let group: GroupId = name("group", &wire.group).map_err(Refusal::from)?;
        for _ in 1..REBALANCE_ATTEMPTS {
            let outcome = self.rebalance_once(&group, operator.clone(), dry_run).await;
            match outcome {
                Err(refusal) if refusal.code == ErrorCode::StaleTarget => {}
                outcome => return Ok(outcome?),
            }
        }
        Ok(self.rebalance_once(&group, operator, dry_run).await?)
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Answer {
        let wire = request.get_ref();
        let (operator, dry_run) = edge::operator(wire.context.as_ref()).map_err(Refusal::from)?;
        let drain = DrainMember {
            operator,
            group: name("group", &wire.group).map_err(Refusal::from)?,
            member: name::<MemberId>("member", &wire.member).map_err(Refusal::from)?,
            undrain: wire.undrain,
        };
        let group = drain.group.clone();
        Ok(self.operate(&group, Command::DrainMember(drain), dry_run).await?)
    }

    async fn raise_epoch_floor(
        &self,
        request: Request<v1::RaiseEpochFloorRequest>,
    ) -> Result<Response<v1::RaiseEpochFloorResponse>, Status> {
        let wire = request.get_ref();
        let (operator, dry_run) = edge::operator(wire.context.as_ref()).map_err(Refusal::from)?;
        let floor = epoch("floor", wire.floor).map_err(Refusal::from)?;
        self.at_leader().await?;
        self.linearize().await?;
        let counter = self.0.raft.with_machine(|machine| machine.state().epoch_counter);
        edge::floor(floor, counter).map_err(Refusal::from)?;
        if dry_run {
            return Ok(Response::new(v1::RaiseEpochFloorResponse {
                request_id: operator.request.to_string(),
                epoch_counter: counter.max(floor.get()),
                index: self.0.raft.with_machine(|machine| machine.state().applied.0),
            }));
        }
        let command = Command::RaiseEpochFloor { operator, floor };
        let verdict = self.0.proposer.propose(command).await.map_err(Refusal::from)?;
        let Reply::Operated { request, .. } = verdict.result().map_err(Refusal::from)? else {
            return Err(unexpected("request of an operator").into());
        };
        Ok(Response::new(v1::RaiseEpochFloorResponse {
            request_id: request.to_string(),
            epoch_counter: self.0.raft.with_machine(|machine| machine.state().epoch_counter),
            index: verdict.index.0,
        }))
    }
}

impl Services {
    async fn rebalance_once(
        &self,
        group: &GroupId,
        operator: OperatorContext,
        dry_run: bool,
    ) -> Result<Response<v1::OperatorResponse>, Refusal> {
        self.at_leader().await?;
        self.linearize().await?;
        let (group_epoch, input) = self.0.raft.with_machine(|machine| {
            let found = machine.state().group(group)?;
            Ok::<_, Rejection>((found.epoch, planning::input(found)))
        })?;
        let planned = tokio::task::spawn_blocking(move || planning::fresh(input)).await;
        let target = planned.map_err(|_panic| unexpected("rebalance"))?;
        let command = Command::RebalanceGroup(RebalanceGroup {
            operator,
            group: group.clone(),
            group_epoch,
            target: target.into_iter().collect(),
        });
        self.operate(group, command, dry_run).await
    }

    async fn operate(
        &self,
        group: &GroupId,
        command: Command,
        dry_run: bool,
    ) -> Result<Response<v1::OperatorResponse>, Refusal> {
        self.at_leader().await?;
        let (reply, index) = if dry_run {
            self.linearize().await?;
            self.0.raft.with_machine(|machine| would_happen(machine.state(), group, &command))?
        } else {
            let verdict = self.0.proposer.propose(command).await?;
            (verdict.result()?.clone(), verdict.index)
        };
        let Reply::Operated { request, group_epoch, moves } = reply else {
            return Err(unexpected("request of an operator"));
        };
        let moves =
            self.0.raft.with_machine(|machine| moves_to_wire(machine.state(), group, &moves));
        Ok(Response::new(v1::OperatorResponse {
            request_id: request.to_string(),
            group_epoch: if dry_run { 0 } else { group_epoch.0 },
            moves,
            index: index.0,
        }))
    }
}

/// Applies `command` to a copy of its group, in a state of nothing else, and looks at the answer.
fn would_happen(
    state: &State,
    group: &GroupId,
    command: &Command,
) -> Result<(Reply, Index), Rejection> {
    let mut copy = State {
        epoch_counter: state.epoch_counter,
        applied: state.applied,
        now: state.now,
        ..State::default()
    };
    let found = state.group(group)?;
    copy.groups.insert(group.clone(), Arc::new(found.clone()));
    let index = Index(state.applied.0 + 1);
    let context = Context { term: Term(0), index, proposed_at: state.now };
    let reply = copy.apply(context, command).result?;
    let reply = match (reply, command) {
        // Where a drain's partitions go is the next plan's answer.
        (Reply::Operated { request, group_epoch, .. }, Command::DrainMember(drain)) => {
            let moves = planning::drain_moves(found, &drain.member, drain.undrain);
            Reply::Operated { request, group_epoch, moves }
        }
        (reply, _) => reply,
    };
    Ok((reply, state.applied))
}

fn moves_to_wire(state: &State, group: &GroupId, moves: &[PlannedMove]) -> Vec<v1::PlannedMove> {
    let topics = state.group(group).ok().map(|group| &group.topics);
    let topic_of = |partition: Partition| {
        let topic = topics.and_then(|topics| topics.get(&partition.topic_id));
        topic.map_or_else(String::new, |topic| topic.name.to_string())
    };
    let text =
        |member: &Option<MemberId>| member.as_ref().map_or_else(String::new, ToString::to_string);
    let moves = moves.iter().map(|step| v1::PlannedMove {
        partition: Some(partition_to_wire(step.partition)),
        topic: topic_of(step.partition),
        from_member: text(&step.from),
        to_member: text(&step.to),
    });
    moves.collect()
}
