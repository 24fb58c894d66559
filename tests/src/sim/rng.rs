//! Random choices of one run. The same seed draws the same.

use std::time::Duration;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed ^ 0x5851_f42d_4c95_7f2d)
    }

    /// Any number.
    pub const fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to below `count`, which is above 0.
    pub const fn below(&mut self, count: u64) -> u64 {
        self.draw() % count
    }

    /// A position in a list of `len`, which is not empty.
    pub fn position(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below a usize")
    }

    /// From `least` to `most`.
    pub const fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// True in `percent` of all cases.
    pub const fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A length of `least_ms` to `most_ms`, in nanoseconds.
    pub fn millis(&mut self, least_ms: u64, most_ms: u64) -> u64 {
        self.within(nanos(least_ms), nanos(most_ms))
    }
}

/// Milliseconds in nanoseconds.
#[must_use]
pub fn nanos(ms: u64) -> u64 {
    u64::try_from(Duration::from_millis(ms).as_nanos()).expect("a run is short")
}
