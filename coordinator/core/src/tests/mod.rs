//! Scripts in, text out. Each line of a script is one entry, `command -> what came of it`.
//!
//! The group is `g`, the topic `t` unless another is named; `7` is its partition 7, `u/7` that of the topic u, and
//! `t#2/7` that of a second life of t. The first entry has index 1, all are of term 5 unless `in N` comes first.

mod history;
mod membership;
mod offsets;
mod operator;
mod ownership;
mod prepare;
mod property;

use std::fmt::Write as _;

use tenure_model::{
    CommitSequence, Epoch, GroupEpoch, GroupId, GroupSettings, Home, Index, InstanceId,
    MemberEpoch, MemberId, NextOffset, Partition, PartitionIndex, RequestId, SinkSetting, Term,
    Timestamp, TopicId, TopicName,
};

use crate::command::{
    AcknowledgeAcquired, AcknowledgePrepared, CommitOffsets, DrainMember, GrantRef, InstallTarget,
    JoinGroup, LeaveGroup, MemberRef, MovePartition, OffsetCommit, OperatorContext, RebalanceGroup,
    Release, ReleasePartitions, ReleaseReason, ReportTopics, RewindOffset, SilentMember,
    TopicReport,
};
use crate::event::FreeCause;
use crate::{Applied, Command, Context, Event, Reply, State};

const TERM: u64 = 5;

/// Runs the part before each `->` and compares the part after it.
fn check(script: &str) {
    let mut run = Run::default();
    let mut found = String::new();
    let mut want = String::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (command, answer) = line.split_once(" ->").unwrap_or((line, ""));
        writeln!(want, "{command} ->{answer}").unwrap();
        writeln!(found, "{command} -> {}", run.line(command.trim())).unwrap();
    }
    assert!(found == want, "found:\n{found}\nwanted:\n{want}");
}

#[derive(Default)]
struct Run {
    state: State,
    term_given: Option<u64>,
}

impl Run {
    fn line(&mut self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words.as_slice() {
            ["in", term] => {
                self.term_given = Some(term.parse().unwrap());
                "so be it".to_owned()
            }
            ["verify", name, at, epoch_text] => {
                let grant = (partition(at), epoch(epoch_text));
                match self.state.check_owner(&group(), &member(name), grant.0, grant.1) {
                    Ok(_) => "owner".to_owned(),
                    Err(rejection) => format!("no: {rejection}"),
                }
            }
            ["show", name] => self.show(name),
            ["due"] => self.due(),
            _ => {
                let command = self.command(&words);
                let applied = self.apply(&command);
                describe(&applied)
            }
        };
        readable(&answer)
    }

    fn apply(&mut self, command: &Command) -> Applied {
        let index = Index(self.state.applied.0 + 1);
        let context = Context { term: Term(TERM), index, proposed_at: Timestamp(index.0 * 1_000) };
        let before = self.state.clone();
        let applied = self.state.apply(context, command);
        if applied.result.is_err() {
            let untouched = State { applied: index, now: self.state.now, ..before };
            assert_eq!(self.state, untouched, "a rejection changes nothing");
        }
        self.state.invariants().unwrap();
        applied
    }

    fn show(&self, name: &str) -> String {
        match self.state.assignment(&group(), &member(name)) {
            Err(rejection) => format!("no: {rejection}"),
            Ok(assignment) => {
                let mut text = format!("version {}", assignment.version);
                for line in &assignment.partitions {
                    let flags = [
                        (line.revoking, " revoking"),
                        (line.home_initialised, " initialised"),
                        (line.starts_at_earliest, " from earliest"),
                    ];
                    write!(text, "; {} {}", line.partition, line.epoch).unwrap();
                    for (_, flag) in flags.iter().filter(|(set, _)| *set) {
                        text.push_str(flag);
                    }
                }
                for line in &assignment.preparing {
                    let owner = line.owner.as_ref().map_or("nobody", MemberId::as_str);
                    let offset = line.committed.map_or_else(String::new, |at| format!(" at {at}"));
                    write!(text, "; prepares {} of {owner}{offset}", line.partition).unwrap();
                }
                text
            }
        }
    }

    /// What the driver has to do.
    fn due(&self) -> String {
        let state = &self.state;
        let mut lines = Vec::new();
        lines.extend(state.groups_to_plan().map(|(_, epoch)| format!("plan for {epoch}")));
        lines.extend(state.partitions_acquiring().map(|(grant, owner, since)| {
            format!("{owner} acquires {} {} since {since}", grant.partition, grant.epoch)
        }));
        lines.extend(state.preparations().map(|preparation| {
            format!("{} prepares for {}", preparation.member, preparation.partition)
        }));
        lines.extend(state.partitions_revoking().map(|(grant, owner, since)| {
            format!("{owner} releases {} {} since {since}", grant.partition, grant.epoch)
        }));
        lines.extend(state.holds().map(|hold| {
            format!("hold {} after {} since {}", hold.partition, hold.failures, hold.since)
        }));
        lines.extend(state.members().filter_map(|(named, _, _, silence)| {
            let silence = silence?;
            Some(format!(
                "{} silent for {}ms at {}",
                named.member, silence.silent_for_ms, silence.index
            ))
        }));
        lines.extend(state.members_away().map(|(named, away)| {
            format!("{} away for {}ms at {}", named.member, away.returning_within_ms, away.since)
        }));
        if lines.is_empty() { "nothing".to_owned() } else { lines.join("; ") }
    }

    fn term(&self) -> Term {
        Term(self.term_given.unwrap_or(TERM))
    }

    fn group_epoch(&self) -> GroupEpoch {
        self.state.groups.get(&group()).map_or(GroupEpoch(0), |group| group.epoch)
    }

    fn membership(&self, text: &str) -> MemberRef {
        let (name, given) = text.split_once('@').map_or((text, None), |(n, e)| (n, Some(e)));
        let known = self.state.groups.get(&group()).and_then(|g| g.members.get(&member(name)));
        let member_epoch = given
            .map(|given| MemberEpoch(given.parse().unwrap()))
            .or_else(|| known.map(|known| known.epoch))
            .unwrap_or_default();
        MemberRef { group: group(), member: member(name), member_epoch }
    }

    fn command(&self, words: &[&str]) -> Command {
        let (group, term) = (group(), self.term());
        match words {
            ["join", name, rest @ ..] => Command::JoinGroup(join(name, rest)),
            ["sees", name, rest @ ..] => Command::ReportTopics(ReportTopics {
                group,
                member: member(name),
                topics: rest.iter().map(|text| report(text)).collect(),
            }),
            ["leave", name, rest @ ..] => Command::LeaveGroup(LeaveGroup {
                group,
                member: member(name),
                partitions: releases(rest),
                reason: String::new(),
                returning_within_ms: None,
            }),
            ["leave-for", returning_within_ms, name, rest @ ..] => {
                Command::LeaveGroup(LeaveGroup {
                    group,
                    member: member(name),
                    partitions: releases(rest),
                    reason: String::new(),
                    returning_within_ms: Some(returning_within_ms.parse().unwrap()),
                })
            }
            ["reserve", returning_within_ms, rest @ ..] => Command::ReserveMembers {
                term,
                members: self.memberships(rest),
                returning_within_ms: returning_within_ms.parse().unwrap(),
            },
            ["expire", rest @ ..] => {
                Command::ExpireMembers { term, members: self.memberships(rest) }
            }
            ["silent", name, silent_for_ms] => {
                let member = self.membership(name);
                let silent_for_ms = silent_for_ms.parse().unwrap();
                let members = vec![SilentMember { member, silent_for_ms }];
                Command::MarkMembersSilent { term, members }
            }
            ["heard", rest @ ..] => {
                Command::MarkMembersHeard { term, members: self.memberships(rest) }
            }
            ["target", rest @ ..] => self.install(self.group_epoch(), rest, false),
            ["target-for", epoch, rest @ ..] => {
                self.install(GroupEpoch(epoch.parse().unwrap()), rest, false)
            }
            ["lines-for", epoch, rest @ ..] => {
                self.install(GroupEpoch(epoch.parse().unwrap()), rest, true)
            }
            ["release", name, rest @ ..] => Command::ReleasePartitions(ReleasePartitions {
                group,
                member: member(name),
                partitions: releases(rest),
            }),
            ["acquired", name, at, epoch_text, rest @ ..] => {
                Command::AcknowledgeAcquired(AcknowledgeAcquired {
                    group,
                    member: member(name),
                    partition: partition(at),
                    epoch: epoch(epoch_text),
                    home_initialised: rest == ["home"],
                })
            }
            ["prepared", name, at] => Command::AcknowledgePrepared(preparation(name, at)),
            ["unprepared", name, at] => {
                Command::ExpirePreparations { term, preparations: vec![preparation(name, at)] }
            }
            ["rewind", request, name, to] => Command::RewindOffset(RewindOffset {
                group,
                member: member(name),
                commit: commit(to),
                request: RequestId::new(request).unwrap(),
            }),
            ["commit", name, rest @ ..] => Command::CommitOffsets(CommitOffsets {
                group,
                member: member(name),
                commits: rest.iter().map(|text| commit(text)).collect(),
            }),
            ["drained", rest @ ..] => Command::ExpireRevocations { term, grants: grants(rest) },
            ["unacquired", rest @ ..] => Command::ExpireAcquisitions { term, grants: grants(rest) },
            ["unserved", rest @ ..] => Command::TakeBackUnserved { term, grants: grants(rest) },
            ["lift", rest @ ..] => Command::LiftHolds {
                term,
                partitions: rest.iter().map(|at| (self::group(), partition(at))).collect(),
            },
            ["move", request, at, to] => Command::MovePartition(MovePartition {
                operator: operator(request),
                group,
                partition: partition(at),
                to: member(to),
            }),
            ["rebalance", request, rest @ ..] => Command::RebalanceGroup(RebalanceGroup {
                operator: operator(request),
                group,
                group_epoch: self.group_epoch(),
                target: target(rest),
            }),
            [verb @ ("drain" | "undrain"), request, name] => Command::DrainMember(DrainMember {
                operator: operator(request),
                group,
                member: member(name),
                undrain: *verb == "undrain",
            }),
            ["floor", request, floor] => {
                Command::RaiseEpochFloor { operator: operator(request), floor: epoch(floor) }
            }
            _ => panic!("no such command: {words:?}"),
        }
    }

    fn memberships(&self, words: &[&str]) -> Vec<MemberRef> {
        words.iter().map(|text| self.membership(text)).collect()
    }

    fn install(&self, group_epoch: GroupEpoch, lines: &[&str], line_by_line: bool) -> Command {
        let target = target(lines);
        Command::InstallTarget(InstallTarget { group: group(), group_epoch, target, line_by_line })
    }
}

fn group() -> GroupId {
    GroupId::new("g").unwrap()
}

fn member(name: &str) -> MemberId {
    MemberId::new(name).unwrap()
}

fn topic(name: &str) -> TopicName {
    TopicName::new(name).unwrap()
}

/// `t`, or `t#2` for the second life of t.
fn life(text: &str) -> (TopicName, TopicId) {
    match text.split_once('#') {
        None => (topic(text), TopicId::of_name(&topic(text))),
        Some((name, life)) => {
            (topic(name), TopicId::of_name(&topic(&format!("{name}:life:{life}"))))
        }
    }
}

fn partition(text: &str) -> Partition {
    let (name, index) = text.split_once('/').unwrap_or(("t", text));
    let index = PartitionIndex::new(index.parse().unwrap()).unwrap();
    Partition { topic_id: life(name).1, index }
}

fn epoch(text: &str) -> Epoch {
    Epoch::new(text.trim_start_matches('e').parse().unwrap()).unwrap()
}

fn operator(request: &str) -> OperatorContext {
    OperatorContext {
        request: RequestId::new(request).unwrap(),
        reason: "because".to_owned(),
        actor: "ops".to_owned(),
    }
}

/// `t=4`.
fn report(text: &str) -> TopicReport {
    let (name, count) = text.split_once('=').unwrap();
    let (topic, topic_id) = life(name);
    TopicReport { topic, topic_id, partition_count: count.parse().unwrap() }
}

/// `0=ann`.
fn target(words: &[&str]) -> Vec<(Partition, MemberId)> {
    let line = |text: &&str| {
        let (at, name) = text.split_once('=').unwrap();
        (partition(at), member(name))
    };
    words.iter().map(line).collect()
}

/// `7@e1`.
fn grant(text: &str) -> GrantRef {
    let (at, epoch_text) = text.split_once('@').unwrap();
    GrantRef { group: group(), partition: partition(at), epoch: epoch(epoch_text) }
}

fn grants(words: &[&str]) -> Vec<GrantRef> {
    words.iter().map(|text| grant(text)).collect()
}

/// `7@e1:42`, then `revoked` (the default), `shutdown`, `lost`, `fenced`, `acquire-failed` or `handler-failed`.
fn releases(words: &[&str]) -> Vec<Release> {
    let mut releases: Vec<Release> = Vec::new();
    for word in words {
        let reason = match *word {
            "revoked" => ReleaseReason::Revoked,
            "shutdown" => ReleaseReason::Shutdown,
            "lost" => ReleaseReason::LeaseLost,
            "fenced" => ReleaseReason::Fenced,
            "acquire-failed" => ReleaseReason::AcquireFailed,
            "handler-failed" => ReleaseReason::HandlerFailed,
            text => {
                let (text, offset) =
                    text.split_once(':').map_or((text, None), |(g, offset)| (g, Some(offset)));
                let GrantRef { partition, epoch, .. } = grant(text);
                releases.push(Release {
                    partition,
                    epoch,
                    next_offset: offset.map(next_offset),
                    reason: ReleaseReason::Revoked,
                    error: "sink is away".to_owned(),
                });
                continue;
            }
        };
        releases.last_mut().unwrap().reason = reason;
    }
    releases
}

fn next_offset(text: &str) -> NextOffset {
    NextOffset::new(text.parse().unwrap()).unwrap()
}

/// `7@e1#1:42`, or `7@e1#1:42:note` with metadata.
fn commit(text: &str) -> OffsetCommit {
    let (at, rest) = text.split_once('@').unwrap();
    let (epoch_text, rest) = rest.split_once('#').unwrap();
    let mut rest = rest.splitn(3, ':');
    let (partition, epoch) = (partition(at), epoch(epoch_text));
    let sequence = CommitSequence(rest.next().unwrap().parse().unwrap());
    let next_offset = next_offset(rest.next().unwrap());
    let metadata = rest.next().unwrap_or("").as_bytes().to_vec();
    OffsetCommit { partition, epoch, sequence, next_offset, metadata }
}

/// `join NAME [wants t,u] [cap N] [instance X] [ttl MS] [heartbeat MS] [client X] [rejoin N] [home sink] [sinks X]
/// [sees t=4]`.
fn join(name: &str, words: &[&str]) -> JoinGroup {
    let mut join = JoinGroup {
        group: group(),
        member: member(name),
        instance: None,
        topics: vec![topic("t")],
        settings: GroupSettings::default(),
        ttl_ms: 10_000,
        heartbeat_interval_ms: 3_000,
        client: String::new(),
        partitions_max: None,
        report: Vec::new(),
        rejoin: None,
        prepares: false,
        weight: 1,
    };
    for pair in words.chunks(2) {
        let value = pair[1];
        match pair[0] {
            "wants" if value == "nothing" => join.topics = Vec::new(),
            "wants" => join.topics = value.split(',').map(topic).collect(),
            "cap" => join.partitions_max = Some(value.parse().unwrap()),
            "instance" => join.instance = Some(InstanceId::new(value).unwrap()),
            "ttl" => join.ttl_ms = value.parse().unwrap(),
            "heartbeat" => join.heartbeat_interval_ms = value.parse().unwrap(),
            "client" => join.client = value.to_owned(),
            "rejoin" => join.rejoin = Some(MemberEpoch(value.parse().unwrap())),
            "home" => {
                assert_eq!(value, "sink");
                join.settings.home = Home::Sink;
            }
            "sinks" => {
                let sink = |name: &str| SinkSetting { name: name.to_owned(), enforces_epoch: true };
                join.settings.sinks = value.split(',').map(sink).collect();
            }
            "weight" => join.weight = value.parse().unwrap(),
            "prepares" => join.prepares = value == "yes",
            "sees" => join.report.push(report(value)),
            word => panic!("no such part of a join: {word}"),
        }
    }
    join
}

fn preparation(name: &str, at: &str) -> AcknowledgePrepared {
    AcknowledgePrepared { group: group(), member: member(name), partition: partition(at) }
}

/// Topic ids back to the names of the scripts.
fn readable(text: &str) -> String {
    let mut text = text.to_owned();
    for name in ["t", "t#2", "u"] {
        let id = life(name).1.to_string();
        let short = if name == "t" { String::new() } else { format!("{name}/") };
        text = text.replace(&format!("{id}/"), &short).replace(&id, name);
    }
    text
}

fn describe(applied: &Applied) -> String {
    let mut parts: Vec<String> = applied.events.iter().map(describe_event).collect();
    match &applied.result {
        Err(rejection) => parts.push(format!("no: {rejection}")),
        Ok(Reply::Joined { member_epoch, ttl_ms, .. }) => {
            parts.push(format!("member epoch {member_epoch}, ttl {ttl_ms}"));
        }
        Ok(Reply::Done) => {}
        Ok(Reply::Verdicts(verdicts)) => {
            parts.extend(
                verdicts.iter().filter_map(|v| v.as_ref().err()).map(|no| format!("no: {no}")),
            );
        }
        Ok(Reply::Operated { group_epoch, moves, .. }) => {
            let name = |id: &Option<MemberId>| {
                id.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string)
            };
            let moves: Vec<String> = moves
                .iter()
                .map(|m| format!("{} {}>{}", m.partition, name(&m.from), name(&m.to)))
                .collect();
            parts.push(format!("epoch {group_epoch} moves [{}]", moves.join(", ")));
        }
    }
    if parts.is_empty() { "ok".to_owned() } else { parts.join("; ") }
}

fn describe_event(event: &Event) -> String {
    match event {
        Event::GroupCreated { group, .. } => format!("group {group} created"),
        Event::MemberJoined(joined) => format!("{} joined", joined.member),
        Event::MemberUpdated(joined) => format!("{} updated", joined.member),
        Event::MemberLeft { member, .. } => format!("{member} left"),
        Event::MemberExpired { member, .. } => format!("{member} expired"),
        Event::MemberSilenced { member, silent_for_ms, .. } => {
            format!("{member} silent for {silent_for_ms}ms")
        }
        Event::MemberAway { member, returning_within_ms, .. } => {
            format!("{member} away for {returning_within_ms}ms")
        }
        Event::PlaceTaken { from, to, .. } => format!("{to} takes the place of {from}"),
        Event::MemberHeard { member, .. } => format!("{member} heard"),
        Event::MemberDrained { member, draining, .. } => {
            format!("{member} {}", if *draining { "draining" } else { "undrained" })
        }
        Event::TopicGrown { topic, partition_count, .. } => {
            format!("{topic} has {partition_count}")
        }
        Event::GroupEpochRaised { group_epoch, .. } => format!("group epoch {group_epoch}"),
        Event::TargetInstalled { group_epoch, .. } => format!("target for {group_epoch}"),
        Event::TargetConfirmed { group_epoch, .. } => format!("target holds for {group_epoch}"),
        Event::PartitionPinned { partition, member, .. } => {
            format!("{partition} pinned to {member}")
        }
        Event::PinsLifted { .. } => "pins lifted".to_owned(),
        Event::PartitionGranted { partition, member, epoch, .. } => {
            format!("{partition} to {member} at {epoch}")
        }
        Event::PreparationBegun { partition, member, .. } => {
            format!("{member} prepares for {partition}")
        }
        Event::PreparationReady { partition, member, .. } => {
            format!("{member} is ready for {partition}")
        }
        Event::PreparationCalledOff { partition, member, .. } => {
            format!("{member} need not prepare for {partition}")
        }
        Event::PartitionAcquired { partition, member, .. } => {
            format!("{partition} runs at {member}")
        }
        Event::PartitionRevoked { partition, member, .. } => {
            format!("{partition} asked back from {member}")
        }
        Event::PartitionReleased { partition, member, epoch, cause, .. } => {
            let cause = match cause {
                FreeCause::Released(_) => "released",
                FreeCause::Expired => "expired",
                FreeCause::Left => "left",
                FreeCause::DrainDeadline => "drain deadline",
                FreeCause::AcquireDeadline => "acquire deadline",
            };
            format!("{partition} {epoch} of {member} free: {cause}")
        }
        Event::PartitionHeldBack { partition, error, .. } => {
            format!("{partition} held back: {error}")
        }
        Event::HoldLifted { partition, .. } => format!("{partition} lifted"),
        Event::OffsetCommitted { commit, .. } => {
            format!("{} = {}", commit.partition, commit.next_offset)
        }
        Event::EpochFloorRaised { floor } => format!("floor {floor}"),
        Event::FeatureLevelRaised { level } => format!("level {level}"),
        Event::OperatorActed { request, .. } => format!("{request} logged"),
    }
}
