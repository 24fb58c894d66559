//! Looks up where partitions start: those that are asked for while a look-up is under way are asked for together in the
//! next one.
//!
//! A look-up costs milliseconds, and those on one connection are answered one after the other: the partitions of a new
//! group would begin that much apart.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenure_model::{NextOffset, Partition, TopicName};
use tenure_sdk::source::{ResetPolicy, SourceError};
use tokio::sync::oneshot;

use crate::lookup::{LOOKUP_TIMEOUT, Lookup};

/// Whose start is asked for, and which.
pub(crate) type Asked = (TopicName, Partition, ResetPolicy);

/// Questions that wait for the look-up under way.
#[derive(Default)]
pub(crate) struct Starts {
    waiting: Mutex<Vec<Question>>,
    turn: tokio::sync::Mutex<()>,
}

struct Question {
    asked: Asked,
    reply: oneshot::Sender<Option<NextOffset>>,
}

/// What one look-up is for.
pub(crate) struct Questions(Vec<Question>);

impl Starts {
    fn waiting(&self) -> MutexGuard<'_, Vec<Question>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for an answer to this question among others; nothing when it has to be asked alone, to get an answer or the
    /// reason why there is none.
    pub(crate) async fn ask_together<F>(
        &self,
        asked: Asked,
        look_up: impl FnOnce(Questions) -> F,
    ) -> Option<NextOffset>
    where
        F: Future<Output = Result<(), SourceError>>,
    {
        let (reply, mut answered) = oneshot::channel();
        self.waiting().push(Question { asked, reply });
        let ask = async {
            let _turn = self.turn.lock().await;
            let questions = mem::take(&mut *self.waiting());
            if questions.is_empty() {
                return;
            }
            // The answers, and those that do not come, are in the questions.
            if let Err(error) = look_up(Questions(questions)).await {
                tracing::debug!(%error, "starts not looked up together");
            }
        };
        let answer = async {
            tokio::select! {
                biased;
                answer = &mut answered => answer,
                () = ask => answered.await,
            }
        };
        tokio::time::timeout(LOOKUP_TIMEOUT, answer).await.ok()?.ok()?
    }
}

impl Questions {
    /// Looks up and tells all who asked. Blocks.
    pub(crate) fn answer(self, lookup: &Lookup) {
        let (asked, replies): (Vec<Asked>, Vec<_>) =
            self.0.into_iter().map(|Question { asked, reply }| (asked, reply)).unzip();
        let found = lookup.starts(&asked).unwrap_or_else(|error| {
            tracing::info!(count = asked.len(), %error, "starts not looked up together, asking one by one");
            vec![None; asked.len()]
        });
        for (reply, start) in replies.into_iter().zip(found) {
            // Who does not wait any more has ended.
            let _waiting = reply.send(start);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use tenure_model::{PartitionIndex, TopicId};

    use super::*;

    fn asked(index: u32) -> Asked {
        let topic = TopicName::new("t").unwrap();
        let topic_id = TopicId::of_name(&topic);
        let partition = Partition { topic_id, index: PartitionIndex::new(index).unwrap() };
        (topic, partition, ResetPolicy::Earliest)
    }

    fn start(index: u32) -> Option<NextOffset> {
        NextOffset::new(u64::from(index) * 10).ok()
    }

    /// Asks for ten partitions at once; answers what they got, and how many each look-up was for.
    async fn ask(fails: bool) -> (Vec<Option<NextOffset>>, Vec<usize>) {
        let (starts, sizes) = (Starts::default(), Mutex::new(Vec::new()));
        let look_up = async |Questions(questions)| {
            sizes.lock().unwrap().push(questions.len());
            tokio::task::yield_now().await;
            if fails {
                return Err(SourceError::Transient("no broker".into()));
            }
            for Question { asked: (_, partition, _), reply } in questions {
                let _waiting = reply.send(start(partition.index.get()));
            }
            Ok(())
        };
        let found = join_all((0..10).map(|at| starts.ask_together(asked(at), &look_up))).await;
        (found, sizes.into_inner().unwrap())
    }

    #[tokio::test]
    async fn partitions_that_are_asked_for_during_a_look_up_share_the_next_one() {
        assert_eq!(ask(false).await, ((0..10).map(start).collect(), vec![1, 9]));
    }

    #[tokio::test]
    async fn look_up_that_fails_leaves_each_to_ask_alone() {
        assert_eq!(ask(true).await, (vec![None; 10], vec![1, 9]));
    }
}
