//! Looks topics and watermarks up, on a client of its own: a question on the reader's connection would wait behind a
//! long-polling fetch.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{Offset, TopicPartitionList};
use tenure_model::{NextOffset, Partition, TopicId, TopicName};
use tenure_sdk::source::{ResetPolicy, SourceError, TopicInfo};

use crate::client::Context;
use crate::convert::{is_final, is_unknown, request_error};
use crate::ffi::{Described, describe_topics};
use crate::settings::{KafkaSettings, create};
use crate::starts::Asked;

/// Longest wait for one answer.
pub(crate) const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for an answer that many wait for: one partition without a leader holds all of them up.
const STARTS_TIMEOUT: Duration = Duration::from_secs(1);
/// How long an answer may be used for an open.
const FRESH: Duration = Duration::from_secs(5);

/// How the ids of librdkafka's mock clusters begin. A mock has no controller, and describing a topic waits for one.
const MOCK_CLUSTER: &str = "mockCluster";

/// How the names of the brokers' own topics begin.
const INTERNAL: &str = "__";

pub(crate) struct Lookup {
    client: BaseConsumer<Context>,
    known: Mutex<BTreeMap<TopicName, (Instant, TopicInfo)>>,
    said_no_ids: AtomicBool,
    cluster_id: OnceLock<String>,
}

impl Lookup {
    pub(crate) fn new(settings: &KafkaSettings) -> KafkaResult<Self> {
        let client = create(&settings.lookup(), Context)?;
        Ok(Self {
            client,
            known: Mutex::default(),
            said_no_ids: AtomicBool::new(false),
            cluster_id: OnceLock::new(),
        })
    }

    /// Asks the brokers. Blocks up to about twice [`LOOKUP_TIMEOUT`].
    pub(crate) fn topics(&self, names: &[TopicName]) -> Result<Vec<TopicInfo>, SourceError> {
        let names: BTreeSet<&TopicName> = names.iter().collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let texts: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
        let described = self.describe(&texts)?;
        self.drain_events();
        let mut found = Vec::new();
        for Described { name, outcome } in described {
            let Some(topic) = names.iter().find(|known| known.as_str() == name) else { continue };
            match outcome {
                Ok((_, 0)) => {
                    let text = format!("topic {topic} has no partitions yet");
                    return Err(SourceError::Transient(text.into()));
                }
                Ok((id, count)) => found.push(self.info(topic, id, count)),
                Err(code) if is_unknown(code) => {}
                Err(code) => {
                    return Err(request_error(code, topic, 0, format!("topic {topic}: {code}")));
                }
            }
        }
        self.remember(&names, &found);
        Ok(found)
    }

    /// Names of all topics but the brokers' own.
    pub(crate) fn names(&self) -> Result<Vec<TopicName>, SourceError> {
        let answer = self.client.fetch_metadata(None, LOOKUP_TIMEOUT);
        self.drain_events();
        let answer = answer.map_err(|error| SourceError::Transient(error.into()))?;
        let names = answer.topics().iter().map(|topic| topic.name());
        let names = names.filter(|name| !name.starts_with(INTERNAL));
        Ok(names.filter_map(|name| TopicName::new(name).ok()).collect())
    }

    /// Checks that the partition is there in the life that is meant; asks the brokers unless an answer is fresh.
    pub(crate) fn check(&self, topic: &TopicName, partition: Partition) -> Result<(), SourceError> {
        if self.is_known(topic, partition) {
            return Ok(());
        }
        let found = self.topics(std::slice::from_ref(topic))?;
        let index = partition.index.get();
        let unknown = || SourceError::UnknownPartition { topic: topic.clone(), index };
        agrees(found.first().ok_or_else(unknown)?, partition)
    }

    /// Whether a fresh answer has the partition in the life that is meant. Asks nobody.
    pub(crate) fn is_known(&self, topic: &TopicName, partition: Partition) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known
            .get(topic)
            .is_some_and(|(at, info)| at.elapsed() < FRESH && agrees(info, partition).is_ok())
    }

    /// First or next offset of a partition.
    pub(crate) fn start(
        &self,
        topic: &TopicName,
        partition: Partition,
        policy: ResetPolicy,
    ) -> Result<NextOffset, SourceError> {
        self.check(topic, partition)?;
        let index = partition.index.get();
        let kafka_index = i32::try_from(index).unwrap_or(i32::MAX);
        if let ResetPolicy::Timestamp(from_ms) = policy
            && let Some(found) = self.first_at(topic, index, kafka_index, from_ms)?
        {
            return Ok(found);
        }
        let answer = self.client.fetch_watermarks(topic.as_str(), kafka_index, LOOKUP_TIMEOUT);
        self.drain_events();
        let (low, high) = answer.map_err(|error| match error.rdkafka_error_code() {
            Some(code) => request_error(code, topic, index, error.to_string()),
            None => SourceError::Transient(error.into()),
        })?;
        let offset = match policy {
            ResetPolicy::Earliest => low,
            // No record is that late: after the last one.
            ResetPolicy::Latest | ResetPolicy::Timestamp(_) => high,
            ResetPolicy::Fail => {
                return Err(SourceError::Fatal("the policy names no offset to look up".into()));
            }
        };
        NextOffset::from_signed(offset).map_err(|error| SourceError::Transient(error.into()))
    }

    /// First or next offsets of partitions, in one request to each broker. Nothing where none was found or the policy is
    /// another, and of a partition that is asked for twice or that no fresh answer has.
    pub(crate) fn starts(&self, asked: &[Asked]) -> KafkaResult<Vec<Option<NextOffset>>> {
        let mut list = TopicPartitionList::with_capacity(asked.len());
        let mut places = BTreeMap::new();
        for (place, (topic, partition, policy)) in asked.iter().enumerate() {
            let time = match policy {
                ResetPolicy::Earliest => Offset::Beginning,
                ResetPolicy::Latest => Offset::End,
                // The offset of a partition that the answer leaves out is the one that was asked with: a time.
                ResetPolicy::Timestamp(_) | ResetPolicy::Fail => continue,
            };
            let index = i32::try_from(partition.index.get()).unwrap_or(i32::MAX);
            if self.is_known(topic, *partition)
                && let Entry::Vacant(entry) = places.entry((topic.as_str(), index))
            {
                list.add_partition_offset(topic.as_str(), index, time)?;
                entry.insert(place);
            }
        }
        let mut found = vec![None; asked.len()];
        if places.is_empty() {
            return Ok(found);
        }
        let answer = self.client.offsets_for_times(list, STARTS_TIMEOUT);
        self.drain_events();
        for one in answer?.elements() {
            if let (Ok(()), Offset::Offset(offset)) = (one.error(), one.offset())
                && let Some(place) = places.get(&(one.topic(), one.partition()))
            {
                found[*place] = NextOffset::from_signed(offset).ok();
            }
        }
        Ok(found)
    }

    /// The first record that is not before `from_ms`; nothing when there is none.
    fn first_at(
        &self,
        topic: &TopicName,
        index: u32,
        kafka_index: i32,
        from_ms: i64,
    ) -> Result<Option<NextOffset>, SourceError> {
        let failed = |error: KafkaError| match error.rdkafka_error_code() {
            Some(code) => request_error(code, topic, index, error.to_string()),
            None => SourceError::Transient(error.into()),
        };
        let mut asked = TopicPartitionList::with_capacity(1);
        asked
            .add_partition_offset(topic.as_str(), kafka_index, Offset::Offset(from_ms))
            .map_err(failed)?;
        let answer = self.client.offsets_for_times(asked, LOOKUP_TIMEOUT);
        self.drain_events();
        let answer = answer.map_err(failed)?;
        let found = answer.find_partition(topic.as_str(), kafka_index);
        let found =
            found.ok_or_else(|| SourceError::Transient("no offset in the answer".into()))?;
        found.error().map_err(failed)?;
        match found.offset() {
            Offset::Offset(offset) => NextOffset::from_signed(offset)
                .map(Some)
                .map_err(|error| SourceError::Transient(error.into())),
            Offset::End => Ok(None),
            other @ (Offset::Beginning
            | Offset::Stored
            | Offset::Invalid
            | Offset::OffsetTail(_)) => {
                Err(SourceError::Transient(format!("no offset but {other:?}").into()))
            }
        }
    }

    fn info(&self, topic: &TopicName, id: u128, count: usize) -> TopicInfo {
        let topic_id = if id == 0 {
            if !self.said_no_ids.swap(true, Ordering::Relaxed) {
                tracing::info!(%topic, "broker has no topic ids: a topic that is created again will not be noticed");
            }
            TopicId::of_name(topic)
        } else {
            TopicId::from_bits(id)
        };
        let partition_count = u32::try_from(count).unwrap_or(u32::MAX);
        TopicInfo { topic: topic.clone(), topic_id, partition_count }
    }

    fn remember(&self, asked: &BTreeSet<&TopicName>, found: &[TopicInfo]) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|topic, (at, _)| !asked.contains(topic) && at.elapsed() < FRESH);
        known.extend(found.iter().map(|info| (info.topic.clone(), (Instant::now(), info.clone()))));
    }

    /// Asks for ids where the cluster has them. An error never falls back on names: the same topic would change its
    /// id.
    fn describe(&self, names: &[&str]) -> Result<Vec<Described>, SourceError> {
        let cluster = self.cluster_id()?;
        if cluster.starts_with(MOCK_CLUSTER) {
            return self.metadata(names);
        }
        match describe_topics(self.client.client(), names, LOOKUP_TIMEOUT) {
            Ok(described) => Ok(described),
            Err((
                RDKafkaErrorCode::UnsupportedFeature | RDKafkaErrorCode::UnsupportedVersion,
                _,
            )) => self.metadata(names),
            Err((code, text)) if is_final(code) => Err(SourceError::Fatal(text.into())),
            Err((code, text)) => Err(SourceError::Transient(format!("{text} ({code})").into())),
        }
    }

    /// Id of the cluster, asked for once.
    fn cluster_id(&self) -> Result<&str, SourceError> {
        if let Some(id) = self.cluster_id.get() {
            return Ok(id);
        }
        let Some(id) = self.client.client().fetch_cluster_id(LOOKUP_TIMEOUT) else {
            self.drain_events();
            return Err(SourceError::Transient("no broker answered in time".into()));
        };
        Ok(self.cluster_id.get_or_init(|| id))
    }

    /// Topics of a broker that cannot describe them, so without ids.
    fn metadata(&self, names: &[&str]) -> Result<Vec<Described>, SourceError> {
        let transient = |error: KafkaError| SourceError::Transient(error.into());
        let mut described = Vec::new();
        for name in names {
            let answer =
                self.client.fetch_metadata(Some(name), LOOKUP_TIMEOUT).map_err(transient)?;
            described.extend(answer.topics().iter().map(|topic| Described {
                name: topic.name().to_owned(),
                outcome: match topic.error() {
                    Some(code) => Err(code.into()),
                    None => Ok((0, topic.partitions().len())),
                },
            }));
        }
        Ok(described)
    }

    /// Logs and errors pile up in the client until someone serves them.
    fn drain_events(&self) {
        for _ in 0..1000 {
            match self.client.poll(Duration::ZERO) {
                None => return,
                Some(Ok(_)) => {}
                Some(Err(error)) => tracing::debug!(%error, "kafka look-up client event"),
            }
        }
    }
}

fn agrees(info: &TopicInfo, partition: Partition) -> Result<(), SourceError> {
    let topic = info.topic.clone();
    if info.topic_id != partition.topic_id {
        let (wanted, found) = (partition.topic_id, info.topic_id);
        return Err(SourceError::OtherTopicId { topic, wanted, found });
    }
    let index = partition.index.get();
    if index >= info.partition_count {
        return Err(SourceError::UnknownPartition { topic, index });
    }
    Ok(())
}
