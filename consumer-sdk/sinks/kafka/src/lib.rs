//! Fenced Kafka sink: records, offset and fence move in one Kafka transaction.
//!
//! The home of the offset of a group with `home = kafka-transaction`: exactly once for readers with
//! `isolation.level=read_committed`. What it protects, what it cannot, and every failure: `docs/sinks/kafka.md`.
//!
//! ```no_run
//! use tenure_model::{Epoch, NextOffset};
//! use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified, conformance};
//! use tenure_sink_kafka::rdkafka::producer::BaseRecord;
//! use tenure_sink_kafka::{KafkaSink, KafkaSinkSettings};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), SinkError> {
//! let sink = KafkaSink::new(KafkaSinkSettings::new("127.0.0.1:9092"))?;
//!
//! // The SDK does this; here the grant comes from nobody.
//! let grant = conformance::grant("ann", 0, Epoch::FIRST);
//! let mut writer = sink.register(&grant).await?.writer;
//! let verified = Verified::without_coordinator(false);
//! let start = match writer.resume(&verified).await? {
//!     Some(next) => next,
//!     None => writer.initialise(NextOffset::ZERO).await?,
//! };
//!
//! let mut tx = writer.begin().await?;
//! tx.send(BaseRecord::to("bills").key("k").payload("v")).await?;
//! tx.commit(NextOffset::new(start.get() + 1).expect("a small offset")).await?;
//! # Ok(())
//! # }
//! ```

#![warn(missing_docs)]

mod client;
mod error;
mod settings;
mod sink;
mod stamp;
mod writer;

pub use client::Step;
pub use rdkafka;
pub use settings::KafkaSinkSettings;
pub use sink::KafkaSink;
pub use writer::{KafkaTx, KafkaWriter};
