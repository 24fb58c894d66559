//! What holds after any sequence of commands.

use super::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_keeps_every_invariant_and_replays_to_the_same_state(steps in steps()) {
        let world = run(steps)?;
        let mut replica = State::default();
        for (context, command, applied) in &world.log {
            prop_assert_eq!(&replica.apply(*context, command), applied);
        }
        prop_assert_eq!(&replica, &world.state);
        for group in replica.groups.values_mut() {
            std::sync::Arc::make_mut(group).derived = crate::state::Derived::default();
        }
        replica.rebuild_derived();
        prop_assert_eq!(&replica, &world.state);
    }

    #[test]
    fn every_command_repeated_at_once_changes_nothing_more(steps in steps()) {
        let mut world = World::default();
        for step in steps {
            let Some(command) = world.command(step) else { continue };
            let first = world.apply(command.clone())?;
            let second = world.apply(command.clone())?;
            // A grant that was refused because it was not being asked back may be, thanks to the rest of the command.
            let all_taken = match &first.result {
                Ok(Reply::Verdicts(verdicts)) => verdicts.iter().all(Result::is_ok),
                Ok(Reply::Joined { .. } | Reply::Done | Reply::Operated { .. }) => true,
                Err(_) => false,
            };
            if all_taken {
                prop_assert_eq!(&second.events, &Vec::new(), "repeated {:?}", command);
            }
        }
    }

    #[test]
    fn history_names_the_owner_at_every_revision_and_time(steps in steps()) {
        let world = run(steps)?;
        let mut owners: BTreeMap<Partition, (MemberId, Epoch)> = BTreeMap::new();
        let mut now = tenure_model::Timestamp(0);
        for (at, (context, _, applied)) in world.log.iter().enumerate() {
            for event in &applied.events {
                if let Event::PartitionGranted { partition, member, epoch, .. } = event {
                    owners.insert(*partition, (member.clone(), *epoch));
                } else if let Event::PartitionReleased { partition, .. } = event {
                    owners.remove(partition);
                }
            }
            now = now.max(context.proposed_at);
            let later = world.log.get(at + 1).is_none_or(|(next, ..)| next.proposed_at > now);
            let pasts = std::iter::once(Past::Revision(context.index));
            let pasts: Vec<Past> = pasts.chain(later.then_some(Past::Time(now))).collect();
            for (partition, state) in world.group().into_iter().flat_map(|group| &group.partitions) {
                for past in &pasts {
                    let found = state.grant_at(*past).unwrap().map(|grant| (grant.member, grant.epoch));
                    prop_assert_eq!(&found.as_ref(), &owners.get(partition), "{} at {:?}", partition, past);
                }
            }
        }
    }

    #[test]
    fn changes_are_the_events_that_concern_ownership_each_once_and_in_order(steps in steps()) {
        let world = run(steps)?;
        let mut told: BTreeMap<Index, Vec<What>> = BTreeMap::new();
        let mut acquired = BTreeSet::new();
        for (context, _, applied) in &world.log {
            for event in &applied.events {
                let mut is_news = true;
                if let Event::PartitionRevoked { epoch, .. } = event {
                    acquired.insert(*epoch);
                } else if let Event::PartitionAcquired { epoch, .. } = event {
                    is_news = acquired.insert(*epoch);
                }
                if let Some(what) = What::of(event).filter(|_| is_news) {
                    told.entry(context.index).or_default().push(what);
                }
            }
        }
        let mut found: BTreeMap<Index, Vec<What>> = BTreeMap::new();
        for change in world.state.changes.since(Index(1)).unwrap() {
            let of_revision = found.entry(change.at.revision).or_default();
            prop_assert_eq!(change.position as usize, of_revision.len());
            of_revision.push(change.what.clone());
        }
        prop_assert_eq!(found, told);
    }

    #[test]
    fn every_group_settles_with_each_partition_owned_by_its_target(steps in steps()) {
        let mut world = run(steps)?;
        world.settle()?;
        let Some(group) = world.group() else { return Ok(()) };
        prop_assert_eq!(group.target_epoch, group.epoch);
        for (partition, state) in &group.partitions {
            prop_assert_eq!(state.ownership.owner(), group.target.get(partition), "{}", partition);
            if group.target.contains_key(partition) {
                continue;
            }
            for (id, member) in &group.members {
                let has_room =
                    member.partitions_max.is_none_or(|max| member.owned.len() < max as usize);
                prop_assert!(!(has_room && group.may_own(id, *partition)), "{} is idle", id);
            }
        }
    }
}
