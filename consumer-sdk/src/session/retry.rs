//! Pauses between attempts.

use std::time::Duration;

/// First pause, before jitter.
const FIRST: Duration = Duration::from_millis(50);

/// Longest pause that a caller may ask for, before jitter.
const LONGEST: Duration = Duration::from_secs(2);

/// Exponential back-off from 50 ms to a longest pause of at most 2 s; each pause is drawn from its upper half, so that callers that failed
/// together do not come back together. The same seed gives the same pauses.
#[derive(Clone, Debug)]
pub(super) struct Backoff {
    state: u64,
    attempt: u32,
    longest: Duration,
}

impl Backoff {
    pub(super) fn new(seed: u64, longest: Duration) -> Self {
        Self { state: seed, attempt: 0, longest: longest.clamp(FIRST, LONGEST) }
    }

    /// For the session of a member with this ttl: a tenth of it, so that several nodes can be asked within one lease.
    pub(super) fn for_ttl(seed: u64, ttl: Duration) -> Self {
        Self::new(seed, ttl / 10)
    }

    /// Pause before the next attempt.
    pub(super) fn pause(&mut self) -> Duration {
        let whole = FIRST.saturating_mul(1 << self.attempt.min(10)).min(self.longest);
        self.attempt = self.attempt.saturating_add(1);
        let half = whole / 2;
        let share = u32::try_from(self.draw() >> 40).unwrap_or(0);
        half + half.saturating_mul(share) / (1 << 24)
    }

    /// Whether no pause was taken since the start or the last reset.
    pub(super) const fn is_fresh(&self) -> bool {
        self.attempt == 0
    }

    /// Starts again from the shortest pause.
    pub(super) const fn reset(&mut self) {
        self.attempt = 0;
    }

    /// One step of SplitMix64.
    const fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_stay_in_the_upper_half() {
        for seed in 0..200 {
            let mut backoff = Backoff::new(seed, LONGEST);
            for whole_ms in [50, 100, 200, 400, 800, 1600, 2000, 2000, 2000] {
                let pause = backoff.pause();
                let whole = Duration::from_millis(whole_ms);
                assert!(
                    pause >= whole / 2 && pause <= whole,
                    "seed {seed}: {pause:?} of {whole:?}"
                );
            }
            backoff.reset();
            assert!(backoff.pause() <= FIRST);
        }
    }

    #[test]
    fn other_seeds_give_other_pauses() {
        assert_ne!(Backoff::new(1, LONGEST).pause(), Backoff::new(2, LONGEST).pause());
        assert_eq!(Backoff::new(7, LONGEST).pause(), Backoff::new(7, LONGEST).pause());
    }

    #[test]
    fn several_attempts_fit_into_one_lease() {
        let mut backoff = Backoff::for_ttl(1, Duration::from_secs(3));
        let pauses: Duration = (0..10).map(|_| backoff.pause()).sum();
        assert!(pauses < Duration::from_secs(3), "{pauses:?}");
    }
}
