//! What the run loop needs of the session and the coordinator; tests put a coordinator in memory behind it.

use std::time::Duration;

use futures::future::BoxFuture;
use tenure_model::{CommitSequence, Epoch, NextOffset, Partition};

use crate::grant::Grant;
use crate::session::{CallError, OffsetCommit, Phase, ReleaseReason, SessionHandle};
use crate::sink::Verified;
use crate::source::TopicInfo;

/// Session of one membership, and the coordinator behind it. No method but the futures waits for anything.
pub(crate) trait Link: Send + Sync + 'static {
    fn report_topics(&self, topics: Vec<TopicInfo>);

    fn acquired(
        &self,
        partition: Partition,
        epoch: Epoch,
        home_initialised: bool,
        resume: NextOffset,
    );

    fn phase(
        &self,
        partition: Partition,
        epoch: Epoch,
        phase: Phase,
        position: NextOffset,
        error: Option<String>,
    );

    fn release(
        &self,
        partition: Partition,
        epoch: Epoch,
        next_offset: Option<NextOffset>,
        reason: ReleaseReason,
        error: String,
    );

    fn leave(&self, deadline: Duration) -> BoxFuture<'_, ()>;

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
        sequence: CommitSequence,
        next_offset: NextOffset,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<(), CallError>>;
}

fn no_verdict() -> CallError {
    CallError::Unknown { attempts: 1, last: "the answer has no verdict".to_owned() }
}

impl Link for SessionHandle {
    fn report_topics(&self, topics: Vec<TopicInfo>) {
        SessionHandle::report_topics(self, topics);
    }

    fn acquired(
        &self,
        partition: Partition,
        epoch: Epoch,
        home_initialised: bool,
        resume: NextOffset,
    ) {
        SessionHandle::acquired(self, partition, epoch, home_initialised, resume);
    }

    fn phase(
        &self,
        partition: Partition,
        epoch: Epoch,
        phase: Phase,
        position: NextOffset,
        error: Option<String>,
    ) {
        SessionHandle::phase(self, partition, epoch, phase, position, error);
    }

    fn release(
        &self,
        partition: Partition,
        epoch: Epoch,
        next_offset: Option<NextOffset>,
        reason: ReleaseReason,
        error: String,
    ) {
        SessionHandle::release(self, partition, epoch, next_offset, reason, error);
    }

    fn leave(&self, deadline: Duration) -> BoxFuture<'_, ()> {
        Box::pin(SessionHandle::leave(self, deadline))
    }

    fn is_ready(&self) -> bool {
        SessionHandle::is_ready(self)
    }

    fn verify<'a>(
        &'a self,
        grant: &'a Grant,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Verified, CallError>> {
        Box::pin(async move {
            let grants = [(grant.partition, grant.epoch)];
            let coordinator = self.coordinator();
            let verdicts =
                coordinator.verify(&grant.group, &grant.member, &grants, deadline).await?;
            let ok =
                verdicts.into_iter().next().ok_or_else(no_verdict)?.map_err(CallError::Refused)?;
            Ok(Verified::new(ok.next_offset, ok.home_initialised))
        })
    }

    fn commit<'a>(
        &'a self,
        grant: &'a Grant,
        sequence: CommitSequence,
        next_offset: NextOffset,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<(), CallError>> {
        Box::pin(async move {
            let commit = OffsetCommit {
                partition: grant.partition,
                epoch: grant.epoch,
                sequence,
                next_offset,
                metadata: Vec::new(),
            };
            let coordinator = self.coordinator();
            let verdicts =
                coordinator.commit(&grant.group, &grant.member, vec![commit], deadline).await?;
            verdicts.into_iter().next().ok_or_else(no_verdict)?.map_err(CallError::Refused)
        })
    }
}
