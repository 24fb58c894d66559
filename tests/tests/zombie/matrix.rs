//! All places side by side, once per test process and kind of check.

use std::fmt::Write as _;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use clap::ValueEnum as _;
use tenure_tests::cluster::Cluster;
use tenure_tests::figures::tell;
use tenure_tests::servers::{Kafka, Postgres};
use tenure_tests::tier::Tier;
use tenure_tests::zombie::Point;

use crate::audit::Outcome;
use crate::place;

/// Stops per place out of all; a tenth of it, rounded up, in CI.
const STOPS_FULL: usize = 21;

/// Stops per place in the negative control: damage shows at the first one.
const STOPS_CONTROL: usize = 2;

/// Whether epochs are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checks {
    On,
    /// The negative control.
    Off,
}

type Outcomes = Vec<(Point, Result<Outcome, String>)>;

/// What became of the owners that were stopped at `point`.
pub(crate) fn outcome(
    postgres: &'static Postgres,
    kafka: &'static Kafka,
    point: Point,
    checks: Checks,
) -> Result<Outcome, String> {
    static ON: OnceLock<Outcomes> = OnceLock::new();
    static OFF: OnceLock<Outcomes> = OnceLock::new();
    let cell = match checks {
        Checks::On => &ON,
        Checks::Off => &OFF,
    };
    let outcomes = cell.get_or_init(|| run_all(postgres, kafka, checks));
    let found = outcomes.iter().find(|(at, _)| *at == point);
    found.expect("every place was run").1.clone()
}

fn run_all(postgres: &'static Postgres, kafka: &'static Kafka, checks: Checks) -> Outcomes {
    // Both kinds at once would make the machine too slow for the short ttl.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (stops, nodes) = match checks {
        Checks::On => (Tier::current().repetitions(STOPS_FULL), 3),
        Checks::Off => (STOPS_CONTROL, 1),
    };
    let cluster = Cluster::start(nodes);
    let outcomes: Outcomes = thread::scope(|scope| {
        let running: Vec<_> = Point::value_variants()
            .iter()
            .map(|point| {
                let cluster = &cluster;
                let place = move || place::run(postgres, kafka, cluster, *point, checks, stops);
                (*point, scope.spawn(place))
            })
            .collect();
        let ended = running.into_iter().map(|(point, running)| {
            let result = running.join().unwrap_or_else(|panic| Err(text_of(&*panic)));
            (point, result)
        });
        ended.collect()
    });
    print(&outcomes, checks);
    outcomes
}

fn print(outcomes: &Outcomes, checks: Checks) {
    let mut text = format!("zombie, epoch check {checks:?}:\n");
    for (point, outcome) in outcomes {
        let figures = match outcome {
            Ok(outcome) => outcome.figures(),
            Err(error) => format!("not through: {}", error.lines().next().unwrap_or_default()),
        };
        writeln!(text, "  {point:?}: {figures}").expect("a string takes all");
    }
    tell(text);
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".to_owned())
}
