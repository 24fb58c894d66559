//! The lease as this process sees it.
//!
//! The coordinator counts a lease from the moment it *receives* a heartbeat, this side from the moment it *sent* it,
//! less the declared drift: while clocks keep to the bound, this side stops first. Safety does not rest on it: a stale
//! owner whose check is slow, wrong or off is refused by the resource.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenure_model::{Clock, Tick};

/// Production clock: `CLOCK_BOOTTIME`, which goes on counting while the machine is suspended.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> Tick {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Tick(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

/// Whether writes consult the local lease before they go out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseCheck {
    /// A write after the local end of the lease is refused in this process.
    #[default]
    On,
    /// Every write goes out and is left to the resource. For tests that prove the resource's own refusal.
    Off,
}

/// Live lease of one grant. Cheap to clone; all clones see the same end.
///
/// One writer (the session) moves the end; any number of tasks read it, without a lock.
#[derive(Clone)]
pub struct Lease {
    clock: Arc<dyn Clock>,
    /// Nanoseconds of the [`Tick`] at which the grant ends; 0 once it was stopped for good.
    ends_at: Arc<AtomicU64>,
    check: LeaseCheck,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("remaining", &self.remaining())
            .field("check", &self.check)
            .finish()
    }
}

impl Lease {
    /// Makes the lease of a new grant.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, ends_at: Tick, check: LeaseCheck) -> Self {
        Self { clock, ends_at: Arc::new(AtomicU64::new(ends_at.0)), check }
    }

    /// Lease that never ends by itself, for tokens that something else hands out.
    #[must_use]
    pub fn endless() -> Self {
        Self::new(Arc::new(BootClock), Tick(u64::MAX), LeaseCheck::On)
    }

    /// Moves the end forward. Does nothing once the lease was stopped or has run out: an epoch that its holder
    /// stopped is never resumed.
    pub fn extend(&self, ends_at: Tick) {
        let now = self.clock.now().0;
        // Nothing to report: an end that no longer moves is the rule above.
        let _moved = self.ends_at.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |end| {
            (end != 0 && end > now && ends_at.0 > end).then_some(ends_at.0)
        });
    }

    /// Moves the end nearer, for a revoked partition whose drain deadline comes first.
    pub fn shorten(&self, ends_at: Tick) {
        self.ends_at.fetch_min(ends_at.0, Ordering::SeqCst);
    }

    /// Ends the lease for good.
    pub fn stop(&self) {
        self.ends_at.store(0, Ordering::SeqCst);
    }

    /// What is left of the lease by this process's clock; zero once it ended.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        Tick(self.ends_at.load(Ordering::SeqCst)).since(self.clock.now())
    }

    /// Whether the grant may still be used, by this process's clock alone.
    #[must_use]
    pub fn is_live(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Refuses a write after the end of the lease, unless the check is off.
    ///
    /// # Errors
    ///
    /// [`LeaseEnded`].
    pub fn check(&self) -> Result<(), LeaseEnded> {
        if self.check == LeaseCheck::Off || self.is_live() { Ok(()) } else { Err(LeaseEnded) }
    }

    /// The clock that the lease is counted on.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }
}

/// The local lease has ended; nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease has ended by this process's own clock: nothing was sent, wait for a new grant")]
pub struct LeaseEnded;

#[cfg(test)]
mod tests {
    use tenure_model::ManualClock;

    use super::*;

    #[test]
    fn lease_that_ran_out_is_never_extended() {
        let clock = ManualClock::default();
        let lease = Lease::new(Arc::new(clock.clone()), Tick(100), LeaseCheck::On);
        assert!(lease.check().is_ok());
        lease.extend(Tick(200));
        clock.advance(Duration::from_nanos(150));
        assert!(lease.is_live());
        clock.advance(Duration::from_nanos(50));
        assert_eq!(lease.check(), Err(LeaseEnded));
        lease.extend(Tick(900));
        assert_eq!(lease.check(), Err(LeaseEnded));
    }

    #[test]
    fn stopped_lease_is_never_extended() {
        let lease = Lease::new(Arc::new(ManualClock::default()), Tick(100), LeaseCheck::On);
        lease.stop();
        lease.extend(Tick(900));
        assert_eq!(lease.check(), Err(LeaseEnded));
    }
}
