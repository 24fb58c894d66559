//! What the run loop needs of the session and the coordinator; tests put a coordinator in memory behind it.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tenure_model::{CommitSequence, Epoch, NextOffset, Partition, RequestId, TopicName};
use tokio::sync::{mpsc, oneshot};

use super::batcher::{Queued, send_batches};
use crate::grant::Grant;
use crate::session::{
    CallError, OffsetCommit, Phase, Progress, ReleaseReason, SessionHandle, VerifyOk,
};
use crate::sink::Verified;
use crate::source::TopicInfo;

/// Session of one membership, and the coordinator behind it. No method but the futures waits for anything.
pub(crate) trait Link: Send + Sync + 'static {
    fn report_topics(&self, topics: Vec<TopicInfo>);

    /// The topics to read are others now.
    fn subscribe(&self, topics: Vec<TopicName>);

    fn acquired(
        &self,
        partition: Partition,
        epoch: Epoch,
        home_initialised: bool,
        resume: NextOffset,
    );

    /// The member has prepared for a partition that is to come, or cannot.
    fn prepared(&self, partition: Partition, error: Option<String>);

    fn phase(
        &self,
        partition: Partition,
        epoch: Epoch,
        phase: Phase,
        position: NextOffset,
        error: Option<String>,
    );

    /// How a running grant gets on.
    fn progress(&self, partition: Partition, epoch: Epoch, progress: Progress);

    fn release(
        &self,
        partition: Partition,
        epoch: Epoch,
        next_offset: Option<NextOffset>,
        reason: ReleaseReason,
        error: String,
    );

    fn leave(&self, deadline: Duration) -> BoxFuture<'_, ()>;

    /// Ends the membership without waiting for it: the run is over, whoever still holds this link.
    fn abandon(&self);

    fn is_ready(&self) -> bool;

    /// Confirms the grant, linearizably.
    fn verify<'a>(
        &'a self,
        grant: &'a Grant,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Verified, CallError>>;

    /// Commits one offset; a refusal of the partition is a refusal of the call.
    fn commit<'a>(
        &'a self,
        grant: &'a Grant,
        mark: OffsetMark,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<(), CallError>>;

    /// Metadata of the committed offset; empty without any.
    fn committed_metadata<'a>(
        &'a self,
        grant: &'a Grant,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Vec<u8>, CallError>>;

    /// Moves one offset to any place, once for each name.
    fn rewind<'a>(
        &'a self,
        grant: &'a Grant,
        sequence: CommitSequence,
        to: NextOffset,
        request: &'a RequestId,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<(), CallError>>;
}

/// One commit of one partition.
#[derive(Clone, Debug)]
pub(crate) struct OffsetMark {
    pub(crate) sequence: CommitSequence,
    pub(crate) next_offset: NextOffset,
    /// At most as long as the limit.
    pub(crate) metadata: Arc<[u8]>,
}

/// Session with a real coordinator.
pub(super) struct SessionLink {
    session: SessionHandle,
    commits: mpsc::UnboundedSender<Queued<OffsetCommit, ()>>,
    verifies: mpsc::UnboundedSender<Queued<(Partition, Epoch), VerifyOk>>,
}

impl SessionLink {
    /// Link of a session; commits and verifies go out in batches until it is dropped.
    pub(super) fn new(session: SessionHandle) -> Self {
        let (commits, queue) = mpsc::unbounded_channel();
        let coordinator = session.coordinator();
        drop(tokio::spawn(send_batches(queue, move |group, member, commits, deadline| {
            let coordinator = coordinator.clone();
            async move { coordinator.commit(&group, &member, commits, deadline).await }
        })));
        let (verifies, queue) = mpsc::unbounded_channel();
        let coordinator = session.coordinator();
        drop(tokio::spawn(send_batches(queue, move |group, member, grants, deadline| {
            let coordinator = coordinator.clone();
            async move { coordinator.verify(&group, &member, &grants, deadline).await }
        })));
        Self { session, commits, verifies }
    }
}

/// Puts one partition's part into the queue of a batched call, and waits for its verdict.
async fn queue<T, V>(
    calls: &mpsc::UnboundedSender<Queued<T, V>>,
    grant: &Grant,
    part: T,
    deadline: Duration,
) -> Result<V, CallError> {
    let (verdict, answered) = oneshot::channel();
    let (group, member) = (grant.group.clone(), grant.member.clone());
    // Refused or dropped by a batcher that has ended with the runtime: there is no verdict either way.
    let _queued = calls.send(Queued { group, member, part, deadline, verdict });
    answered.await.unwrap_or_else(|_| Err(no_verdict()))
}

fn no_verdict() -> CallError {
    CallError::Unknown { attempts: 1, last: "the answer has no verdict".to_owned() }
}

impl Link for SessionLink {
    fn report_topics(&self, topics: Vec<TopicInfo>) {
        self.session.report_topics(topics);
    }

    fn subscribe(&self, topics: Vec<TopicName>) {
        self.session.subscribe(topics);
    }

    fn acquired(
        &self,
        partition: Partition,
        epoch: Epoch,
        home_initialised: bool,
        resume: NextOffset,
    ) {
        self.session.acquired(partition, epoch, home_initialised, resume);
    }

    fn prepared(&self, partition: Partition, error: Option<String>) {
        self.session.prepared(partition, error);
    }

    fn phase(
        &self,
        partition: Partition,
        epoch: Epoch,
        phase: Phase,
        position: NextOffset,
        error: Option<String>,
    ) {
        self.session.phase(partition, epoch, phase, position, error);
    }

    fn progress(&self, partition: Partition, epoch: Epoch, progress: Progress) {
        self.session.progress(partition, epoch, progress);
    }

    fn release(
        &self,
        partition: Partition,
        epoch: Epoch,
        next_offset: Option<NextOffset>,
        reason: ReleaseReason,
        error: String,
    ) {
        self.session.release(partition, epoch, next_offset, reason, error);
    }

    fn leave(&self, deadline: Duration) -> BoxFuture<'_, ()> {
        Box::pin(self.session.leave(deadline))
    }

    fn abandon(&self) {
        self.session.abandon();
    }

    fn is_ready(&self) -> bool {
        self.session.is_ready()
    }

    fn verify<'a>(
        &'a self,
        grant: &'a Grant,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Verified, CallError>> {
        Box::pin(async move {
            let part = (grant.partition, grant.epoch);
            let ok = queue(&self.verifies, grant, part, deadline).await?;
            Ok(Verified::new(ok.next_offset, ok.home_initialised)
                .starting_at_earliest(ok.starts_at_earliest))
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
            let commit = OffsetCommit {
                partition: grant.partition,
                epoch: grant.epoch,
                sequence,
                next_offset,
                metadata: metadata.to_vec(),
            };
            queue(&self.commits, grant, commit, deadline).await
        })
    }

    fn committed_metadata<'a>(
        &'a self,
        grant: &'a Grant,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Vec<u8>, CallError>> {
        Box::pin(async move {
            let coordinator = self.session.coordinator();
            let found = coordinator.fetch(&grant.group, &[grant.partition], deadline).await?;
            Ok(found.into_iter().next().ok_or_else(no_verdict)?.metadata)
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
            let commit = OffsetCommit {
                partition: grant.partition,
                epoch: grant.epoch,
                sequence,
                next_offset: to,
                metadata: Vec::new(),
            };
            let coordinator = self.session.coordinator();
            coordinator.rewind(&grant.group, &grant.member, commit, request, deadline).await
        })
    }
}
