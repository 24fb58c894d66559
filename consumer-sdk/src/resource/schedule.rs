//! When a job's ticks are.

use std::time::Duration;

/// Ticks that a [`Schedule`] may be asked to pass over in one go.
const PASSED_OVER_MAX: usize = 10_000_000;

/// When the ticks of a job are, in milliseconds since 1970. The same everywhere: a tick's name is made from it.
pub trait Schedule: Send + Sync + 'static {
    /// The first tick at or after `from_ms`; nothing when there are no more.
    fn next(&self, from_ms: u64) -> Option<u64>;

    /// The last tick from `from_ms` up to `until_ms`, both included; nothing when there is none.
    ///
    /// The default asks [`Schedule::next`] for one after the other, at most ten million.
    fn latest(&self, from_ms: u64, until_ms: u64) -> Option<u64> {
        let mut latest = None;
        let mut from = from_ms;
        for _ in 0..PASSED_OVER_MAX {
            match self.next(from) {
                Some(at) if at <= until_ms => {
                    latest = Some(at);
                    from = at + 1;
                }
                Some(_) | None => break,
            }
        }
        latest
    }
}

/// A tick every `period`, counted from 1970 plus `offset`: `Every { period: 1 day, offset: 3 h }` is at 03:00 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every {
    /// Time between two ticks; less than a millisecond counts as one.
    pub period: Duration,
    /// How far the ticks lie behind whole periods.
    pub offset: Duration,
}

impl Every {
    /// A tick every `period`, at whole periods since 1970.
    #[must_use]
    pub const fn new(period: Duration) -> Self {
        Self { period, offset: Duration::ZERO }
    }

    fn period_ms(&self) -> u64 {
        milliseconds(self.period).max(1)
    }

    fn offset_ms(&self) -> u64 {
        milliseconds(self.offset) % self.period_ms()
    }
}

fn milliseconds(length: Duration) -> u64 {
    u64::try_from(length.as_millis()).unwrap_or(u64::MAX)
}

impl Schedule for Every {
    fn next(&self, from_ms: u64) -> Option<u64> {
        let (period, offset) = (self.period_ms(), self.offset_ms());
        let whole = from_ms.saturating_sub(offset).div_ceil(period);
        whole.checked_mul(period)?.checked_add(offset)
    }

    fn latest(&self, from_ms: u64, until_ms: u64) -> Option<u64> {
        let (period, offset) = (self.period_ms(), self.offset_ms());
        let latest = until_ms.checked_sub(offset)? / period * period + offset;
        (latest >= from_ms).then_some(latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A schedule that says nothing but its next tick.
    struct Plain(Every);

    impl Schedule for Plain {
        fn next(&self, from_ms: u64) -> Option<u64> {
            self.0.next(from_ms)
        }
    }

    #[test]
    fn ticks_lie_at_whole_periods_behind_the_offset() {
        let every = Every { period: Duration::from_secs(10), offset: Duration::from_secs(3) };
        for (from, next) in [(0, 3_000), (3_000, 3_000), (3_001, 13_000), (13_000, 13_000)] {
            assert_eq!(every.next(from), Some(next), "from {from}");
        }
        assert_eq!(every.next(u64::MAX), None);
    }

    #[test]
    fn latest_tick_is_the_one_that_asking_one_by_one_finds() {
        let every = Every { period: Duration::from_millis(7), offset: Duration::from_millis(3) };
        for from in 0..40 {
            for until in 0..40 {
                let one_by_one = Plain(every).latest(from, until);
                assert_eq!(every.latest(from, until), one_by_one, "{from} to {until}");
            }
        }
    }
}
