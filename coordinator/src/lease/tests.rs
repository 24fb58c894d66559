use std::fmt::Write as _;

use proptest::prelude::*;
use tenure_model::{GroupId, LeaseSettings, MemberEpoch, MemberId};

use super::*;

const RULES: Rules = Rules {
    silence_slack: Duration::from_millis(1_000),
    vanished_share_percent: 100,
    vanished_least: 5,
    vanished_window: Duration::from_millis(3_000),
    vanished_pause: Duration::from_millis(10_000),
};

fn member(name: &str) -> MemberRef {
    MemberRef {
        group: GroupId::new("g").unwrap(),
        member: MemberId::new(name).unwrap(),
        member_epoch: MemberEpoch(1),
    }
}

const fn at(ms: u64) -> Tick {
    Tick(ms * 1_000_000)
}

fn lengths() -> Lengths {
    Lengths { ttl: Duration::from_secs(10), interval: Duration::from_secs(3) }
}

#[test]
fn id_of_a_lease_names_nothing_once_that_lease_is_gone() {
    let mut table = LeaseTable::new(RULES);
    let ann = member("ann");
    table.admit(&ann, lengths(), at(0));
    let first = table.id(&ann).unwrap();
    table.admit(&ann, lengths(), at(1_000));
    assert_eq!(table.id(&ann), Some(first), "the same lease");
    let renewed = table.renew_by_id(first, at(2_000)).unwrap();
    assert_eq!((renewed.answer, renewed.heard_at), (Answer::Now, at(2_000)));
    assert_eq!((renewed.deadline, table.deadline(&ann)), (at(12_000), Some(at(12_000))));
    table.remove(&ann);
    table.admit(&ann, lengths(), at(3_000));
    assert!(table.renew_by_id(first, at(4_000)).is_none());
    assert_eq!(table.answer_by_id(first), Answer::Gone);
    assert_eq!(table.heard_at(&ann), Some(at(3_000)));
}

/// Runs a script of `TIME ACT [MEMBER] [NUMBER]`, in milliseconds; what the table has to say is one line per act.
fn run(rules: Rules, script: &str) -> String {
    let mut table = LeaseTable::new(rules);
    let mut told = String::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split(' ').collect();
        let now = at(words[0].parse().unwrap());
        let name = words.get(2).copied().unwrap_or("-");
        let number = || words[3].parse().unwrap();
        let said = match words[1] {
            "admit" => {
                table.admit(&member(name), lengths(), now);
                String::new()
            }
            "silent" => {
                table.admit_silent(&member(name), lengths(), now, Duration::from_millis(number()));
                String::new()
            }
            "hear" => format!("{:?}", table.renew(&member(name), now)),
            "ask" => format!("{:?}", table.answer(&member(name))),
            "silence-applied" => {
                table.silence_applied(&member(name));
                String::new()
            }
            "heard-applied" => {
                table.heard_applied(&member(name));
                String::new()
            }
            "gone" => {
                table.remove(&member(name));
                String::new()
            }
            "gap" => {
                table.add_gap(Duration::from_millis(name.parse().unwrap()), now);
                String::new()
            }
            "check" => check_line(&mut table, now),
            other => panic!("no act {other}"),
        };
        writeln!(told, "{}", format!("{line} -> {said}").trim_end_matches(" -> ")).unwrap();
    }
    told
}

fn check_line(table: &mut LeaseTable, now: Tick) -> String {
    let mut parts = Vec::new();
    if let Some(notice) = table.check(now) {
        parts.push(format!("{notice:?}"));
    }
    let names = |members: Vec<&MemberRef>| {
        members.iter().map(|m| m.member.to_string()).collect::<Vec<_>>().join(",")
    };
    let expiring = names(table.expiring().collect());
    if !expiring.is_empty() {
        parts.push(format!("expire {expiring}"));
    }
    for silent in table.silence_to_log(now) {
        parts.push(format!("silent {} for {}", silent.member.member, silent.silent_for_ms));
    }
    let heard = table.heard_to_log();
    if !heard.is_empty() {
        parts.push(format!("heard {}", names(heard.iter().collect())));
    }
    if parts.is_empty() { "nothing".to_owned() } else { parts.join("; ") }
}

fn tidy(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(|l| format!("{l}\n")).collect()
}

fn expect(rules: Rules, told: &str) {
    let script: String = told
        .lines()
        .map(|line| format!("{}\n", line.split(" -> ").next().unwrap().trim()))
        .collect();
    assert_eq!(run(rules, &script), tidy(told));
}

#[test]
fn new_leader_gives_everyone_a_full_ttl_from_its_own_start() {
    expect(
        RULES,
        "
        5000 admit ann
        14999 check -> silent ann for 9999
        15000 check -> expire ann
        ",
    );
}

#[test]
fn heartbeat_renews_from_its_receipt() {
    expect(
        RULES,
        "
        0 admit ann
        2000 hear ann -> Now
        5999 check -> nothing
        5999 hear ann -> Now
        9998 check -> nothing
        9999 check -> silent ann for 4000
        15998 check -> silent ann for 9999
        15999 check -> expire ann
        ",
    );
}

#[test]
fn expiring_member_is_not_renewed_and_proposed_until_the_outcome_is_applied() {
    expect(
        RULES,
        "
        0 admit ann
        10000 check -> expire ann
        10001 hear ann -> Later
        10002 ask ann -> Later
        30000 check -> expire ann
        30001 gone ann
        30002 hear ann -> Gone
        30003 check -> nothing
        ",
    );
}

#[test]
fn silent_member_is_answered_only_once_heard_is_applied() {
    expect(
        RULES,
        "
        0 admit ann
        4000 check -> silent ann for 4000
        4100 silence-applied ann
        4200 check -> nothing
        5000 hear ann -> Later
        5001 check -> heard ann
        5002 ask ann -> Later
        5100 heard-applied ann
        5101 ask ann -> Now
        9000 check -> silent ann for 4000
        14999 check -> silent ann for 9999
        15000 check -> expire ann
        ",
    );
}

#[test]
fn silence_that_was_not_logged_before_the_member_was_heard_is_taken_back_all_the_same() {
    // The proposal may still be on its way.
    expect(
        RULES,
        "
        0 admit ann
        4000 check -> silent ann for 4000
        4500 hear ann -> Later
        4501 check -> heard ann
        4502 heard-applied ann
        4503 hear ann -> Now
        ",
    );
}

#[test]
fn member_already_silent_in_the_log_expires_by_what_the_log_says() {
    expect(
        RULES,
        "
        7000 silent ann 4000
        7001 admit bob
        12999 check -> silent bob for 5998
        13000 check -> expire ann; silent bob for 5999
        ",
    );
}

#[test]
fn member_silent_in_the_log_is_not_logged_again_and_may_come_back() {
    expect(
        RULES,
        "
        7000 silent ann 4000
        12000 check -> nothing
        12500 hear ann -> Later
        12501 check -> heard ann
        12600 heard-applied ann
        12601 ask ann -> Now
        22499 check -> silent ann for 9999
        22500 check -> expire ann
        ",
    );
}

#[test]
fn gap_of_the_loop_moves_every_deadline() {
    expect(
        RULES,
        "
        0 admit ann
        9000 gap 9000
        12999 check -> nothing
        13000 check -> silent ann for 4000
        18999 check -> silent ann for 9999
        19000 check -> expire ann
        ",
    );
}

#[test]
fn who_is_heard_after_a_gap_of_the_loop_and_dies_is_not_kept_longer() {
    expect(
        RULES,
        "
        0 admit ann
        9001 hear ann -> Now
        9002 gap 9000
        12501 check -> nothing
        13002 check -> silent ann for 4000
        19001 check -> silent ann for 9999
        19002 check -> expire ann
        ",
    );
}

#[test]
fn longer_ttl_counts_at_once() {
    let mut table = LeaseTable::new(RULES);
    table.admit(&member("ann"), lengths(), at(0));
    table.admit(&member("ann"), Lengths { ttl: Duration::from_secs(30), ..lengths() }, at(1));
    assert_eq!(table.deadline(&member("ann")), Some(at(30_000)));
}

#[test]
fn expiry_pauses_when_too_many_vanish_and_goes_on_after_the_pause() {
    let rules = Rules { vanished_share_percent: 50, vanished_least: 3, ..RULES };
    expect(
        rules,
        "
        0 admit ann
        0 admit bob
        0 admit cec
        9000 admit dan
        10000 check -> ExpiryPaused { vanished_count: 3, member_count: 4 }; silent ann for 10000; silent bob for 10000; silent cec for 10000
        10500 hear ann -> Later
        10501 heard-applied ann
        10502 hear dan -> Now
        14000 hear dan -> Now
        14000 hear ann -> Now
        17000 hear dan -> Now
        17000 hear ann -> Now
        20000 check -> ExpiryResumed; expire bob,cec
        ",
    );
}

#[test]
fn one_of_three_members_expires_without_a_pause() {
    let rules = Rules { vanished_share_percent: 50, vanished_least: 1, ..RULES };
    expect(
        rules,
        "
        0 admit ann
        9000 admit bob
        9000 admit cec
        10000 check -> expire ann
        ",
    );
}

#[derive(Clone, Debug)]
enum Step {
    /// A heartbeat that travels this long and whose answer is on its way at once.
    Heartbeat(u64),
    Check,
    Gap(u64),
    SilenceApplied,
    HeardApplied,
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_u64..2_000).prop_map(Step::Heartbeat),
        Just(Step::Check),
        (0_u64..3_000).prop_map(Step::Gap),
        Just(Step::SilenceApplied),
        Just(Step::HeardApplied),
        (0_u64..4_000).prop_map(Step::Wait),
    ]
}

proptest! {
    /// The member counts from its send and takes the drift margin off; the table counts from receipt.
    #[test]
    fn member_stops_before_the_table_expires_it(
        steps in proptest::collection::vec(step(), 1..200),
        // The member's clock runs slow by up to the declared drift over one ttl.
        slow_per_mille in 0_u64..=47,
    ) {
        let settings = LeaseSettings::default();
        let lengths = Lengths { ttl: settings.ttl(), interval: settings.heartbeat_interval() };
        let ann = member("ann");
        let mut table = LeaseTable::new(RULES);
        let mut now = 0;
        table.admit(&ann, lengths, at(now));
        // The deadline that the member believes in, on the coordinator's clock.
        let mut member_stops_at = 0_u64;
        for step in steps {
            match step {
                Step::Heartbeat(travel_ms) => {
                    let sent = now;
                    now += travel_ms;
                    if table.renew(&ann, at(now)) == Answer::Now && table.answer(&ann) == Answer::Now {
                        let counted = settings.ttl_ms - settings.clock_drift_max_ms;
                        member_stops_at = member_stops_at.max(sent + counted + counted * slow_per_mille / 1_000);
                    }
                }
                Step::Check => { table.check(at(now)); }
                Step::Gap(gap_ms) => {
                    now += gap_ms;
                    table.add_gap(Duration::from_millis(gap_ms), at(now));
                }
                Step::SilenceApplied => {
                    if !table.silence_to_log(at(now)).is_empty() { table.silence_applied(&ann); }
                }
                Step::HeardApplied => {
                    if !table.heard_to_log().is_empty() { table.heard_applied(&ann); }
                }
                Step::Wait(ms) => now += ms,
            }
            let deadline = table.deadline(&ann).unwrap();
            prop_assert!(deadline >= at(member_stops_at), "{deadline:?} is before {member_stops_at} ms");
            if table.expiring().next().is_some() {
                prop_assert!(now >= member_stops_at);
            }
        }
    }

    /// A new raft leader reads the silence from the log and must not be earlier than the member.
    #[test]
    fn next_leader_expires_a_silent_member_after_its_own_deadline(
        heard_ms in 0_u64..10_000,
        travel_ms in 0_u64..2_000,
        apply_lag_ms in 0_u64..5_000,
    ) {
        let settings = LeaseSettings::default();
        let lengths = Lengths { ttl: settings.ttl(), interval: settings.heartbeat_interval() };
        let ann = member("ann");
        let receipt = heard_ms + travel_ms;
        let mut first = LeaseTable::new(RULES);
        first.admit(&ann, lengths, at(heard_ms));
        prop_assert_eq!(first.renew(&ann, at(receipt)), Answer::Now);
        let marked = receipt + settings.heartbeat_interval_ms + 1_000;
        first.check(at(marked));
        let silent = first.silence_to_log(at(marked)).remove(0);
        let known_at = at(marked + apply_lag_ms);
        let mut next = LeaseTable::new(RULES);
        next.admit_silent(&ann, lengths, known_at, Duration::from_millis(silent.silent_for_ms));
        let member_stops_at = heard_ms + settings.ttl_ms - settings.clock_drift_max_ms;
        prop_assert!(next.deadline(&ann).unwrap() >= at(member_stops_at));
    }
}
