//! Worker processes with real Kafka and real PostgreSQL, disturbed every second by a schedule that a seed repeats.
//!
//! The negative control runs the same worker and the same audit with the comparison of epochs taken out, and must come
//! out red.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

mod apart;
mod charges;
mod crew;
mod deleted;
mod ends;
mod heartbeats;
mod logs;
mod member;
mod one_thread;
mod rolling;
mod run;
mod schedule;

use run::{Home, Plan, run};
use schedule::Kind;
use tenure_tests::servers::{Kafka, Postgres, require};
use tenure_tests::tier::Tier;

/// Both real parts, or nothing: the test is skipped.
fn parts() -> Option<(&'static Postgres, &'static Kafka)> {
    Some((require(Postgres::shared())?, require(Kafka::shared())?))
}

/// Seconds and records of a run.
fn size(full: (u64, u64), ci: (u64, u64)) -> (u64, u64) {
    match Tier::current() {
        Tier::Full => full,
        Tier::Ci | Tier::Fast => ci,
    }
}

#[test]
fn nothing_is_lost_or_doubled_while_workers_are_stopped_killed_restarted_and_drained() {
    let Some((postgres, kafka)) = parts() else { return };
    let (seconds, records) = size((180, 2_000_000), (40, 300_000));
    let outcome = run(
        postgres,
        kafka,
        Plan {
            name: "offsets in PostgreSQL",
            nodes: 3,
            seconds,
            records,
            acts: Kind::Everything,
            options: &[],
            home: Home::Sink,
            must_end: true,
        },
    );
    let faults = outcome.audit.faults();
    assert!(faults.is_empty(), "{}; {}", faults.join("; "), outcome.acts);
    assert!(!outcome.hits.is_empty(), "nobody was disturbed: {}", outcome.acts);
}

#[test]
fn with_offsets_at_the_coordinator_only_the_uncommitted_tail_of_a_stopped_or_killed_worker_comes_again()
 {
    let Some((postgres, kafka)) = parts() else { return };
    let (seconds, records) = size((60, 200_000), (20, 60_000));
    let outcome = run(
        postgres,
        kafka,
        Plan {
            name: "offsets at the coordinator",
            nodes: 3,
            seconds,
            records,
            acts: Kind::Everything,
            options: &["--replays", "--charges"],
            home: Home::Coordinator,
            must_end: true,
        },
    );
    assert_eq!((outcome.audit.lost, outcome.audit.altered), (0, 0), "{}", outcome.acts);
    assert_eq!(outcome.out_of_order_in_a_grant, 0, "{}", outcome.acts);
    let unexplained = outcome.unexplained();
    assert!(
        unexplained.is_empty(),
        "{} of {} rows that came again are outside of the tails, as {:?}; {}",
        unexplained.len(),
        outcome.again.len(),
        &unexplained[..unexplained.len().min(5)],
        outcome.acts
    );
    assert_eq!(outcome.charges, outcome.audit.produced, "each record is charged once");
    assert!(outcome.attempts >= outcome.charges);
}

#[test]
fn without_the_epoch_check_the_audit_sees_damage() {
    let Some((postgres, kafka)) = parts() else { return };
    let outcome = run(
        postgres,
        kafka,
        Plan {
            name: "without the epoch check",
            nodes: 1,
            seconds: 21,
            records: 60_000,
            acts: Kind::LongStops,
            options: &["--without-fencing", "--without-lease-check", "--hold-ms", "20"],
            home: Home::Sink,
            must_end: false,
        },
    );
    assert!(outcome.audit.is_damaged(), "no damage: {:?}; {}", outcome.audit, outcome.acts);
}
