//! What an existing consumer group of Kafka has committed, to take it over from.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::{Offset, TopicPartitionList};
use tenure_model::{NextOffset, TopicName};
use tenure_sdk::source::TopicInfo;

use crate::client::Context;
use crate::settings::{KafkaSettings, SettingsError, create};

/// Longest wait for one answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why a Kafka group could not be read.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// A setting contradicts what this crate promises.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The brokers refused, or did not answer.
    #[error("kafka group {group}: {source}")]
    Kafka {
        /// The group.
        group: String,
        /// What the client says.
        source: KafkaError,
    },
    /// The group is at work: what it has committed changes under the reader's eyes.
    #[error("kafka group {group} has members ({members}): stop them first")]
    HasMembers {
        /// The group.
        group: String,
        /// Their client ids, or a count.
        members: String,
    },
}

/// A consumer group of Kafka. Blocks: use it from a thread that may.
pub struct KafkaGroup {
    name: String,
    client: BaseConsumer<Context>,
}

impl std::fmt::Debug for KafkaGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaGroup").field("name", &self.name).finish_non_exhaustive()
    }
}

impl KafkaGroup {
    /// The group `name`; joins nothing.
    ///
    /// # Errors
    ///
    /// [`GroupError`] when the settings are refused.
    pub fn new(settings: &KafkaSettings, name: &str) -> Result<Self, GroupError> {
        settings.validate()?;
        let mut config = settings.lookup();
        config.set("client.id", format!("{}-group", settings.client_id));
        config.set("group.id", name);
        let client = create(&config, Context)
            .map_err(|source| GroupError::Kafka { group: name.to_owned(), source })?;
        Ok(Self { name: name.to_owned(), client })
    }

    fn failed(&self, source: KafkaError) -> GroupError {
        GroupError::Kafka { group: self.name.clone(), source }
    }

    /// Refuses a group that has members, as far as the brokers tell.
    ///
    /// # Errors
    ///
    /// [`GroupError::HasMembers`], or [`GroupError::Kafka`] when no broker answers.
    pub fn check_is_empty(&self) -> Result<(), GroupError> {
        let list = self.client.fetch_group_list(Some(&self.name), TIMEOUT);
        let list = list.map_err(|source| self.failed(source))?;
        let members: Vec<String> = list
            .groups()
            .iter()
            .filter(|group| group.name() == self.name)
            .flat_map(|group| group.members().iter().map(|member| member.client_id().to_owned()))
            .collect();
        if members.is_empty() {
            return Ok(());
        }
        Err(GroupError::HasMembers { group: self.name.clone(), members: members.join(", ") })
    }

    /// What is committed for each partition of `topics`; partitions without an offset are left out.
    ///
    /// # Errors
    ///
    /// [`GroupError::Kafka`]. A failed read is never an absence.
    pub fn committed(
        &self,
        topics: &[TopicInfo],
    ) -> Result<BTreeMap<(TopicName, u32), NextOffset>, GroupError> {
        let mut asked = TopicPartitionList::new();
        for TopicInfo { topic, partition_count, .. } in topics {
            for index in 0..*partition_count {
                asked.add_partition(topic.as_str(), i32::try_from(index).unwrap_or(i32::MAX));
            }
        }
        let found = self.client.committed_offsets(asked, TIMEOUT);
        let found = found.map_err(|source| self.failed(source))?;
        let mut committed = BTreeMap::new();
        for line in found.elements() {
            line.error().map_err(|source| self.failed(source))?;
            let topic = topics.iter().find(|known| known.topic.as_str() == line.topic());
            let index = u32::try_from(line.partition()).ok();
            if let (Some(topic), Some(index), Offset::Offset(offset)) =
                (topic, index, line.offset())
                && let Ok(next) = NextOffset::from_signed(offset)
            {
                committed.insert((topic.topic.clone(), index), next);
            }
        }
        Ok(committed)
    }

    /// Commits what is committed once more: the brokers refuse that while the group has members of either protocol,
    /// also where they list none.
    ///
    /// # Errors
    ///
    /// [`GroupError::HasMembers`], or [`GroupError::Kafka`].
    pub fn check_takes_no_members(
        &self,
        committed: &BTreeMap<(TopicName, u32), NextOffset>,
    ) -> Result<(), GroupError> {
        if committed.is_empty() {
            return Ok(());
        }
        let mut list = TopicPartitionList::with_capacity(committed.len());
        for ((topic, index), next) in committed {
            let index = i32::try_from(*index).unwrap_or(i32::MAX);
            list.add_partition_offset(topic.as_str(), index, Offset::Offset(next.signed()))
                .map_err(|source| self.failed(source))?;
        }
        match self.client.commit(&list, CommitMode::Sync) {
            Ok(()) => Ok(()),
            Err(error) => match error.rdkafka_error_code() {
                Some(
                    RDKafkaErrorCode::UnknownMemberId
                    | RDKafkaErrorCode::IllegalGeneration
                    | RDKafkaErrorCode::RebalanceInProgress,
                ) => {
                    let members = "the brokers refuse a commit from outside".to_owned();
                    Err(GroupError::HasMembers { group: self.name.clone(), members })
                }
                Some(_) | None => Err(self.failed(error)),
            },
        }
    }
}
