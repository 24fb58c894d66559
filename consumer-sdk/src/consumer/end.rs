//! How the ownership of a partition ends, and the cell through which its parties learn of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tenure_model::{NextOffset, Tick};
use tokio::sync::watch;

use crate::session::LostCause;

/// Why no more records come.
#[derive(Clone, Debug)]
pub enum End {
    /// The coordinator asks for the partition. Finish what is in hand and return before `deadline`.
    Revoked {
        /// When the handler is aborted, on the clock of the grant's lease.
        deadline: Tick,
    },
    /// The consumer shuts down. Finish what is in hand and return before `deadline`.
    Shutdown {
        /// When the handler is aborted, on the clock of the grant's lease.
        deadline: Tick,
    },
    /// The partition is not ours any more, or cannot go on. Stop at once.
    Lost {
        /// Why.
        cause: LostCause,
    },
}

impl End {
    /// Whether work in hand may still be committed: not after a loss.
    #[must_use]
    pub const fn may_commit(&self) -> bool {
        match self {
            Self::Revoked { .. } | Self::Shutdown { .. } => true,
            Self::Lost { .. } => false,
        }
    }

    /// Until when the handler may work on; nothing after a loss.
    #[must_use]
    pub const fn deadline(&self) -> Option<Tick> {
        match self {
            Self::Revoked { deadline } | Self::Shutdown { deadline } => Some(*deadline),
            Self::Lost { .. } => None,
        }
    }
}

/// Shared by the run loop, the task of one grant and its [`Input`](super::Input).
///
/// | from              | told                 | to                |
/// |-------------------|----------------------|-------------------|
/// | running           | any end              | that end          |
/// | Revoked, Shutdown | Lost                 | Lost              |
/// | Revoked, Shutdown | Revoked or Shutdown  | the first stays   |
/// | Lost              | anything             | the first stays   |
#[derive(Debug)]
pub(crate) struct Control {
    ending: watch::Sender<Option<End>>,
    /// Whether `ending` has an end: asked for each record, so without its lock.
    has_ended: AtomicBool,
    position: AtomicU64,
    /// Position at the last look of [`Control::take_moved`].
    seen_position: AtomicU64,
    /// The handler has taken records and not asked for more since.
    holds_records: AtomicBool,
    /// The handler has said that it loads state, and has taken no record since.
    is_loading: AtomicBool,
}

impl Control {
    pub(crate) fn new() -> Self {
        Self {
            ending: watch::Sender::new(None),
            has_ended: AtomicBool::new(false),
            position: AtomicU64::new(0),
            seen_position: AtomicU64::new(0),
            holds_records: AtomicBool::new(false),
            is_loading: AtomicBool::new(false),
        }
    }

    /// Tells everyone that the grant ends.
    pub(crate) fn end(&self, end: End) {
        self.ending.send_if_modified(|ending| {
            let wins = match (&*ending, &end) {
                (None, _) => true,
                (Some(before), End::Lost { .. }) => before.may_commit(),
                (Some(_), End::Revoked { .. } | End::Shutdown { .. }) => false,
            };
            if wins {
                *ending = Some(end);
                self.has_ended.store(true, Ordering::SeqCst);
            }
            wins
        });
    }

    /// Whether the grant ends; an end that is being told this moment counts.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    pub(crate) fn ending(&self) -> Option<End> {
        self.ending.borrow().clone()
    }

    /// Waits until the grant ends.
    pub(crate) async fn ended(&self) -> End {
        self.wait_for(|_| true).await
    }

    /// Waits until the grant is lost; an orderly end is passed over.
    pub(crate) async fn lost(&self) -> End {
        self.wait_for(|end| !end.may_commit()).await
    }

    async fn wait_for(&self, wanted: impl Fn(&End) -> bool) -> End {
        let mut ending = self.ending.subscribe();
        loop {
            if let Some(end) = ending.borrow_and_update().as_ref().filter(|end| wanted(end)) {
                return end.clone();
            }
            // The sender lives in `self`, so the channel cannot close under the wait.
            ending.changed().await.expect("the control outlives those who wait on it");
        }
    }

    pub(crate) fn position(&self) -> NextOffset {
        NextOffset::new(self.position.load(Ordering::Relaxed)).unwrap_or(NextOffset::ZERO)
    }

    pub(crate) fn set_holds_records(&self, holds: bool) {
        self.holds_records.store(holds, Ordering::Relaxed);
    }

    /// Whether the handler has taken records and not asked for more since.
    pub(crate) fn holds_records(&self) -> bool {
        self.holds_records.load(Ordering::Relaxed)
    }

    /// Whether the position has moved since this was last asked.
    pub(crate) fn take_moved(&self) -> bool {
        let position = self.position.load(Ordering::Relaxed);
        self.seen_position.swap(position, Ordering::Relaxed) != position
    }

    pub(crate) fn set_loading(&self, is_loading: bool) {
        self.is_loading.store(is_loading, Ordering::Relaxed);
    }

    /// Whether the handler has said that it loads state, and has taken no record since.
    pub(crate) fn is_loading(&self) -> bool {
        self.is_loading.load(Ordering::Relaxed)
    }

    pub(crate) fn set_position(&self, next: NextOffset) {
        self.position.store(next.get(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(told: &[End], want: &str) {
        let control = Control::new();
        for end in told {
            control.end(end.clone());
        }
        let end = match control.ending() {
            None => "running".to_owned(),
            Some(End::Revoked { deadline }) => format!("revoked {}", deadline.0),
            Some(End::Shutdown { deadline }) => format!("shutdown {}", deadline.0),
            Some(End::Lost { cause }) => format!("lost {cause:?}"),
        };
        assert_eq!(end, want);
    }

    #[test]
    fn first_end_stays_unless_a_loss_follows_an_orderly_one() {
        let revoked = || End::Revoked { deadline: Tick(3) };
        let shutdown = || End::Shutdown { deadline: Tick(4) };
        let lost = |text: &str| End::Lost { cause: LostCause::Sink(text.to_owned()) };
        check(&[], "running");
        check(&[revoked(), shutdown()], "revoked 3");
        check(&[shutdown(), revoked()], "shutdown 4");
        check(&[revoked(), lost("a"), lost("b")], "lost Sink(\"a\")");
        check(&[shutdown(), lost("a"), revoked()], "lost Sink(\"a\")");
    }
}
