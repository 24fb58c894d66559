//! Each protection that is taken away is found within 200 seeds of the simulator: `tests/run controls`.
//!
//! Two more are not the simulator's: a node that acknowledges before its log is durable, and a node that applies a rule
//! above the feature level of the state. They are in modules named `controls` too, of the suites on those parts.

#![allow(clippy::print_stdout, reason = "the seeds that a control took are worth reading")]

use std::panic::{catch_unwind, resume_unwind};

use tenure_tests::figures::tell;
use tenure_tests::sim::control::Protection;
use tenure_tests::sim::{self, Plan};
use tenure_tests::tier;

const SEEDS_MAX: u64 = 200;

/// Plays seeds without `gone` until a property breaks.
fn is_found(gone: Protection) {
    let first = tier::seed();
    println!("seeds from {first} (TENURE_SEED), without {}", gone.as_str());
    for count in 0..SEEDS_MAX {
        let plan = Plan { seed: first.wrapping_add(count), without: Some(gone), ..Plan::default() };
        if let Some(violation) = violation_of(plan) {
            tell(format_args!(
                "{} was missed after {} seeds: {violation}",
                gone.as_str(),
                count + 1
            ));
            println!("  {}", sim::replay(plan));
            return;
        }
    }
    panic!("nobody missed {} in {SEEDS_MAX} seeds from {first}", gone.as_str());
}

/// What a run breaks: a property of the simulator, or an invariant of the core, which panics.
fn violation_of(plan: Plan) -> Option<String> {
    match catch_unwind(|| sim::run(plan)) {
        Ok(report) => report.violation.map(|violation| violation.to_string()),
        Err(panic) => match panic.downcast::<String>() {
            Ok(message) if message.starts_with("invariant broken") => Some(*message),
            Ok(other) => resume_unwind(other),
            Err(other) => resume_unwind(other),
        },
    }
}

macro_rules! controls {
    ($($name:ident: $gone:ident,)*) => {
        $(
            #[test]
            fn $name() {
                is_found(Protection::$gone);
            }
        )*

        #[test]
        fn every_protection_has_its_control() {
            assert_eq!(Protection::ALL, [$(Protection::$gone),*]);
        }
    };
}

controls! {
    epoch_check_at_the_sink_is_missed: SinkEpoch,
    epoch_check_at_commit_is_missed: CommitEpoch,
    verify_is_missed: Verify,
    resume_point_read_after_the_registration_is_missed: ResumeAfterRegister,
    lease_counted_from_the_send_is_missed: LeaseFromSend,
    term_of_an_expiry_is_missed: ExpiryTerm,
    silence_in_a_snapshot_is_missed: SnapshotSilence,
    final_offset_of_a_release_is_missed: FinalOffset,
    epoch_of_an_acknowledgement_is_missed: AckEpoch,
    epoch_counter_in_a_snapshot_is_missed: SnapshotCounter,
}
