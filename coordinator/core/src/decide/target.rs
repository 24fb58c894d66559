//! Targets, as the planner computed them.

use std::collections::BTreeMap;

use tenure_model::{GroupId, MemberId, Partition};

use super::{Decided, Draft, Verdict};
use crate::command::InstallTarget;
use crate::state::Group;
use crate::{Event, Rejection, Reply, State};

impl State {
    pub(super) fn install_target(&self, install: &InstallTarget) -> Decided {
        let group = self.group(&install.group)?;
        let is_current = install.group_epoch == group.epoch;
        let stale = || Rejection::StaleTarget {
            group: install.group.clone(),
            given: install.group_epoch,
            current: group.epoch,
        };
        if !is_current && !install.line_by_line {
            return Err(stale());
        }
        if install.group_epoch < group.target_epoch || install.group_epoch > group.epoch {
            return Err(stale());
        }
        let target = if is_current {
            check_target(&install.group, group, &install.target)?;
            install.target.clone()
        } else {
            check_order(&install.target)?;
            lines_that_hold(group, &install.target)
        };
        let mut draft = Draft::default();
        let same = install.group_epoch == group.target_epoch
            && target.len() == group.target.len()
            && target.iter().all(|(partition, member)| group.target.get(partition) == Some(member));
        if !same {
            draft.push(Event::TargetInstalled {
                group: install.group.clone(),
                group_epoch: install.group_epoch,
                target,
            });
        }
        Ok((Reply::Done, draft.finish(self)))
    }
}

/// Checks each line of a target that is planned for the present.
pub(super) fn check_target(
    id: &GroupId,
    group: &Group,
    target: &[(Partition, MemberId)],
) -> Verdict {
    check_order(target)?;
    let mut counts: BTreeMap<&MemberId, u32> = BTreeMap::new();
    for (partition, member) in target {
        if !group.partitions.contains_key(partition) {
            return Err(Rejection::UnknownPartition { group: id.clone(), partition: *partition });
        }
        check_candidate(id, group, *partition, member)?;
        let count = counts.entry(member).or_default();
        *count += 1;
        check_room(group, member, *count)?;
    }
    Ok(())
}

/// Refuses a member that may not own `partition`, and says why.
pub(super) fn check_candidate(
    id: &GroupId,
    group: &Group,
    partition: Partition,
    member: &MemberId,
) -> Verdict {
    let unknown = || Rejection::UnknownPartition { group: id.clone(), partition };
    let topic = group.topics.get(&partition.topic_id).ok_or_else(unknown)?;
    if topic.frozen_by.is_some() {
        return Err(Rejection::Invalid {
            what: format!(
                "partition {partition} is of an earlier life of topic {}: name one of the present life",
                topic.name
            ),
        });
    }
    let Some(record) = group.members.get(member) else {
        return Err(Rejection::UnknownMember { group: id.clone(), member: member.clone() });
    };
    if record.draining {
        return Err(Rejection::Invalid {
            what: format!("member {member} is draining: undrain it, or name another"),
        });
    }
    if !record.subscribes_to(&topic.name) {
        return Err(Rejection::Invalid {
            what: format!("member {member} does not subscribe to topic {}", topic.name),
        });
    }
    Ok(())
}

/// Refuses more partitions than `member` takes.
pub(super) fn check_room(group: &Group, member: &MemberId, count: u32) -> Verdict {
    match group.members.get(member).and_then(|member| member.partitions_max) {
        Some(limit) if count > limit => Err(Rejection::LimitReached {
            what: format!("partitions of member {member}: {count}"),
            limit: u64::from(limit),
        }),
        Some(_) | None => Ok(()),
    }
}

fn check_order(target: &[(Partition, MemberId)]) -> Verdict {
    if target.is_sorted_by(|(one, _), (next, _)| one < next) {
        Ok(())
    } else {
        Err(Rejection::Invalid { what: "target is not sorted, or has a partition twice".into() })
    }
}

/// The lines of a late target that still hold. Where one does not, the partition stays where the earlier target, or
/// its owner, has it: taking it away for a plan that is due again would only open a gap.
fn lines_that_hold(group: &Group, target: &[(Partition, MemberId)]) -> Vec<(Partition, MemberId)> {
    let given: BTreeMap<Partition, &MemberId> =
        target.iter().map(|(partition, member)| (*partition, member)).collect();
    let mut counts: BTreeMap<&MemberId, u32> = BTreeMap::new();
    let mut kept = Vec::new();
    for (partition, state) in &group.partitions {
        let line = given.get(partition).copied();
        let candidates = [line, group.target.get(partition), state.ownership.owner()];
        for member in candidates.into_iter().flatten() {
            let count = counts.get(member).copied().unwrap_or(0) + 1;
            if group.may_own(member, *partition) && check_room(group, member, count).is_ok() {
                counts.insert(member, count);
                kept.push((*partition, member.clone()));
                break;
            }
        }
    }
    kept
}
