//! The thread that owns the client, its queue and every stream.
//!
//! A batch of messages is always handed out in full before the next command is looked at, and both happen on this
//! thread: once a close is answered, nothing of the partition is in anyone's hands, and the next open starts clean.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use rdkafka::types::RDKafkaErrorCode;
use tenure_model::{Partition, TopicId, TopicName};
use tenure_sdk::source::SourceError;

use crate::checker::{CHECK_INTERVAL, Checker};
use crate::client::{Client, Stray, drop_elsewhere};
#[cfg(test)]
use crate::command::Counts;
use crate::command::{Command, Stopped};
use crate::convert::{is_final, is_unknown};
use crate::ends::Ends;
use crate::ffi::{Message, Waker};
use crate::pack::Unread;
use crate::part::{Part, Step};
use crate::settings::KafkaSettings;

mod opening;

use self::opening::Opening;

/// Longest wait for records; events are served at least as often.
const WAIT_IDLE: Duration = Duration::from_millis(100);
/// Wait while a reader is behind: nothing tells when it takes a record.
const WAIT_BEHIND: Duration = Duration::from_millis(5);
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
const REBUILD_AFTER_MIN: Duration = Duration::from_millis(100);
const REBUILD_AFTER_MAX: Duration = Duration::from_secs(10);

/// State of the thread.
pub(crate) struct Owner {
    settings: KafkaSettings,
    waker: Arc<Waker>,
    commands: Receiver<Command>,
    checker: Checker,
    ends: Arc<Ends>,
    unread: Unread,
    /// Absent between a fatal error and the next attempt.
    client: Option<Client>,
    client_count: u64,
    parts: BTreeMap<Partition, Part>,
    /// Opens that were asked for together, to be assigned together.
    opening: Vec<Opening>,
    /// Which open partition is meant by a topic's name and an index.
    routes: BTreeMap<String, BTreeMap<i32, Partition>>,
    /// Topics that were looked up: they are checked while nothing of them is open too, so that an open need not ask.
    seen: BTreeSet<TopicName>,
    /// Partitions that need a visit although nothing was fetched for them.
    waiting: BTreeSet<Partition>,
    events_at: Instant,
    watched_at: Instant,
    checked_at: Instant,
    rebuilt_at: Instant,
    rebuild_after: Duration,
}

impl Owner {
    pub(crate) fn new(
        settings: KafkaSettings,
        waker: Arc<Waker>,
        commands: Receiver<Command>,
        checker: Checker,
        ends: Arc<Ends>,
        client: Client,
    ) -> Self {
        let now = Instant::now();
        Self {
            settings,
            waker,
            commands,
            checker,
            ends,
            unread: Unread::default(),
            client: Some(client),
            client_count: 1,
            parts: BTreeMap::new(),
            opening: Vec::new(),
            routes: BTreeMap::new(),
            seen: BTreeSet::new(),
            waiting: BTreeSet::new(),
            events_at: now,
            watched_at: now,
            checked_at: now,
            rebuilt_at: now,
            rebuild_after: REBUILD_AFTER_MIN,
        }
    }

    /// Runs until it is told to stop, or everyone who could tell it is gone.
    pub(crate) fn run(mut self) {
        let stopped = self.serve();
        // The streams end first, so that a client that hangs in its destructor keeps no reader waiting.
        self.opening.clear();
        self.parts.clear();
        self.unread.settle_all();
        self.client = None;
        if let Some(Err(())) = stopped.map(|reply| reply.send(())) {
            tracing::debug!("nobody waits for the end of the kafka source any more");
        }
    }

    fn serve(&mut self) -> Option<Stopped> {
        let mut messages = Vec::new();
        loop {
            loop {
                match self.commands.try_recv() {
                    Ok(Command::Stop { reply }) => return Some(reply),
                    Ok(command) => self.handle(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return None,
                }
            }
            self.finish_opening();
            for partition in self.waiting.clone() {
                self.flush(partition);
            }
            self.check_topics();
            let wait = if self.waiting.is_empty() { WAIT_IDLE } else { WAIT_BEHIND };
            let Some(client) = &self.client else {
                match self.commands.recv_timeout(wait) {
                    Ok(Command::Stop { reply }) => return Some(reply),
                    Ok(command) => self.handle(command),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return None,
                }
                self.finish_opening();
                self.rebuild();
                continue;
            };
            client.take(wait, &mut messages);
            let is_idle = messages.is_empty();
            self.dispatch(&mut messages);
            self.unread.prune();
            if is_idle || self.events_at.elapsed() >= WAIT_IDLE {
                let _strays = self.serve_events();
            }
            if self.watched_at.elapsed() >= WATCH_INTERVAL {
                self.watch();
            }
        }
    }

    fn handle(&mut self, command: Command) {
        // What was asked for after an open finds it done.
        if !matches!(command, Command::Open { .. }) {
            self.finish_opening();
        }
        match command {
            Command::Open { topic, partition, from, read_ahead, reply } => {
                match self.begin_open(topic, partition, from, read_ahead) {
                    Ok(stream) => self.opening.push(Opening { partition, stream, reply }),
                    Err(error) => {
                        if reply.send(Err(error)).is_err() {
                            tracing::debug!(%partition, "nobody waits for the open any more");
                        }
                    }
                }
            }
            Command::Close { partition, reply } => {
                self.close(partition);
                if reply.send(()).is_err() {
                    tracing::debug!(%partition, "nobody waits for the close any more");
                }
            }
            Command::TopicSeen { topic, topic_id } => {
                self.fail_other_lives(&topic, topic_id);
                if let Some(client) = &mut self.client {
                    client.get_to_know(&topic);
                }
                self.seen.insert(topic);
            }
            Command::TopicGone { topic } => {
                self.fail_deleted(&topic);
                self.seen.remove(&topic);
            }
            Command::Stop { .. } => unreachable!("the loop ends at a stop"),
            #[cfg(test)]
            Command::Break => self.client.as_ref().expect("a client").break_for_good(),
            #[cfg(test)]
            Command::Mislead { partition, begun, end, on } => {
                let client = self.client.as_ref().expect("a client");
                client.mislead(partition);
                begun.send(()).expect("the test waits");
                end.recv().expect("the test goes on");
                client.lead(partition);
                on.recv().expect("the test goes on");
            }
            #[cfg(test)]
            Command::Pretend { partition, next, leader_epoch } => {
                let part = self.parts.get_mut(&partition).expect("an open partition");
                part.next = next;
                self.client.as_ref().expect("a client").seek(part, leader_epoch);
            }
            #[cfg(test)]
            Command::Wait { begun, on } => {
                begun.send(()).expect("the test waits");
                on.recv().expect("the test goes on");
            }
            #[cfg(test)]
            Command::Occupy { topic, partition } => {
                let index = i32::try_from(partition.index.get()).expect("an index");
                self.client.as_ref().expect("a client").occupy(topic.as_str(), index);
            }
            #[cfg(test)]
            Command::Count { reply } => {
                let assign_calls = self.client.as_ref().map_or(0, |client| client.assign_calls);
                let (clients, open) = (self.client_count, self.parts.len());
                reply.send(Counts { clients, assign_calls, open }).expect("the test waits");
            }
        }
    }

    fn fail(&mut self, partition: Partition, error: SourceError) {
        self.unassign(partition);
        if let Some(part) = self.parts.get_mut(&partition).filter(|part| !part.has_failed()) {
            let topic = &part.topic;
            tracing::warn!(%topic, partition = %partition.index, %error, "partition cannot go on");
            part.fail(error);
            self.waiting.insert(partition);
        }
    }

    fn fail_other_lives(&mut self, topic: &TopicName, found: TopicId) {
        let route = self.routes.get(topic.as_str()).into_iter().flat_map(BTreeMap::values);
        let others: Vec<Partition> =
            route.filter(|partition| partition.topic_id != found).copied().collect();
        for partition in others {
            let wanted = partition.topic_id;
            self.fail(partition, SourceError::OtherTopicId { topic: topic.clone(), wanted, found });
        }
    }

    fn fail_deleted(&mut self, topic: &TopicName) {
        let route = self.routes.get(topic.as_str()).into_iter().flat_map(BTreeMap::values);
        for partition in route.copied().collect::<Vec<Partition>>() {
            let (topic, index) = (topic.clone(), partition.index.get());
            self.fail(partition, SourceError::UnknownPartition { topic, index });
        }
    }

    /// Hands messages to their partitions, each run of one partition at once. Leaves none.
    fn dispatch(&mut self, messages: &mut Vec<Message>) {
        let Some(hold) = self.client.as_ref().map(Client::hold) else { return };
        let now = Instant::now();
        let mark = |message: &Message| (message.topic_mark(), message.index(), message.is_error());
        let runs: Vec<usize> =
            messages.chunk_by(|one, next| mark(one) == mark(next)).map(<[Message]>::len).collect();
        let (mut touched, mut astray) = (BTreeSet::new(), BTreeSet::new());
        let mut rest = messages.drain(..);
        for length in runs {
            let run: Vec<Message> = rest.by_ref().take(length).collect();
            let Some(first) = run.first() else { continue };
            let Some(partition) = self.route(first.topic(), first.index()) else {
                run.iter().for_each(unrouted);
                continue;
            };
            // What a gap leaves out may wait on the queue of events: then all of this is read again from there.
            if self.parts.get(&partition).is_some_and(|part| part.is_past_gap(&run)) {
                astray.extend(self.serve_events());
            }
            if astray.contains(&partition) {
                continue;
            }
            if first.is_error() {
                for message in &run {
                    self.partition_error(partition, message);
                }
                touched.insert(partition);
                continue;
            }
            let Some(part) = self.parts.get_mut(&partition) else { continue };
            if !part.has_failed() {
                part.accept(run, &hold, self.settings.headers, &mut self.unread, now);
                touched.insert(partition);
            }
        }
        drop(rest);
        for partition in touched {
            self.flush(partition);
        }
    }

    fn route(&self, topic: Option<&str>, index: i32) -> Option<Partition> {
        self.routes.get(topic?)?.get(&index).copied()
    }

    fn partition_error(&mut self, partition: Partition, message: &Message) {
        let Some(code) = message.error() else { return };
        let Some(part) = self.parts.get_mut(&partition) else { return };
        if code == RDKafkaErrorCode::PartitionEOF {
            return part.read_to(message.offset());
        }
        let (topic, index) = (part.topic.clone(), partition.index.get());
        if matches!(code, RDKafkaErrorCode::AutoOffsetReset | RDKafkaErrorCode::OffsetOutOfRange) {
            let wanted = part.next;
            if message.is_truncation() {
                return self.fail(partition, SourceError::Truncated { topic, index, wanted });
            }
            tracing::info!(%topic, partition = index, reason = message.reason(), "offset out of range");
            self.fail(partition, SourceError::OutOfRange { topic, index, wanted });
        } else if is_unknown(code) {
            self.fail(partition, SourceError::UnknownPartition { topic, index });
        } else if is_final(code) {
            self.fail(partition, SourceError::Fatal(message.reason().into()));
        } else {
            let reason = message.reason();
            tracing::info!(%topic, partition = index, %code, reason, "partition error that may pass");
        }
    }

    /// Gives a reader what it has room for, and fetches less or more by it.
    fn flush(&mut self, partition: Partition) {
        let Some(part) = self.parts.get_mut(&partition) else { return };
        match part.flush(Instant::now()) {
            Step::None => {}
            Step::Keep => {
                if let Some(client) = &self.client {
                    client.keep(partition);
                }
            }
            Step::Lead => {
                if let Some(client) = &self.client {
                    client.lead(partition);
                }
            }
            Step::Park => {
                tracing::debug!(topic = %part.topic, partition = %partition.index, "reader is behind, fetching stops");
                self.unassign(partition);
            }
            Step::Unpark => self.assign_open(&[partition]),
            Step::Remove => self.close(partition),
        }
        if self.parts.get(&partition).is_some_and(Part::is_waiting) {
            self.waiting.insert(partition);
        } else {
            self.waiting.remove(&partition);
        }
    }

    /// Answers the partitions that records were found of.
    fn serve_events(&mut self) -> BTreeSet<Partition> {
        self.events_at = Instant::now();
        let Some(client) = &self.client else { return BTreeSet::new() };
        let events = client.serve_events();
        let strays = events.strays.iter().filter_map(|stray| self.take_stray(stray)).collect();
        if let Some(reason) = events.fatal {
            self.discard_client(&reason);
        }
        strays
    }

    /// A record past the order of its partition: read again from the position, or end the partition when later
    /// records went out before it. Nothing is skipped silently.
    fn take_stray(&mut self, stray: &Stray) -> Option<Partition> {
        let partition = self.route(Some(&stray.topic), stray.index)?;
        let part = self.parts.get(&partition)?;
        let (topic, offset) = (&part.topic, stray.offset);
        tracing::warn!(%topic, partition = stray.index, offset, "record on the queue of events");
        if part.wants(stray.offset) {
            self.assign_anew(partition);
        } else if stray.offset >= part.from.signed() {
            let text = format!("record {} came after later ones", stray.offset);
            self.fail(partition, SourceError::Transient(text.into()));
        }
        Some(partition)
    }

    fn check_topics(&mut self) {
        if self.checked_at.elapsed() < CHECK_INTERVAL {
            return;
        }
        self.checked_at = Instant::now();
        let open = self.parts.values().map(|part| &part.topic);
        let topics: BTreeSet<&TopicName> = open.chain(&self.seen).collect();
        if !topics.is_empty() {
            self.checker.ask(topics.into_iter().cloned().collect());
        }
    }

    /// Looks for readers that left and for partitions that stand still although they have records.
    fn watch(&mut self) {
        let now = Instant::now();
        self.watched_at = now;
        let Some(client) = &self.client else { return };
        let (mut gone, mut stalled) = (Vec::new(), Vec::new());
        let mut ends = BTreeMap::new();
        for (partition, part) in &mut self.parts {
            let high = client.high(part);
            if let Some(end) = part.end(high) {
                ends.insert(*partition, end);
            }
            // Once more, should the end of an earlier assignment have come even later than the last time.
            if part.is_led() {
                client.lead(*partition);
            }
            if part.is_gone() {
                gone.push(*partition);
            } else if part.is_stalled(high, now) {
                tracing::info!(
                    topic = %part.topic, partition = %partition.index, position = %part.next,
                    high_watermark = high, "no progress, assigning anew"
                );
                stalled.push(*partition);
            }
        }
        self.ends.replace(ends);
        gone.into_iter().for_each(|partition| self.close(partition));
        stalled.into_iter().for_each(|partition| self.assign_anew(partition));
    }

    /// Lets go of a client that failed for good. Its destructor may hang, so it runs on a thread of its own.
    fn discard_client(&mut self, reason: &str) {
        let Some(client) = self.client.take() else { return };
        self.unread.settle_all();
        // A client that lived for long starts the back-off from its beginning.
        if self.rebuilt_at.elapsed() > REBUILD_AFTER_MAX * 2 {
            self.rebuild_after = REBUILD_AFTER_MIN;
        }
        self.rebuilt_at = Instant::now();
        tracing::warn!(reason, again_in = ?self.rebuild_after, "kafka client failed for good, making a new one");
        drop_elsewhere(client);
    }

    fn rebuild(&mut self) {
        if self.rebuilt_at.elapsed() < self.rebuild_after {
            return;
        }
        self.rebuilt_at = Instant::now();
        self.rebuild_after = (self.rebuild_after * 2).min(REBUILD_AFTER_MAX);
        match Client::new(&self.settings, &self.waker) {
            Ok(client) => {
                self.client = Some(client);
                self.client_count += 1;
            }
            Err(error) => {
                tracing::warn!(%error, again_in = ?self.rebuild_after, "cannot make a kafka client");
                return;
            }
        }
        let open = self.parts.iter().filter(|(_, part)| part.is_assigned());
        let open: Vec<Partition> = open.map(|(partition, _)| *partition).collect();
        tracing::info!(
            partition_count = open.len(),
            client_count = self.client_count,
            "new kafka client, going on at the positions"
        );
        self.assign_open(&open);
    }
}

fn unrouted(message: &Message) {
    if let Some(code) = message.error().filter(|code| *code != RDKafkaErrorCode::PartitionEOF) {
        tracing::info!(%code, reason = message.reason(), "kafka error outside the open partitions");
    }
}
