//! Changes of ownership, proposed as commands, and what they came to.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tenure_coordinator::raft::ProposeError;
use tenure_coordinator::stored;
use tenure_core::command::{
    AcknowledgeAcquired, InstallTarget, JoinGroup, MovePartition, OperatorContext, Release,
    ReleasePartitions, ReleaseReason, TopicReport,
};
use tenure_core::{Applied, Command, Event};
use tenure_model::{
    Epoch, GroupEpoch, GroupId, GroupSettings, Index, MemberId, Partition, PartitionIndex, Term,
    Timestamp, TopicId, TopicName,
};
use tenure_proto::{convert, v1};

use crate::rig::{PATIENCE, Rig, until};

/// Partitions of each group: their first grants are one revision that is told in parts. So many that the state machine
/// does not check all of them after each command, as it does in a debug build for smaller groups.
const PARTITIONS: u32 = 2_400;

/// What one watcher is told of one change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) revision: u64,
    pub(crate) position: u32,
    group: String,
    what: String,
}

impl Told {
    pub(crate) fn of(revision: u64, change: &v1::Change) -> Self {
        let grant = || {
            let partition = change.partition.as_ref().unwrap();
            format!(
                "{}/{} {} e{}",
                partition.topic_id, partition.index, change.member, change.epoch
            )
        };
        let what = match v1::ChangeKind::try_from(change.kind).unwrap() {
            v1::ChangeKind::Granted => format!("granted {}", grant()),
            v1::ChangeKind::Acquired => format!("acquired {}", grant()),
            v1::ChangeKind::Revoked => format!("revoked {}", grant()),
            v1::ChangeKind::Released => {
                assert_eq!(change.cause(), v1::EndCause::Revoked);
                format!("released {}", grant())
            }
            v1::ChangeKind::MemberJoined => format!("joined {}", change.member),
            v1::ChangeKind::Operated => {
                let operated = change.operated.as_ref().unwrap();
                assert_eq!((operated.actor.as_str(), operated.reason.as_str()), ("test", "try"));
                format!("{} {}", operated.action, operated.request_id)
            }
            v1::ChangeKind::MemberLeft
            | v1::ChangeKind::MemberExpired
            | v1::ChangeKind::MemberDrained
            | v1::ChangeKind::MemberUndrained
            | v1::ChangeKind::Unspecified => panic!("nobody asked for it: {change:?}"),
        };
        Self { revision, position: change.position, group: change.group.clone(), what }
    }
}

/// What the proposals came to, by the answers of the node that proposed them.
#[derive(Default)]
pub(crate) struct Truth {
    changes: Vec<Told>,
    last: u64,
}

/// Member, epoch, revision of the grant, and that of its end.
type GrantLine = (String, u64, u64, Option<u64>);

impl Truth {
    pub(crate) const fn last_revision(&self) -> u64 {
        self.last
    }

    pub(crate) fn ownership_changes(&self) -> usize {
        let verbs = ["granted ", "acquired ", "revoked ", "released "];
        let counts = |told: &&Told| verbs.iter().any(|verb| told.what.starts_with(verb));
        self.changes.iter().filter(counts).count()
    }

    pub(crate) fn of_group(&self, group: Option<&str>) -> Vec<Told> {
        let wanted = |told: &&Told| group.is_none_or(|group| told.group == group);
        self.changes.iter().filter(wanted).cloned().collect()
    }

    /// The grants of each partition, those of the most granted first.
    pub(crate) fn grants(&self) -> Vec<(String, v1::Partition, Vec<GrantLine>)> {
        let mut grants: BTreeMap<(String, String), Vec<GrantLine>> = BTreeMap::new();
        for told in &self.changes {
            let words: Vec<&str> = told.what.split(' ').collect();
            let lines = grants.entry((told.group.clone(), words[1].to_owned())).or_default();
            match words.as_slice() {
                ["granted", _, member, epoch] => {
                    let epoch = epoch[1..].parse().unwrap();
                    lines.push(((*member).to_owned(), epoch, told.revision, None));
                }
                ["released", ..] => lines.last_mut().unwrap().3 = Some(told.revision),
                _ => {}
            }
        }
        grants.retain(|_, lines| !lines.is_empty());
        let named = |((group, text), lines): ((String, String), Vec<GrantLine>)| {
            let (topic_id, index) = text.split_once('/').unwrap();
            let index = index.parse().unwrap();
            (group, v1::Partition { topic_id: topic_id.to_owned(), index }, lines)
        };
        let mut grants: Vec<_> = grants.into_iter().map(named).collect();
        grants.sort_by_key(|(_, _, lines)| std::cmp::Reverse(lines.len()));
        grants
    }

    fn add(&mut self, index: Index, outcomes: &[Applied]) {
        let mut position = 0;
        for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
            let Some(what) = what(event) else { continue };
            let group = event.group().map_or_else(String::new, ToString::to_string);
            self.changes.push(Told { revision: index.0, position, group, what });
            position += 1;
        }
        self.last = index.0;
    }
}

fn what(event: &Event) -> Option<String> {
    Some(match event {
        Event::PartitionGranted { partition, member, epoch, .. } => {
            format!("granted {partition} {member} e{}", epoch.get())
        }
        Event::PartitionAcquired { partition, member, epoch, .. } => {
            format!("acquired {partition} {member} e{}", epoch.get())
        }
        Event::PartitionRevoked { partition, member, epoch, .. } => {
            format!("revoked {partition} {member} e{}", epoch.get())
        }
        Event::PartitionReleased { partition, member, epoch, .. } => {
            format!("released {partition} {member} e{}", epoch.get())
        }
        Event::MemberJoined(joined) => format!("joined {}", joined.member),
        Event::OperatorActed { request, .. } => format!("move {request}"),
        Event::GroupCreated { .. }
        | Event::TopicGrown { .. }
        | Event::GroupEpochRaised { .. }
        | Event::TargetInstalled { .. }
        | Event::TargetConfirmed { .. }
        | Event::PartitionPinned { .. }
        | Event::FeatureLevelRaised { .. } => return None,
        Event::MemberUpdated(_)
        | Event::MemberLeft { .. }
        | Event::MemberExpired { .. }
        | Event::MemberAway { .. }
        | Event::PlaceTaken { .. }
        | Event::MemberSilenced { .. }
        | Event::MemberHeard { .. }
        | Event::MemberDrained { .. }
        | Event::PinsLifted { .. }
        | Event::PartitionHeldBack { .. }
        | Event::HoldLifted { .. }
        | Event::PreparationBegun { .. }
        | Event::PreparationReady { .. }
        | Event::PreparationCalledOff { .. }
        | Event::OffsetCommitted { .. }
        | Event::EpochFloorRaised { .. } => panic!("nobody asked for it: {event:?}"),
    })
}

/// Where one partition stands.
#[derive(Clone, Copy)]
enum Stage {
    Acquiring,
    Held,
    Revoking,
}

#[derive(Clone, Copy)]
struct Line {
    stage: Stage,
    owner: usize,
    epoch: Epoch,
}

/// Proposes changes, one entry after the other, and keeps what they came to.
pub(crate) struct Driver {
    random: StdRng,
    truth: Truth,
    lines: BTreeMap<(usize, u32), Line>,
    requests: u64,
    topic: TopicName,
    /// Changes that made the groups what they start from.
    founding: usize,
}

const MEMBERS: [&str; 2] = ["ann", "bob"];

impl Driver {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            truth: Truth::default(),
            lines: BTreeMap::new(),
            requests: 0,
            topic: TopicName::new("orders").unwrap(),
            founding: 0,
        }
    }

    pub(crate) fn finish(self) -> Truth {
        self.truth
    }

    pub(crate) const fn last(&self) -> Index {
        Index(self.truth.last)
    }

    #[allow(clippy::unused_self, reason = "reads like the other parts of a command")]
    pub(crate) fn group(&self, at: usize) -> GroupId {
        GroupId::new(&format!("g{at}")).unwrap()
    }

    fn partition(&self, index: u32) -> Partition {
        let index = PartitionIndex::new(index).unwrap();
        Partition { topic_id: TopicId::of_name(&self.topic), index }
    }

    pub(crate) fn join(&self, name: &str) -> Command {
        self.join_of(0, name, PARTITIONS)
    }

    fn join_of(&self, group: usize, name: &str, partition_count: u32) -> Command {
        Command::JoinGroup(JoinGroup {
            group: self.group(group),
            member: MemberId::new(name).unwrap(),
            instance: None,
            topics: vec![self.topic.clone()],
            settings: GroupSettings::default(),
            ttl_ms: 3_600_000,
            heartbeat_interval_ms: 1_200_000,
            client: String::new(),
            partitions_max: None,
            report: vec![TopicReport {
                topic: self.topic.clone(),
                topic_id: TopicId::of_name(&self.topic),
                partition_count,
            }],
            rejoin: None,
            prepares: false,
            weight: 1,
        })
    }

    fn target(
        &self,
        group: usize,
        group_epoch: u64,
        count: u32,
        owner: fn(u32) -> usize,
    ) -> Command {
        let line = |index| (self.partition(index), MemberId::new(MEMBERS[owner(index)]).unwrap());
        Command::InstallTarget(InstallTarget {
            group: self.group(group),
            group_epoch: GroupEpoch(group_epoch),
            target: (0..count).map(line).collect(),
            line_by_line: false,
        })
    }

    /// Two groups of two members, every partition granted.
    pub(crate) async fn found(&mut self, rig: &Rig) {
        for group in 0..2 {
            for member in MEMBERS {
                let join = self.join_of(group, member, PARTITIONS);
                self.entry(rig, vec![join]).await;
            }
            let target = self.target(group, 2, PARTITIONS, |index| (index % 2) as usize);
            self.entry(rig, vec![target]).await;
        }
        self.founding = self.truth.ownership_changes();
        assert_eq!(self.founding, 2 * PARTITIONS as usize);
    }

    /// One group with so many partitions that its second target leaves nothing of the first. Gives the index of the
    /// second.
    pub(crate) async fn found_large(&mut self, rig: &Rig, partition_count: u32) -> Index {
        // A long name, so that few changes fill a connection.
        self.topic = TopicName::new(&"t".repeat(200)).unwrap();
        for member in MEMBERS {
            let join = self.join_of(0, member, partition_count);
            self.entry(rig, vec![join]).await;
        }
        let ann = self.target(0, 2, partition_count, |_| 0);
        self.entry(rig, vec![ann]).await;
        let bob = self.target(0, 2, partition_count, |_| 1);
        self.entry(rig, vec![bob]).await
    }

    /// Proposes entries until there were so many changes of ownership since the groups were founded.
    pub(crate) async fn run_until(&mut self, rig: &Rig, wanted: usize) {
        while self.truth.ownership_changes() - self.founding < wanted {
            // Now and then more than one message of a watch holds.
            let is_large = self.random.random_bool(0.02);
            let count = if is_large { 400 } else { self.random.random_range(1..12) };
            let commands = (0..count).filter_map(|_| self.step()).collect();
            self.entry(rig, commands).await;
            // So that there is something to tell for as long as watchers come and go.
            tokio::time::sleep(Duration::from_millis(self.random.random_range(0..20))).await;
        }
    }

    /// The next step of some partition.
    fn step(&mut self) -> Option<Command> {
        let group = usize::from(self.random.random_bool(0.2));
        let index = self.random.random_range(0..PARTITIONS / 4);
        let Line { stage, owner, epoch } = *self.lines.get(&(group, index))?;
        let (group_id, partition) = (self.group(group), self.partition(index));
        let member = MemberId::new(MEMBERS[owner]).unwrap();
        Some(match stage {
            Stage::Acquiring => Command::AcknowledgeAcquired(AcknowledgeAcquired {
                group: group_id,
                member,
                partition,
                epoch,
                home_initialised: false,
            }),
            Stage::Held => {
                self.requests += 1;
                Command::MovePartition(MovePartition {
                    operator: OperatorContext {
                        request: format!("r-{}", self.requests).parse().unwrap(),
                        reason: "try".to_owned(),
                        actor: "test".to_owned(),
                    },
                    group: group_id,
                    partition,
                    to: MemberId::new(MEMBERS[1 - owner]).unwrap(),
                })
            }
            Stage::Revoking => Command::ReleasePartitions(ReleasePartitions {
                group: group_id,
                member,
                partitions: vec![Release {
                    partition,
                    epoch,
                    next_offset: None,
                    reason: ReleaseReason::Revoked,
                    error: String::new(),
                }],
            }),
        })
    }

    /// Entries that change nothing, many at a time.
    pub(crate) async fn idle_entries(&mut self, rig: &Rig, count: u64) {
        let node = rig.node(rig.leader().await);
        let late = Command::MarkMembersHeard { term: Term(0), members: vec![] };
        let payload = stored::encode_batch(Timestamp(1), &[late]);
        for _ in 0..count.div_ceil(100) {
            let proposals = (0..100).map(|_| node.raft().propose(payload.clone(), None));
            for proposed in futures::future::join_all(proposals).await {
                let (index, outcomes) = proposed.unwrap();
                assert!(outcomes[0].events.is_empty());
                self.truth.last = self.truth.last.max(index.0);
            }
        }
    }

    /// Proposes one entry at whoever leads, and takes note of what it came to.
    pub(crate) async fn entry(&mut self, rig: &Rig, commands: Vec<Command>) -> Index {
        let payload = stored::encode_batch(Timestamp(1), &commands);
        let (index, outcomes) = until("a raft leader that takes an entry", || async {
            let node = rig.node(rig.leader().await);
            let proposed =
                tokio::time::timeout(PATIENCE, node.raft().propose(payload.clone(), None));
            match proposed.await.unwrap() {
                Ok(done) => Some(done),
                Err(ProposeError::NotLeader { .. } | ProposeError::NoLeader) => None,
                Err(error) => panic!("{error}"),
            }
        })
        .await;
        self.truth.add(index, &outcomes);
        for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
            self.follow(event);
        }
        index
    }

    fn follow(&mut self, event: &Event) {
        let group = event.group().map_or(0, |group| usize::from(group.as_str() == "g1"));
        if let Event::PartitionGranted { partition, member, epoch, .. } = event {
            let owner = usize::from(member.as_str() == MEMBERS[1]);
            let line = Line { stage: Stage::Acquiring, owner, epoch: *epoch };
            self.lines.insert((group, partition.index.get()), line);
        } else if let Event::PartitionAcquired { partition, .. } = event {
            self.lines.get_mut(&(group, partition.index.get())).unwrap().stage = Stage::Held;
        } else if let Event::PartitionRevoked { partition, .. } = event {
            self.lines.get_mut(&(group, partition.index.get())).unwrap().stage = Stage::Revoking;
        }
    }
}

/// Partition of the topic that the groups read.
pub(crate) fn partition_to_wire(index: u32) -> v1::Partition {
    convert::partition_to_wire(Driver::new(0).partition(index))
}
