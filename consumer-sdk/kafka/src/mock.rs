//! A Kafka cluster inside the process, for tests and demonstrations.
//!
//! It knows no transactions that fence, no look-up by time and no growth of partitions; retention is fixed at 5 MiB
//! per partition.

use rdkafka::error::KafkaError;
use rdkafka::mocking::MockCluster;

use crate::ffi::SharedMock;

/// The mock cluster refused.
#[derive(Debug, thiserror::Error)]
#[error("mock cluster: {0}")]
pub struct MockError(#[from] KafkaError);

/// A mock cluster on 127.0.0.1. It ends when dropped.
pub struct MockKafka {
    cluster: SharedMock,
}

impl MockKafka {
    /// Starts a cluster of `broker_count` brokers, at least 1.
    ///
    /// # Errors
    ///
    /// [`MockError`] when librdkafka cannot make one.
    pub fn start(broker_count: u16) -> Result<Self, MockError> {
        let cluster = MockCluster::new(i32::from(broker_count.max(1)))?;
        Ok(Self { cluster: SharedMock(cluster) })
    }

    /// Brokers to start from, as [`KafkaSettings::bootstrap`](crate::KafkaSettings) wants them.
    #[must_use]
    pub fn bootstrap(&self) -> String {
        self.cluster.0.bootstrap_servers()
    }

    /// Creates a topic, each partition on one broker.
    ///
    /// # Errors
    ///
    /// [`MockError`] when it exists.
    pub fn create_topic(&self, name: &str, partition_count: u16) -> Result<(), MockError> {
        Ok(self.cluster.0.create_topic(name, i32::from(partition_count), 1)?)
    }

    /// Makes a broker the leader of a partition, under the next leader epoch. Brokers count from 1.
    ///
    /// # Errors
    ///
    /// [`MockError`] when there is no such broker.
    pub fn elect_leader(&self, topic: &str, partition: u16, broker: u16) -> Result<(), MockError> {
        let (partition, broker) = (i32::from(partition), i32::from(broker));
        Ok(self.cluster.0.partition_leader(topic, partition, Some(broker))?)
    }

    /// Cuts all connections and takes no new ones.
    ///
    /// # Errors
    ///
    /// [`MockError`] when the cluster has ended.
    pub fn take_brokers_down(&self) -> Result<(), MockError> {
        Ok(self.cluster.0.broker_down(-1)?)
    }

    /// Takes connections again.
    ///
    /// # Errors
    ///
    /// [`MockError`] when the cluster has ended.
    pub fn bring_brokers_up(&self) -> Result<(), MockError> {
        Ok(self.cluster.0.broker_up(-1)?)
    }
}
