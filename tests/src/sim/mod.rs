//! One-thread simulator: the real parts of both ends of the protocol in a virtual world.
//!
//! Real are the group state machine behind its stored forms, the raft leader's lease table, deadlines and answers, the
//! planner, the edge of the gRPC services, and the SDK's session machine. Modelled are the replicated log, the network,
//! the clocks, the sinks, the records, and a run loop that acquires as DESIGN.md, section 8, says. openraft and tonic
//! are tested elsewhere.
//!
//! A run is a function of its seed: faults for three quarters of a minute and more, then everything is healed, and every
//! partition must come back. `invariants` says what must hold, `matrix` counts which refusals each fault has met.

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "a property looks at the few facts and events that it is about"
)]

pub mod clock;
pub mod control;
pub mod event;
pub mod faults;
pub mod invariants;
pub mod log;
pub mod matrix;
pub mod member;
pub mod network;
pub mod node;
pub mod oracle;
pub mod rng;
pub mod sink;
pub mod world;

use control::Protection;
use matrix::Matrix;

/// What a run is made from.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan {
    /// Everything random follows from it.
    pub seed: u64,
    /// The protection that is taken away; nothing in an honest run.
    pub without: Option<Protection>,
    /// Whether members prepare for partitions before they get them.
    pub is_warm: bool,
    /// Whether each step is printed.
    pub prints: bool,
}

/// How a run went.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was broken first; nothing in a good run.
    pub violation: Option<Violation>,
    /// Hash over everything that happened, in order.
    pub trace: u64,
    /// Virtual time that passed, in milliseconds.
    pub simulated_ms: u64,
    pub member_count: usize,
    pub fault_count: usize,
    /// Partitions that went from one member to another and were acquired there.
    pub handoff_count: usize,
    /// Preparations that came to their end, by their members' word or by their deadline.
    pub prepared_count: usize,
    /// Entries committed.
    pub entry_count: usize,
    /// Events handled.
    pub event_count: u64,
    pub matrix: Matrix,
}

/// A broken property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Name of the property.
    pub property: &'static str,
    /// What happened.
    pub what: String,
    /// Virtual time, in milliseconds.
    pub at_ms: u64,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {} ms: {}", self.property, self.at_ms, self.what)
    }
}

/// Plays one run to its end, or to the first broken property.
#[must_use]
pub fn run(plan: Plan) -> Report {
    world::World::new(plan).run()
}

/// The command that plays a seed again, with every step printed.
#[must_use]
pub fn replay(plan: Plan) -> String {
    let without =
        plan.without.map_or_else(String::new, |gone| format!(" --without {}", gone.as_str()));
    let warm = if plan.is_warm { " --warm" } else { "" };
    format!("cargo run -p tenure-tests --bin sim -- --seed {}{without}{warm}", plan.seed)
}
