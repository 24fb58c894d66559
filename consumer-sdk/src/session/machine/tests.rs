//! Scripts through the machine.
//!
//! Each line is a moment in milliseconds and an input; the machine's own wake-ups between two lines happen by
//! themselves, unless a `!` after the moment says that the process slept until then. The ttl is 3000, the interval 1000,
//! the drift 100. Partitions are `0:e7` (number and epoch), `0:e7/500` with 500 ms of its drain left.

use tenure_model::{PartitionIndex, TopicId};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;

use super::*;

mod grants;
mod leases;
mod lists;
mod membership;
mod nodes;
mod progress;
mod property;
mod streams;

pub(super) const TTL_MS: u64 = 3000;
pub(super) const INTERVAL_MS: u64 = 1000;
pub(super) const DRIFT_MS: u64 = 100;

pub(super) fn settings(seed: u64) -> Settings {
    Settings {
        coordinators: vec!["a:1".into(), "b:1".into(), "c:1".into()],
        group: GroupId::new("g").unwrap(),
        member: MemberId::new("m").unwrap(),
        instance: None,
        returning_within: None,
        topics: vec![TopicName::new("t").unwrap()],
        settings: GroupSettings::default(),
        lease: LeaseSettings {
            ttl_ms: TTL_MS,
            heartbeat_interval_ms: INTERVAL_MS,
            clock_drift_max_ms: DRIFT_MS,
        },
        partitions_max: None,
        client: String::new(),
        rejoin: true,
        prepares: true,
        weight: 1,
        labels: std::collections::BTreeMap::new(),
        seed,
    }
}

pub(super) fn partition(index: u32) -> Partition {
    Partition { topic_id: TopicId::from_bits(1), index: PartitionIndex::new(index).unwrap() }
}

pub(super) const fn at_ms(ms: u64) -> Tick {
    Tick(ms * 1_000_000)
}

pub(super) fn joined(member_epoch: u64, assignment: v1::Assignment) -> Input {
    Input::Received(v1::SessionDown {
        down: Some(Down::Joined(v1::Joined {
            member_epoch,
            ttl_ms: TTL_MS,
            heartbeat_interval_ms: INTERVAL_MS,
            clock_drift_max_ms: DRIFT_MS,
            assignment: Some(assignment),
            node_address: String::new(),
        })),
    })
}

pub(super) fn down(down: Down) -> Input {
    Input::Received(v1::SessionDown { down: Some(down) })
}

fn error(code: &str, leader: &str) -> v1::Error {
    v1::Error { code: code.into(), leader_address: leader.into(), ..v1::Error::default() }
}

fn parse_assignment(words: &[&str]) -> v1::Assignment {
    let (listed, preparing): (Vec<&str>, Vec<&str>) =
        words[1..].iter().partition(|word| !word.starts_with("prepare:"));
    let preparing = preparing.iter().map(|word| {
        // prepare:2@40/500: partition 2, read at 40, 500 ms left.
        let (index, rest) = word["prepare:".len()..].split_once('@').unwrap();
        let (offset, remaining) = rest.split_once('/').unwrap();
        v1::Preparing {
            partition: Some(partition_to_wire(partition(index.parse().unwrap()))),
            topic: "t".into(),
            home_initialised: true,
            next_offset: Some(offset.parse().unwrap()),
            remaining_ms: remaining.parse().unwrap(),
        }
    });
    let preparing = preparing.collect();
    let partitions = listed.iter().map(|word| {
        let (index, rest) = word.split_once(":e").unwrap();
        let (rest, token) = rest.split_once('+').unwrap_or((rest, ""));
        let (epoch, drain) = rest.split_once('/').map_or((rest, None), |(e, d)| (e, Some(d)));
        v1::Assigned {
            partition: Some(partition_to_wire(partition(index.parse().unwrap()))),
            topic: "t".into(),
            epoch: epoch.parse().unwrap(),
            revoking: drain.is_some(),
            drain_remaining_ms: drain.map_or(0, |ms| ms.parse().unwrap()),
            home_initialised: false,
            handoff: 1,
            token: token.into(),
        }
    });
    let version = words[0][1..].parse().unwrap();
    v1::Assignment { version, partitions: partitions.collect(), preparing }
}

fn parse_grant(word: &str) -> (Partition, Epoch) {
    let (index, epoch) = word.split_once(":e").unwrap();
    (partition(index.parse().unwrap()), Epoch::new(epoch.parse().unwrap()).unwrap())
}

fn parse(words: &[&str]) -> Input {
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    match words[0] {
        "tick" => Input::Tick,
        "connected" => Input::Connected,
        "unreachable" => Input::ConnectFailed { error: "refused".into() },
        "broken" if words.len() == 1 => Input::Disconnected { error: None },
        "broken" => {
            let leader = words.get(2).copied().unwrap_or("");
            Input::Disconnected { error: Some(error(words[1], leader)) }
        }
        "joined" => joined(number(1), parse_assignment(&words[2..])),
        "answer" => down(Down::HeartbeatAnswer(v1::HeartbeatAnswer {
            sequence: number(1),
            assignment: Some(parse_assignment(&words[2..])),
            as_held: 0,
        })),
        "as-held" => down(Down::HeartbeatAnswer(v1::HeartbeatAnswer {
            sequence: number(1),
            assignment: None,
            as_held: words[2][1..].parse().unwrap(),
        })),
        "assign" => down(Down::Assignment(parse_assignment(&words[1..]))),
        "done" => down(Down::ActAnswer(v1::ActAnswer { request: number(1), error: None })),
        "refused" => down(Down::ActAnswer(v1::ActAnswer {
            request: number(1),
            error: Some(error(words[2], "")),
        })),
        "ended" => down(Down::Ended(v1::Ended { error: Some(error(words[1], "")) })),
        "topics" => Input::Act(Act::ReportTopics {
            topics: vec![TopicInfo {
                topic: TopicName::new("t").unwrap(),
                topic_id: TopicId::from_bits(1),
                partition_count: u32::try_from(number(1)).unwrap(),
            }],
        }),
        "prepared" => Input::Act(Act::Prepared {
            partition: partition(words[1].parse().unwrap()),
            error: words.get(2).map(|text| (*text).to_owned()),
        }),
        "subscribe" => Input::Act(Act::Subscribe {
            topics: words[1..].iter().map(|topic| TopicName::new(topic).unwrap()).collect(),
        }),
        "leave" => Input::Act(Act::Leave { reason: "bye".into() }),
        act => {
            let (partition, epoch) = parse_grant(words[1]);
            let offset = NextOffset::new(number(2)).unwrap();
            Input::Act(match act {
                "acquired" => {
                    Act::Acquired { partition, epoch, home_initialised: true, resume: offset }
                }
                "draining" => Act::Phase {
                    partition,
                    epoch,
                    phase: Phase::Draining,
                    position: offset,
                    error: None,
                },
                "release" | "shutdown" => Act::Release {
                    partition,
                    epoch,
                    next_offset: Some(offset),
                    reason: match act {
                        "shutdown" => ReleaseReason::Shutdown,
                        _ => ReleaseReason::Revoked,
                    },
                    error: String::new(),
                },
                other => panic!("no input {other:?}"),
            })
        }
    }
}

fn index_of(wire: Option<&v1::Partition>) -> u32 {
    wire.unwrap().index
}

fn released(partitions: &[v1::Released]) -> String {
    let texts = partitions.iter().map(|released| {
        let offset = released.next_offset.map_or_else(String::new, |offset| format!("@{offset}"));
        let reason = released.reason().as_str_name().trim_start_matches("RELEASE_REASON_");
        let index = index_of(released.partition.as_ref());
        format!(" {index}:e{}{offset} {}", released.epoch, reason.to_lowercase())
    });
    texts.collect()
}

fn sent_text(up: &v1::SessionUp) -> String {
    match up.up.as_ref().unwrap() {
        Up::Join(join) => {
            let topics: String = join
                .report
                .iter()
                .map(|topic| format!(" topics {}", topic.partition_count))
                .collect();
            format!("join {} epoch {}{topics}", join.member, join.member_epoch)
        }
        Up::Heartbeat(heartbeat) => {
            let held: String = heartbeat
                .held
                .iter()
                .map(|held| {
                    let phase = held.phase().as_str_name().trim_start_matches("PHASE_");
                    let index = index_of(held.partition.as_ref());
                    let (epoch, position) = (held.epoch, held.position);
                    format!(
                        " {index}:e{epoch}@{position} {} {}ms",
                        phase.to_lowercase(),
                        held.phase_ms
                    )
                })
                .collect();
            let (sequence, version) = (heartbeat.sequence, heartbeat.assignment_version);
            match &heartbeat.as_listed {
                Some(v1::HeldAsListed { version, positions, .. }) => {
                    assert_eq!(held, "", "the short form stands in place of the list");
                    format!("heartbeat {sequence} as listed v{version}@{positions:?}")
                }
                None => format!("heartbeat {sequence} v{version}{held}"),
            }
        }
        Up::Acquired(acquired) => {
            let index = index_of(acquired.partition.as_ref());
            format!("acquired #{} {index}:e{}", acquired.request, acquired.epoch)
        }
        Up::Release(release) => {
            format!("release #{}{}", release.request, released(&release.partitions))
        }
        Up::ReportTopics(report) => {
            format!("topics #{} {}", report.request, report.topics[0].partition_count)
        }
        Up::Prepared(prepared) => {
            let index = index_of(prepared.partition.as_ref());
            format!("prepared #{} {index}{}", prepared.request, prepared.error)
        }
        Up::Leave(leave) => {
            let back = match leave.returning_within_ms {
                0 => String::new(),
                length => format!(" back within {length}ms"),
            };
            format!("leave #{}{}{back}", leave.request, released(&leave.partitions))
        }
    }
}

fn text(output: &Output) -> String {
    let ms = |tick: &Tick| tick.0 / 1_000_000;
    let grant = |partition: &Partition, epoch: &Epoch| format!("{}:{epoch}", partition.index);
    match output {
        Output::Connect { address } => format!("connect {address}"),
        Output::Disconnect => "disconnect".into(),
        Output::Send(up) => sent_text(up),
        Output::Joined { member, member_epoch } => format!("JOINED {member} {member_epoch}"),
        Output::LeaderFound { address } => format!("leader {address}"),
        Output::LeaseEnds { at: Some(at) } => format!("lease to {}", ms(at)),
        Output::LeaseEnds { at: None } => "no lease".into(),
        Output::Prepare(preparing) => format!(
            "PREPARE {} from {} by {}",
            preparing.partition.index,
            preparing.next_offset.unwrap(),
            ms(&preparing.deadline)
        ),
        Output::PreparationEnded { partition } => format!("CALLED OFF {}", partition.index),
        Output::LeaseAtRisk { ends_at } => format!("AT RISK until {}", ms(ends_at)),
        Output::LeaseRenewed => "RENEWED".into(),
        Output::Granted(granted) => {
            let grant = grant(&granted.partition, &granted.epoch);
            let token =
                granted.token.as_ref().map_or(String::new(), |token| format!(" with {token}"));
            format!("GRANTED {grant} to {}{token}", ms(&granted.ends_at))
        }
        Output::Lease { partition, epoch, change } => {
            let grant = grant(partition, epoch);
            match change {
                LeaseChange::Extended(at) => format!("{grant} extended to {}", ms(at)),
                LeaseChange::Shortened(at) => format!("{grant} shortened to {}", ms(at)),
                LeaseChange::Stopped => format!("{grant} stopped"),
            }
        }
        Output::Revoked { partition, epoch, deadline } => {
            format!("REVOKED {} by {}", grant(partition, epoch), ms(deadline))
        }
        Output::Lost { partition, epoch, cause } => {
            let cause = format!("{cause:?}");
            // The text in it is for people.
            let cause = cause.split("(\"").next().unwrap_or_default();
            format!("LOST {} {cause}", grant(partition, epoch))
        }
        Output::Ended { cause: EndCause::Refused { code, .. } } => format!("ENDED {code}"),
        Output::Ended { cause } => format!("ENDED {cause:?}"),
    }
}

fn run(script: &str) -> Vec<String> {
    run_as(settings(1), script)
}

fn run_as(settings: Settings, script: &str) -> Vec<String> {
    let mut machine = Machine::new(settings);
    let mut lines = Vec::new();
    let mut handle = |machine: &mut Machine, input: Input, now: Tick, what: &str| {
        for output in machine.handle(input, now) {
            lines.push(format!("{what} -> {}", text(&output)));
        }
    };
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (moment, rest) = line.split_once(' ').unwrap();
        let slept = moment.ends_with('!');
        let now = at_ms(moment.trim_end_matches('!').parse().unwrap());
        while let Some(wake) = machine.next_wake().filter(|wake| !slept && *wake < now) {
            handle(&mut machine, Input::Tick, wake, "wake");
            assert!(machine.next_wake().is_none_or(|next| next > wake), "wakes for nothing");
        }
        let words: Vec<&str> = rest.split(' ').collect();
        handle(&mut machine, parse(&words), now, line);
    }
    lines
}

#[track_caller]
fn check(script: &str, want: &str) {
    compare(&run(script), want);
}

/// As [`check`], of a member that connected at 0 and was granted `grants` by version 5 at 1, until 2900.
#[track_caller]
fn check_holding(grants: &str, script: &str, want: &str) {
    let joined = format!("1 joined 7 v5 {grants}");
    let granted: String =
        grants.split(' ').map(|grant| format!("{joined} -> GRANTED {grant} to 2900\n")).collect();
    let opening = format!(
        "0 tick -> connect a:1
        0 connected -> join m epoch 0
        {joined} -> JOINED m 7
        {joined} -> lease to 2900
        {granted}"
    );
    check(&format!("0 tick\n0 connected\n{joined}\n{script}"), &format!("{opening}{want}"));
}

#[track_caller]
fn compare(got: &[String], want: &str) {
    let want: Vec<&str> = want.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(got == want, "got:\n{}\n\nwant:\n{}", got.join("\n"), want.join("\n"));
}
