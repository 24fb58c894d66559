//! Puts the commits of many partitions into few calls, and in the same way the questions whether grants are current.
//!
//! Each partition has at most one of them in flight; those that come while a call is under way go out together in the
//! next one. Verdicts are per partition: a fenced one never fails its neighbours.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{GroupId, MemberId};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::session::{CallError, Refused};

/// Partitions in one call, at most.
const BATCH_MAX: usize = 1_000;
/// Calls under way at the same time: a second one, so that one that is not answered does not hold up the rest.
const CALLS_MAX: usize = 2;

/// What a call answers: one verdict per partition, in order.
pub(super) type Verdicts<V> = Result<Vec<Result<V, Refused>>, CallError>;

/// One partition's part of a call, that waits for it.
pub(super) struct Queued<T, V> {
    pub(super) group: GroupId,
    pub(super) member: MemberId,
    pub(super) part: T,
    pub(super) deadline: Duration,
    pub(super) verdict: oneshot::Sender<Result<V, CallError>>,
}

/// Sends what is queued until the queue's last sender is gone.
pub(super) async fn send_batches<T, V, C, F>(
    mut queue: mpsc::UnboundedReceiver<Queued<T, V>>,
    call: C,
) where
    T: Clone + Send + 'static,
    V: Send + 'static,
    C: Fn(GroupId, MemberId, Vec<T>, Duration) -> F,
    F: Future<Output = Verdicts<V>> + Send + 'static,
{
    let calls = Arc::new(Semaphore::new(CALLS_MAX));
    let mut batch = Vec::new();
    loop {
        // Never closed: it lives here.
        let Ok(permit) = Arc::clone(&calls).acquire_owned().await else { return };
        if queue.recv_many(&mut batch, BATCH_MAX).await == 0 {
            return;
        }
        // One membership, unless one has just followed another.
        let mut members: BTreeMap<(GroupId, MemberId), Vec<Queued<T, V>>> = BTreeMap::new();
        for queued in batch.drain(..) {
            let key = (queued.group.clone(), queued.member.clone());
            members.entry(key).or_default().push(queued);
        }
        let sent: Vec<_> = members
            .into_iter()
            .map(|((group, member), queued)| {
                let parts = queued.iter().map(|queued| queued.part.clone()).collect();
                let deadline = queued.iter().map(|queued| queued.deadline).max();
                (call(group, member, parts, deadline.unwrap_or_default()), queued)
            })
            .collect();
        drop(tokio::spawn(async move {
            for (call, queued) in sent {
                answer(call.await, queued);
            }
            drop(permit);
        }));
    }
}

fn answer<T, V>(verdicts: Verdicts<V>, queued: Vec<Queued<T, V>>) {
    let unknown =
        || CallError::Unknown { attempts: 1, last: "the answer has no verdict".to_owned() };
    let mut verdicts = verdicts.map(Vec::into_iter);
    for Queued { verdict, .. } in queued {
        let result = match &mut verdicts {
            Ok(verdicts) => match verdicts.next() {
                Some(verdict) => verdict.map_err(CallError::Refused),
                None => Err(unknown()),
            },
            Err(error) => Err(error.clone()),
        };
        // Who does not wait any more repeats it, or has ended.
        let _waiting = verdict.send(result);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tenure_model::{
        CommitSequence, Epoch, ErrorCode, NextOffset, Partition, PartitionIndex, TopicId,
    };

    use super::*;
    use crate::session::OffsetCommit;

    type Commit = Queued<OffsetCommit, ()>;

    fn queued(index: u32) -> (Commit, oneshot::Receiver<Result<(), CallError>>) {
        let (verdict, answered) = oneshot::channel();
        let index = PartitionIndex::new(index).unwrap();
        let part = OffsetCommit {
            partition: Partition { topic_id: TopicId::from_bits(1), index },
            epoch: Epoch::FIRST,
            sequence: CommitSequence(1),
            next_offset: NextOffset::ZERO,
            metadata: Vec::new(),
        };
        let (group, member) = (GroupId::new("g").unwrap(), MemberId::new("m").unwrap());
        let deadline = Duration::from_secs(1);
        (Queued { group, member, part, deadline, verdict }, answered)
    }

    #[tokio::test(start_paused = true)]
    async fn commits_that_come_together_share_a_call_and_only_the_fenced_one_fails() {
        let sizes = Arc::new(Mutex::new(Vec::new()));
        let (sender, queue) = mpsc::unbounded_channel();
        let (all, answers): (Vec<_>, Vec<_>) = (0..1500).map(queued).unzip();
        for queued in all {
            sender.send(queued).ok().unwrap();
        }
        drop(sender);
        let seen = Arc::clone(&sizes);
        send_batches(queue, move |_group, _member, commits: Vec<OffsetCommit>, _deadline| {
            seen.lock().unwrap().push(commits.len());
            std::future::ready(Ok(commits
                .iter()
                .map(|commit| match commit.partition.index.get() {
                    7 => Err(Refused {
                        code: ErrorCode::Fenced,
                        message: String::new(),
                        current_epoch: None,
                    }),
                    _ => Ok(()),
                })
                .collect()))
        })
        .await;
        for (index, answered) in answers.into_iter().enumerate() {
            assert_eq!(answered.await.unwrap().is_err(), index == 7, "partition {index}");
        }
        assert_eq!(*sizes.lock().unwrap(), [1000, 500]);
    }

    #[tokio::test(start_paused = true)]
    async fn call_that_is_not_answered_does_not_hold_up_the_next() {
        let (sender, queue) = mpsc::unbounded_channel();
        let batches = tokio::spawn(send_batches(
            queue,
            |_group, _member, commits: Vec<OffsetCommit>, _deadline| {
                let hangs = commits.iter().any(|commit| commit.partition.index.get() == 0);
                async move {
                    if hangs {
                        std::future::pending::<()>().await;
                    }
                    Ok(vec![Ok(()); commits.len()])
                }
            },
        ));
        let (stuck, mut unanswered) = queued(0);
        sender.send(stuck).ok().unwrap();
        tokio::task::yield_now().await;
        for index in 1..4 {
            let (next, answered) = queued(index);
            sender.send(next).ok().unwrap();
            answered.await.unwrap().unwrap();
        }
        assert!(unanswered.try_recv().is_err());
        batches.abort();
    }
}
