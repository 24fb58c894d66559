//! Opens and closes partitions, and has the client fetch them.

use std::collections::BTreeMap;
use std::mem;
use std::time::Instant;

use rdkafka::error::KafkaError;
use tenure_model::{NextOffset, Partition, TopicName};
use tenure_sdk::source::{ReadAhead, RecordStream, SourceError};

use super::Owner;
use crate::command::Opened;
use crate::part::Part;

/// An open that waits for its partition to be assigned.
pub(super) struct Opening {
    pub(super) partition: Partition,
    pub(super) stream: RecordStream,
    pub(super) reply: Opened,
}

impl Owner {
    /// Takes a partition in, to be assigned.
    pub(super) fn begin_open(
        &mut self,
        topic: TopicName,
        partition: Partition,
        from: NextOffset,
        read_ahead: ReadAhead,
    ) -> Result<RecordStream, SourceError> {
        let index = i32::try_from(partition.index.get()).unwrap_or(i32::MAX);
        if self.route(Some(topic.as_str()), index).is_some() {
            self.finish_opening();
        }
        // A reader that dropped its stream without a close has closed it.
        if let Some(left) = self.route(Some(topic.as_str()), index)
            && self.parts.get(&left).is_some_and(Part::is_gone)
        {
            self.close(left);
        }
        let (part, stream) = Part::new(topic.clone(), partition, from, read_ahead, Instant::now());
        let route = self.routes.entry(topic.as_str().to_owned()).or_default();
        if let Some(open) = route.get(&part.index()) {
            let text = format!("{topic}/{} is open already, as {open}", partition.index);
            return Err(SourceError::Fatal(text.into()));
        }
        route.insert(part.index(), partition);
        self.parts.insert(partition, part);
        Ok(stream)
    }

    /// Assigns the partitions that were taken in, and answers those who asked for them.
    pub(super) fn finish_opening(&mut self) {
        let opening = mem::take(&mut self.opening);
        if opening.is_empty() {
            return;
        }
        let partitions: Vec<Partition> = opening.iter().map(|one| one.partition).collect();
        let mut refused = self.assign(&partitions);
        for Opening { partition, stream, reply } in opening {
            let opened = match refused.remove(&partition) {
                None => Ok(stream),
                Some(error) => {
                    self.close(partition);
                    Err(error)
                }
            };
            // Nobody waits any more: what was opened for them must not stay open.
            if matches!(reply.send(opened), Err(Ok(_))) {
                self.close(partition);
            }
        }
    }

    /// Assigns partitions at their positions; answers those that were refused. Without a client, or with one that failed
    /// for good, the next client will.
    fn assign(&mut self, partitions: &[Partition]) -> BTreeMap<Partition, SourceError> {
        let Some(client) = &mut self.client else { return BTreeMap::new() };
        let now = Instant::now();
        for partition in partitions {
            if let Some(part) = self.parts.get_mut(partition) {
                part.assigned_now(now);
            }
        }
        let parts: Vec<&Part> = partitions.iter().filter_map(|one| self.parts.get(one)).collect();
        let refused = client.assign(&parts);
        if !refused.is_empty()
            && let Some(reason) = client.fatal()
        {
            self.discard_client(&reason);
            return BTreeMap::new();
        }
        let told =
            |(partition, error): (_, KafkaError)| (partition, SourceError::Transient(error.into()));
        refused.into_iter().map(told).collect()
    }

    /// Assigns partitions that are open, and ends those that are refused.
    pub(super) fn assign_open(&mut self, partitions: &[Partition]) {
        for (partition, error) in self.assign(partitions) {
            self.fail(partition, error);
        }
    }

    pub(super) fn unassign(&mut self, partition: Partition) {
        if let (Some(client), Some(part)) = (&mut self.client, self.parts.get(&partition)) {
            client.unassign(part);
        }
    }

    pub(super) fn close(&mut self, partition: Partition) {
        self.unassign(partition);
        self.waiting.remove(&partition);
        self.ends.forget(partition);
        let Some(part) = self.parts.remove(&partition) else { return };
        if let Some(route) = self.routes.get_mut(part.topic.as_str()) {
            route.remove(&part.index());
            if route.is_empty() {
                self.routes.remove(part.topic.as_str());
            }
        }
    }

    pub(super) fn assign_anew(&mut self, partition: Partition) {
        if self.parts.get(&partition).is_some_and(Part::is_assigned) {
            self.unassign(partition);
            self.assign_open(&[partition]);
        }
    }
}
