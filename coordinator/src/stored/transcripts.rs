//! Golden transcripts: what commands of the past come to, for each feature level.
//!
//! `core/tests/transcripts/level-N/*.txt` hold the commands in their stored form with everything that they came to.
//! A rule that changes without a level of its own shows here. `TENURE_WRITE_TRANSCRIPTS=1` writes the files anew: right
//! after a type was renamed, and for a new level; never because a rule has changed.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use tenure_core::command::{
    AcknowledgeAcquired, CommitOffsets, Context, DrainMember, GrantRef, InstallTarget, JoinGroup,
    LeaveGroup, MemberRef, MovePartition, OffsetCommit, OperatorContext, RebalanceGroup, Release,
    ReleasePartitions, ReleaseReason, ReportTopics, SilentMember, TopicReport,
};
use tenure_core::level::NEWEST;
use tenure_core::{Command, State};
use tenure_model::{
    CommitSequence, Epoch, FeatureLevel, GroupEpoch, GroupSettings, Index, MemberEpoch, MemberId,
    NextOffset, Partition, PartitionIndex, Term, Timestamp, TopicId,
};

use super::tests::{busy_commands, bytes_of, commands, hex};
use super::{decode_batch, digest_of, encode_batch};

const TERM: Term = Term(2);

fn folder(level: FeatureLevel) -> PathBuf {
    // From the folder that tests run in: one that was compiled in may be another checkout's, which shares the target folder.
    Path::new("core/tests/transcripts").join(format!("level-{level}"))
}

/// Starts at `level`; each entry is one command.
struct Play {
    state: State,
    text: String,
}

impl Play {
    fn new(level: FeatureLevel) -> Self {
        let mut state = State::default();
        if level > state.level {
            let raise = Command::RaiseFeatureLevel { level };
            let context = Context { term: TERM, index: Index(0), proposed_at: Timestamp(0) };
            state.apply(context, &raise).result.unwrap();
        }
        Self { state, text: String::new() }
    }

    fn step(&mut self, command: &Command) {
        let index = Index(self.state.applied.0 + 1);
        let proposed_at = Timestamp(1_000 + index.0);
        let bytes = encode_batch(proposed_at, std::slice::from_ref(command));
        let applied = self.state.apply(Context { term: TERM, index, proposed_at }, command);
        let text = &mut self.text;
        writeln!(text, "{index} {command:?}\n  entry {}", hex(&bytes)).unwrap();
        for event in &applied.events {
            writeln!(text, "  + {event:?}").unwrap();
        }
        match applied.result {
            Ok(reply) => writeln!(text, "  = {reply:?}").unwrap(),
            Err(rejection) => writeln!(text, "  no: {rejection}").unwrap(),
        }
        writeln!(text, "  digest {}", digest_of(&self.state)).unwrap();
    }
}

fn entries(transcript: &str) -> impl Iterator<Item = Command> {
    transcript.lines().filter_map(|line| line.strip_prefix("  entry ")).flat_map(|line| {
        let entry = Bytes::from(bytes_of(line));
        decode_batch(&entry).unwrap().commands
    })
}

fn play(level: FeatureLevel, commands: impl IntoIterator<Item = Command>) -> String {
    let mut play = Play::new(level);
    for command in commands {
        play.step(&command);
    }
    play.text
}

#[test]
fn commands_of_the_past_come_to_what_they_came_to_at_every_level() {
    if std::env::var_os("TENURE_WRITE_TRANSCRIPTS").is_some() {
        write_all();
    }
    for level in 1..=NEWEST.0.min(NEWEST_WRITTEN) {
        let level = FeatureLevel(level);
        let mut files: Vec<PathBuf> =
            fs::read_dir(folder(level)).unwrap().map(|file| file.unwrap().path()).collect();
        files.sort();
        assert!(!files.is_empty(), "level {level} has transcripts");
        for file in files {
            let want = fs::read_to_string(&file).unwrap();
            let found = play(level, entries(&want));
            let differs = found.lines().zip(want.lines()).find(|(found, want)| found != want);
            assert!(found == want, "{}: {differs:#?}", file.display());
        }
    }
}

/// The level of the tests of upgrades has no transcripts.
const NEWEST_WRITTEN: u32 = 1;

fn write_all() {
    let level = NEWEST;
    let folder = folder(level);
    fs::create_dir_all(&folder).unwrap();
    let is_of_level = |command: &Command| !matches!(command, Command::RaiseFeatureLevel { .. });
    let story = busy_commands().into_iter().chain(commands().into_iter().filter(is_of_level));
    let texts = [("story", play(level, story)), ("walk", play(level, walk(level)))];
    for (name, text) in texts {
        fs::write(folder.join(format!("{name}.txt")), text).unwrap();
    }
}

/// A walk of members, targets and offsets, half of it refused. The same at every run.
fn walk(level: FeatureLevel) -> Vec<Command> {
    let mut play = Play::new(level);
    let mut dice = Dice(42);
    (0..160)
        .map(|step| {
            let command = dice.command(&play.state, step);
            play.step(&command);
            command
        })
        .collect()
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn member(&mut self) -> MemberId {
        ["ann", "bob", "cat"][self.roll(3) as usize].parse().unwrap()
    }

    /// One that is owned, if there is one, or now and then any.
    fn partition(&mut self, state: &State) -> Partition {
        let group = state.groups.get(&"g".parse().unwrap());
        let owned: Vec<Partition> = group
            .map(|group| {
                let owned =
                    group.partitions.iter().filter(|(_, at)| at.ownership.owner().is_some());
                owned.map(|(partition, _)| *partition).collect()
            })
            .unwrap_or_default();
        if !owned.is_empty() && self.roll(4) > 0 {
            return owned[self.roll(owned.len() as u64) as usize];
        }
        let index = PartitionIndex::new(self.roll(4) as u32).unwrap();
        Partition { topic_id: TopicId::from_bits(7), index }
    }

    /// The partition's epoch, or now and then the one before.
    fn grant(&mut self, state: &State) -> (Partition, Epoch) {
        let partition = self.partition(state);
        let group = state.groups.get(&"g".parse().unwrap());
        let known = group.and_then(|group| group.partitions.get(&partition)?.epoch);
        let epoch = known.map_or(1, Epoch::get);
        let late = u64::from(self.roll(8) == 0 && epoch > 1);
        (partition, Epoch::new(epoch - late).unwrap())
    }

    /// Its owner, or now and then somebody.
    fn owner(&mut self, state: &State, partition: Partition) -> MemberId {
        let group = state.groups.get(&"g".parse().unwrap());
        let owner =
            group.and_then(|group| group.partitions.get(&partition)?.ownership.owner().cloned());
        match owner {
            Some(owner) if self.roll(8) > 0 => owner,
            _ => self.member(),
        }
    }

    fn member_ref(&mut self, state: &State) -> MemberRef {
        let member = self.member();
        let group = "g".parse().unwrap();
        let known = state.groups.get(&group).and_then(|group| group.members.get(&member));
        let member_epoch = known.map_or(MemberEpoch(1), |known| known.epoch);
        MemberRef { group, member, member_epoch }
    }

    fn target(&mut self) -> Vec<(Partition, MemberId)> {
        (0..4)
            .map(|index| {
                let index = PartitionIndex::new(index).unwrap();
                (Partition { topic_id: TopicId::from_bits(7), index }, self.member())
            })
            .collect()
    }

    fn command(&mut self, state: &State, step: u64) -> Command {
        let group = || "g".parse().unwrap();
        let group_epoch = state.groups.get(&group()).map_or(GroupEpoch(0), |group| group.epoch);
        let operator = || OperatorContext {
            request: format!("r-{step}").parse().unwrap(),
            reason: "try".into(),
            actor: "ann".into(),
        };
        let (partition, epoch) = self.grant(state);
        let member = self.owner(state, partition);
        // Members that leave, expire or drain are rare: there must be somebody to own.
        let kind = match self.roll(20) {
            3 | 5 | 19 if self.roll(4) > 0 => 13,
            kind => kind,
        };
        match kind {
            0..=2 => Command::JoinGroup(JoinGroup {
                group: group(),
                // A member that has left is gone: others come under new names.
                member: format!("{}-{}", self.member(), step / 40).parse().unwrap_or(member),
                instance: None,
                topics: vec!["orders".parse().unwrap()],
                settings: GroupSettings::default(),
                ttl_ms: 10_000,
                heartbeat_interval_ms: 3_000,
                client: "host/1".into(),
                partitions_max: (self.roll(4) == 0).then_some(1),
                report: vec![self.report()],
                rejoin: None,
                prepares: false,
                weight: 1,
            }),
            3 => Command::LeaveGroup(LeaveGroup {
                group: group(),
                member,
                partitions: vec![self.release(partition, epoch)],
                reason: "stop".into(),
                returning_within_ms: None,
            }),
            4 => Command::ReportTopics(ReportTopics {
                group: group(),
                member,
                topics: vec![self.report()],
            }),
            5 => Command::ExpireMembers { term: TERM, members: vec![self.named(state)] },
            6 => Command::MarkMembersSilent {
                term: TERM,
                members: vec![SilentMember { member: self.named(state), silent_for_ms: 4_000 }],
            },
            7 => Command::MarkMembersHeard { term: TERM, members: vec![self.named(state)] },
            8 | 9 => Command::InstallTarget(InstallTarget {
                group: group(),
                group_epoch,
                target: self.live_target(state),
                line_by_line: self.roll(4) == 0,
            }),
            10 | 11 => Command::ReleasePartitions(ReleasePartitions {
                group: group(),
                member,
                partitions: vec![self.release(partition, epoch)],
            }),
            12 => Command::AcknowledgeAcquired(AcknowledgeAcquired {
                group: group(),
                member,
                partition,
                epoch,
                home_initialised: self.roll(2) == 0,
            }),
            13..=15 => Command::CommitOffsets(CommitOffsets {
                group: group(),
                member,
                commits: vec![OffsetCommit {
                    partition,
                    epoch,
                    sequence: CommitSequence(step),
                    next_offset: NextOffset::new(step * 10).unwrap(),
                    metadata: if self.roll(2) == 0 { b"note".to_vec() } else { vec![] },
                }],
            }),
            16 => {
                let grants = vec![GrantRef { group: group(), partition, epoch }];
                if self.roll(2) == 0 {
                    Command::ExpireRevocations { term: TERM, grants }
                } else {
                    Command::ExpireAcquisitions { term: TERM, grants }
                }
            }
            17 => Command::LiftHolds { term: TERM, partitions: vec![(group(), partition)] },
            18 if self.roll(2) == 0 => Command::MovePartition(MovePartition {
                operator: operator(),
                group: group(),
                partition,
                to: self.named(state).member,
            }),
            18 => Command::RebalanceGroup(RebalanceGroup {
                operator: operator(),
                group: group(),
                group_epoch,
                target: self.live_target(state),
            }),
            _ => Command::DrainMember(DrainMember {
                operator: operator(),
                group: group(),
                member: self.named(state).member,
                undrain: self.roll(2) == 0,
            }),
        }
    }

    fn report(&mut self) -> TopicReport {
        let partition_count = 2 + self.roll(3) as u32;
        TopicReport {
            topic: "orders".parse().unwrap(),
            topic_id: TopicId::from_bits(7),
            partition_count,
        }
    }

    fn release(&mut self, partition: Partition, epoch: Epoch) -> Release {
        let (reason, error) = match self.roll(3) {
            0 => (ReleaseReason::AcquireFailed, "no sink".to_owned()),
            _ => (ReleaseReason::Revoked, String::new()),
        };
        let next_offset = (self.roll(2) == 0).then(|| NextOffset::new(self.roll(2_000)).unwrap());
        Release { partition, epoch, next_offset, reason, error }
    }

    /// Some live member, if there is one.
    fn named(&mut self, state: &State) -> MemberRef {
        let live = self.live(state);
        if live.is_empty() {
            return self.member_ref(state);
        }
        live[self.roll(live.len() as u64) as usize].clone()
    }

    fn live(&self, state: &State) -> Vec<MemberRef> {
        state.members().map(|(member, ..)| member).collect()
    }

    fn live_target(&mut self, state: &State) -> Vec<(Partition, MemberId)> {
        let live = self.live(state);
        if live.is_empty() {
            return self.target();
        }
        let group = state.groups.get(&"g".parse().unwrap());
        let partitions: Vec<Partition> =
            group.map(|group| group.partitions.keys().copied().collect()).unwrap_or_default();
        partitions
            .into_iter()
            .map(|partition| {
                let member = &live[self.roll(live.len() as u64) as usize].member;
                (partition, member.clone())
            })
            .collect()
    }
}
