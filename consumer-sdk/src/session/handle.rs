//! What the run loop holds of a session.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tenure_model::{Clock, Epoch, MemberId, NextOffset, Partition, Tick, TopicName};
use tokio::sync::{mpsc, oneshot};

use super::client::CoordinatorClient;
use super::event::{Phase, Progress, ReleaseReason};
use super::machine::Act;
use crate::source::TopicInfo;

/// Time for the goodbye of a session that nobody waits for.
pub(super) const DROPPED_LEAVE: Duration = Duration::from_secs(2);

/// Handle of a running session. Cheap to clone; its methods never block and never wait for the network.
///
/// Once the membership has ended, its methods do nothing. When the last clone is dropped, the member leaves.
#[derive(Clone, Debug)]
pub struct SessionHandle {
    orders: mpsc::UnboundedSender<Order>,
    view: Arc<View>,
    coordinator: CoordinatorClient,
}

/// What goes from the handle to the session's thread.
///
/// The queue has no limit of its own: the thread that drains it waits for nothing else.
#[derive(Debug)]
pub(super) enum Order {
    /// For the machine.
    Act(Act),
    /// Leave within `deadline`; `done` is dropped or answered when the thread is through.
    Leave { deadline: Duration, done: oneshot::Sender<()> },
}

/// What the session's thread shows to its handles.
pub(super) struct View {
    pub(super) clock: Arc<dyn Clock>,
    pub(super) state: RwLock<ViewState>,
}

/// State behind a [`View`].
#[derive(Debug)]
pub(super) struct ViewState {
    pub(super) member: MemberId,
    /// Nothing while the member is not in the group.
    pub(super) lease_ends_at: Option<Tick>,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("state", &self.state).finish_non_exhaustive()
    }
}

impl View {
    pub(super) fn change(&self, change: impl FnOnce(&mut ViewState)) {
        change(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
    }
}

impl SessionHandle {
    pub(super) fn new(
        orders: mpsc::UnboundedSender<Order>,
        view: Arc<View>,
        coordinator: CoordinatorClient,
    ) -> Self {
        Self { orders, view, coordinator }
    }

    /// Tells what is known of the topics. The newest report replaces one that was not answered yet.
    pub fn report_topics(&self, topics: Vec<TopicInfo>) {
        self.act(Act::ReportTopics { topics });
    }

    /// Changes the topics to read, 1 to 1000.
    pub fn subscribe(&self, topics: Vec<TopicName>) {
        self.act(Act::Subscribe { topics });
    }

    /// Says that a grant is registered, verified and resumed: it runs from `resume`.
    pub fn acquired(
        &self,
        partition: Partition,
        epoch: Epoch,
        home_initialised: bool,
        resume: NextOffset,
    ) {
        self.act(Act::Acquired { partition, epoch, home_initialised, resume });
    }

    /// Says that the member has prepared for a partition that is to come, or why it cannot. Once for each preparation.
    pub fn prepared(&self, partition: Partition, error: Option<String>) {
        self.act(Act::Prepared { partition, error });
    }

    /// Notes how far a grant has come; goes up with the next heartbeat.
    pub fn phase(
        &self,
        partition: Partition,
        epoch: Epoch,
        phase: Phase,
        position: NextOffset,
        error: Option<String>,
    ) {
        self.act(Act::Phase { partition, epoch, phase, position, error });
    }

    /// Notes how a running grant gets on; goes up with the next heartbeat. One that nothing is noted for stands still.
    pub fn progress(&self, partition: Partition, epoch: Epoch, progress: Progress) {
        self.act(Act::Progress { partition, epoch, progress });
    }

    /// Gives a grant back for good. Said again until it is answered, over reconnects.
    ///
    /// Does nothing for a grant that was lost or released before.
    pub fn release(
        &self,
        partition: Partition,
        epoch: Epoch,
        next_offset: Option<NextOffset>,
        reason: ReleaseReason,
        error: String,
    ) {
        self.act(Act::Release { partition, epoch, next_offset, reason, error });
    }

    /// Says the releases that are queued and ends the membership. Returns within `deadline`, whatever happens.
    pub async fn leave(&self, deadline: Duration) {
        let (done, ended) = oneshot::channel();
        if self.orders.send(Order::Leave { deadline, done }).is_ok() {
            // A dropped sender says the same: the thread is through.
            let _ended = ended.await;
        }
    }

    /// As dropping the last clone does, although others exist: ends the membership, and waits for nothing.
    pub(crate) fn abandon(&self) {
        let (done, _nobody_waits) = oneshot::channel();
        // A session that is through has left.
        let _sent = self.orders.send(Order::Leave { deadline: DROPPED_LEAVE, done });
    }

    /// Whether the member is in the group and its lease is live.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let ends_at = self.view.state.read().unwrap_or_else(PoisonError::into_inner).lease_ends_at;
        ends_at.is_some_and(|ends_at| self.view.clock.now() < ends_at)
    }

    /// Id of the present membership.
    #[must_use]
    pub fn member(&self) -> MemberId {
        self.view.state.read().unwrap_or_else(PoisonError::into_inner).member.clone()
    }

    /// Client for the unary calls, at the same nodes.
    #[must_use]
    pub fn coordinator(&self) -> CoordinatorClient {
        self.coordinator.clone()
    }

    fn act(&self, act: Act) {
        // An ended session has no use for it.
        let _sent = self.orders.send(Order::Act(act));
    }
}
