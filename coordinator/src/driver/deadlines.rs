//! Deadlines of revocations, acquires, holds and returns, on the raft leader's own clock. Pure: time is an argument.
//!
//! Level-triggered: [`Timers::follow`] takes over what the state says; a new raft leader gives every length again.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_core::State;
use tenure_core::command::{AcknowledgePrepared, GrantRef, MemberRef};
use tenure_model::{Epoch, GroupId, Index, MemberId, Partition, Takeover, Tick};

use crate::settings::NodeSettings;

/// How long the raft leader waits.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    pub drain: Duration,
    pub acquire: Duration,
    pub prepare: Duration,
    /// Back-off after the first failed acquire; doubles with each one in a row.
    pub hold: Duration,
    pub hold_max: Duration,
    /// What a drain lasts beyond the member's ttl, at least, where only the lease protects.
    pub clock_drift_max: Duration,
}

impl From<&NodeSettings> for Lengths {
    fn from(settings: &NodeSettings) -> Self {
        let deadlines = &settings.deadlines;
        Self {
            drain: Duration::from_millis(deadlines.drain_deadline_ms),
            acquire: Duration::from_millis(deadlines.acquire_deadline_ms),
            prepare: Duration::from_millis(deadlines.prepare_deadline_ms),
            hold: Duration::from_millis(deadlines.hold_ms),
            hold_max: Duration::from_millis(deadlines.hold_max_ms),
            clock_drift_max: Duration::from_millis(settings.lease.clock_drift_max_ms),
        }
    }
}

/// What has to be proposed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Due {
    pub drains: Vec<GrantRef>,
    pub acquires: Vec<GrantRef>,
    pub preparations: Vec<AcknowledgePrepared>,
    pub holds: Vec<(GroupId, Partition)>,
    /// Static members that did not return in time.
    pub returns: Vec<MemberRef>,
}

/// See the module.
#[derive(Debug)]
pub struct Timers {
    lengths: Lengths,
    drains: BTreeMap<GrantRef, Tick>,
    acquires: BTreeMap<GrantRef, Tick>,
    preparations: BTreeMap<(GroupId, Partition), (MemberId, Tick)>,
    holds: BTreeMap<(GroupId, Partition), (Index, Tick)>,
    returns: BTreeMap<MemberRef, Tick>,
}

impl Timers {
    pub const fn new(lengths: Lengths) -> Self {
        Self {
            lengths,
            drains: BTreeMap::new(),
            acquires: BTreeMap::new(),
            preparations: BTreeMap::new(),
            holds: BTreeMap::new(),
            returns: BTreeMap::new(),
        }
    }

    /// As [`Timers::follow`], for one partition that has changed.
    pub fn follow_partition(
        &mut self,
        state: &State,
        group: &GroupId,
        partition: Partition,
        now: Tick,
    ) {
        let drain = take_of(&mut self.drains, group, partition);
        let acquire = take_of(&mut self.acquires, group, partition);
        let key = (group.clone(), partition);
        let hold = self.holds.remove(&key);
        let preparation = self.preparations.remove(&key);
        if let Some(member) = state.preparing(group, partition) {
            let known = preparation.filter(|(known, _)| known == member).map(|(_, at)| at);
            let at = known.unwrap_or_else(|| now.after(self.lengths.prepare));
            self.preparations.insert(key, (member.clone(), at));
        }
        if let Some((grant, owner)) = state.revoking(group, partition) {
            let known = drain.filter(|(known, _)| *known == grant).map(|(_, at)| at);
            let at = known.unwrap_or_else(|| now.after(self.drain_length(state, group, owner)));
            self.drains.insert(grant, at);
        }
        if let Some(grant) = state.acquiring(group, partition) {
            let known = acquire.filter(|(known, _)| *known == grant).map(|(_, at)| at);
            self.acquires.insert(grant, known.unwrap_or_else(|| now.after(self.lengths.acquire)));
        }
        if let Some(found) = state.hold(group, partition) {
            let timer = match hold {
                Some((since, at)) if since == found.since => (since, at),
                Some(_) | None => (found.since, now.after(self.back_off(found.failures))),
            };
            self.holds.insert((found.group, partition), timer);
        }
    }

    /// Starts a timer for everything new in `state`, and forgets what is not there any more.
    pub fn follow(&mut self, state: &State, now: Tick) {
        let mut drains = BTreeMap::new();
        for (grant, owner, _) in state.partitions_revoking() {
            let at = self
                .drains
                .remove(&grant)
                .unwrap_or_else(|| now.after(self.drain_length(state, &grant.group, owner)));
            drains.insert(grant, at);
        }
        self.drains = drains;
        let mut acquires = BTreeMap::new();
        for (grant, _, _) in state.partitions_acquiring() {
            let at =
                self.acquires.remove(&grant).unwrap_or_else(|| now.after(self.lengths.acquire));
            acquires.insert(grant, at);
        }
        self.acquires = acquires;
        let mut preparations = BTreeMap::new();
        for AcknowledgePrepared { group, member, partition } in state.preparations() {
            let key = (group, partition);
            let known = self.preparations.remove(&key).filter(|(known, _)| *known == member);
            let at = known.map_or_else(|| now.after(self.lengths.prepare), |(_, at)| at);
            preparations.insert(key, (member, at));
        }
        self.preparations = preparations;
        let mut holds = BTreeMap::new();
        for hold in state.holds() {
            let key = (hold.group, hold.partition);
            let timer = match self.holds.remove(&key) {
                Some((since, at)) if since == hold.since => (since, at),
                Some(_) | None => (hold.since, now.after(self.back_off(hold.failures))),
            };
            holds.insert(key, timer);
        }
        self.holds = holds;
        self.follow_places(state, now);
    }

    /// As [`Timers::follow`], for places that are kept.
    pub fn follow_places(&mut self, state: &State, now: Tick) {
        let mut returns = BTreeMap::new();
        for (member, away) in state.members_away() {
            let length = Duration::from_millis(away.returning_within_ms);
            let at = self.returns.remove(&member).unwrap_or_else(|| now.after(length));
            returns.insert(member, at);
        }
        self.returns = returns;
    }

    /// Where only the lease protects, a drain outlasts the lease of an owner that never heard of it.
    fn drain_length(&self, state: &State, group: &GroupId, owner: &MemberId) -> Duration {
        let Ok((group, member)) = state.member(group, owner) else { return self.lengths.drain };
        match group.settings.takeover {
            Takeover::Fence => self.lengths.drain,
            Takeover::Lease => {
                let ttl = Duration::from_millis(member.ttl_ms);
                self.lengths.drain.max(ttl + self.lengths.clock_drift_max)
            }
        }
    }

    fn back_off(&self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.lengths.hold.saturating_mul(factor).min(self.lengths.hold_max)
    }

    /// Everything that is due; again at every call until the state has changed.
    pub fn due(&self, now: Tick) -> Due {
        let grants = |timers: &BTreeMap<GrantRef, Tick>| {
            timers.iter().filter(|(_, at)| **at <= now).map(|(grant, _)| grant.clone()).collect()
        };
        Due {
            drains: grants(&self.drains),
            acquires: grants(&self.acquires),
            preparations: self
                .preparations
                .iter()
                .filter(|(_, (_, at))| *at <= now)
                .map(|((group, partition), (member, _))| AcknowledgePrepared {
                    group: group.clone(),
                    member: member.clone(),
                    partition: *partition,
                })
                .collect(),
            holds: self
                .holds
                .iter()
                .filter(|(_, (_, at))| *at <= now)
                .map(|(key, _)| key.clone())
                .collect(),
            returns: self
                .returns
                .iter()
                .filter(|(_, at)| **at <= now)
                .map(|(member, _)| member.clone())
                .collect(),
        }
    }

    /// What remains of the drain of `grant`, seen from `from`; nothing when it is not known to be revoking.
    pub fn drain_remaining(&self, grant: &GrantRef, from: Tick) -> Option<Duration> {
        self.drains.get(grant).map(|at| at.since(from))
    }

    /// What remains of a prepare deadline, seen from `from`; nothing when no move waits for it.
    pub fn prepare_remaining(
        &self,
        preparation: &AcknowledgePrepared,
        from: Tick,
    ) -> Option<Duration> {
        let key = (preparation.group.clone(), preparation.partition);
        let (member, at) = self.preparations.get(&key)?;
        (*member == preparation.member).then(|| at.since(from))
    }

    /// The raft leader's loop stood still for `gap`: all deadlines move by it.
    pub fn add_gap(&mut self, gap: Duration) {
        let holds = self.holds.values_mut().map(|(_, at)| at);
        let preparations = self.preparations.values_mut().map(|(_, at)| at);
        let drains = self.drains.values_mut().chain(self.acquires.values_mut());
        for at in drains.chain(self.returns.values_mut()).chain(preparations).chain(holds) {
            *at = at.after(gap);
        }
    }
}

/// The timer of a partition, whatever its epoch; there is at most one.
fn take_of(
    timers: &mut BTreeMap<GrantRef, Tick>,
    group: &GroupId,
    partition: Partition,
) -> Option<(GrantRef, Tick)> {
    let first = GrantRef { group: group.clone(), partition, epoch: Epoch::FIRST };
    let (found, _) = timers.range(&first..).next()?;
    if found.group != first.group || found.partition != partition {
        return None;
    }
    let found = found.clone();
    timers.remove_entry(&found)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenure_core::command::{
        AcknowledgeAcquired, Context, InstallTarget, JoinGroup, LeaveGroup, Release,
        ReleasePartitions, ReleaseReason, TopicReport,
    };
    use tenure_core::{Command, Event};
    use tenure_model::{
        GroupEpoch, GroupSettings, PartitionIndex, SinkSetting, Term, Timestamp, TopicId, TopicName,
    };

    use super::*;

    fn lengths() -> Lengths {
        Lengths {
            drain: Duration::from_secs(30),
            acquire: Duration::from_secs(20),
            prepare: Duration::from_secs(10),
            hold: Duration::from_secs(1),
            hold_max: Duration::from_secs(60),
            clock_drift_max: Duration::from_millis(500),
        }
    }

    fn secs(seconds: u64) -> Tick {
        Tick::default().after(Duration::from_secs(seconds))
    }

    struct Rig {
        state: State,
        index: u64,
    }

    impl Rig {
        fn new(ttl_ms: u64, settings: GroupSettings) -> Self {
            let mut rig = Self { state: State::default(), index: 0 };
            for member in ["ann", "bob"] {
                let topic = TopicName::new("t").unwrap();
                rig.apply(Command::JoinGroup(JoinGroup {
                    group: group(),
                    member: MemberId::new(member).unwrap(),
                    instance: None,
                    topics: vec![topic.clone()],
                    settings: settings.clone(),
                    ttl_ms,
                    heartbeat_interval_ms: ttl_ms / 3,
                    client: String::new(),
                    partitions_max: None,
                    report: vec![TopicReport {
                        topic,
                        topic_id: TopicId::from_bits(1),
                        partition_count: 1,
                    }],
                    rejoin: None,
                    prepares: false,
                    weight: 1,
                }));
            }
            rig
        }

        fn apply(&mut self, command: Command) -> Vec<Event> {
            self.index += 1;
            let context =
                Context { term: Term(1), index: Index(self.index), proposed_at: Timestamp(0) };
            let applied = self.state.apply(context, &command);
            assert!(applied.result.is_ok(), "{:?}", applied.result);
            applied.events
        }

        fn target(&mut self, member: &str) {
            let group_epoch = GroupEpoch(self.state.group(&group()).unwrap().epoch.0);
            self.apply(Command::InstallTarget(InstallTarget {
                group: group(),
                group_epoch,
                target: vec![(partition(), MemberId::new(member).unwrap())],
                line_by_line: false,
            }));
        }

        fn acquire(&mut self, epoch: u64) {
            self.apply(Command::AcknowledgeAcquired(AcknowledgeAcquired {
                group: group(),
                member: MemberId::new("ann").unwrap(),
                partition: partition(),
                epoch: Epoch::new(epoch).unwrap(),
                home_initialised: false,
            }));
        }
    }

    fn group() -> GroupId {
        GroupId::new("g").unwrap()
    }

    fn partition() -> Partition {
        Partition { topic_id: TopicId::from_bits(1), index: PartitionIndex::new(0).unwrap() }
    }

    fn grant(epoch: u64) -> GrantRef {
        GrantRef { group: group(), partition: partition(), epoch: Epoch::new(epoch).unwrap() }
    }

    #[test]
    fn acquire_has_a_deadline_until_it_is_acknowledged() {
        let mut rig = Rig::new(9_000, GroupSettings::default());
        rig.target("ann");
        let mut timers = Timers::new(lengths());
        timers.follow(&rig.state, secs(0));
        timers.follow(&rig.state, secs(10));
        assert_eq!(timers.due(secs(19)), Due::default());
        assert_eq!(timers.due(secs(20)).acquires, [grant(1)]);
        rig.acquire(1);
        timers.follow(&rig.state, secs(20));
        assert_eq!(timers.due(secs(100)), Due::default());
    }

    #[test]
    fn drain_outlasts_a_long_lease_only_where_the_lease_protects() {
        let sinks = vec![SinkSetting { name: "pg".to_owned(), enforces_epoch: true }];
        let fence = GroupSettings { takeover: Takeover::Fence, sinks, ..GroupSettings::default() };
        for (settings, due_ms) in [(GroupSettings::default(), 60_500), (fence, 30_000)] {
            let mut rig = Rig::new(60_000, settings);
            rig.target("ann");
            rig.acquire(1);
            // The move to bob.
            let group_state = Arc::make_mut(rig.state.groups.get_mut(&group()).unwrap());
            group_state.epoch = GroupEpoch(group_state.epoch.0 + 1);
            rig.target("bob");
            let mut timers = Timers::new(lengths());
            timers.follow(&rig.state, secs(0));
            let due = Tick::default().after(Duration::from_millis(due_ms));
            assert_eq!(
                timers.drain_remaining(&grant(1), secs(0)).unwrap().as_millis(),
                due_ms.into()
            );
            assert_eq!(timers.due(Tick(due.0 - 1)), Due::default());
            assert_eq!(timers.due(due).drains, [grant(1)]);
            timers.add_gap(Duration::from_secs(5));
            assert_eq!(timers.due(due), Due::default());
        }
    }

    #[test]
    fn back_off_doubles_up_to_its_cap() {
        let timers = Timers::new(lengths());
        let seconds = |failures| timers.back_off(failures).as_secs();
        assert_eq!([seconds(1), seconds(2), seconds(3)], [1, 2, 4]);
        assert_eq!([seconds(7), seconds(40), seconds(u32::MAX)], [60, 60, 60]);
    }

    #[test]
    fn place_is_kept_for_the_length_that_its_member_named() {
        let mut rig = Rig::new(9_000, GroupSettings::default());
        rig.apply(Command::JoinGroup(JoinGroup {
            group: group(),
            member: MemberId::new("cat").unwrap(),
            instance: Some("x".parse().unwrap()),
            topics: vec![TopicName::new("t").unwrap()],
            settings: GroupSettings::default(),
            ttl_ms: 9_000,
            heartbeat_interval_ms: 3_000,
            client: String::new(),
            partitions_max: None,
            report: vec![],
            rejoin: None,
            prepares: false,
            weight: 1,
        }));
        rig.apply(Command::LeaveGroup(LeaveGroup {
            group: group(),
            member: MemberId::new("cat").unwrap(),
            partitions: vec![],
            reason: String::new(),
            returning_within_ms: Some(60_000),
        }));
        let mut timers = Timers::new(lengths());
        timers.follow(&rig.state, secs(0));
        timers.add_gap(Duration::from_secs(5));
        timers.follow(&rig.state, secs(30));
        assert_eq!(timers.due(secs(64)), Due::default());
        let due = timers.due(secs(65)).returns;
        assert_eq!(due.iter().map(|named| named.member.as_str()).collect::<Vec<_>>(), ["cat"]);
        rig.apply(Command::ExpireMembers { term: Term(1), members: due });
        timers.follow(&rig.state, secs(66));
        assert_eq!(timers.due(secs(100)), Due::default());
    }

    #[test]
    fn hold_is_lifted_after_the_back_off() {
        let mut rig = Rig::new(9_000, GroupSettings::default());
        rig.target("ann");
        rig.apply(Command::ReleasePartitions(ReleasePartitions {
            group: group(),
            member: MemberId::new("ann").unwrap(),
            partitions: vec![Release {
                partition: partition(),
                epoch: Epoch::FIRST,
                next_offset: None,
                reason: ReleaseReason::AcquireFailed,
                error: "no route to the database".to_owned(),
            }],
        }));
        let mut timers = Timers::new(lengths());
        timers.follow(&rig.state, secs(0));
        assert_eq!(timers.due(Tick(secs(1).0 - 1)), Due::default());
        assert_eq!(timers.due(secs(1)).holds, [(group(), partition())]);
    }
}
