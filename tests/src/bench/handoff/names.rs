//! What the figures are called.

use super::trail::Step;

/// Names of the figures of one home.
pub(super) struct Names {
    pub(super) p50: &'static str,
    pub(super) p99: &'static str,
    pub(super) unowned_p50: &'static str,
    pub(super) unowned_p99: &'static str,
    pub(super) undisturbed_p50: &'static str,
    pub(super) undisturbed_p99: &'static str,
    pub(super) busy: &'static str,
    pub(super) effects: &'static str,
    pub(super) full: FullNames,
    /// Median and 99th percentile of each.
    pub(super) steps: [(&'static str, &'static str); Step::ALL.len()],
}

/// Names of the figures where the machine is full.
pub(super) struct FullNames {
    pub(super) p50: &'static str,
    pub(super) p99: &'static str,
    pub(super) unowned_p50: &'static str,
    pub(super) unowned_p99: &'static str,
    pub(super) undisturbed_p99: &'static str,
}

pub(super) const COORDINATOR: Names = Names {
    p50: "coordinator_gap_p50_ms",
    p99: "coordinator_gap_p99_ms",
    unowned_p50: "coordinator_unowned_p50_ms",
    unowned_p99: "coordinator_unowned_p99_ms",
    undisturbed_p50: "coordinator_undisturbed_p50_ms",
    undisturbed_p99: "coordinator_undisturbed_p99_ms",
    busy: "coordinator_busy_share",
    effects: "coordinator_effects_per_s",
    full: FullNames {
        p50: "coordinator_full_gap_p50_ms",
        p99: "coordinator_full_gap_p99_ms",
        unowned_p50: "coordinator_full_unowned_p50_ms",
        unowned_p99: "coordinator_full_unowned_p99_ms",
        undisturbed_p99: "coordinator_full_undisturbed_p99_ms",
    },
    steps: [
        ("coordinator_revoke_ms", "coordinator_revoke_p99_ms"),
        ("coordinator_release_to_grant_ms", "coordinator_release_to_grant_p99_ms"),
        ("coordinator_register_ms", "coordinator_register_p99_ms"),
        ("coordinator_verify_ms", "coordinator_verify_p99_ms"),
        ("coordinator_resume_ms", "coordinator_resume_p99_ms"),
        ("coordinator_open_ms", "coordinator_open_p99_ms"),
        ("coordinator_first_fetch_ms", "coordinator_first_fetch_p99_ms"),
    ],
};

pub(super) const POSTGRES: Names = Names {
    p50: "postgres_gap_p50_ms",
    p99: "postgres_gap_p99_ms",
    unowned_p50: "postgres_unowned_p50_ms",
    unowned_p99: "postgres_unowned_p99_ms",
    undisturbed_p50: "postgres_undisturbed_p50_ms",
    undisturbed_p99: "postgres_undisturbed_p99_ms",
    busy: "postgres_busy_share",
    effects: "postgres_effects_per_s",
    full: FullNames {
        p50: "postgres_full_gap_p50_ms",
        p99: "postgres_full_gap_p99_ms",
        unowned_p50: "postgres_full_unowned_p50_ms",
        unowned_p99: "postgres_full_unowned_p99_ms",
        undisturbed_p99: "postgres_full_undisturbed_p99_ms",
    },
    steps: [
        ("postgres_revoke_ms", "postgres_revoke_p99_ms"),
        ("postgres_release_to_grant_ms", "postgres_release_to_grant_p99_ms"),
        ("postgres_register_ms", "postgres_register_p99_ms"),
        ("postgres_verify_ms", "postgres_verify_p99_ms"),
        ("postgres_resume_ms", "postgres_resume_p99_ms"),
        ("postgres_open_ms", "postgres_open_p99_ms"),
        ("postgres_first_fetch_ms", "postgres_first_fetch_p99_ms"),
    ],
};
