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

mod nodes;
mod progress;
mod property;

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

#[track_caller]
fn compare(got: &[String], want: &str) {
    let want: Vec<&str> = want.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(got == want, "got:\n{}\n\nwant:\n{}", got.join("\n"), want.join("\n"));
}

#[test]
fn lease_counts_from_the_send_and_not_from_the_receipt() {
    check(
        "
        0 tick
        10 connected
        900 joined 7 v5 0:e1
        1500 tick
        1900 answer 1 v5 0:e1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        900 joined 7 v5 0:e1 -> JOINED m 7
        900 joined 7 v5 0:e1 -> lease to 2910
        900 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        wake -> heartbeat 1 v5 0:e1@0 registering 110ms
        1900 answer 1 v5 0:e1 -> lease to 3910
        1900 answer 1 v5 0:e1 -> 0:e1 extended to 3910
        ",
    );
}

#[test]
fn token_that_came_before_the_lease_was_live_stays_with_the_grant() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1+first
        3000! assign v6 1:e2+second
        3000! answer 1 v6 1:e2
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1+first -> JOINED m 7
        1 joined 7 v5 0:e1+first -> lease to 2900
        1 joined 7 v5 0:e1+first -> GRANTED 0:e1 to 2900 with first
        3000! assign v6 1:e2+second -> 0:e1 stopped
        3000! assign v6 1:e2+second -> LOST 0:e1 LeaseEnded
        3000! assign v6 1:e2+second -> release #1 0:e1 lease_lost
        3000! assign v6 1:e2+second -> heartbeat 1 v6
        3000! answer 1 v6 1:e2 -> lease to 5900
        3000! answer 1 v6 1:e2 -> GRANTED 1:e2 to 5900 with second
        ",
    );
}

#[test]
fn late_wake_up_sends_at_once() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        2500! tick
        2510 answer 1 v5 0:e1
        3000 tick
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        2500! tick -> AT RISK until 2900
        2500! tick -> heartbeat 1 v5 0:e1@0 registering 2499ms
        2510 answer 1 v5 0:e1 -> lease to 5400
        2510 answer 1 v5 0:e1 -> 0:e1 extended to 5400
        2510 answer 1 v5 0:e1 -> RENEWED
        ",
    );
}

#[test]
fn answer_to_an_older_heartbeat_after_a_newer_one_moves_nothing() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        1001 answer 9 v5 0:e1
        1002 tick
        1400! answer 1 v5 0:e1
        2400! tick
        2401 answer 2 v5 0:e1
        2402 answer 1 v5 0:e1
        2403 answer 2 v5 0:e1
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        1400! answer 1 v5 0:e1 -> lease to 3900
        1400! answer 1 v5 0:e1 -> 0:e1 extended to 3900
        2400! tick -> heartbeat 2 v5 0:e1@0 registering 2399ms
        2401 answer 2 v5 0:e1 -> lease to 5300
        2401 answer 2 v5 0:e1 -> 0:e1 extended to 5300
        ",
    );
}

#[test]
fn answer_without_a_list_extends_what_its_heartbeat_named_and_the_next_one_is_short() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 acquired 0:e1 40
        11 done 1
        20 acquired 1:e2 50
        21 done 2
        1010 as-held 1 v5
        2010 as-held 2 v5
        3000 tick
        3001 broken
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 acquired 0:e1 40 -> acquired #1 0:e1
        20 acquired 1:e2 50 -> acquired #2 1:e2
        wake -> heartbeat 1 v5 0:e1@40 running 990ms 1:e2@50 running 980ms
        1010 as-held 1 v5 -> lease to 3900
        1010 as-held 1 v5 -> 0:e1 extended to 3900
        1010 as-held 1 v5 -> 1:e2 extended to 3900
        wake -> heartbeat 2 as listed v5@[40, 50]
        2010 as-held 2 v5 -> lease to 4900
        2010 as-held 2 v5 -> 0:e1 extended to 4900
        2010 as-held 2 v5 -> 1:e2 extended to 4900
        3000 tick -> heartbeat 3 as listed v5@[40, 50]
        ",
    );
}

#[test]
fn heartbeat_is_spelled_out_again_once_the_list_is_not_what_is_held_or_the_stream_is_new() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 acquired 0:e1 40
        11 done 1
        20 acquired 1:e2 50
        21 done 2
        1010 as-held 1 v5
        1500 release 0:e1 41
        2010 answer 2 v6 1:e2
        3010 answer 3 v6 1:e2
        3500 draining 1:e2 51
        4001 broken
        5001 connected
        5002 joined 7 v6 1:e2
        6010 answer 1 v6 1:e2
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 acquired 0:e1 40 -> acquired #1 0:e1
        20 acquired 1:e2 50 -> acquired #2 1:e2
        wake -> heartbeat 1 v5 0:e1@40 running 990ms 1:e2@50 running 980ms
        1010 as-held 1 v5 -> lease to 3900
        1010 as-held 1 v5 -> 0:e1 extended to 3900
        1010 as-held 1 v5 -> 1:e2 extended to 3900
        1500 release 0:e1 41 -> 0:e1 stopped
        1500 release 0:e1 41 -> release #3 0:e1@41 revoked
        wake -> heartbeat 2 v5 1:e2@50 running 1980ms
        2010 answer 2 v6 1:e2 -> lease to 4900
        2010 answer 2 v6 1:e2 -> 1:e2 extended to 4900
        wake -> heartbeat 3 as listed v6@[50]
        3010 answer 3 v6 1:e2 -> lease to 5900
        3010 answer 3 v6 1:e2 -> 1:e2 extended to 5900
        wake -> heartbeat 4 v6 1:e2@51 draining 500ms
        wake -> connect b:1
        wake -> AT RISK until 5900
        5001 connected -> join m epoch 7
        5002 joined 7 v6 1:e2 -> lease to 7901
        5002 joined 7 v6 1:e2 -> 1:e2 extended to 7901
        5002 joined 7 v6 1:e2 -> RENEWED
        5002 joined 7 v6 1:e2 -> release #3 0:e1@41 revoked
        wake -> heartbeat 1 v6 1:e2@51 draining 2501ms
        6010 answer 1 v6 1:e2 -> lease to 8901
        6010 answer 1 v6 1:e2 -> 1:e2 extended to 8901
        ",
    );
}

#[test]
fn answer_without_a_list_ends_what_came_and_went_meanwhile() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        1005 assign v6 0:e1 1:e2
        1010 as-held 1 v7
        2005 as-held 9 v8
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        1005 assign v6 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        1010 as-held 1 v7 -> lease to 3900
        1010 as-held 1 v7 -> 1:e2 stopped
        1010 as-held 1 v7 -> LOST 1:e2 Gone
        1010 as-held 1 v7 -> 0:e1 extended to 3900
        wake -> heartbeat 2 v7 0:e1@0 registering 1999ms
        ",
    );
}

#[test]
fn answer_without_a_list_of_an_old_version_moves_nothing() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        1005 assign v6 0:e1 1:e2
        1010 as-held 1 v5
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        1005 assign v6 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        ",
    );
}

#[test]
fn answer_with_an_old_version_extends_nothing_and_grants_nothing() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        500 assign v6 0:e1
        1100 answer 1 v5 0:e1 1:e2
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        wake -> heartbeat 1 v6 0:e1@0 registering 999ms
        ",
    );
}

#[test]
fn revoke_shortens_and_the_drain_is_counted_from_the_send() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        100 assign v6 0:e1/1500 1:e2
        1200 answer 1 v6 0:e1/500 1:e2
        1300 draining 0:e1 40
        1310 release 0:e1 41
        1320 done 1
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        100 assign v6 0:e1/1500 1:e2 -> REVOKED 0:e1 by 1500
        100 assign v6 0:e1/1500 1:e2 -> 0:e1 shortened to 1500
        wake -> heartbeat 1 v6 0:e1@0 registering 999ms 1:e2@0 registering 999ms
        1200 answer 1 v6 0:e1/500 1:e2 -> lease to 3900
        1200 answer 1 v6 0:e1/500 1:e2 -> 0:e1 shortened to 1400
        1200 answer 1 v6 0:e1/500 1:e2 -> 1:e2 extended to 3900
        1310 release 0:e1 41 -> 0:e1 stopped
        1310 release 0:e1 41 -> release #1 0:e1@41 revoked
        ",
    );
}

#[test]
fn long_drain_is_extended_by_answers_but_not_by_a_bare_assignment() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        900 assign v6 0:e1/30000
        1100 answer 1 v6 0:e1/29000
        1200 assign v7
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        900 assign v6 0:e1/30000 -> REVOKED 0:e1 by 30800
        wake -> heartbeat 1 v6 0:e1@0 registering 999ms
        1100 answer 1 v6 0:e1/29000 -> lease to 3900
        1100 answer 1 v6 0:e1/29000 -> 0:e1 extended to 3900
        1200 assign v7 -> 0:e1 stopped
        1200 assign v7 -> LOST 0:e1 Gone
        ",
    );
}

#[test]
fn drain_that_runs_out_ends_the_grant() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        100 assign v6 0:e1/500
        600 tick
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        100 assign v6 0:e1/500 -> REVOKED 0:e1 by 500
        100 assign v6 0:e1/500 -> 0:e1 shortened to 500
        wake -> 0:e1 stopped
        wake -> LOST 0:e1 LeaseEnded
        wake -> release #1 0:e1 lease_lost
        ",
    );
}

#[test]
fn epoch_that_ended_here_is_never_resumed_and_is_released_again() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e4
        10 release 0:e4 41
        20 assign v6 0:e4
        30 done 1
        40 assign v7 0:e4
        50 assign v8 0:e3
        60 refused 2 NOT_OWNED
        70 assign v9 0:e9
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e4 -> JOINED m 7
        1 joined 7 v5 0:e4 -> lease to 2900
        1 joined 7 v5 0:e4 -> GRANTED 0:e4 to 2900
        10 release 0:e4 41 -> 0:e4 stopped
        10 release 0:e4 41 -> release #1 0:e4@41 revoked
        40 assign v7 0:e4 -> release #2 0:e4 lease_lost
        50 assign v8 0:e3 -> release #3 0:e3 lease_lost
        70 assign v9 0:e9 -> GRANTED 0:e9 to 2900
        ",
    );
}

#[test]
fn higher_epoch_of_the_same_partition_ends_the_old_grant_first() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        20 assign v6 0:e2
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        20 assign v6 0:e2 -> 0:e1 stopped
        20 assign v6 0:e2 -> LOST 0:e1 Gone
        20 assign v6 0:e2 -> GRANTED 0:e2 to 2900
        ",
    );
}

#[test]
fn acts_are_said_again_after_a_reconnect_until_they_are_answered() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 topics 4
        20 acquired 0:e1 7
        30 release 1:e2 41
        40 done 1
        50 broken
        150 connected
        160 joined 7 v6 0:e1
        170 refused 3 OVERLOADED
        250 done 2
        260 done 3
        300 broken
        500 connected
        510 joined 7 v6 0:e1
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 topics 4 -> topics #1 4
        20 acquired 0:e1 7 -> acquired #2 0:e1
        30 release 1:e2 41 -> 1:e2 stopped
        30 release 1:e2 41 -> release #3 1:e2@41 revoked
        wake -> connect b:1
        150 connected -> join m epoch 7 topics 4
        160 joined 7 v6 0:e1 -> lease to 3050
        160 joined 7 v6 0:e1 -> 0:e1 extended to 3050
        160 joined 7 v6 0:e1 -> acquired #2 0:e1
        160 joined 7 v6 0:e1 -> release #3 1:e2@41 revoked
        wake -> release #3 1:e2@41 revoked
        wake -> connect c:1
        500 connected -> join m epoch 7 topics 4
        510 joined 7 v6 0:e1 -> lease to 3400
        510 joined 7 v6 0:e1 -> 0:e1 extended to 3400
        ",
    );
}

#[test]
fn redirect_is_followed_at_once_and_only_a_few_times() {
    check(
        "
        0 tick
        1 connected
        2 broken NOT_LEADER b:1
        3 connected
        4 broken NOT_LEADER c:1
        5 connected
        6 broken NOT_LEADER b:1
        7 connected
        8 broken NOT_LEADER c:1
        100 connected
        110 joined 7 v5
        ",
        "
        0 tick -> connect a:1
        1 connected -> join m epoch 0
        2 broken NOT_LEADER b:1 -> connect b:1
        3 connected -> join m epoch 0
        4 broken NOT_LEADER c:1 -> connect c:1
        5 connected -> join m epoch 0
        6 broken NOT_LEADER b:1 -> connect b:1
        7 connected -> join m epoch 0
        wake -> connect c:1
        100 connected -> join m epoch 0
        110 joined 7 v5 -> JOINED m 7
        110 joined 7 v5 -> lease to 3000
        ",
    );
}

#[test]
fn unreachable_nodes_are_tried_in_turn() {
    check(
        "
        0 tick
        1 unreachable
        100 unreachable
        300 unreachable
        700 unreachable
        1200 connected
        1210 broken NO_LEADER
        1520 tick
        ",
        "
        0 tick -> connect a:1
        wake -> connect b:1
        wake -> connect c:1
        wake -> connect a:1
        wake -> connect b:1
        1200 connected -> join m epoch 0
        wake -> connect c:1
        ",
    );
}

#[test]
fn lease_that_ran_out_loses_every_grant_and_releases_it_once_connected() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 acquired 0:e1 7
        20 broken
        120 unreachable
        3000! tick
        3001 connected
        3002 joined 7 v5 0:e1 1:e2
        3010 done 2
        3020 assign v6 0:e5
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 acquired 0:e1 7 -> acquired #1 0:e1
        wake -> connect b:1
        3000! tick -> 0:e1 stopped
        3000! tick -> LOST 0:e1 LeaseEnded
        3000! tick -> 1:e2 stopped
        3000! tick -> LOST 1:e2 LeaseEnded
        3000! tick -> connect c:1
        3001 connected -> join m epoch 7
        3002 joined 7 v5 0:e1 1:e2 -> lease to 5901
        3002 joined 7 v5 0:e1 1:e2 -> release #2 0:e1 lease_lost 1:e2 lease_lost
        3020 assign v6 0:e5 -> GRANTED 0:e5 to 5901
        ",
    );
}

#[test]
fn dead_stream_is_given_up_after_one_and_a_half_intervals() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        1600 tick
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        wake -> heartbeat 1 v5 0:e1@0 registering 999ms
        wake -> disconnect
        wake -> connect b:1
        ",
    );
}

#[test]
fn membership_that_is_gone_is_followed_by_one_under_a_new_id() {
    check(
        "
        0 tick
        0 connected
        1 topics 4
        2 joined 7 v50 0:e1
        10 ended MEMBER_GONE
        100 connected
        110 joined 9 v40 0:e3
        120 broken
        300 connected
        310 broken STALE_MEMBER
        800 connected
        810 broken MEMBER_GONE
        2000 connected
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        2 joined 7 v50 0:e1 -> JOINED m 7
        2 joined 7 v50 0:e1 -> lease to 2900
        2 joined 7 v50 0:e1 -> GRANTED 0:e1 to 2900
        2 joined 7 v50 0:e1 -> topics #1 4
        10 ended MEMBER_GONE -> disconnect
        10 ended MEMBER_GONE -> 0:e1 stopped
        10 ended MEMBER_GONE -> LOST 0:e1 MembershipEnded
        10 ended MEMBER_GONE -> no lease
        wake -> connect b:1
        100 connected -> join m.1 epoch 0 topics 4
        110 joined 9 v40 0:e3 -> JOINED m.1 9
        110 joined 9 v40 0:e3 -> lease to 3000
        110 joined 9 v40 0:e3 -> GRANTED 0:e3 to 3000
        wake -> connect c:1
        300 connected -> join m.1 epoch 9 topics 4
        310 broken STALE_MEMBER -> 0:e3 stopped
        310 broken STALE_MEMBER -> LOST 0:e3 MembershipEnded
        310 broken STALE_MEMBER -> no lease
        wake -> connect a:1
        800 connected -> join m.2 epoch 0 topics 4
        810 broken MEMBER_GONE -> no lease
        wake -> connect b:1
        2000 connected -> join m.3 epoch 0 topics 4
        ",
    );
}

#[test]
fn refusal_for_good_ends_the_session() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        10 broken
        100 connected
        110 broken SETTINGS_CONFLICT
        120 tick
        130 connected
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        wake -> connect b:1
        100 connected -> join m epoch 7
        110 broken SETTINGS_CONFLICT -> 0:e1 stopped
        110 broken SETTINGS_CONFLICT -> LOST 0:e1 MembershipEnded
        110 broken SETTINGS_CONFLICT -> no lease
        110 broken SETTINGS_CONFLICT -> ENDED SETTINGS_CONFLICT
        ",
    );
}

#[test]
fn messages_that_come_twice_change_nothing() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1
        2 joined 7 v5 0:e1
        10 assign v6 0:e1/9000
        11 assign v6 0:e1/9000
        20 release 0:e1 3
        30 done 1
        31 done 1
        40 release 0:e1 3
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 -> JOINED m 7
        1 joined 7 v5 0:e1 -> lease to 2900
        1 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2900
        10 assign v6 0:e1/9000 -> REVOKED 0:e1 by 8910
        20 release 0:e1 3 -> 0:e1 stopped
        20 release 0:e1 3 -> release #1 0:e1@3 revoked
        ",
    );
}

#[test]
fn refused_acquire_ends_the_grant() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 acquired 0:e1 7
        11 acquired 1:e2 7
        20 refused 1 FENCED
        30 refused 2 NOTHING_TO_DO
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 acquired 0:e1 7 -> acquired #1 0:e1
        11 acquired 1:e2 7 -> acquired #2 1:e2
        20 refused 1 FENCED -> 0:e1 stopped
        20 refused 1 FENCED -> LOST 0:e1 Fenced { current: None }
        ",
    );
}

#[test]
fn leave_carries_what_is_unanswered_and_is_said_until_answered() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 release 0:e1 41
        20 leave
        21 leave
        30 broken
        100 connected
        110 joined 7 v5 0:e1 1:e2
        120 done 2
        130 tick
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 release 0:e1 41 -> 0:e1 stopped
        10 release 0:e1 41 -> release #1 0:e1@41 revoked
        20 leave -> 1:e2 stopped
        20 leave -> LOST 1:e2 MembershipEnded
        20 leave -> leave #2 0:e1@41 revoked 1:e2 shutdown
        wake -> connect b:1
        100 connected -> join m epoch 7
        110 joined 7 v5 0:e1 1:e2 -> lease to 3000
        110 joined 7 v5 0:e1 1:e2 -> leave #2 0:e1@41 revoked 1:e2 shutdown
        120 done 2 -> disconnect
        120 done 2 -> ENDED Left
        ",
    );
}

#[test]
fn leave_before_any_join_ends_at_once() {
    check(
        "
        0 tick
        5 leave
        ",
        "
        0 tick -> connect a:1
        5 leave -> disconnect
        5 leave -> ENDED Left
        ",
    );
}

#[test]
fn heartbeat_carries_phases_and_positions() {
    check(
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 acquired 0:e1 7
        400 draining 0:e1 9
        1001 tick
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 acquired 0:e1 7 -> acquired #1 0:e1
        wake -> heartbeat 1 v5 0:e1@9 draining 600ms 1:e2@0 registering 999ms
        ",
    );
}

#[test]
fn lease_is_at_risk_once_two_heartbeats_have_no_answer_and_that_is_said_once() {
    check(
        "
        0 tick
        10 connected
        100 joined 7 v5 0:e1
        1200 broken
        2200 unreachable
        2300 tick
        2500 connected
        2600 joined 7 v5 0:e1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        100 joined 7 v5 0:e1 -> JOINED m 7
        100 joined 7 v5 0:e1 -> lease to 2910
        100 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        wake -> heartbeat 1 v5 0:e1@0 registering 910ms
        wake -> connect b:1
        wake -> AT RISK until 2910
        wake -> connect c:1
        2500 connected -> join m epoch 7
        2600 joined 7 v5 0:e1 -> lease to 5400
        2600 joined 7 v5 0:e1 -> 0:e1 extended to 5400
        2600 joined 7 v5 0:e1 -> RENEWED
        ",
    );
}

#[test]
fn lease_that_is_renewed_in_time_is_never_at_risk() {
    check(
        "
        0 tick
        10 connected
        900 joined 7 v5 0:e1
        1009 answer 1 v5 0:e1
        2005 answer 1 v5 0:e1
        2009 tick
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        900 joined 7 v5 0:e1 -> JOINED m 7
        900 joined 7 v5 0:e1 -> lease to 2910
        900 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        wake -> heartbeat 1 v5 0:e1@0 registering 110ms
        2005 answer 1 v5 0:e1 -> lease to 3910
        2005 answer 1 v5 0:e1 -> 0:e1 extended to 3910
        ",
    );
}

#[test]
fn what_is_to_come_is_told_once_and_its_preparation_said_once_until_it_comes() {
    check(
        "
        0 tick
        10 connected
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900
        30 assign v5 prepare:0@41/400 prepare:1@7/800
        40 prepared 0
        50 prepared 0
        60 prepared 2
        70 done 1
        80 assign v6 0:e3 prepare:1@7/700
        90 prepared 0
        100 assign v7 0:e3
        110 prepared 1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> JOINED m 7
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> lease to 2910
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> PREPARE 0 from 40 by 510
        20 joined 7 v5 prepare:0@40/500 prepare:1@7/900 -> PREPARE 1 from 7 by 910
        40 prepared 0 -> prepared #1 0
        80 assign v6 0:e3 prepare:1@7/700 -> GRANTED 0:e3 to 2910
        100 assign v7 0:e3 -> CALLED OFF 1
        ",
    );
}

#[test]
fn preparation_that_is_not_answered_is_said_again_and_ends_with_the_membership() {
    check(
        "
        0 tick
        10 connected
        20 joined 7 v5 prepare:0@40/500
        40 prepared 0 cold
        50 broken
        60 tick
        260 connected
        270 joined 7 v5 prepare:0@40/300
        280 ended MEMBER_GONE
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        20 joined 7 v5 prepare:0@40/500 -> JOINED m 7
        20 joined 7 v5 prepare:0@40/500 -> lease to 2910
        20 joined 7 v5 prepare:0@40/500 -> PREPARE 0 from 40 by 510
        40 prepared 0 cold -> prepared #1 0cold
        wake -> connect b:1
        260 connected -> join m epoch 7
        270 joined 7 v5 prepare:0@40/300 -> lease to 3160
        270 joined 7 v5 prepare:0@40/300 -> prepared #1 0cold
        280 ended MEMBER_GONE -> disconnect
        280 ended MEMBER_GONE -> CALLED OFF 0
        280 ended MEMBER_GONE -> no lease
        ",
    );
}

#[test]
fn other_topics_are_said_by_joining_anew_and_cost_no_lease() {
    check(
        "
        0 tick
        10 connected
        20 joined 7 v5 0:e1
        30 subscribe t
        40 subscribe t u
        50 connected
        60 joined 7 v5 0:e1
        ",
        "
        0 tick -> connect a:1
        10 connected -> join m epoch 0
        20 joined 7 v5 0:e1 -> JOINED m 7
        20 joined 7 v5 0:e1 -> lease to 2910
        20 joined 7 v5 0:e1 -> GRANTED 0:e1 to 2910
        40 subscribe t u -> disconnect
        40 subscribe t u -> connect b:1
        50 connected -> join m epoch 7
        60 joined 7 v5 0:e1 -> lease to 2950
        60 joined 7 v5 0:e1 -> 0:e1 extended to 2950
        ",
    );
}

#[test]
fn member_that_will_return_keeps_its_releases_for_the_leave() {
    let settings = Settings {
        instance: Some(InstanceId::new("x").unwrap()),
        returning_within: Some(Duration::from_secs(60)),
        ..settings(1)
    };
    let got = run_as(
        settings,
        "
        0 tick
        0 connected
        1 joined 7 v5 0:e1 1:e2
        10 shutdown 0:e1 41
        1001 tick
        1002 answer 1 v5 0:e1 1:e2
        1010 release 1:e2 9
        1020 leave
        1030 done 2
        ",
    );
    compare(
        &got,
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        1 joined 7 v5 0:e1 1:e2 -> JOINED m 7
        1 joined 7 v5 0:e1 1:e2 -> lease to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 0:e1 to 2900
        1 joined 7 v5 0:e1 1:e2 -> GRANTED 1:e2 to 2900
        10 shutdown 0:e1 41 -> 0:e1 stopped
        wake -> heartbeat 1 v5 1:e2@0 registering 999ms 0:e1@41 draining 0ms
        1002 answer 1 v5 0:e1 1:e2 -> lease to 3900
        1002 answer 1 v5 0:e1 1:e2 -> 1:e2 extended to 3900
        1010 release 1:e2 9 -> 1:e2 stopped
        1010 release 1:e2 9 -> release #1 1:e2@9 revoked
        1020 leave -> leave #2 0:e1@41 shutdown 1:e2@9 revoked back within 60000ms
        1030 done 2 -> disconnect
        1030 done 2 -> ENDED Left
        ",
    );
}

#[test]
fn process_with_a_live_instance_id_waits_and_one_that_is_refused_ends() {
    check(
        "
        0 tick
        0 connected
        1 broken INSTANCE_WAITS
        60 connected
        61 broken INSTANCE_IN_USE
        ",
        "
        0 tick -> connect a:1
        0 connected -> join m epoch 0
        wake -> connect b:1
        60 connected -> join m epoch 0
        61 broken INSTANCE_IN_USE -> no lease
        61 broken INSTANCE_IN_USE -> ENDED INSTANCE_IN_USE
        ",
    );
}
