//! What every plan promises.

use super::*;

#[derive(Clone, Debug)]
struct Shape {
    topic_max: usize,
    partition_max: u32,
    member_max: usize,
}

/// Any input within `shape`, odd lines included.
fn any_input(shape: Shape) -> impl Strategy<Value = Input> {
    let Shape { topic_max, partition_max, member_max } = shape;
    let topics = prop::collection::vec(0..=partition_max, 1..=topic_max);
    let wish = (any::<u16>(), prop::option::weighted(0.3, 1..6_u32), prop::bool::weighted(0.15));
    let members = prop::collection::vec(wish, 0..=member_max);
    let lines = || {
        let line = (0..topic_max, 0..partition_max, 0..=member_max);
        prop::collection::vec(line, 0..(topic_max * partition_max as usize))
    };
    (
        topics,
        members,
        lines(),
        prop::collection::vec((0..topic_max, 0..partition_max, 0..=member_max), 0..4),
        prop::collection::vec((0..topic_max, 0..partition_max, 0..=member_max), 0..4),
    )
        .prop_map(|(topics, members, current, pins, avoid)| {
            let at =
                |(topic, index, _): &(usize, u32, usize)| partition(&format!("t{topic}"), *index);
            let who = |(_, _, at): &(usize, u32, usize)| member(&format!("m{at}"));
            let mut built = Input::default();
            for (topic, count) in topics.iter().enumerate() {
                let name = TopicName::new(&format!("t{topic}")).unwrap();
                built
                    .topics
                    .insert(TopicId::of_name(&name), Topic { name, partition_count: *count });
            }
            for (id, (wants, partitions_max, draining)) in members.into_iter().enumerate() {
                let topics = (0..topics.len())
                    .filter(|topic| wants & (1 << topic) != 0)
                    .map(|topic| TopicName::new(&format!("t{topic}")).unwrap())
                    .collect();
                built.members.insert(
                    member(&format!("m{id}")),
                    Member { topics, partitions_max, weight: 1, draining },
                );
            }
            built.current = current.iter().map(|line| (at(line), who(line))).collect();
            built.pins = pins.iter().map(|line| (at(line), who(line))).collect();
            for line in &avoid {
                built.avoid.entry(at(line)).or_default().insert(who(line));
            }
            built
        })
}

/// The most partitions that can have an owner, and the least sum of squared loads then, by trying everything.
fn best_by_force(input: &Input) -> (usize, usize) {
    fn search(
        input: &Input,
        partitions: &[Partition],
        loads: &mut BTreeMap<MemberId, usize>,
        owned: usize,
        best: &mut (usize, usize),
    ) {
        let Some((first, rest)) = partitions.split_first() else {
            let squares = loads.values().map(|load| load * load).sum();
            if owned > best.0 || (owned == best.0 && squares < best.1) {
                *best = (owned, squares);
            }
            return;
        };
        search(input, rest, loads, owned, best);
        for id in candidates(input, *first) {
            let load = loads.entry(id.clone()).or_default();
            if *load < cap(input, id) {
                *load += 1;
                search(input, rest, loads, owned + 1, best);
                *loads.get_mut(id).unwrap() -= 1;
            }
        }
    }
    let partitions: Vec<Partition> = input
        .topics
        .iter()
        .flat_map(|(topic_id, topic)| {
            (0..topic.partition_count).map(|index| Partition {
                topic_id: *topic_id,
                index: PartitionIndex::new(index).unwrap(),
            })
        })
        .collect();
    let mut best = (0, 0);
    search(input, &partitions, &mut BTreeMap::new(), 0, &mut best);
    best
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_keeps_its_promises(
        input in any_input(Shape { topic_max: 5, partition_max: 8, member_max: 7 })
    ) {
        let target = plan(&input);
        promises(&input, &target)?;
        let mut room: BTreeMap<MemberId, usize> =
            input.members.keys().map(|id| (id.clone(), cap(&input, id))).collect();
        for (partition, id) in &input.pins {
            let known = input.topics.get(&partition.topic_id)
                .is_some_and(|topic| partition.index.get() < topic.partition_count);
            if known && candidates(&input, *partition).contains(&id) && room[id] > 0 {
                *room.get_mut(id).unwrap() -= 1;
                prop_assert_eq!(target.get(partition), Some(id), "pin of {}", partition);
            }
        }
    }

    #[test]
    fn every_plan_is_as_even_as_any_can_be(
        mut input in any_input(Shape { topic_max: 3, partition_max: 3, member_max: 4 })
    ) {
        input.pins.clear();
        input.avoid.clear();
        // Draining members and small caps leave too little to choose from.
        for member in input.members.values_mut() {
            member.draining = false;
            member.partitions_max = member.partitions_max.filter(|max| *max > 3);
        }
        let target = plan(&input);
        let squares: usize = loads(&input, &target).iter().map(|load| load * load).sum();
        prop_assert_eq!((target.len(), squares), best_by_force(&input));
    }

    #[test]
    fn members_with_few_topics_in_common_are_as_even_as_any_can_be(
        wants in prop::collection::vec(1..16_u16, 3..6),
        owners in prop::collection::vec(0..5_usize, 6),
    ) {
        let mut input = Input::default();
        for (topic, count) in [(0, 2), (1, 2), (2, 1), (3, 1)] {
            let name = TopicName::new(&format!("t{topic}")).unwrap();
            let topic = Topic { name: name.clone(), partition_count: count };
            input.topics.insert(TopicId::of_name(&name), topic);
        }
        for (at, wants) in wants.iter().enumerate() {
            let topics = (0..4)
                .filter(|topic| wants & (1 << topic) != 0)
                .map(|topic| TopicName::new(&format!("t{topic}")).unwrap())
                .collect();
            let joined = Member { topics, partitions_max: None, weight: 1, draining: false };
            input.members.insert(member(&format!("m{at}")), joined);
        }
        let partitions = ["t0/0", "t0/1", "t1/0", "t1/1", "t2/0", "t3/0"];
        for (partition, owner) in partitions.iter().zip(owners) {
            input.current.insert(partition_of(partition), member(&format!("m{owner}")));
        }
        let target = plan(&input);
        promises(&input, &target)?;
        let squares: usize = loads(&input, &target).iter().map(|load| load * load).sum();
        prop_assert_eq!((target.len(), squares), best_by_force(&input));
    }

    #[test]
    fn equal_members_differ_by_one_at_most_and_only_what_must_moves(
        partition_count in 0..60_u32,
        member_count in 1..12_usize,
        owners in prop::collection::vec(0..14_usize, 0..60),
    ) {
        let mut script = format!("topic t {partition_count}\n");
        for at in 0..member_count {
            writeln!(script, "member m{at:02} t").unwrap();
        }
        for (index, owner) in (0..partition_count).zip(&owners) {
            writeln!(script, "owns m{owner:02} t/{index}").unwrap();
        }
        let input = input(&script);
        let target = plan(&input);
        promises(&input, &target)?;
        let fair = partition_count as usize / member_count;
        let larger = partition_count as usize % member_count;
        let mut owned = loads(&input, &input.current);
        owned.sort_unstable_by(|one, other| other.cmp(one));
        let must: usize = owned
            .iter()
            .enumerate()
            .map(|(at, load)| load.saturating_sub(fair + usize::from(at < larger)))
            .sum();
        let lost = input.current.values().filter(|id| !input.members.contains_key(*id)).count();
        prop_assert_eq!(moved(&input, &target), must + lost);
        let loads = loads(&input, &target);
        prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1);
    }
}
