//! The pause between two confirmations of leadership: what arrives meanwhile shares the next one.

use std::time::Duration;

use tokio::time::Instant;

/// Longest pause between the beginnings of two confirmations.
///
/// A heartbeat is answered within this and a round trip to a majority. A confirmation costs the nodes together about
/// as much as ten heartbeats.
const LENGTH_MAX: Duration = Duration::from_micros(2_500);

/// Between two looks whether many wait already.
const LOOK: Duration = Duration::from_micros(500);

/// Inputs that are many: more would hardly make their share of a confirmation smaller, and their members would send the
/// next ones later.
const INPUTS_MANY: usize = 32;

/// See the module.
#[derive(Debug)]
pub(super) struct Pause {
    is_on: bool,
    look_at: Instant,
    ends_at: Instant,
}

impl Pause {
    /// None is on at the start.
    pub(super) const fn new(now: Instant) -> Self {
        Self { is_on: false, look_at: now, ends_at: now }
    }

    /// A confirmation begins.
    pub(super) fn begin(&mut self, now: Instant) {
        *self = Self { is_on: true, look_at: now + LOOK, ends_at: now + LENGTH_MAX };
    }

    pub(super) const fn is_on(&self) -> bool {
        self.is_on
    }

    /// When to look next.
    pub(super) const fn look_at(&self) -> Instant {
        self.look_at
    }

    /// Looks whether it is over: at its end, or as soon as there are many inputs. With few it goes on to the next look.
    pub(super) fn look(&mut self, now: Instant, inputs: usize) -> bool {
        self.is_on = now < self.ends_at && inputs < INPUTS_MANY;
        if self.is_on {
            self.look_at = self.ends_at.min(now + LOOK);
        }
        !self.is_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_inputs_wait_for_its_end_and_many_for_the_next_look() {
        let began = Instant::now();
        let mut pause = Pause::new(began);
        assert!(pause.look(began, 0), "none is on");
        pause.begin(began);
        let mut looks = 0;
        while !pause.look(pause.look_at(), INPUTS_MANY - 1) {
            assert!(pause.is_on());
            looks += 1;
        }
        assert_eq!(pause.look_at(), began + LENGTH_MAX);
        assert_eq!(looks, 4, "each after another one");
        pause.begin(began);
        assert_eq!(pause.look_at(), began + LOOK);
        assert!(pause.look(began + LOOK, INPUTS_MANY) && !pause.is_on());
    }

    #[test]
    fn late_look_ends_it() {
        let began = Instant::now();
        let mut pause = Pause::new(began);
        pause.begin(began);
        assert!(pause.look(began + LENGTH_MAX * 100, 0) && !pause.is_on());
    }
}
