//! The clocks of a node.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tenure_model::{Clock, Tick, Timestamp};

/// Steady clock that goes on counting while the machine is suspended (`CLOCK_BOOTTIME`).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> Tick {
        let time = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Tick(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

/// Wall clock, for audit and history only.
pub(crate) fn wall_clock() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
