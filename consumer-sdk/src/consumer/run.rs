//! The run loop: session events go to the task of the grant that they name, and to no other.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use tenure_model::{Epoch, Partition};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::end::{Control, End};
use super::lifecycle::{Lifecycle, Told};
use super::link::Link;
use super::topics::Subscription;
use super::{ConsumerError, Handler, Parts, SharedClock, Stopped, serve, topics};
use crate::grant::Grant;
use crate::metrics;
use crate::offsets::CoordinatorOffsets;
use crate::session::{EndCause, LostCause, ReleaseReason, SessionEvent};
use crate::sink::FencedSink;

/// Share of a shutdown's deadline that is kept for leaving and for the source.
const LEAVE_SHARE: u32 = 4;
/// Longest such part.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// Share of a shutdown's deadline that is left unused, so that the return itself is within it.
const RETURN_SHARE: u32 = 50;
/// Longest such part.
const RETURN_MAX: Duration = Duration::from_millis(50);
/// How long grants are waited for after the membership has ended, beyond the grace of a lost one.
const LOST_EXTRA: Duration = Duration::from_secs(5);

/// A consumer at work.
pub(crate) struct Running<S: FencedSink> {
    pub(crate) parts: Parts<S>,
    pub(crate) link: Arc<dyn Link>,
    pub(crate) handler: Handler<S>,
    pub(crate) clock: SharedClock,
    pub(crate) topics: Arc<Subscription>,
}

/// Ends the membership when the run ends or is dropped, whatever still holds the link: a commit in the background, or
/// what a handler has left behind.
struct Bound {
    offsets: CoordinatorOffsets,
    link: Arc<dyn Link>,
}

/// Tells the end, whichever way the run ends.
struct Ends(Arc<Told>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.tell(Lifecycle::Ended);
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.offsets.unbind();
        self.link.abandon();
    }
}

impl<S: FencedSink> Running<S> {
    pub(crate) async fn run(
        self,
        mut events: mpsc::UnboundedReceiver<SessionEvent>,
        mut stop: watch::Receiver<Option<Duration>>,
    ) -> Result<Stopped, ConsumerError> {
        let running = Arc::new(self);
        running.parts.offsets.bind(Arc::clone(&running.link));
        let _bound =
            Bound { offsets: running.parts.offsets.clone(), link: Arc::clone(&running.link) };
        let _ends = Ends(Arc::clone(&running.parts.told));
        let joined = Arc::new(Notify::new());
        let mut background = JoinSet::new();
        background.spawn(topics::report(
            Arc::clone(&running.parts.source),
            Arc::clone(&running.link),
            Arc::clone(&running.topics),
            running.parts.settings.topics_interval,
            Arc::clone(&joined),
        ));
        background.spawn(metrics::publish_on(
            Arc::clone(&running.parts.counters),
            Arc::clone(&running.parts.grants),
            Arc::downgrade(&running.link),
        ));
        let mut slots = Slots::new(Arc::clone(&running));
        loop {
            tokio::select! {
                biased;
                length = asked(&mut stop) => {
                    return Ok(slots.shut_down(length, &mut events).await);
                }
                Some(done) = slots.tasks.join_next_with_id() => slots.finished(done),
                event = events.recv() => match event {
                    Some(SessionEvent::Joined { member_epoch }) => {
                        running.parts.told.tell(Lifecycle::Joined { member_epoch });
                        joined.notify_one();
                    }
                    Some(SessionEvent::Ended { cause }) => {
                        slots.lose_all(&cause).await;
                        return Err(ConsumerError::MembershipEnded(cause));
                    }
                    Some(event) => slots.handle(event),
                    None => {
                        slots.lose_all(&EndCause::Failed("no more events".to_owned())).await;
                        return Err(ConsumerError::SessionGone);
                    }
                },
            }
        }
    }
}

fn make_sinks_ready<S: FencedSink>(running: Arc<Running<S>>) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let also = running.parts.also.iter().map(|sink| sink.make_ready_only());
        futures::future::join(running.parts.home.make_ready(), join_all(also)).await;
    })
}

/// Waits until a shutdown is asked for; answers its deadline.
async fn asked(stop: &mut watch::Receiver<Option<Duration>>) -> Duration {
    match stop.wait_for(Option::is_some).await.map(|asked| *asked) {
        Ok(length) => length.unwrap_or_default(),
        Err(_nobody_can_ask) => std::future::pending().await,
    }
}

/// One partition: the grant at work, and a newer one that waits for it to end.
struct Slot {
    epoch: Epoch,
    control: Arc<Control>,
    next: Option<Grant>,
}

/// Tasks of all grants. Every action names the epoch that it is for; one for another epoch does nothing.
struct Slots<S: FencedSink> {
    running: Arc<Running<S>>,
    slots: BTreeMap<Partition, Slot>,
    tasks: JoinSet<()>,
    grants: HashMap<Id, (Partition, Epoch)>,
    /// Grants that were lost and not followed by another of the same partition here.
    lost: BTreeMap<Partition, Epoch>,
}

impl<S: FencedSink> Slots<S> {
    fn new(running: Arc<Running<S>>) -> Self {
        Self {
            running,
            slots: BTreeMap::new(),
            tasks: JoinSet::new(),
            grants: HashMap::new(),
            lost: BTreeMap::new(),
        }
    }

    fn handle(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Joined { .. } | SessionEvent::Ended { .. } => {}
            SessionEvent::Prepare(preparing) => {
                let parts = &self.running.parts;
                self.tell(Lifecycle::Preparing {
                    topic: preparing.topic.clone(),
                    partition: preparing.partition,
                });
                let (link, ahead) = (&self.running.link, parts.settings.read_ahead);
                let sinks = make_sinks_ready(Arc::clone(&self.running));
                parts.warm.begin(&preparing, &parts.source, ahead, sinks, link);
            }
            SessionEvent::PreparationEnded { partition } => self.call_off(partition),
            SessionEvent::LeaseAtRisk { ends_at } => self.tell(Lifecycle::LeaseAtRisk { ends_at }),
            SessionEvent::LeaseRenewed => self.tell(Lifecycle::LeaseRenewed),
            SessionEvent::Granted(grant) => {
                let granted = match self.lost.remove(&grant.partition) {
                    Some(lost) => Lifecycle::Regained { grant: grant.clone(), lost },
                    None => Lifecycle::Granted { grant: grant.clone() },
                };
                self.tell(granted);
                self.granted(grant);
            }
            SessionEvent::Revoked { partition, epoch, deadline } => {
                self.tell(Lifecycle::Revoking { partition, epoch, deadline });
                if let Some(control) = self.control(partition, epoch) {
                    control.end(End::Revoked { deadline });
                } else if self.drop_waiting(partition, epoch) {
                    let (reason, error) = (ReleaseReason::Revoked, String::new());
                    self.running.link.release(partition, epoch, None, reason, error);
                }
            }
            SessionEvent::Lost { partition, epoch, cause } => {
                self.lost.insert(partition, epoch);
                self.tell(Lifecycle::Lost { partition, epoch, cause: cause.clone() });
                if let Some(control) = self.control(partition, epoch) {
                    control.end(End::Lost { cause });
                } else {
                    self.drop_waiting(partition, epoch);
                }
            }
        }
    }

    fn call_off(&mut self, partition: Partition) {
        self.tell(Lifecycle::PreparationEnded { partition });
        if self.running.parts.warm.call_off(partition) && !self.slots.contains_key(&partition) {
            let source = Arc::clone(&self.running.parts.source);
            drop(tokio::spawn(async move { source.close(partition).await }));
        }
    }

    fn show_count(&self) {
        let count = self.running.parts.grants.count();
        ::metrics::gauge!(metrics::PARTITIONS_OWNED).set(count as f64);
    }

    fn tell(&self, event: Lifecycle) {
        self.running.parts.told.tell(event);
    }

    fn control(&self, partition: Partition, epoch: Epoch) -> Option<&Arc<Control>> {
        self.slots.get(&partition).filter(|slot| slot.epoch == epoch).map(|slot| &slot.control)
    }

    /// Drops a grant that waits for an older one to end; whether there was one.
    fn drop_waiting(&mut self, partition: Partition, epoch: Epoch) -> bool {
        let Some(slot) = self.slots.get_mut(&partition) else { return false };
        slot.next.take_if(|grant| grant.epoch == epoch).is_some()
    }

    fn granted(&mut self, grant: Grant) {
        let Some(slot) = self.slots.get_mut(&grant.partition) else { return self.start(grant) };
        let newest = slot.next.as_ref().map_or(slot.epoch, |next| next.epoch);
        if grant.epoch > newest {
            slot.control.end(End::Lost { cause: LostCause::Fenced { current: Some(grant.epoch) } });
            slot.next = Some(grant);
        }
    }

    fn start(&mut self, grant: Grant) {
        let Grant { partition, epoch, .. } = grant;
        let control = Arc::new(Control::new());
        let slot = Slot { epoch, control: Arc::clone(&control), next: None };
        self.slots.insert(partition, slot);
        let span = tracing::info_span!(
            "partition",
            group = %grant.group,
            topic = %grant.topic,
            partition = %partition.index,
            %epoch,
            handoff = %grant.handoff,
        );
        self.running.parts.grants.begin(&grant, &control);
        self.show_count();
        let serve = serve::serve(Arc::clone(&self.running), grant, control);
        let task = self.tasks.spawn(serve.instrument(span));
        self.grants.insert(task.id(), (partition, epoch));
    }

    fn finished(&mut self, done: Result<(Id, ()), JoinError>) {
        let (id, error) = match done {
            Ok((id, ())) => (id, None),
            Err(error) => (error.id(), Some(error)),
        };
        let Some((partition, epoch)) = self.grants.remove(&id) else { return };
        self.running.parts.grants.end(partition, epoch);
        self.show_count();
        if let Some(error) = error {
            tracing::error!(%partition, %epoch, %error, "the task of a grant failed: this is a bug");
            self.running.parts.offsets.forget(partition, epoch);
            let reason = ReleaseReason::HandlerFailed;
            self.running.link.release(partition, epoch, None, reason, error.to_string());
        }
        let Some(slot) = self.slots.remove(&partition) else { return };
        if let Some(next) = slot.next {
            self.start(next);
        }
    }

    fn end_all(&mut self, end: &End) {
        self.running.parts.warm.call_off_all();
        for (partition, slot) in &mut self.slots {
            slot.control.end(end.clone());
            if let Some(waiting) = slot.next.take() {
                let (reason, error) = (ReleaseReason::Shutdown, String::new());
                self.running.link.release(*partition, waiting.epoch, None, reason, error);
            }
        }
    }

    /// Waits until every grant has ended; whether they did before `until`.
    async fn drained(&mut self, until: Instant) -> bool {
        while !self.tasks.is_empty() {
            match tokio::time::timeout_at(until, self.tasks.join_next_with_id()).await {
                Ok(Some(done)) => self.finished(done),
                Ok(None) => break,
                Err(_elapsed) => return false,
            }
        }
        true
    }

    async fn lose_all(mut self, cause: &EndCause) {
        self.end_all(&End::Lost { cause: LostCause::MembershipEnded(format!("{cause:?}")) });
        let until = Instant::now() + self.running.parts.settings.lost_grace + LOST_EXTRA;
        self.drained(until).await;
        self.running.parts.source.shutdown(LEAVE_MAX).await;
    }

    /// Drains, releases, leaves and ends the source, within `length`.
    async fn shut_down(
        mut self,
        length: Duration,
        events: &mut mpsc::UnboundedReceiver<SessionEvent>,
    ) -> Stopped {
        let aborted_before = self.running.parts.counters.handlers_aborted();
        // Timers come late, and the promise is to be back by then.
        let length = length - (length / RETURN_SHARE).min(RETURN_MAX);
        let until = Instant::now() + length;
        let reserve = (length / LEAVE_SHARE).min(LEAVE_MAX);
        let drain = length - reserve;
        // The release itself comes after the handler: it gets the second half of the reserve's like.
        let handler = drain - reserve / 2;
        self.end_all(&End::Shutdown { deadline: self.running.clock.now().after(handler) });
        let drained_until = Instant::now() + drain;
        let drained = loop {
            tokio::select! {
                biased;
                drained = self.drained(drained_until) => break drained,
                Some(event) = events.recv() => self.handle_while_draining(event),
            }
        };
        self.tasks.abort_all();
        let left = until.saturating_duration_since(Instant::now());
        let running = Arc::clone(&self.running);
        let mirrored = async {
            if let Some(mirror) = &running.parts.mirror {
                mirror.flush(left).await;
            }
        };
        let end = async {
            let source = running.parts.source.shutdown(left);
            tokio::join!(running.link.leave(left), source, mirrored);
        };
        let left_in_time = tokio::time::timeout_at(until, end).await.is_ok();
        let aborted = running.parts.counters.handlers_aborted() - aborted_before;
        let handlers_aborted = usize::try_from(aborted).unwrap_or(usize::MAX);
        Stopped { clean: drained && left_in_time && handlers_aborted == 0, handlers_aborted }
    }

    /// Losses still stop their grants; a new grant goes straight back.
    fn handle_while_draining(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Granted(grant) => {
                let (reason, error) = (ReleaseReason::Shutdown, String::new());
                self.running.link.release(grant.partition, grant.epoch, None, reason, error);
            }
            SessionEvent::Ended { cause } => {
                self.end_all(&End::Lost {
                    cause: LostCause::MembershipEnded(format!("{cause:?}")),
                });
            }
            SessionEvent::Prepare(_) => {}
            event @ (SessionEvent::Joined { .. }
            | SessionEvent::PreparationEnded { .. }
            | SessionEvent::LeaseAtRisk { .. }
            | SessionEvent::LeaseRenewed
            | SessionEvent::Revoked { .. }
            | SessionEvent::Lost { .. }) => self.handle(event),
        }
    }
}
