//! Benches on real parts: a scenario measures, the program prints what and on what.
//!
//! `cargo run --release -p tenure-tests --bin bench -- SCENARIO [--json]`

mod beside;
mod commits;
mod consume;
mod disk;
mod failover;
mod handoff;
mod heartbeats;
mod load;
mod machine;
mod nodes;
mod recovery;
mod sink_postgres;
mod stats;
mod steady;
mod takeover;
mod usage;

use std::time::Duration;

use serde_json::{Map, Value, json};

pub use beside::Peer;
pub use stats::{median, percentile};

/// Any reason why a scenario could not be measured.
pub type BenchError = Box<dyn std::error::Error + Send + Sync>;

/// One thing that can be measured.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Name on the command line and in the JSON.
    pub name: &'static str,
    /// What is measured, in a line.
    pub about: &'static str,
    /// Measures. Blocks; no async runtime is running.
    pub run: fn(&Options) -> Result<Measured, BenchError>,
}

/// All scenarios, by name.
pub const SCENARIOS: &[Scenario] = &[
    commits::SCENARIO,
    heartbeats::SCENARIO,
    failover::SCENARIO,
    recovery::SCENARIO,
    steady::SCENARIO,
    consume::SCENARIO,
    handoff::SCENARIO,
    takeover::SCENARIO,
    sink_postgres::SCENARIO,
];

/// What the command line says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Rounds; nothing: the scenario's own number.
    pub rounds: Option<u32>,
    /// How long a stretch is measured; nothing: the scenario's own length.
    pub seconds: Option<u32>,
    /// What gets the same load in the same run, for those scenarios that compare.
    pub beside: Option<Peer>,
    /// Little of everything: whether it works, not how fast it is.
    pub is_small: bool,
}

impl Options {
    fn length(&self, own: Duration) -> Duration {
        let small = self.is_small.then_some(Duration::from_millis(500));
        let told = self.seconds.map(|seconds| Duration::from_secs(u64::from(seconds)));
        told.or(small).unwrap_or(own)
    }
}

/// What was measured, and with what.
#[derive(Debug, Default)]
pub struct Measured {
    setup: Map<String, Value>,
    metrics: Vec<Metric>,
}

#[derive(Debug)]
struct Metric {
    name: &'static str,
    value: f64,
    bound: Option<Bound>,
}

/// What a metric must keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// No less than this.
    AtLeast(f64),
    /// No more than this.
    AtMost(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "at least {least}"),
            Self::AtMost(most) => write!(f, "at most {most}"),
        }
    }
}

impl Measured {
    /// Notes something that the figures depend on.
    pub fn setup(&mut self, name: &str, value: impl Into<Value>) {
        self.setup.insert(name.to_owned(), value.into());
    }

    /// Notes a figure. The unit is the end of its name.
    pub fn metric(&mut self, name: &'static str, value: f64) {
        self.metrics.push(Metric { name, value, bound: None });
    }

    /// Notes a figure that must keep a bound.
    pub fn bounded(&mut self, name: &'static str, value: f64, bound: Bound) {
        self.metrics.push(Metric { name, value, bound: Some(bound) });
    }

    /// Whether all bounds are kept.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.metrics.iter().all(|metric| metric.bound.is_none_or(|b| b.holds(metric.value)))
    }

    /// One object: scenario, set-up with the machine in it, and metrics rounded to three places.
    #[must_use]
    pub fn json(&self, scenario: &Scenario) -> Value {
        let metrics: Map<String, Value> = self
            .metrics
            .iter()
            .map(|metric| (metric.name.to_owned(), json!(rounded(metric.value))))
            .collect();
        let mut setup = self.setup.clone();
        setup.insert("machine".into(), machine::describe());
        json!({ "scenario": scenario.name, "setup": setup, "metrics": metrics })
    }
}

/// For people: one line for each fact and figure.
#[must_use]
pub fn text(scenario: &Scenario, measured: &Measured) -> String {
    let mut lines = vec![format!("{}: {}", scenario.name, scenario.about)];
    let machine = machine::describe();
    let facts = machine.as_object().into_iter().flatten().chain(&measured.setup);
    for (name, value) in facts {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        lines.push(format!("  {name:<34} {value}"));
    }
    for Metric { name, value, bound } in &measured.metrics {
        let verdict = bound.map_or_else(String::new, |bound| {
            format!("  ({bound}: {})", if bound.holds(*value) { "holds" } else { "MISSED" })
        });
        lines.push(format!("  {name:<34} {}{verdict}", rounded(*value)));
    }
    lines.join("\n")
}

fn rounded(value: f64) -> f64 {
    (value * 1_000.0).round() / 1_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missed_bound_is_told_and_the_json_has_all_three_parts() {
        let scenario = &SCENARIOS[0];
        let mut measured = Measured::default();
        measured.setup("rows", 500);
        measured.bounded("ratio", 0.91234, Bound::AtLeast(0.9));
        assert!(measured.holds());
        measured.bounded("wait_ms", 12.0, Bound::AtMost(10.0));
        assert!(!measured.holds());
        assert!(text(scenario, &measured).contains("(at most 10: MISSED)"));
        let json = measured.json(scenario);
        assert_eq!(json["metrics"], json!({ "ratio": 0.912, "wait_ms": 12.0 }));
        assert_eq!(json["setup"]["rows"], 500);
        assert!(json["setup"]["machine"]["cpus"].as_u64() > Some(0));
    }
}
