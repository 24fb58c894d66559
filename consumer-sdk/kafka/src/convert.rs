//! From librdkafka's messages and errors to those of the source.

use bytes::{Bytes, BytesMut};
use rdkafka::types::RDKafkaErrorCode;
use tenure_model::{NextOffset, TopicName};
use tenure_sdk::source::{Record, SourceError};

use crate::ffi::Message;
use crate::outlet::Load;
use crate::pack::Origin;

/// Keys and values of neighbours share blocks of this size, in bytes: one that is kept keeps its block.
const BLOCK_BYTES: usize = 64 * 1024;

/// Copies what `messages` hold into records, and lets go of them; `load` is what they amount to.
///
/// A name and blocks of its own for each call: the threads that read let go of them one by one, and must not share the
/// counts with each other.
pub(crate) fn records_of(origin: &Origin, load: Load, messages: Vec<Message>) -> Vec<Record> {
    let topic = TopicName::new(origin.topic.as_str()).unwrap_or_else(|_| origin.topic.clone());
    let mut blocks = Blocks { left_bytes: load.bytes, block: BytesMut::new() };
    let mut records = Vec::with_capacity(messages.len());
    for message in messages {
        let Ok(offset) = NextOffset::from_signed(message.offset()) else { continue };
        let mut headers = Vec::new();
        // librdkafka makes and frees a buffer for the look alone.
        if origin.with_headers {
            message.headers(|name, value| {
                headers.push((name.to_owned(), value.map(Bytes::copy_from_slice)));
            });
        }
        records.push(Record {
            partition: origin.partition,
            topic: topic.clone(),
            offset,
            timestamp_ms: message.timestamp_ms(),
            key: message.key().map(|key| blocks.copy(key)),
            value: message.value().map(|value| blocks.copy(value)),
            headers,
        });
    }
    records
}

/// Memory for the keys and values of one call.
struct Blocks {
    left_bytes: usize,
    block: BytesMut,
}

impl Blocks {
    fn copy(&mut self, bytes: &[u8]) -> Bytes {
        if self.block.capacity() < bytes.len() {
            self.block = BytesMut::with_capacity(self.left_bytes.min(BLOCK_BYTES).max(bytes.len()));
        }
        self.left_bytes = self.left_bytes.saturating_sub(bytes.len());
        self.block.extend_from_slice(bytes);
        self.block.split().freeze()
    }
}

/// Sorts an error of a request by whether it may pass.
pub(crate) fn request_error(
    code: RDKafkaErrorCode,
    topic: &TopicName,
    index: u32,
    text: String,
) -> SourceError {
    if is_unknown(code) {
        SourceError::UnknownPartition { topic: topic.clone(), index }
    } else if is_final(code) {
        SourceError::Fatal(text.into())
    } else {
        SourceError::Transient(text.into())
    }
}

/// Whether the code says that the topic or partition does not exist.
pub(crate) fn is_unknown(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::UnknownTopicOrPartition
            | RDKafkaErrorCode::UnknownTopic
            | RDKafkaErrorCode::UnknownPartition
            | RDKafkaErrorCode::InvalidTopic
    )
}

/// Whether the code does not pass by itself.
pub(crate) fn is_final(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::TopicAuthorizationFailed
            | RDKafkaErrorCode::GroupAuthorizationFailed
            | RDKafkaErrorCode::ClusterAuthorizationFailed
            | RDKafkaErrorCode::BadMessage
            | RDKafkaErrorCode::InvalidMessage
            | RDKafkaErrorCode::InvalidMessageSize
            | RDKafkaErrorCode::MessageSizeTooLarge
            | RDKafkaErrorCode::UnsupportedVersion
            | RDKafkaErrorCode::UnsupportedCompressionType
    )
}
