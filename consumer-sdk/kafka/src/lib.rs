//! Record source of Tenure on Kafka, read by explicit offsets.
//!
//! [`KafkaSource`] never joins a consumer group and never stores an offset at the broker: who owns a partition, and
//! where it goes on, is decided elsewhere. One thread owns the Kafka client, its queue of fetched records and every
//! stream, so the answer of a close is a barrier. [`mock`] and [`producer`] are tools for tests and demonstrations.

#![warn(missing_docs)]
#![allow(
    unsafe_code,
    reason = "batches, partition errors and topic ids are reached through librdkafka's C interface only"
)]

mod checker;
mod client;
mod command;
mod convert;
mod ends;
mod ffi;
mod group;
mod lookup;
mod mirror;
mod outlet;
mod owner;
mod pack;
mod part;
mod settings;
mod source;
mod starts;

pub mod mock;
pub mod producer;

pub use group::{GroupError, KafkaGroup};
pub use mirror::{KafkaMirror, MIRROR_INTERVAL, MIRROR_METADATA};
pub use settings::{KafkaSettings, SettingsError};
pub use source::{KafkaSource, StartError};
