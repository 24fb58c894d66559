//! Moments at which a write is stopped.

use std::sync::Mutex;
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
    Fixed(Duration),
    Random { random: Box<Mutex<StdRng>>, longest: Duration },
    Gate { reached: watch::Sender<bool>, open: watch::Receiver<bool> },
}

/// Other side of a gate: sees the write arrive, and lets it go on.
#[derive(Debug)]
pub(super) struct Gate {
    reached: watch::Receiver<bool>,
    open: watch::Sender<bool>,
}

impl Pauses {
    /// A write that is never stopped.
    #[must_use]
    pub const fn none() -> Self {
        Self(Kind::None)
    }

    pub(super) const fn fixed(length: Duration) -> Self {
        Self(Kind::Fixed(length))
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
            Kind::Fixed(length) => tokio::time::sleep(*length).await,
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
