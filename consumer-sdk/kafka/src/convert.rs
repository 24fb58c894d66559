//! From librdkafka's messages and errors to those of the source.

use bytes::Bytes;
use rdkafka::types::RDKafkaErrorCode;
use tenure_model::{NextOffset, Partition, TopicName};
use tenure_sdk::source::{Record, SourceError};

use crate::ffi::Message;

/// Copies a message once. Nothing for a message without a valid offset.
pub(crate) fn record(topic: &TopicName, partition: Partition, message: &Message) -> Option<Record> {
    let mut headers = Vec::new();
    message.headers(|name, value| {
        headers.push((name.to_owned(), value.map(Bytes::copy_from_slice)));
    });
    Some(Record {
        partition,
        topic: topic.clone(),
        offset: NextOffset::from_signed(message.offset()).ok()?,
        timestamp_ms: message.timestamp_ms(),
        key: message.key().map(Bytes::copy_from_slice),
        value: message.value().map(Bytes::copy_from_slice),
        headers,
    })
}

/// Bytes of key and value.
pub(crate) fn size_bytes(record: &Record) -> usize {
    record.key.as_ref().map_or(0, Bytes::len) + record.value.as_ref().map_or(0, Bytes::len)
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
