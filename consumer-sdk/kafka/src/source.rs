//! The handle that others hold.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use rdkafka::error::KafkaError;
use tenure_model::{NextOffset, Partition, TopicName};
use tenure_sdk::source::{
    ReadAhead, RecordSource, RecordStream, ResetPolicy, SourceError, TopicInfo,
};
use tokio::sync::oneshot;

use crate::checker::Checker;
use crate::client::{Client, drop_elsewhere};
use crate::command::Command;
use crate::ends::Ends;
use crate::ffi::Waker;
use crate::lookup::{LOOKUP_TIMEOUT, Lookup};
use crate::owner::Owner;
use crate::settings::{KafkaSettings, SettingsError};
use crate::starts::{Questions, Starts};

/// Why a source could not be made.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A setting contradicts what the source promises.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// librdkafka refuses the settings.
    #[error("kafka client cannot be made: {0}")]
    Client(#[from] KafkaError),
    /// No thread.
    #[error("thread of the kafka source cannot be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// Reads Kafka partitions by explicit offsets. Needs a tokio runtime around its calls.
///
/// A stream holds up to its [`ReadAhead`]. Behind it are kept back, while the reader is slower than the broker, up to
/// as many bytes again or four times as many records (at least 1024), plus one batch of 500 records; beyond that the
/// partition alone is no longer fetched until half of it has gone.
///
/// A broker that is away only shows as silence: streams go on when it is back. A client that fails for good is
/// replaced, and every open partition goes on at its position.
///
/// Open topics are looked up once a second. The stream of one that was created again fails with
/// [`SourceError::OtherTopicId`], of one that was deleted with [`SourceError::UnknownPartition`] after three such
/// look-ups; until then records of a new life at the same offsets may pass for those of the old one.
///
/// Where an open partition ends is noted once a second, from the answers of fetches: no request is made for it, and it
/// costs nothing by the record. Records of a transaction that is still open are before the end only until all before
/// them was read. A tail without records is told to the reader as [`Fetched::Passed`](tenure_sdk::source::Fetched).
///
/// Partitions that are started or opened in the same moment share a request and an assignment: a reader of many has its
/// first records of all of them together.
///
/// Dropping the source ends all streams.
pub struct KafkaSource {
    commands: Sender<Command>,
    waker: Arc<Waker>,
    ends: Arc<Ends>,
    lookup: Mutex<Option<Arc<Lookup>>>,
    starts: Starts,
}

impl KafkaSource {
    /// Starts the source. Does not wait for a broker.
    ///
    /// # Errors
    ///
    /// [`StartError`] when the settings are refused or the machine has no thread left.
    pub fn new(settings: KafkaSettings) -> Result<Self, StartError> {
        settings.validate()?;
        let waker = Arc::new(Waker::default());
        let lookup = Arc::new(Lookup::new(&settings)?);
        let client = Client::new(&settings, &waker)?;
        let (commands, queue) = std::sync::mpsc::channel();
        let checker = Checker::start(Arc::clone(&lookup), commands.clone(), Arc::clone(&waker))?;
        let ends = Arc::new(Ends::default());
        let told = Arc::clone(&ends);
        let owner = Owner::new(settings, Arc::clone(&waker), queue, checker, told, client);
        std::thread::Builder::new().name("tenure-kafka".into()).spawn(move || owner.run())?;
        Ok(Self {
            commands,
            waker,
            ends,
            lookup: Mutex::new(Some(lookup)),
            starts: Starts::default(),
        })
    }

    /// Hands a command to the owner thread; false when that has ended.
    pub(crate) fn send(&self, command: Command) -> bool {
        let sent = self.commands.send(command).is_ok();
        self.waker.wake();
        sent
    }

    /// Runs a look-up on a thread that may block. The time-outs inside are not always kept (librdkafka #4878), so
    /// there is one outside as well.
    async fn look_up<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Lookup) -> Result<T, SourceError> + Send + 'static,
    ) -> Result<T, SourceError> {
        let lookup = self.lookup.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let lookup = lookup.ok_or_else(ended)?;
        let task = tokio::task::spawn_blocking(move || {
            let answer = ask(&lookup);
            // The last one may be this one, and dropping it here keeps that off the async threads.
            drop(lookup);
            answer
        });
        match tokio::time::timeout(LOOKUP_TIMEOUT * 3, task).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Err(SourceError::Fatal(error.into())),
            Err(elapsed) => Err(SourceError::Transient(elapsed.into())),
        }
    }

    /// Whether the partition may be opened without a look-up, which would cost a change of threads.
    fn knows(&self, topic: &TopicName, partition: Partition) -> bool {
        let lookup = self.lookup.lock().unwrap_or_else(PoisonError::into_inner);
        lookup.as_ref().is_some_and(|lookup| lookup.is_known(topic, partition))
    }

    fn drop_lookup(&self) {
        let lookup = self.lookup.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(lookup) = lookup {
            drop_elsewhere(lookup);
        }
    }
}

impl RecordSource for KafkaSource {
    fn topics<'a>(
        &'a self,
        names: &'a [TopicName],
    ) -> BoxFuture<'a, Result<Vec<TopicInfo>, SourceError>> {
        Box::pin(async move {
            let names = names.to_vec();
            let found = self.look_up(move |lookup| lookup.topics(&names)).await?;
            for TopicInfo { topic, topic_id, .. } in &found {
                self.send(Command::TopicSeen { topic: topic.clone(), topic_id: *topic_id });
            }
            Ok(found)
        })
    }

    fn topic_names(&self) -> BoxFuture<'_, Result<Vec<TopicName>, SourceError>> {
        Box::pin(self.look_up(Lookup::names))
    }

    fn start<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        policy: ResetPolicy,
    ) -> BoxFuture<'a, Result<NextOffset, SourceError>> {
        let topic = topic.clone();
        Box::pin(async move {
            let asked = (topic.clone(), partition, policy);
            let ask = |questions: Questions| {
                self.look_up(move |lookup| {
                    questions.answer(lookup);
                    Ok(())
                })
            };
            match self.starts.ask_together(asked, ask).await {
                Some(start) => Ok(start),
                None => self.look_up(move |lookup| lookup.start(&topic, partition, policy)).await,
            }
        })
    }

    fn end_offset(&self, partition: Partition) -> Option<NextOffset> {
        self.ends.of(partition)
    }

    fn open<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        from: NextOffset,
        read_ahead: ReadAhead,
    ) -> BoxFuture<'a, Result<RecordStream, SourceError>> {
        let topic = topic.clone();
        Box::pin(async move {
            if !self.knows(&topic, partition) {
                let name = topic.clone();
                self.look_up(move |lookup| lookup.check(&name, partition)).await?;
            }
            let (reply, opened) = oneshot::channel();
            self.send(Command::Open { topic, partition, from, read_ahead, reply });
            opened.await.unwrap_or_else(|_| Err(ended()))
        })
    }

    fn close(&self, partition: Partition) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (reply, closed) = oneshot::channel();
            self.send(Command::Close { partition, reply });
            if closed.await.is_err() {
                tracing::debug!(%partition, "kafka source had ended before the close");
            }
        })
    }

    fn shutdown(&self, deadline: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.drop_lookup();
            let (reply, stopped) = oneshot::channel();
            self.send(Command::Stop { reply });
            match tokio::time::timeout(deadline, stopped).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => tracing::debug!("kafka source had ended before the shutdown"),
                Err(_) => {
                    tracing::warn!(?deadline, "kafka client does not close, leaving it behind");
                }
            }
        })
    }
}

impl Drop for KafkaSource {
    fn drop(&mut self) {
        self.drop_lookup();
        let (reply, _) = oneshot::channel();
        self.send(Command::Stop { reply });
    }
}

fn ended() -> SourceError {
    SourceError::Fatal("the kafka source has ended".into())
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
