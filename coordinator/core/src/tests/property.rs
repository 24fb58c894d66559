//! Random sequences of commands, right and wrong ones, against what must hold of any.

mod sequences;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use tenure_model::{
    Epoch, GroupEpoch, Index, MemberEpoch, MemberId, Partition, PartitionIndex, RequestId, Term,
    TopicId, TopicName,
};

use super::{TERM, commit, group, join, member, operator, topic};
use crate::command::{
    AcknowledgeAcquired, AcknowledgePrepared, CommitOffsets, DrainMember, GrantRef, InstallTarget,
    LeaveGroup, MemberRef, MovePartition, RebalanceGroup, Release, ReleasePartitions,
    ReleaseReason, ReportTopics, SilentMember, TopicReport,
};
use crate::history::{Past, What};
use crate::state::{Group, Ownership};
use crate::{Applied, Command, Context, Event, Reply, State};

const MEMBERS: usize = 6;
const TOPICS: usize = 3;
const PARTITIONS: u32 = 6;

/// One step before it meets a state: what to do, and numbers to do it with.
type Step = (u8, u8, u8, u8, u8);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((0..28_u8, any::<u8>(), any::<u8>(), any::<u8>(), any::<u8>()), 1..120)
}

/// Who owns what, followed from the events alone.
#[derive(Default)]
struct Ledger {
    owners: BTreeMap<Partition, (MemberId, Epoch, bool)>,
    grants: BTreeMap<(Partition, Epoch), MemberId>,
    highest: u64,
}

impl Ledger {
    fn follow(&mut self, event: &Event) -> Result<(), TestCaseError> {
        match event {
            Event::PartitionGranted { partition, member, epoch, .. } => {
                let before = self.owners.insert(*partition, (member.clone(), *epoch, false));
                prop_assert!(before.is_none(), "{partition} granted while {before:?} owned it");
                prop_assert!(epoch.get() > self.highest, "{epoch} after {}", self.highest);
                self.highest = epoch.get();
                let before = self.grants.insert((*partition, *epoch), member.clone());
                prop_assert!(before.is_none(), "{partition} {epoch} names two grants");
            }
            Event::PartitionRevoked { partition, member, epoch, .. } => {
                let was = self.owners.insert(*partition, (member.clone(), *epoch, true));
                prop_assert_eq!(was, Some((member.clone(), *epoch, false)));
            }
            Event::PartitionAcquired { partition, member, epoch, .. } => {
                let owner = self.owners.get(partition);
                prop_assert!(owner.is_some_and(|(m, e, _)| m == member && e == epoch));
            }
            Event::PartitionReleased { partition, member, epoch, .. } => {
                let was = self.owners.remove(partition);
                prop_assert!(was.is_some_and(|(m, e, _)| m == *member && e == *epoch));
            }
            Event::OffsetCommitted { member, commit, .. } => {
                let owner = self.owners.get(&commit.partition);
                prop_assert!(owner.is_some_and(|(m, e, _)| m == member && *e == commit.epoch));
            }
            Event::EpochFloorRaised { floor } => self.highest = self.highest.max(floor.get()),
            Event::GroupCreated { .. }
            | Event::FeatureLevelRaised { .. }
            | Event::MemberJoined(_)
            | Event::MemberUpdated(_)
            | Event::MemberLeft { .. }
            | Event::MemberExpired { .. }
            | Event::MemberAway { .. }
            | Event::PlaceTaken { .. }
            | Event::MemberSilenced { .. }
            | Event::MemberHeard { .. }
            | Event::MemberDrained { .. }
            | Event::TopicGrown { .. }
            | Event::GroupEpochRaised { .. }
            | Event::TargetInstalled { .. }
            | Event::TargetConfirmed { .. }
            | Event::PartitionPinned { .. }
            | Event::PinsLifted { .. }
            | Event::PartitionHeldBack { .. }
            | Event::HoldLifted { .. }
            | Event::PreparationBegun { .. }
            | Event::PreparationReady { .. }
            | Event::PreparationCalledOff { .. }
            | Event::OperatorActed { .. } => {}
        }
        Ok(())
    }
}

#[derive(Default)]
struct World {
    state: State,
    ledger: Ledger,
    log: Vec<(Context, Command, Applied)>,
    /// How often each member id came and went; a new life has a new id.
    lives: [u32; MEMBERS],
    requests: u32,
}

impl World {
    fn apply(&mut self, command: Command) -> Result<Applied, TestCaseError> {
        let index = Index(self.state.applied.0 + 1);
        let context = Context {
            term: Term(TERM),
            index,
            proposed_at: tenure_model::Timestamp(index.0 * 7 % 50),
        };
        let before = self.state.clone();
        let applied = self.state.apply(context, &command);
        self.state.invariants().map_err(TestCaseError::fail)?;
        for event in &applied.events {
            self.ledger.follow(event)?;
        }
        self.check_owners()?;
        check_offsets(&before, &self.state)?;
        check_grants(&self.state, &applied.events)?;
        if applied.result.is_err() {
            let untouched = State { applied: self.state.applied, now: self.state.now, ..before };
            prop_assert_eq!(&self.state, &untouched);
        }
        self.log.push((context, command, applied.clone()));
        Ok(applied)
    }

    /// The state says of every partition what the events said.
    fn check_owners(&self) -> Result<(), TestCaseError> {
        let mut found = BTreeMap::new();
        for (partition, state) in self.group().into_iter().flat_map(|group| &group.partitions) {
            if let Some(owner) = state.ownership.owner() {
                let epoch = state.epoch.unwrap();
                found.insert(*partition, (owner.clone(), epoch, state.ownership.is_revoking()));
            }
        }
        prop_assert_eq!(&found, &self.ledger.owners);
        Ok(())
    }

    fn group(&self) -> Option<&Group> {
        self.state.groups.get(&group()).map(AsRef::as_ref)
    }

    fn name(&self, at: u8) -> MemberId {
        let at = usize::from(at) % MEMBERS;
        member(&format!("m{at}-{}", self.lives[at]))
    }

    /// The grant that is current, or a neighbour of it.
    fn grant(&self, a: u8, twist: u8) -> GrantRef {
        let partition = partition(a);
        let current = self.group().and_then(|group| group.partitions.get(&partition));
        let current = current.and_then(|state| state.epoch).map_or(1, Epoch::get);
        let epoch = match twist % 8 {
            0 => current.saturating_sub(1).max(1),
            1 => current + 1,
            _ => current,
        };
        GrantRef { group: group(), partition, epoch: Epoch::new(epoch).unwrap() }
    }

    /// The owner, or now and then somebody else.
    fn owner(&self, partition: Partition, twist: u8) -> MemberId {
        let owner = self.ledger.owners.get(&partition).map(|(owner, _, _)| owner.clone());
        owner.filter(|_| !twist.is_multiple_of(6)).unwrap_or_else(|| self.name(twist))
    }

    fn membership(&self, a: u8, twist: u8) -> MemberRef {
        let name = self.name(a);
        let known = self.group().and_then(|group| group.members.get(&name));
        let off = u64::from(twist.is_multiple_of(8));
        let epoch = MemberEpoch(known.map_or(0, |known| known.epoch.0) + off);
        MemberRef { group: group(), member: name, member_epoch: epoch }
    }

    fn operator(&mut self, twist: u8) -> crate::command::OperatorContext {
        if !twist.is_multiple_of(5) {
            self.requests += 1;
        }
        let request = RequestId::new(&format!("r{}", self.requests)).unwrap();
        crate::command::OperatorContext { request, ..operator("r") }
    }

    fn plan(&self) -> Option<Vec<(Partition, MemberId)>> {
        self.group().map(|group| tenure_planner::plan(&planner_input(group)).into_iter().collect())
    }

    fn install(&self, behind: u64, line_by_line: bool) -> Option<Command> {
        let current = self.group()?.epoch.0;
        let target = self.plan()?;
        let group_epoch = GroupEpoch(current.saturating_sub(behind));
        Some(Command::InstallTarget(InstallTarget {
            group: group(),
            group_epoch,
            target,
            line_by_line,
        }))
    }

    fn command(&mut self, (kind, a, b, c, d): Step) -> Option<Command> {
        let term = Term(TERM - u64::from(d.is_multiple_of(16)));
        Some(match kind {
            0..=2 => self.join(a, b, c, d),
            3 => Command::ReportTopics(ReportTopics {
                group: group(),
                member: self.name(a),
                topics: vec![report(b, c)],
            }),
            4 => self.leave(a, b, c),
            5 => {
                let members = vec![self.membership(a, b)];
                if c.is_multiple_of(2) {
                    Command::ReserveMembers { term, members, returning_within_ms: 10_000 }
                } else {
                    Command::ExpireMembers { term, members }
                }
            }
            6 => {
                let member = self.membership(a, b);
                let members = vec![SilentMember { member, silent_for_ms: u64::from(c) }];
                Command::MarkMembersSilent { term, members }
            }
            7 => Command::MarkMembersHeard { term, members: vec![self.membership(a, b)] },
            8..=10 => self.install(0, false)?,
            11 => self.install(u64::from(a % 4), b.is_multiple_of(2))?,
            12 => self.random_target(a, b, c),
            13 | 14 => self.release(a, b, c, d),
            15 => self.release_revoked(a)?,
            16 | 17 => {
                let GrantRef { partition, epoch, .. } = self.grant(a, b);
                Command::AcknowledgeAcquired(AcknowledgeAcquired {
                    group: group(),
                    member: self.owner(partition, c),
                    partition,
                    epoch,
                    home_initialised: d.is_multiple_of(2),
                })
            }
            18 | 19 => self.commit(a, b, c, d),
            20 => Command::ExpireRevocations {
                term,
                grants: vec![self.grant(a, b), self.grant(c, b)],
            },
            21 if c.is_multiple_of(3) => {
                Command::TakeBackUnserved { term, grants: vec![self.grant(a, b)] }
            }
            21 => Command::ExpireAcquisitions { term, grants: vec![self.grant(a, b)] },
            22 => {
                let partitions = (0..4).map(|more| (group(), partition(a.wrapping_add(more))));
                Command::LiftHolds { term, partitions: partitions.collect() }
            }
            23 => Command::MovePartition(MovePartition {
                operator: self.operator(c),
                group: group(),
                partition: partition(a),
                to: self.name(b),
            }),
            24 => Command::DrainMember(DrainMember {
                operator: self.operator(c),
                group: group(),
                member: self.name(a),
                undrain: b.is_multiple_of(2),
            }),
            25 => {
                let of = partition(a);
                let waits = self.state.preparations().find(|waits| waits.partition == of);
                Command::AcknowledgePrepared(waits.unwrap_or_else(|| AcknowledgePrepared {
                    group: group(),
                    member: self.name(b),
                    partition: of,
                }))
            }
            26 => Command::ExpirePreparations {
                term,
                preparations: self.state.preparations().take(usize::from(a % 3)).collect(),
            },
            _ if d.is_multiple_of(3) => Command::RaiseEpochFloor {
                operator: self.operator(c),
                floor: Epoch::new(u64::from(a) + 1).unwrap(),
            },
            _ => {
                let target = self.plan()?;
                let group_epoch = self.group()?.epoch;
                let operator = self.operator(c);
                let group = group();
                Command::RebalanceGroup(RebalanceGroup { operator, group, group_epoch, target })
            }
        })
    }

    fn join(&mut self, a: u8, b: u8, c: u8, d: u8) -> Command {
        let at = usize::from(a) % MEMBERS;
        let is_gone = self.group().is_some_and(|group| {
            let is_away = group.members.get(&self.name(a)).is_some_and(|m| m.away.is_some());
            is_away || group.tombstones.contains(&self.name(a))
        });
        if is_gone && !d.is_multiple_of(8) {
            self.lives[at] += 1;
        }
        let mut wish = join(self.name(a).as_str(), &[]);
        wish.topics = (0..TOPICS)
            .filter(|at| b & (1 << at) != 0)
            .map(|at| topic(&format!("t{at}")))
            .collect();
        if wish.topics.is_empty() {
            wish.topics.push(topic("t0"));
        }
        // Three of four places are static; one of them may be found taken.
        let instance = at + usize::from(d.is_multiple_of(16));
        wish.instance =
            (at % 4 != 3).then(|| tenure_model::InstanceId::new(&format!("i{instance}")).unwrap());
        if let Some(known) = self.group().and_then(|group| group.members.get(&self.name(a)))
            && !d.is_multiple_of(16)
        {
            wish.instance.clone_from(&known.instance);
        }
        wish.partitions_max = (c.is_multiple_of(3)).then(|| u32::from(c / 3) % 5 + 1);
        wish.report = vec![report(c, d)];
        wish.ttl_ms += u64::from(d % 2) * 1_000;
        wish.prepares = d.is_multiple_of(3);
        wish.weight = u32::from(b % 3) + 1;
        if d.is_multiple_of(7) {
            wish.rejoin = Some(self.membership(a, b).member_epoch);
        }
        Command::JoinGroup(wish)
    }

    fn leave(&self, a: u8, b: u8, c: u8) -> Command {
        let name = self.name(a);
        let is_static = self.group().is_some_and(|group| {
            group.members.get(&name).is_some_and(|member| member.instance.is_some())
        });
        let owned = self.ledger.owners.iter().filter(|(_, (owner, _, _))| *owner == name);
        let partitions = owned
            .take(usize::from(b % 4))
            .map(|(partition, (_, epoch, _))| release(*partition, *epoch, ReleaseReason::Shutdown))
            .collect();
        Command::LeaveGroup(LeaveGroup {
            group: group(),
            member: name,
            partitions,
            reason: String::new(),
            returning_within_ms: (is_static && c.is_multiple_of(2)).then_some(10_000),
        })
    }

    fn random_target(&self, a: u8, b: u8, c: u8) -> Command {
        let group_epoch = self.group().map_or(GroupEpoch(0), |group| group.epoch);
        let lines: BTreeMap<Partition, MemberId> = (0..c % 8)
            .map(|at| (partition(a.wrapping_add(at)), self.name(b.wrapping_add(at))))
            .collect();
        let target = lines.into_iter().collect();
        let line_by_line = c.is_multiple_of(2);
        Command::InstallTarget(InstallTarget { group: group(), group_epoch, target, line_by_line })
    }

    fn release(&self, a: u8, b: u8, c: u8, d: u8) -> Command {
        let GrantRef { partition, epoch, .. } = self.grant(a, b);
        let reason = [
            ReleaseReason::Revoked,
            ReleaseReason::Shutdown,
            ReleaseReason::LeaseLost,
            ReleaseReason::Fenced,
            ReleaseReason::AcquireFailed,
            ReleaseReason::HandlerFailed,
        ][usize::from(d) % 6];
        let mut first = release(partition, epoch, reason);
        first.next_offset = (c.is_multiple_of(2)).then(|| super::next_offset(&c.to_string()));
        Command::ReleasePartitions(ReleasePartitions {
            group: group(),
            member: self.owner(partition, c),
            partitions: vec![first.clone(), first],
        })
    }

    /// One member does what it was asked to.
    fn release_revoked(&self, a: u8) -> Option<Command> {
        let revoking: Vec<_> = self.state.partitions_revoking().collect();
        let (_, name, _) = revoking.get(usize::from(a) % revoking.len().max(1))?;
        let partitions = revoking
            .iter()
            .filter(|(_, owner, _)| owner == name)
            .map(|(grant, _, _)| release(grant.partition, grant.epoch, ReleaseReason::Revoked))
            .collect();
        let member = (*name).clone();
        Some(Command::ReleasePartitions(ReleasePartitions { group: group(), member, partitions }))
    }

    fn commit(&self, a: u8, b: u8, c: u8, d: u8) -> Command {
        let commits: Vec<_> = [(a, d), (a.wrapping_add(1), d), (a, d.wrapping_add(c))]
            .into_iter()
            .map(|(at, offset)| {
                let GrantRef { partition, epoch, .. } = self.grant(at, b);
                let mut line = commit(&format!("0@e1#{}:{offset}", c % 16));
                (line.partition, line.epoch) = (partition, epoch);
                line
            })
            .collect();
        let member = self.owner(commits[0].partition, c);
        Command::CommitOffsets(CommitOffsets { group: group(), member, commits })
    }

    /// Everybody does its part until nothing is left to do.
    fn settle(&mut self) -> Result<(), TestCaseError> {
        let away: Vec<MemberRef> = self.state.members_away().map(|(named, _)| named).collect();
        let places_end = Command::ExpireMembers { term: Term(TERM), members: away };
        prop_assert!(self.apply(places_end)?.result.is_ok());
        // Whatever target the steps left behind, an odd one included.
        if let Some(install) = self.install(0, false) {
            prop_assert_eq!(self.apply(install)?.result, Ok(Reply::Done));
        }
        for _ in 0..100 {
            let due = self.state.groups_to_plan().next().is_some();
            let held: Vec<_> =
                self.state.holds().map(|hold| (hold.group, hold.partition)).collect();
            let install = if due { self.install(0, false) } else { None };
            if let Some(install) = install {
                let applied = self.apply(install)?;
                prop_assert_eq!(applied.result, Ok(Reply::Done), "a plan for now is taken");
            } else if !held.is_empty() {
                let lift = Command::LiftHolds { term: Term(TERM), partitions: held };
                prop_assert!(self.apply(lift)?.result.is_ok());
            } else if self.state.preparations().next().is_some() {
                let preparations = self.state.preparations().collect();
                let expire = Command::ExpirePreparations { term: Term(TERM), preparations };
                prop_assert!(self.apply(expire)?.result.is_ok());
            } else if let Some(release) = self.release_revoked(0) {
                prop_assert!(self.apply(release)?.result.is_ok());
            } else {
                return Ok(());
            }
        }
        Err(TestCaseError::fail("does not settle"))
    }
}

fn release(partition: Partition, epoch: Epoch, reason: ReleaseReason) -> Release {
    Release { partition, epoch, next_offset: None, reason, error: String::new() }
}

fn topic_at(at: u8) -> (TopicName, TopicId) {
    let name = topic(&format!("t{}", usize::from(at) % TOPICS));
    let topic_id = TopicId::of_name(&name);
    (name, topic_id)
}

fn partition(a: u8) -> Partition {
    let index = PartitionIndex::new(u32::from(a / 3) % PARTITIONS).unwrap();
    Partition { topic_id: topic_at(a).1, index }
}

fn report(a: u8, b: u8) -> TopicReport {
    let (topic, topic_id) = topic_at(a);
    TopicReport { topic, topic_id, partition_count: u32::from(b) % PARTITIONS + 1 }
}

fn planner_input(group: &Group) -> tenure_planner::Input {
    let mut current: BTreeMap<Partition, MemberId> = group.target.clone();
    let (mut avoid, mut since) = (BTreeMap::new(), BTreeMap::new());
    for (partition, state) in &group.partitions {
        since.extend(state.epoch.map(|epoch| (*partition, epoch.get())));
        match &state.ownership {
            Ownership::Held { member, .. } => {
                current.insert(*partition, member.clone());
            }
            Ownership::Revoking { .. } | Ownership::Free => {}
        }
        if let Some(trouble) = &state.trouble {
            avoid.insert(*partition, trouble.members.clone());
        }
    }
    tenure_planner::Input {
        since,
        members: group
            .members
            .iter()
            .map(|(id, member)| {
                let planned = tenure_planner::Member {
                    topics: member.topics.iter().cloned().collect(),
                    partitions_max: member.partitions_max,
                    weight: member.weight,
                    draining: member.draining,
                };
                (id.clone(), planned)
            })
            .collect(),
        topics: group
            .topics
            .iter()
            .filter(|(_, topic)| topic.frozen_by.is_none())
            .map(|(id, topic)| {
                let planned = tenure_planner::Topic {
                    name: topic.name.clone(),
                    partition_count: topic.partition_count,
                };
                (*id, planned)
            })
            .collect(),
        current,
        pins: group.pins.clone(),
        avoid,
    }
}

/// No offset moves back, and none vanishes.
fn check_offsets(before: &State, after: &State) -> Result<(), TestCaseError> {
    for (id, group) in &before.groups {
        for (partition, state) in &group.partitions {
            let now = &after.groups[id].partitions[partition];
            prop_assert!(now.epoch >= state.epoch, "the epoch of {partition} fell");
            prop_assert!(now.home_initialised >= state.home_initialised);
            if let Some(committed) = &state.committed {
                let now = now.committed.as_ref();
                prop_assert!(now.is_some_and(|now| now.next_offset >= committed.next_offset));
            }
        }
    }
    Ok(())
}

/// Who is granted a partition lives, wants it, is not draining, and is within its cap.
fn check_grants(state: &State, events: &[Event]) -> Result<(), TestCaseError> {
    let mut granted = BTreeSet::new();
    for event in events {
        if let Event::PartitionGranted { group, partition, member, .. } = event {
            let group = &state.groups[group];
            let may = group.may_be_granted(member, *partition);
            prop_assert!(may, "{member} may not be granted {partition}");
            granted
                .insert((group.members[member].partitions_max, group.members[member].owned.len()));
        }
    }
    for (cap, owned) in granted {
        prop_assert!(cap.is_none_or(|cap| owned <= cap as usize), "{owned} of {cap:?}");
    }
    Ok(())
}

fn run(steps: Vec<Step>) -> Result<World, TestCaseError> {
    let mut world = World::default();
    for step in steps {
        if let Some(command) = world.command(step) {
            world.apply(command)?;
        }
    }
    Ok(world)
}
