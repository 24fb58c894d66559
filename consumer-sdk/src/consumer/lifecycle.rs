//! What happens to a consumer, told to whoever listens: frameworks, logs, readiness.

use std::fmt;

use tenure_model::{Epoch, MemberEpoch, NextOffset, Partition, Tick, TopicName};
use tokio::sync::{broadcast, watch};

use crate::grant::Grant;
use crate::session::{LostCause, ReleaseReason};

/// Events that one listener may leave unread; what comes beyond is missed and counted.
pub const LIFECYCLE_EVENTS_MAX: usize = 4096;

/// One thing that happened to a consumer, in the order in which it happened.
///
/// | event        | then                                                                              |
/// |--------------|-----------------------------------------------------------------------------------|
/// | `Preparing`  | `Granted`, or `PreparationEnded`                                                  |
/// | `Granted`    | `Acquired`, `Revoking`, `Lost` or `Released`                                      |
/// | `Acquired`   | `Revoking`, `Lost` or `Released`                                                  |
/// | `Revoking`   | `Released` or `Lost`                                                              |
/// | `Lost`       | `Released` once the handler has ended; later perhaps `Regained`, under a new epoch |
#[derive(Clone, Debug)]
pub enum Lifecycle {
    /// The consumer is in the group. Comes again when an expired membership is followed by a new one.
    Joined {
        /// Identity of the membership.
        member_epoch: MemberEpoch,
    },
    /// The partition is to come, and is prepared for; another still owns it.
    Preparing {
        /// Name of the topic.
        topic: TopicName,
        /// The partition.
        partition: Partition,
    },
    /// It does not come after all.
    PreparationEnded {
        /// The partition.
        partition: Partition,
    },
    /// The partition was given to this consumer; it is not acquired yet.
    Granted {
        /// The grant.
        grant: Grant,
    },
    /// As `Granted`, of a partition that this consumer lost before, and that it has again under a new epoch.
    Regained {
        /// The new grant.
        grant: Grant,
        /// Epoch of the grant that was lost.
        lost: Epoch,
    },
    /// Registered at every sink, verified, resumed: the handler runs.
    Acquired {
        /// Name of the topic.
        topic: TopicName,
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Where reading starts.
        resume: NextOffset,
    },
    /// The coordinator asks for the partition.
    Revoking {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant that ends.
        epoch: Epoch,
        /// When the coordinator may take it without a release.
        deadline: Tick,
    },
    /// The grant ended at once: nothing may be committed under its epoch any more.
    Lost {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant that ended.
        epoch: Epoch,
        /// Why.
        cause: LostCause,
    },
    /// The grant is over for this process: its handler has ended, nothing of it is written any more.
    Released {
        /// The partition.
        partition: Partition,
        /// Epoch of the grant.
        epoch: Epoch,
        /// Why.
        reason: ReleaseReason,
        /// For people; empty: nothing went wrong.
        error: String,
    },
    /// Two heartbeats in a row have no answer: everything is lost at this moment, unless one comes.
    LeaseAtRisk {
        /// End of the member's lease, on the lease's clock.
        ends_at: Tick,
    },
    /// The lease that was at risk was renewed.
    LeaseRenewed,
    /// The membership is over, for good; the last event.
    Ended,
    /// The listener was too slow: this many events were missed here.
    Missed {
        /// How many.
        count: u64,
    },
}

/// What is told; shared by the run loop, the tasks of grants and whoever listens.
pub(crate) struct Told {
    events: broadcast::Sender<Lifecycle>,
    /// End of the lease while it is at risk.
    risk: watch::Sender<Option<Tick>>,
}

impl Default for Told {
    fn default() -> Self {
        let events = broadcast::Sender::new(LIFECYCLE_EVENTS_MAX);
        Self { events, risk: watch::Sender::new(None) }
    }
}

impl Told {
    pub(crate) fn tell(&self, event: Lifecycle) {
        match &event {
            Lifecycle::LeaseAtRisk { ends_at } => {
                self.risk.send_replace(Some(*ends_at));
            }
            Lifecycle::LeaseRenewed | Lifecycle::Joined { .. } | Lifecycle::Ended => {
                self.risk.send_replace(None);
            }
            Lifecycle::Preparing { .. }
            | Lifecycle::PreparationEnded { .. }
            | Lifecycle::Granted { .. }
            | Lifecycle::Regained { .. }
            | Lifecycle::Acquired { .. }
            | Lifecycle::Revoking { .. }
            | Lifecycle::Lost { .. }
            | Lifecycle::Released { .. }
            | Lifecycle::Missed { .. } => {}
        }
        // Mostly nobody listens.
        let _listeners = self.events.send(event);
    }

    pub(crate) fn listen(&self) -> LifecycleEvents {
        LifecycleEvents { events: self.events.subscribe() }
    }

    /// Waits until the lease is at risk; answers when it ends.
    pub(crate) async fn lease_at_risk(&self) -> Tick {
        let mut risk = self.risk.subscribe();
        loop {
            if let Some(ends_at) = *risk.borrow_and_update() {
                return ends_at;
            }
            // The sender lives in `self`.
            risk.changed().await.expect("what is told outlives those who wait on it");
        }
    }

    pub(crate) fn is_at_risk(&self) -> bool {
        self.risk.borrow().is_some()
    }
}

/// What happens to one consumer from now on.
pub struct LifecycleEvents {
    events: broadcast::Receiver<Lifecycle>,
}

impl fmt::Debug for LifecycleEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LifecycleEvents").field("unread", &self.events.len()).finish()
    }
}

impl LifecycleEvents {
    /// Waits for the next event; nothing once the consumer has ended. Cancel-safe.
    pub async fn next(&mut self) -> Option<Lifecycle> {
        match self.events.recv().await {
            Ok(event) => Some(event),
            Err(broadcast::error::RecvError::Lagged(count)) => Some(Lifecycle::Missed { count }),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}
