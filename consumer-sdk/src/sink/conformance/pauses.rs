//! Moments at which a write is stopped.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::watch;

/// Pauses inside one write, decided by the kit.
#[derive(Debug)]
pub struct Pauses(Kind);

#[derive(Debug)]
enum Kind {
    None,
    Random { random: Box<Mutex<StdRng>>, longest: Duration },
    Gate { reached: watch::Sender<bool>, open: watch::Receiver<bool> },
    Relay(Arc<Relay>),
}

/// Other side of a gate: sees the write arrive, and lets it go on.
#[derive(Debug)]
pub(super) struct Gate {
    reached: watch::Receiver<bool>,
    open: watch::Sender<bool>,
}

/// Writers that keep each other company: none goes on before another one has come, as long as the sink lets two of them
/// in at once. A lock that they share is then never free, however fast or slow the machine is.
#[derive(Debug)]
pub(super) struct Relay {
    /// Shortest stay.
    hold: Duration,
    /// Longest wait for company where the sink has not let two in yet.
    alone_max: Duration,
    inside: watch::Sender<Inside>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Inside {
    writers: usize,
    have_met: bool,
}

impl Pauses {
    /// A write that is never stopped.
    #[must_use]
    pub const fn none() -> Self {
        Self(Kind::None)
    }

    pub(super) const fn relay(relay: Arc<Relay>) -> Self {
        Self(Kind::Relay(relay))
    }

    pub(super) fn random(seed: u64, longest: Duration) -> Self {
        Self(Kind::Random { random: Box::new(Mutex::new(StdRng::seed_from_u64(seed))), longest })
    }

    pub(super) fn gate() -> (Self, Gate) {
        let (reached, seen) = watch::channel(false);
        let (opener, open) = watch::channel(false);
        (Self(Kind::Gate { reached, open }), Gate { reached: seen, open: opener })
    }

    /// Stops here for as long as the kit wants.
    pub async fn here(&self) {
        match &self.0 {
            Kind::None => {}
            Kind::Random { random, longest } => {
                let length = {
                    let mut random = random.lock().expect("no holder panics");
                    if random.random_bool(0.5) {
                        Duration::ZERO
                    } else {
                        random.random_range(Duration::ZERO..=*longest)
                    }
                };
                if !length.is_zero() {
                    tokio::time::sleep(length).await;
                }
            }
            Kind::Gate { reached, open } => {
                reached.send_replace(true);
                let mut open = open.clone();
                // A gate that is gone is open.
                let _opened = open.wait_for(|open| *open).await;
            }
            Kind::Relay(relay) => relay.stay().await,
        }
    }
}

impl Gate {
    /// Waits until the write has arrived; `false` when it ended without.
    pub(super) async fn reached(&mut self) -> bool {
        self.reached.wait_for(|reached| *reached).await.is_ok()
    }

    pub(super) fn open(&self) {
        self.open.send_replace(true);
    }
}

impl Relay {
    pub(super) fn new(hold: Duration, alone_max: Duration) -> Arc<Self> {
        let (inside, _) = watch::channel(Inside::default());
        Arc::new(Self { hold, alone_max, inside })
    }

    /// Whether the sink ever let two in at once.
    pub(super) fn have_met(&self) -> bool {
        self.inside.borrow().have_met
    }

    async fn stay(&self) {
        self.inside.send_modify(|inside| {
            inside.writers += 1;
            inside.have_met |= inside.writers > 1;
        });
        tokio::time::sleep(self.hold).await;
        let mut changes = self.inside.subscribe();
        let patience = tokio::time::sleep(self.alone_max);
        tokio::pin!(patience);
        while !self.leave(false) {
            tokio::select! {
                // The sender is this relay's own.
                _changed = changes.changed() => {}
                () = &mut patience, if !patience.is_elapsed() => {
                    if self.leave(!self.have_met()) {
                        return;
                    }
                }
            }
        }
    }

    /// Leaves company behind, or, `alone`, nobody.
    fn leave(&self, alone: bool) -> bool {
        self.inside.send_if_modified(|inside| {
            let may_leave = alone || inside.writers > 1;
            if may_leave {
                inside.writers -= 1;
            }
            may_leave
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writers_that_met_leave_only_when_another_has_come() {
        let relay = Relay::new(Duration::from_millis(5), Duration::from_millis(10));
        let writer = || {
            let relay = Arc::clone(&relay);
            tokio::spawn(async move { relay.stay().await })
        };
        let mut writers = vec![writer(), writer()];
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let waiting = writers.iter().filter(|writer| !writer.is_finished()).count();
            assert_eq!((waiting, relay.have_met()), (1, true), "one of them waits for company");
            writers.push(writer());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn writer_that_the_sink_keeps_alone_leaves_after_its_time() {
        let relay = Relay::new(Duration::from_millis(5), Duration::from_millis(10));
        let started = tokio::time::Instant::now();
        relay.stay().await;
        relay.stay().await;
        assert_eq!(started.elapsed(), Duration::from_millis(30));
        assert!(!relay.have_met());
    }
}
