//! Watches whether the open topics are still the ones that were opened.
//!
//! A topic that is deleted gives its reader no error, and when it is created again the reader goes on at its offset in
//! the new one, silently (both seen on Kafka 4.3.1 with librdkafka 2.12.1). Only a look-up tells.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use tenure_model::TopicName;
use tenure_sdk::source::TopicInfo;

use crate::command::Command;
use crate::ffi::Waker;
use crate::lookup::Lookup;

/// Time between two checks; so long may records of a new life pass for those of the old one.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Checks in a row that must miss a topic before it counts as deleted: one broker may be behind.
const MISSES: u32 = 3;

/// Hands topics to the checking thread.
pub(crate) struct Checker(SyncSender<Vec<TopicName>>);

impl Checker {
    /// Starts the thread. It ends when this handle is dropped, after the look-up it is in.
    pub(crate) fn start(
        lookup: Arc<Lookup>,
        commands: Sender<Command>,
        waker: Arc<Waker>,
    ) -> std::io::Result<Self> {
        let (sender, topics) = sync_channel(1);
        std::thread::Builder::new()
            .name("tenure-kafka-topics".into())
            .spawn(move || check(&lookup, &topics, &commands, &waker))?;
        Ok(Self(sender))
    }

    /// Asks for a check; dropped when the last one is still under way.
    pub(crate) fn ask(&self, topics: Vec<TopicName>) {
        match self.0.try_send(topics) {
            Ok(()) | Err(TrySendError::Full(_)) => {}
            Err(TrySendError::Disconnected(_)) => {
                tracing::warn!("nobody checks the topics any more");
            }
        }
    }
}

fn check(
    lookup: &Lookup,
    topics: &Receiver<Vec<TopicName>>,
    commands: &Sender<Command>,
    waker: &Waker,
) {
    let mut misses: BTreeMap<TopicName, u32> = BTreeMap::new();
    while let Ok(names) = topics.recv() {
        let found = match lookup.topics(&names) {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "topics not checked");
                continue;
            }
        };
        let missing = names.iter().filter(|name| found.iter().all(|info| info.topic != **name));
        misses = missing
            .map(|name| (name.clone(), misses.get(name).copied().unwrap_or(0) + 1))
            .collect();
        let gone = misses.iter().filter(|(_, count)| **count >= MISSES);
        let gone = gone.map(|(topic, _)| Command::TopicGone { topic: topic.clone() });
        let seen = found
            .iter()
            .map(|TopicInfo { topic, topic_id, .. }| (topic.clone(), *topic_id))
            .map(|(topic, topic_id)| Command::TopicSeen { topic, topic_id });
        for command in seen.chain(gone) {
            if commands.send(command).is_err() {
                return;
            }
        }
        waker.wake();
    }
}
