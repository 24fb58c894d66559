//! From a group of the state to the planner's question, and from its answer to what would move.

use std::collections::{BTreeMap, BTreeSet};

use tenure_core::reply::PlannedMove;
use tenure_core::state::Group;
use tenure_model::{MemberId, Partition, TopicId};
use tenure_planner::{Input, Member, Topic};

/// What a plan of `group` is made from; it stays close to the last target and to who owns what.
pub fn input(group: &Group) -> Input {
    let mut pins = group.pins.clone();
    let kept = group.target.iter().filter(|(_, member)| {
        group.members.get(*member).is_some_and(|member| member.away.is_some())
    });
    for (partition, member) in kept {
        pins.entry(*partition).or_insert_with(|| member.clone());
    }
    let members = group.members.iter().map(|(name, member)| {
        // Who is away keeps what is kept for it, and is given nothing more.
        let kept = group.derived.waiting.get(name).map_or(0, BTreeSet::len);
        let kept = member.away.map(|_| u32::try_from(kept).unwrap_or(u32::MAX));
        let planned = Member {
            topics: member.topics.iter().cloned().collect(),
            partitions_max: kept.or(member.partitions_max),
            weight: member.weight,
            draining: member.draining,
        };
        (name.clone(), planned)
    });
    let is_frozen = |partition: &Partition| {
        group.topics.get(&partition.topic_id).is_none_or(|topic| topic.frozen_by.is_some())
    };
    pins.retain(|partition, _| !is_frozen(partition));
    let topics = group.topics.iter().filter(|(_, topic)| topic.frozen_by.is_none());
    let topics = topics.map(|(id, topic)| {
        (*id, Topic { name: topic.name.clone(), partition_count: topic.partition_count })
    });
    let present = group.partitions.iter().filter(|(partition, _)| !is_frozen(partition));
    let current = present.filter_map(|(partition, state)| {
        let meant = group.target.get(partition).filter(|member| group.may_own(member, *partition));
        let member = meant.or_else(|| state.ownership.owner())?;
        Some((*partition, member.clone()))
    });
    let since = group
        .partitions
        .iter()
        .filter_map(|(partition, state)| state.epoch.map(|epoch| (*partition, epoch.get())));
    let avoid = group.partitions.iter().filter_map(|(partition, state)| {
        let trouble = state.trouble.as_ref()?;
        Some((*partition, trouble.members.clone()))
    });
    Input {
        members: members.collect(),
        topics: topics.collect(),
        current: current.collect(),
        since: since.collect(),
        pins,
        avoid: avoid.collect(),
    }
}

/// A target planned afresh: pins are lifted, and what is lopsided within a topic is put right although totals are even.
///
/// Moves nothing where nothing is gained.
pub fn fresh(mut input: Input) -> BTreeMap<Partition, MemberId> {
    input.pins.clear();
    let close = tenure_planner::plan(&input);
    input.current.clear();
    let far = tenure_planner::plan(&input);
    if spread(&input, &far) < spread(&input, &close) { far } else { close }
}

/// How uneven a target is within topics: for each, the largest count less the smallest among its subscribers.
fn spread(input: &Input, target: &BTreeMap<Partition, MemberId>) -> u64 {
    let mut counts: BTreeMap<(TopicId, &MemberId), u64> = BTreeMap::new();
    for (id, topic) in &input.topics {
        let subscribers = input
            .members
            .iter()
            .filter(|(_, member)| !member.draining && member.topics.contains(&topic.name));
        counts.extend(subscribers.map(|(name, _)| ((*id, name), 0)));
    }
    for (partition, member) in target {
        *counts.entry((partition.topic_id, member)).or_default() += 1;
    }
    let mut extremes: BTreeMap<TopicId, (u64, u64)> = BTreeMap::new();
    for ((topic, _), count) in counts {
        let (least, most) = extremes.entry(topic).or_insert((count, count));
        *least = (*least).min(count);
        *most = (*most).max(count);
    }
    extremes.values().map(|(least, most)| most - least).sum()
}

/// What a target would move, compared with who owns what now.
pub fn moves(group: &Group, target: &BTreeMap<Partition, MemberId>) -> Vec<PlannedMove> {
    let owners: BTreeMap<Partition, MemberId> = group
        .partitions
        .iter()
        .filter_map(|(partition, state)| Some((*partition, state.ownership.owner()?.clone())))
        .collect();
    tenure_planner::moves(&owners, target)
        .into_iter()
        .map(|step| PlannedMove { partition: step.partition, from: step.from, to: step.to })
        .collect()
}

/// What draining or undraining `member` would move.
pub fn drain_moves(group: &Group, member: &MemberId, undrain: bool) -> Vec<PlannedMove> {
    let mut input = input(group);
    if let Some(planned) = input.members.get_mut(member) {
        planned.draining = !undrain;
    }
    if !undrain {
        input.pins.retain(|_, pinned| pinned != member);
    }
    let touched: BTreeSet<Partition> =
        group.members.get(member).map(|record| record.owned.clone()).unwrap_or_default();
    moves(group, &tenure_planner::plan(&input))
        .into_iter()
        .filter(|step| undrain || touched.contains(&step.partition))
        .collect()
}

#[cfg(test)]
mod tests {
    use tenure_core::command::{Context, InstallTarget, JoinGroup, TopicReport};
    use tenure_core::{Command, State};
    use tenure_model::{GroupId, GroupSettings, Index, PartitionIndex, Term, Timestamp, TopicName};

    use super::*;

    fn group_of(topics: u32, partitions: u32, members: &[&str]) -> State {
        let mut state = State::default();
        for (position, member) in members.iter().enumerate() {
            let names = (0..topics).map(|topic| TopicName::new(&format!("t{topic}")).unwrap());
            let report = names.clone().enumerate().map(|(id, topic)| TopicReport {
                topic,
                topic_id: TopicId::from_bits(id as u128 + 1),
                partition_count: partitions,
            });
            let join = JoinGroup {
                group: GroupId::new("g").unwrap(),
                member: MemberId::new(member).unwrap(),
                instance: None,
                topics: names.collect(),
                settings: GroupSettings::default(),
                ttl_ms: 9_000,
                heartbeat_interval_ms: 3_000,
                client: String::new(),
                partitions_max: None,
                report: report.collect(),
                rejoin: None,
                prepares: false,
                weight: 1,
            };
            let index = Index(position as u64 + 1);
            let context = Context { term: Term(1), index, proposed_at: Timestamp(0) };
            assert!(state.apply(context, &Command::JoinGroup(join)).result.is_ok());
        }
        state
    }

    fn install(state: &mut State, target: BTreeMap<Partition, MemberId>) {
        let id = GroupId::new("g").unwrap();
        let group_epoch = state.group(&id).unwrap().epoch;
        let command = Command::InstallTarget(InstallTarget {
            group: id,
            group_epoch,
            target: target.into_iter().collect(),
            line_by_line: false,
        });
        let index = Index(state.applied.0 + 1);
        let context = Context { term: Term(1), index, proposed_at: Timestamp(0) };
        assert_eq!(state.apply(context, &command).result.map(|_| ()), Ok(()));
    }

    fn only_group(state: &State) -> &Group {
        state.groups.values().next().unwrap()
    }

    #[test]
    fn plan_of_a_group_is_accepted_by_the_state_and_planning_again_moves_nothing() {
        let mut state = group_of(2, 3, &["ann", "bob"]);
        let target = tenure_planner::plan(&input(only_group(&state)));
        install(&mut state, target.clone());
        let group = only_group(&state);
        assert_eq!(tenure_planner::plan(&input(group)), target);
        assert_eq!(moves(group, &fresh(input(group))), []);
    }

    #[test]
    fn fresh_plan_evens_out_what_is_lopsided_within_a_topic() {
        let mut state = group_of(2, 4, &["ann", "bob"]);
        let lopsided = only_group(&state).partitions.keys().map(|partition| {
            let member = if partition.topic_id == TopicId::from_bits(1) { "ann" } else { "bob" };
            (*partition, MemberId::new(member).unwrap())
        });
        let lopsided = lopsided.collect();
        install(&mut state, lopsided);
        let group = only_group(&state);
        let target = fresh(input(group));
        assert_eq!(spread(&input(group), &target), 0);
        assert_eq!(moves(group, &target).len(), 4);
    }

    #[test]
    fn drain_moves_only_what_the_member_owns() {
        let mut state = group_of(1, 6, &["ann", "bob", "cec"]);
        let target = tenure_planner::plan(&input(only_group(&state)));
        install(&mut state, target);
        let group = only_group(&state);
        let ann = MemberId::new("ann").unwrap();
        let steps = drain_moves(group, &ann, false);
        assert_eq!(steps.len(), 2);
        assert!(steps.iter().all(|step| step.from.as_ref() == Some(&ann)), "{steps:?}");
        let first =
            Partition { topic_id: TopicId::from_bits(1), index: PartitionIndex::new(0).unwrap() };
        assert!(group.partitions.contains_key(&first));
    }
}
