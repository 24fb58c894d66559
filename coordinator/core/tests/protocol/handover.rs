//! Grant, expire, register, verify, resume, write, commit and release, by the real core, in every order.
//!
//! A member acts on what it was told last, and may be told, or act, arbitrarily late: an owner that sleeps is one that
//! the explorer does not pick for a while. Old commits, releases and expiries may arrive once more.

mod steps;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use stateright::{Model, Property};
use tenure_core::command::{
    CommitOffsets, GrantRef, InstallTarget, JoinGroup, MemberRef, MovePartition, OffsetCommit,
    OperatorContext, Release, ReleasePartitions, ReleaseReason, TopicReport,
};
use tenure_core::state::Ownership;
use tenure_core::{Command, Context, Reply, State};
use tenure_model::{
    CommitSequence, Epoch, GroupId, GroupSettings, Index, MemberId, NextOffset, Partition,
    PartitionIndex, RequestId, Term, Timestamp, TopicId, TopicName,
};

use super::explore;

const OWNERS: usize = 2;
const PARTITIONS: usize = 2;

/// How a sink shuts out earlier owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    /// By the epoch.
    Epoch,
    /// Whoever registered last writes.
    LastRegistered,
}

/// A guard that is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// The sink takes every write.
    SinkCheck,
    /// Nobody verifies after the registration.
    Verify,
    /// Verify asks who owns the partition, not under which epoch.
    VerifyEpoch,
    /// A commit counts for the current grant, whatever it names.
    CommitEpoch,
    /// So does a release.
    ReleaseEpoch,
    /// A release says nothing of the offset.
    FinalOffset,
    /// An expiry counts in every term.
    ExpiryTerm,
}

struct Handover {
    fence: Fence,
    gone: Option<Gone>,
    /// Moves by an operator.
    moves_max: u8,
    /// Records of each partition.
    records: u8,
    /// Whether members expire and raft leaders change.
    expires: bool,
}

/// A grant at its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Work {
    #[default]
    None,
    Granted {
        epoch: u64,
    },
    Registered {
        epoch: u64,
        registration: u8,
    },
    Running {
        epoch: u64,
        registration: u8,
        position: u8,
        committed: u8,
    },
    /// Refused: this epoch is never taken up again.
    Ended {
        epoch: u64,
    },
}

/// The sink's resource of one partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Resource {
    /// Highest epoch that registered.
    highest: u64,
    /// Who may write: the last registration that was taken.
    current: u8,
    written: u8,
}

/// A message that may arrive once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Late {
    Commit { owner: usize, partition: usize, epoch: u64, next: u8 },
    Release { owner: usize, partition: usize, epoch: u64 },
}

#[derive(Clone)]
struct Situation {
    core: Arc<State>,
    /// What of the core bears on what can happen next.
    core_key: [(u8, u64, u8); PARTITIONS],
    alive: [bool; OWNERS],
    term: u8,
    /// Owners that the present raft leader has heard.
    heard: [bool; OWNERS],
    /// An expiry that the lease table of a term wants.
    expiry: Option<(usize, u8)>,
    works: [[Work; PARTITIONS]; OWNERS],
    sink: [Resource; PARTITIONS],
    acknowledged: [u8; PARTITIONS],
    late: Option<Late>,
    moves: u8,
    broken: Option<&'static str>,
}

impl Situation {
    fn key(&self) -> impl PartialEq + Hash + '_ {
        (
            (self.core_key, self.alive, self.term, self.heard, self.expiry),
            (self.works, self.sink, self.acknowledged, self.late, self.moves, self.broken),
        )
    }
}

impl PartialEq for Situation {
    fn eq(&self, other: &Self) -> bool {
        self.core_key == other.core_key
            && (self.alive, self.term, self.heard, self.expiry)
                == (other.alive, other.term, other.heard, other.expiry)
            && (self.works, self.sink, self.acknowledged)
                == (other.works, other.sink, other.acknowledged)
            && (self.late, self.moves, self.broken) == (other.late, other.moves, other.broken)
    }
}

impl Hash for Situation {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl fmt::Debug for Situation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Situation")
            .field("core", &self.core_key)
            .field("works", &self.works)
            .field("sink", &self.sink)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// An operator moves a partition to the other owner.
    Move {
        partition: usize,
    },
    /// The owner is told of its grant.
    Take {
        owner: usize,
        partition: usize,
    },
    Register {
        owner: usize,
        partition: usize,
    },
    /// Asks whether the grant is current, and where to resume.
    Verify {
        owner: usize,
        partition: usize,
    },
    Write {
        owner: usize,
        partition: usize,
    },
    Commit {
        owner: usize,
        partition: usize,
    },
    Release {
        owner: usize,
        partition: usize,
    },
    /// The drain deadline passes.
    TakeBack {
        partition: usize,
    },
    /// An old message arrives once more.
    Arrive,
    /// The raft leader's lease table finds an owner due.
    Due {
        owner: usize,
    },
    /// What it wanted is in the log.
    Expire,
    /// Another raft leader, in another term.
    Elect,
    /// The raft leader hears an owner and answers.
    Hear {
        owner: usize,
    },
}

fn group() -> GroupId {
    GroupId::new("g").unwrap()
}

fn member(owner: usize) -> MemberId {
    MemberId::new(["a", "b"][owner]).unwrap()
}

fn partition(index: usize) -> Partition {
    let index = PartitionIndex::new(u32::try_from(index).unwrap()).unwrap();
    Partition { topic_id: TopicId::from_bits(1), index }
}

fn operator(name: &str) -> OperatorContext {
    let request = RequestId::new(name).unwrap();
    OperatorContext { request, reason: "a model".to_owned(), actor: "the explorer".to_owned() }
}

impl Situation {
    fn new() -> Self {
        let mut situation = Self {
            core: Arc::default(),
            core_key: Default::default(),
            alive: [true; OWNERS],
            term: 1,
            heard: [true; OWNERS],
            expiry: None,
            works: Default::default(),
            sink: Default::default(),
            acknowledged: Default::default(),
            late: None,
            moves: 0,
            broken: None,
        };
        for owner in 0..OWNERS {
            let topic = TopicName::new("t").unwrap();
            let report = TopicReport {
                topic: topic.clone(),
                topic_id: TopicId::from_bits(1),
                partition_count: u32::try_from(PARTITIONS).unwrap(),
            };
            situation.apply(&Command::JoinGroup(JoinGroup {
                group: group(),
                member: member(owner),
                instance: None,
                topics: vec![topic],
                settings: GroupSettings::default(),
                ttl_ms: 10_000,
                heartbeat_interval_ms: 3_000,
                client: String::new(),
                partitions_max: None,
                report: vec![report],
                rejoin: None,
                prepares: false,
                weight: 1,
            }));
        }
        situation.install(|partition| partition % OWNERS);
        situation
    }

    /// Makes a target from who should own which partition.
    fn install(&mut self, owner_of: impl Fn(usize) -> usize) {
        let group_epoch = self.core.group(&group()).unwrap().epoch;
        let target =
            (0..PARTITIONS).map(|index| (partition(index), member(owner_of(index)))).collect();
        let line_by_line = false;
        let install = InstallTarget { group: group(), group_epoch, target, line_by_line };
        self.apply(&Command::InstallTarget(install));
    }

    /// Applies a command in the present term; answers the verdict on its one line.
    fn apply(&mut self, command: &Command) -> bool {
        let core = Arc::make_mut(&mut self.core);
        let index = Index(core.applied.0 + 1);
        let term = Term(self.term.into());
        let context = Context { term, index, proposed_at: Timestamp(0) };
        let applied = core.apply(context, command);
        for index in 0..PARTITIONS {
            let Ok(found) = core.partition(&group(), partition(index)) else { continue };
            let owner = found.ownership.owner().map_or(OWNERS, |owner| {
                (0..OWNERS).find(|one| member(*one) == *owner).expect("one of the two")
            });
            let kind = owner * 2 + usize::from(found.ownership.is_revoking());
            let committed =
                found.committed.as_ref().map_or(0, |committed| committed.next_offset.get());
            self.core_key[index] = (
                u8::try_from(kind).unwrap(),
                found.epoch.map_or(0, Epoch::get),
                u8::try_from(committed).unwrap(),
            );
        }
        match applied.result {
            Ok(Reply::Verdicts(verdicts)) => verdicts.iter().all(Result::is_ok),
            Ok(_) => true,
            Err(_) => false,
        }
    }

    /// Who holds a partition now, under which epoch.
    fn current(&self, index: usize) -> Option<(usize, u64)> {
        let (kind, epoch, _) = self.core_key[index];
        let owner = usize::from(kind / 2);
        (owner < OWNERS).then_some((owner, epoch))
    }

    fn is_held(&self, owner: usize, index: usize) -> Option<u64> {
        let found = self.core.partition(&group(), partition(index)).ok()?;
        match &found.ownership {
            Ownership::Held { .. } => {
                self.current(index).filter(|(held_by, _)| *held_by == owner).map(|(_, epoch)| epoch)
            }
            Ownership::Revoking { .. } | Ownership::Free => None,
        }
    }

    /// The grant whose release the coordinator waits for.
    fn asked_back(&self, owner: usize, index: usize) -> Option<u64> {
        let is_revoking = self.core_key[index].0 % 2 == 1;
        let current = self.current(index).filter(|(holder, _)| is_revoking && *holder == owner);
        current.map(|(_, epoch)| epoch)
    }

    fn break_rule(&mut self, rule: &'static str) {
        self.broken.get_or_insert(rule);
    }
}

const fn epoch_of(work: Work) -> Option<u64> {
    match work {
        Work::None => None,
        Work::Granted { epoch }
        | Work::Registered { epoch, .. }
        | Work::Ended { epoch }
        | Work::Running { epoch, .. } => Some(epoch),
    }
}

fn breaks(name: &str, model: Handover) -> bool {
    let found = explore(name, model);
    let broken = found.iter().find(|(property, _)| *property == "no rule is broken");
    println!("{name}: {broken:?}");
    assert!(broken.is_some() || found.len() == 1, "{name}: too little can happen");
    broken.is_some()
}

const fn honest(fence: Fence) -> Handover {
    Handover { fence, gone: None, moves_max: 2, records: 1, expires: false }
}

#[test]
fn no_order_of_steps_breaks_a_rule_where_the_epoch_fences() {
    assert!(!breaks("epoch fences", honest(Fence::Epoch)));
}

#[test]
fn no_order_of_steps_breaks_a_rule_where_the_last_registration_fences() {
    assert!(!breaks("last registration fences", honest(Fence::LastRegistered)));
}

#[test]
fn no_order_of_steps_breaks_a_rule_with_expiries_and_elections() {
    let model = Handover { expires: true, moves_max: 1, ..honest(Fence::Epoch) };
    assert!(!breaks("expiries and elections", model));
}

#[test]
fn each_guard_that_is_taken_away_gives_a_counter_example() {
    use Fence::{Epoch, LastRegistered};
    for (gone, fence) in [
        (Gone::SinkCheck, Epoch),
        (Gone::SinkCheck, LastRegistered),
        (Gone::Verify, LastRegistered),
        (Gone::VerifyEpoch, LastRegistered),
        (Gone::CommitEpoch, Epoch),
        (Gone::ReleaseEpoch, Epoch),
        (Gone::FinalOffset, Epoch),
        (Gone::ExpiryTerm, Epoch),
    ] {
        let expires = gone == Gone::ExpiryTerm;
        let model = Handover { gone: Some(gone), expires, ..honest(fence) };
        let name = format!("without {gone:?}, {fence:?}");
        assert!(breaks(&name, model), "{name}");
    }
}

/// Where the epoch itself fences at the sink, verify keeps nobody out who was not kept out already.
#[test]
fn verify_is_needed_only_where_the_last_registration_fences() {
    let model = Handover { gone: Some(Gone::Verify), ..honest(Fence::Epoch) };
    assert!(!breaks("without Verify, Epoch", model));
}
