//! A coordinator in memory that does as a test tells it.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use tenure_model::{
    Clock, CommitSequence, Epoch, ErrorCode, GroupId, Index, MemberEpoch, MemberId, NextOffset,
    Partition, RequestId, Tick, TopicName,
};
use tokio::sync::{mpsc, watch};

use crate::consumer::{Consumer, ConsumerError, Link, OffsetMark, Owned, Preparation, Stopped};
use crate::grant::{Grant, Resource};
use crate::lease::{Lease, LeaseCheck};
use crate::session::{
    CallError, EndCause, LostCause, Phase, Preparing, Progress, Refused, ReleaseReason,
    SessionEvent,
};
use crate::sink::{BoxError, FencedSink, Verified};
use crate::source::TopicInfo;

const LOGGED_MAX: Duration = Duration::from_secs(60);

/// Coordinator of one group, in memory. Cheap to clone.
///
/// It grants, revokes and takes away when it is told to, fences commits as the real one does, and writes down what it
/// was told, one line each.
#[derive(Clone)]
pub struct MemoryCoordinator {
    inner: Arc<Inner>,
}

struct Inner {
    group: GroupId,
    clock: Arc<dyn Clock>,
    check: LeaseCheck,
    state: Mutex<State>,
    changed: watch::Sender<u64>,
}

struct State {
    epochs: u64,
    partitions: BTreeMap<Partition, Held>,
    sessions: BTreeMap<MemberId, mpsc::UnboundedSender<SessionEvent>>,
    log: Vec<String>,
    answers: bool,
}

/// What is known of one partition.
#[derive(Default)]
struct Held {
    owner: Option<(MemberId, Epoch)>,
    newest: Option<Epoch>,
    committed: Option<NextOffset>,
    sequence: CommitSequence,
    initialised: bool,
    rewind: Option<RequestId>,
    metadata: Vec<u8>,
    progress: Option<(Epoch, Progress)>,
}

impl fmt::Debug for MemoryCoordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryCoordinator")
            .field("group", &self.inner.group)
            .finish_non_exhaustive()
    }
}

impl MemoryCoordinator {
    /// Coordinator whose leases are counted on `clock`.
    #[must_use]
    pub fn new(group: GroupId, clock: Arc<dyn Clock>, check: LeaseCheck) -> Self {
        let state = State {
            epochs: 0,
            partitions: BTreeMap::new(),
            sessions: BTreeMap::new(),
            log: Vec::new(),
            answers: true,
        };
        let (state, changed) = (Mutex::new(state), watch::Sender::new(0));
        Self { inner: Arc::new(Inner { group, clock, check, state, changed }) }
    }

    /// Runs a consumer as `member` of this group instead of at a real coordinator.
    ///
    /// # Errors
    ///
    /// As [`Consumer::run`].
    pub async fn run<S, F, Fut>(
        &self,
        member: &MemberId,
        consumer: Consumer<S>,
        handler: F,
    ) -> Result<Stopped, ConsumerError>
    where
        S: FencedSink,
        F: Fn(Owned<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (events, received) = mpsc::unbounded_channel();
        // The receiver is held below.
        let _sent = events.send(SessionEvent::Joined { member_epoch: MemberEpoch(1) });
        self.state().sessions.insert(member.clone(), events);
        self.note(format!("{member} joined"));
        let link = MemoryLink { coordinator: self.clone(), member: member.clone() };
        consumer.run_with(Arc::new(link), received, handler).await
    }

    /// As [`MemoryCoordinator::run`], of a consumer that prepares.
    ///
    /// # Errors
    ///
    /// As [`Consumer::run_warm`].
    pub async fn run_warm<S, W, P, PFut, F, Fut>(
        &self,
        member: &MemberId,
        consumer: Consumer<S>,
        prepare: P,
        own: F,
    ) -> Result<Stopped, ConsumerError>
    where
        S: FencedSink,
        W: Send + 'static,
        P: Fn(Preparation) -> PFut + Send + Sync + 'static,
        PFut: Future<Output = Result<W, BoxError>> + Send + 'static,
        F: Fn(Owned<S>, W) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (consumer, handler) = consumer.into_warm(prepare, own);
        self.run(member, consumer, handler).await
    }

    /// Gives a partition to a member elsewhere under the next epoch; nobody is told. Answers the epoch.
    ///
    /// # Panics
    ///
    /// When the epochs are used up.
    pub fn take_for(&self, topic: &TopicName, partition: Partition, member: &MemberId) -> Epoch {
        self.next_grant(topic, partition, member).epoch
    }

    /// Grants a partition to a member under the next epoch, taking it from whoever holds it; the holder is not told.
    /// Answers the epoch and the lease.
    ///
    /// # Panics
    ///
    /// When the member has not joined.
    pub fn grant(
        &self,
        topic: &TopicName,
        partition: Partition,
        member: &MemberId,
    ) -> (Epoch, Lease) {
        let grant = self.next_grant(topic, partition, member);
        let (epoch, lease) = (grant.epoch, grant.lease.clone());
        let session = self.state().sessions.get(member).expect("the member has joined").clone();
        // A consumer that has ended misses it, as a real one would.
        let _sent = session.send(SessionEvent::Granted(grant));
        (epoch, lease)
    }

    fn next_grant(&self, topic: &TopicName, partition: Partition, member: &MemberId) -> Grant {
        let Inner { group, clock, check, .. } = &*self.inner;
        let mut state = self.state();
        state.epochs += 1;
        let epoch = Epoch::new(state.epochs).expect("few epochs");
        let held = state.partitions.entry(partition).or_default();
        held.owner = Some((member.clone(), epoch));
        held.newest = Some(epoch);
        held.sequence = CommitSequence(0);
        let home_initialised = held.initialised;
        drop(state);
        self.note(format!("grant {} to {member} at {epoch}", partition.index));
        Grant {
            group: group.clone(),
            member: member.clone(),
            topic: topic.clone(),
            partition,
            epoch,
            handoff: Index(epoch.get()),
            home_initialised,
            resource: Resource::of_partition(group, partition),
            token: None,
            lease: Lease::new(Arc::clone(clock), Tick(u64::MAX), *check),
        }
    }

    /// Tells a member that a partition is to come, which another reads at `next_offset`.
    pub fn prepare(
        &self,
        member: &MemberId,
        topic: &TopicName,
        partition: Partition,
        next_offset: Option<NextOffset>,
    ) {
        let deadline = self.inner.clock.now().after(LOGGED_MAX);
        let (topic, home_initialised) = (topic.clone(), next_offset.is_some());
        let preparing = Preparing { topic, partition, home_initialised, next_offset, deadline };
        self.send(member, SessionEvent::Prepare(preparing));
    }

    /// Tells a member that a partition does not come after all.
    pub fn call_off(&self, member: &MemberId, partition: Partition) {
        self.send(member, SessionEvent::PreparationEnded { partition });
    }

    /// Tells a member that its lease is at risk, or renewed.
    pub fn put_lease_at_risk(&self, member: &MemberId, at_risk: bool) {
        let event = match at_risk {
            true => SessionEvent::LeaseAtRisk { ends_at: self.inner.clock.now().after(LOGGED_MAX) },
            false => SessionEvent::LeaseRenewed,
        };
        self.send(member, event);
    }

    /// Commits an offset in the name of a member elsewhere, which must hold the partition at `epoch`.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub fn commit_as(
        &self,
        member: &MemberId,
        partition: Partition,
        epoch: Epoch,
        next: NextOffset,
    ) {
        self.check(member, partition, epoch).expect("the member holds the partition");
        let mut state = self.state();
        let held = state.partitions.entry(partition).or_default();
        held.committed = Some(next);
        held.initialised = true;
    }

    /// Asks a member for a partition that it holds, or held, at `epoch`.
    pub fn revoke(&self, member: &MemberId, partition: Partition, epoch: Epoch, drain: Duration) {
        let deadline = self.inner.clock.now().after(drain);
        self.send(member, SessionEvent::Revoked { partition, epoch, deadline });
    }

    /// Tells a member that a grant is lost.
    pub fn lose(&self, member: &MemberId, partition: Partition, epoch: Epoch, cause: LostCause) {
        self.send(member, SessionEvent::Lost { partition, epoch, cause });
    }

    /// Ends a membership.
    pub fn end(&self, member: &MemberId, cause: EndCause) {
        self.send(member, SessionEvent::Ended { cause });
    }

    /// Whether verifies and commits are answered; if not, their outcome is unknown. Default true.
    pub fn set_answers(&self, answers: bool) {
        self.state().answers = answers;
        self.inner.changed.send_modify(|count| *count += 1);
    }

    /// The committed offset of a partition.
    #[must_use]
    pub fn committed(&self, partition: Partition) -> Option<NextOffset> {
        self.state().partitions.get(&partition).and_then(|held| held.committed)
    }

    /// How the owner of a partition gets on, as it last said, and under which epoch.
    #[must_use]
    pub fn progress(&self, partition: Partition) -> Option<(Epoch, Progress)> {
        self.state().partitions.get(&partition).and_then(|held| held.progress)
    }

    /// What was told to the coordinator so far, one line each.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        self.state().log.clone()
    }

    /// Adds a line of the test's own to the log.
    pub fn note(&self, line: impl Into<String>) {
        self.state().log.push(line.into());
        self.inner.changed.send_modify(|count| *count += 1);
    }

    /// Waits until the log has a line that starts with `start`; answers it.
    ///
    /// # Panics
    ///
    /// When there is none after 60 s on the runtime's clock; the message has the whole log.
    pub async fn logged(&self, start: &str) -> String {
        let mut changed = self.inner.changed.subscribe();
        let until = tokio::time::Instant::now() + LOGGED_MAX;
        loop {
            let line = self.state().log.iter().find(|line| line.starts_with(start)).cloned();
            if let Some(line) = line {
                return line;
            }
            if tokio::time::timeout_at(until, changed.changed()).await.is_err() {
                panic!("no line starts with {start:?} in:\n{}", self.log().join("\n"));
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, member: &MemberId, event: SessionEvent) {
        if let Some(session) = self.state().sessions.get(member) {
            // A consumer that has ended misses it.
            let _sent = session.send(event);
        }
    }

    /// The fencing check: member and epoch of the partition, nothing else.
    fn check(
        &self,
        member: &MemberId,
        partition: Partition,
        epoch: Epoch,
    ) -> Result<(), CallError> {
        let state = self.state();
        let held = state.partitions.get(&partition);
        let owner = held.and_then(|held| held.owner.as_ref());
        if owner.is_some_and(|(owner, current)| owner == member && *current == epoch) {
            return Ok(());
        }
        let current_epoch = held.and_then(|held| held.newest);
        let message = format!("{partition} is fenced: given {epoch}");
        Err(CallError::Refused(Refused { code: ErrorCode::Fenced, message, current_epoch }))
    }

    async fn answering(&self, deadline: Duration) -> Result<(), CallError> {
        if !self.state().answers {
            tokio::time::sleep(deadline).await;
            return Err(CallError::Unknown { attempts: 1, last: "no answer".to_owned() });
        }
        Ok(())
    }
}

/// Session of one member with a [`MemoryCoordinator`].
struct MemoryLink {
    coordinator: MemoryCoordinator,
    member: MemberId,
}

impl Link for MemoryLink {
    fn report_topics(&self, topics: Vec<TopicInfo>) {
        for topic in topics {
            self.coordinator.note(format!("topic {} has {}", topic.topic, topic.partition_count));
        }
    }

    fn subscribe(&self, topics: Vec<TopicName>) {
        let names: Vec<&str> = topics.iter().map(TopicName::as_str).collect();
        self.coordinator.note(format!("{} subscribes to {}", self.member, names.join(", ")));
    }

    fn acquired(
        &self,
        partition: Partition,
        epoch: Epoch,
        home_initialised: bool,
        resume: NextOffset,
    ) {
        if let Some(held) = self.coordinator.state().partitions.get_mut(&partition) {
            held.initialised |= home_initialised;
        }
        self.coordinator.note(format!("acquired {} at {epoch} from {resume}", partition.index));
    }

    fn prepared(&self, partition: Partition, error: Option<String>) {
        let error = error.map_or_else(String::new, |error| format!(": {error}"));
        self.coordinator.note(format!("prepared {}{error}", partition.index));
    }

    fn phase(
        &self,
        partition: Partition,
        epoch: Epoch,
        phase: Phase,
        _position: NextOffset,
        error: Option<String>,
    ) {
        let mut line = format!("phase {} {epoch} {phase:?}", partition.index);
        if let Some(error) = error {
            line = format!("{line}: {error}");
        }
        let repeated = self.coordinator.state().log.contains(&line);
        if !repeated {
            self.coordinator.note(line);
        }
    }

    fn progress(&self, partition: Partition, epoch: Epoch, progress: Progress) {
        let mut state = self.coordinator.state();
        if let Some(held) = state.partitions.get_mut(&partition) {
            held.progress = Some((epoch, progress));
        }
    }

    fn release(
        &self,
        partition: Partition,
        epoch: Epoch,
        next_offset: Option<NextOffset>,
        reason: ReleaseReason,
        error: String,
    ) {
        if self.coordinator.check(&self.member, partition, epoch).is_ok() {
            let mut state = self.coordinator.state();
            let held = state.partitions.entry(partition).or_default();
            held.committed = held.committed.max(next_offset);
            held.owner = None;
        }
        let next = next_offset.map_or_else(|| "-".to_owned(), |next| next.to_string());
        let index = partition.index;
        self.coordinator.note(format!("release {index} {epoch} {reason:?} at {next}: {error}"));
    }

    fn leave(&self, _deadline: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.coordinator.state().sessions.remove(&self.member);
            self.coordinator.note(format!("{} left", self.member));
        })
    }

    fn abandon(&self) {
        let was_there = self.coordinator.state().sessions.remove(&self.member).is_some();
        if was_there {
            self.coordinator.note(format!("{} left", self.member));
        }
    }

    fn is_ready(&self) -> bool {
        self.coordinator.state().sessions.contains_key(&self.member)
    }

    fn verify<'a>(
        &'a self,
        grant: &'a Grant,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Verified, CallError>> {
        Box::pin(async move {
            self.coordinator.answering(deadline).await?;
            let Grant { partition, epoch, .. } = *grant;
            let checked = self.coordinator.check(&grant.member, partition, epoch);
            let verdict = if checked.is_ok() { "current" } else { "fenced" };
            self.coordinator.note(format!("verify {} {epoch}: {verdict}", partition.index));
            checked?;
            let mut state = self.coordinator.state();
            let held = state.partitions.entry(partition).or_default();
            Ok(Verified::new(held.committed, held.initialised))
        })
    }

    fn commit<'a>(
        &'a self,
        grant: &'a Grant,
        mark: OffsetMark,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<(), CallError>> {
        Box::pin(async move {
            let OffsetMark { sequence, next_offset, metadata } = mark;
            let Grant { partition, epoch, .. } = *grant;
            let line = format!("commit {} {epoch} #{sequence} {next_offset}", partition.index);
            let answered = self.coordinator.answering(deadline).await;
            if answered.is_err() {
                self.coordinator.note(format!("{line}: unanswered"));
                return answered;
            }
            let checked = self.coordinator.check(&grant.member, partition, epoch);
            if checked.is_err() {
                self.coordinator.note(format!("{line}: fenced"));
                return checked;
            }
            let mut state = self.coordinator.state();
            let held = state.partitions.entry(partition).or_default();
            let newer = sequence >= held.sequence && held.committed <= Some(next_offset);
            if newer {
                held.sequence = sequence;
                held.committed = Some(next_offset);
                held.metadata = metadata.to_vec();
                held.initialised = true;
            }
            drop(state);
            self.coordinator.note(format!("{line}: {}", if newer { "committed" } else { "stale" }));
            let stale = Refused {
                code: ErrorCode::StaleCommit,
                message: "a later commit is in".to_owned(),
                current_epoch: None,
            };
            if newer { Ok(()) } else { Err(CallError::Refused(stale)) }
        })
    }

    fn committed_metadata<'a>(
        &'a self,
        grant: &'a Grant,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Vec<u8>, CallError>> {
        Box::pin(async move {
            self.coordinator.answering(deadline).await?;
            let state = self.coordinator.state();
            let held = state.partitions.get(&grant.partition);
            Ok(held.map(|held| held.metadata.clone()).unwrap_or_default())
        })
    }

    fn rewind<'a>(
        &'a self,
        grant: &'a Grant,
        sequence: CommitSequence,
        to: NextOffset,
        request: &'a RequestId,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<(), CallError>> {
        Box::pin(async move {
            let Grant { partition, epoch, .. } = *grant;
            self.coordinator.answering(deadline).await?;
            self.coordinator.check(&grant.member, partition, epoch)?;
            let mut state = self.coordinator.state();
            let held = state.partitions.entry(partition).or_default();
            let is_new = held.rewind.as_ref() != Some(request);
            if is_new {
                held.sequence = sequence;
                held.committed = Some(to);
                held.rewind = Some(request.clone());
            }
            drop(state);
            let verdict = if is_new { "done" } else { "done before" };
            let index = partition.index;
            self.coordinator.note(format!("rewind {request} {index} {epoch} to {to}: {verdict}"));
            Ok(())
        })
    }
}
