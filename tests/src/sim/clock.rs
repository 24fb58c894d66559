//! Clocks that drift. True time is in nanoseconds since the start of the run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenure_model::{Clock, Tick};

const MILLION: u128 = 1_000_000;

/// Clock of one process: an origin of its own, and a rate that stays.
#[derive(Clone, Copy, Debug)]
pub struct DriftingClock {
    started_at: u64,
    origin: u64,
    /// Local nanoseconds in a million true ones.
    rate: u64,
}

impl DriftingClock {
    /// A clock that shows `origin` at `started_at` and gains `drift_ppm` from then on.
    #[must_use]
    pub fn new(started_at: u64, origin: u64, drift_ppm: i64) -> Self {
        let rate = 1_000_000_u64.saturating_add_signed(drift_ppm);
        Self { started_at, origin, rate }
    }

    /// What the clock shows at the true time `at`.
    #[must_use]
    pub fn show(&self, at: u64) -> Tick {
        let passed = u128::from(at.saturating_sub(self.started_at)) * u128::from(self.rate);
        Tick(self.origin + narrow(passed / MILLION))
    }

    /// The first true time at which the clock shows `tick`.
    #[must_use]
    pub fn when(&self, tick: Tick) -> u64 {
        let local = u128::from(tick.0.saturating_sub(self.origin)) * MILLION;
        let passed = local.div_ceil(u128::from(self.rate));
        self.started_at.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }
}

fn narrow(nanos: u128) -> u64 {
    u64::try_from(nanos).unwrap_or(u64::MAX)
}

/// Clock that a part of the coordinator holds; the simulator sets it before it calls the part.
#[derive(Clone, Debug, Default)]
pub struct SetClock(Arc<AtomicU64>);

impl SetClock {
    /// Makes it show `tick`.
    pub fn set(&self, tick: Tick) {
        self.0.store(tick.0, Ordering::Relaxed);
    }
}

impl Clock for SetClock {
    fn now(&self) -> Tick {
        Tick(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moment_at_which_a_clock_shows_a_tick_is_the_first_one() {
        for drift_ppm in [-20_000, 0, 20_000] {
            let clock = DriftingClock::new(500, 7_000, drift_ppm);
            for tick in [7_000, 7_001, 1_000_000, 987_654_321] {
                let at = clock.when(Tick(tick));
                assert!(clock.show(at) >= Tick(tick), "{drift_ppm}: {tick}");
                assert!(at == 500 || clock.show(at - 1) < Tick(tick), "{drift_ppm}: {tick}");
            }
        }
    }
}
