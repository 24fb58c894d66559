//! What operators ask for. The same request id is the same request.

use tenure_model::limits::REASON_BYTES_MAX;
use tenure_model::{Epoch, GroupEpoch, GroupId, Partition};

use super::ownership::find_partition;
use super::target::{check_candidate, check_room, check_target};
use super::{Decided, Draft, Verdict, check_limit};
use crate::command::{DrainMember, MovePartition, OperatorContext, RebalanceGroup};
use crate::event::OperatorAction;
use crate::reply::PlannedMove;
use crate::{Event, Rejection, Reply, State};

impl State {
    pub(super) fn move_partition(&self, wish: &MovePartition) -> Decided {
        let MovePartition { operator, group: id, partition, to } = wish;
        if let Some(decided) = self.repeated(operator, OperatorAction::Move, Some(id)) {
            return decided;
        }
        check_operator(operator)?;
        let group = self.group(id)?;
        let state = find_partition(id, group, *partition)?;
        check_candidate(id, group, *partition, to)?;
        if group.members.get(to).is_some_and(|member| member.away.is_some()) {
            return Err(Rejection::MemberGone { group: id.clone(), member: to.clone() });
        }
        let owner = state.ownership.owner();
        let line = group.target.get(partition);
        if owner == Some(to) && !state.ownership.is_revoking() && line == Some(to) {
            return Err(Rejection::NothingToDo { what: format!("{to} owns {partition} already") });
        }
        let has_cap = group.members.get(to).is_some_and(|member| member.partitions_max.is_some());
        if line != Some(to) && has_cap {
            let count = group.target.values().filter(|member| *member == to).count() + 1;
            check_room(group, to, u32::try_from(count).unwrap_or(u32::MAX))?;
        }
        let moves =
            vec![PlannedMove { partition: *partition, from: owner.cloned(), to: Some(to.clone()) }];
        let group_epoch = GroupEpoch(group.epoch.0 + 1);
        let mut draft = Draft::default();
        draft.push(Event::PartitionPinned {
            group: id.clone(),
            partition: *partition,
            member: to.clone(),
        });
        draft.push(Event::GroupEpochRaised { group: id.clone(), group_epoch });
        if group.target_epoch == group.epoch {
            draft.push(Event::TargetConfirmed { group: id.clone(), group_epoch });
        }
        Ok(acted(operator, OperatorAction::Move, Some(id), group_epoch, moves, draft.events))
    }

    pub(super) fn rebalance_group(&self, rebalance: &RebalanceGroup) -> Decided {
        let RebalanceGroup { operator, group: id, group_epoch: given, target } = rebalance;
        if let Some(decided) = self.repeated(operator, OperatorAction::Rebalance, Some(id)) {
            return decided;
        }
        check_operator(operator)?;
        let group = self.group(id)?;
        if *given != group.epoch {
            return Err(Rejection::StaleTarget {
                group: id.clone(),
                given: *given,
                current: group.epoch,
            });
        }
        check_target(id, group, target)?;
        let mut lines = target.iter().peekable();
        let moves = group
            .partitions
            .iter()
            .filter_map(|(partition, state)| {
                let to = lines
                    .next_if(|(planned, _)| planned == partition)
                    .map(|(_, member)| member.clone());
                let from = state.ownership.owner();
                (from != to.as_ref()).then(|| PlannedMove {
                    partition: *partition,
                    from: from.cloned(),
                    to,
                })
            })
            .collect();
        let group_epoch = GroupEpoch(group.epoch.0 + 1);
        let mut draft = Draft::default();
        draft.push(Event::PinsLifted { group: id.clone() });
        draft.push(Event::GroupEpochRaised { group: id.clone(), group_epoch });
        draft.push(Event::TargetInstalled {
            group: id.clone(),
            group_epoch,
            target: target.clone(),
        });
        Ok(acted(operator, OperatorAction::Rebalance, Some(id), group_epoch, moves, draft.events))
    }

    pub(super) fn drain_member(&self, drain: &DrainMember) -> Decided {
        let DrainMember { operator, group: id, member, undrain } = drain;
        let action = if *undrain { OperatorAction::Undrain } else { OperatorAction::Drain };
        if let Some(decided) = self.repeated(operator, action, Some(id)) {
            return decided;
        }
        check_operator(operator)?;
        let (group, record) = self.member(id, member)?;
        if record.draining != *undrain {
            let state = if *undrain { "is not draining" } else { "is draining already" };
            return Err(Rejection::NothingToDo { what: format!("{member} {state}") });
        }
        let leaves = |partition: &Partition| PlannedMove {
            partition: *partition,
            from: Some(member.clone()),
            to: None,
        };
        let moves = if *undrain { Vec::new() } else { record.owned.iter().map(leaves).collect() };
        let group_epoch = GroupEpoch(group.epoch.0 + 1);
        let mut draft = Draft::default();
        draft.push(Event::MemberDrained {
            group: id.clone(),
            member: member.clone(),
            draining: !undrain,
        });
        draft.push(Event::GroupEpochRaised { group: id.clone(), group_epoch });
        Ok(acted(operator, action, Some(id), group_epoch, moves, draft.events))
    }

    pub(super) fn raise_epoch_floor(&self, operator: &OperatorContext, floor: Epoch) -> Decided {
        let action = OperatorAction::RaiseEpochFloor;
        if let Some(decided) = self.repeated(operator, action, None) {
            return decided;
        }
        check_operator(operator)?;
        let mut draft = Draft::default();
        if floor.get() > self.epoch_counter {
            draft.push(Event::EpochFloorRaised { floor });
        }
        Ok(acted(operator, action, None, GroupEpoch(0), Vec::new(), draft.events))
    }

    /// The earlier answer to the same request, if it is remembered.
    fn repeated(
        &self,
        operator: &OperatorContext,
        action: OperatorAction,
        group: Option<&GroupId>,
    ) -> Option<Decided> {
        let earlier = self.operations.iter().rev().find(|op| op.request == operator.request)?;
        if earlier.action != action || earlier.group.as_ref() != group {
            return Some(Err(Rejection::Invalid {
                what: format!("request id {} was used for another request", operator.request),
            }));
        }
        let reply = Reply::Operated {
            request: earlier.request.clone(),
            group_epoch: earlier.group_epoch,
            moves: earlier.moves.clone(),
        };
        Some(Ok((reply, Vec::new())))
    }
}

fn check_operator(operator: &OperatorContext) -> Verdict {
    check_limit("bytes in the reason", operator.reason.len(), REASON_BYTES_MAX)?;
    check_limit("bytes in the actor", operator.actor.len(), REASON_BYTES_MAX)
}

fn acted(
    operator: &OperatorContext,
    action: OperatorAction,
    group: Option<&GroupId>,
    group_epoch: GroupEpoch,
    moves: Vec<PlannedMove>,
    mut events: Vec<Event>,
) -> (Reply, Vec<Event>) {
    events.push(Event::OperatorActed {
        request: operator.request.clone(),
        actor: operator.actor.clone(),
        reason: operator.reason.clone(),
        action,
        group: group.cloned(),
        group_epoch,
        moves: moves.clone(),
    });
    (Reply::Operated { request: operator.request.clone(), group_epoch, moves }, events)
}
