//! What an error of the Kafka client means.

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use tenure_sdk::sink::SinkError;

const REJECTED: [RDKafkaErrorCode; 4] = [
    RDKafkaErrorCode::MessageSizeTooLarge,
    RDKafkaErrorCode::MessageBatchTooLarge,
    RDKafkaErrorCode::InvalidMessage,
    RDKafkaErrorCode::InvalidRecord,
];

const MISCONFIGURED: [RDKafkaErrorCode; 14] = [
    RDKafkaErrorCode::TransactionalIdAuthorizationFailed,
    RDKafkaErrorCode::GroupAuthorizationFailed,
    RDKafkaErrorCode::TopicAuthorizationFailed,
    RDKafkaErrorCode::ClusterAuthorizationFailed,
    RDKafkaErrorCode::SaslAuthenticationFailed,
    RDKafkaErrorCode::UnsupportedVersion,
    RDKafkaErrorCode::InvalidTransactionTimeout,
    RDKafkaErrorCode::OffsetMetadataTooLarge,
    RDKafkaErrorCode::UnknownTopicOrPartition,
    RDKafkaErrorCode::UnknownTopic,
    RDKafkaErrorCode::UnknownPartition,
    RDKafkaErrorCode::InvalidConfig,
    // A consumer has joined the sink's own group.
    RDKafkaErrorCode::UnknownMemberId,
    RDKafkaErrorCode::IllegalGeneration,
];

/// Reads an error of a step that certainly changed nothing, or that the next initialisation undoes.
pub(crate) fn classify(error: KafkaError) -> SinkError {
    match (error.rdkafka_error_code(), &error) {
        (Some(code), _) => classify_code(code, error.to_string()),
        // Without the value, which may be a password under a misspelt name.
        (None, KafkaError::ClientConfig(_, text, key, _value)) => {
            SinkError::Misconfigured(format!("kafka setting {key}: {text}"))
        }
        (None, _) => SinkError::Misconfigured(error.to_string()),
    }
}

pub(crate) fn classify_code(code: RDKafkaErrorCode, text: String) -> SinkError {
    if REJECTED.contains(&code) {
        SinkError::Rejected(text.into())
    } else if MISCONFIGURED.contains(&code) {
        SinkError::Misconfigured(text)
    } else {
        // Fenced is among them: any newer initialisation fences, also a stale one. The stamp tells which it was.
        transient(text)
    }
}

pub(crate) fn transient(why: impl Into<tenure_sdk::sink::BoxError>) -> SinkError {
    SinkError::Transient { retry_after: None, source: why.into() }
}
