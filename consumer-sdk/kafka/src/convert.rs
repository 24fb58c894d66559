//! From librdkafka's messages and errors to those of the source.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use rdkafka::types::RDKafkaErrorCode;
use tenure_model::{NextOffset, TopicName};
use tenure_sdk::source::{Lender, Payload, Record, SourceError};

use crate::client::Fetch;
use crate::ffi::Message;
use crate::outlet::Load;
use crate::pack::{Loan, Origin};

/// Keys and values of neighbours share blocks of this size, in bytes: one that is kept keeps its block.
const BLOCK_BYTES: usize = 64 * 1024;

type Headers = Vec<(String, Option<Bytes>)>;

/// Messages that records refer to. Fields drop in this order.
struct Lent {
    fetch: Fetch,
    _loan: Loan,
}

impl Lent {
    const fn place_of_value(position: usize) -> usize {
        position * 2
    }

    const fn place_of_key(position: usize) -> usize {
        position * 2 + 1
    }
}

impl Lender for Lent {
    fn lend(&self, place: usize) -> &[u8] {
        let Some(message) = self.fetch.messages.get(place / 2) else { return &[] };
        let bytes = if place.is_multiple_of(2) { message.value() } else { message.key() };
        bytes.unwrap_or_default()
    }
}

/// Makes records that refer to the messages, which are let go of together, with the last record.
pub(crate) fn lend(origin: &Origin, mut fetch: Fetch, loan: Loan) -> Vec<Record> {
    let headers = headers_of(origin, &mut fetch.messages);
    let lent = Arc::new(Lent { fetch, _loan: loan });
    let payload = |place, _: &[u8]| Payload::lent(Arc::clone(&lent) as Arc<dyn Lender>, place);
    records_of(origin, &lent.fetch.messages, headers, payload)
}

/// Copies what `messages` hold into records, and lets go of them; `load` is what they amount to.
pub(crate) fn copy(origin: &Origin, load: Load, mut messages: Vec<Message>) -> Vec<Record> {
    let headers = headers_of(origin, &mut messages);
    let mut blocks = Blocks { left_bytes: load.bytes, block: BytesMut::new() };
    records_of(origin, &messages, headers, |_, bytes| blocks.copy(bytes).into())
}

/// `payload` gets the place of a key or value, and what is there.
fn records_of(
    origin: &Origin,
    messages: &[Message],
    headers: Vec<Headers>,
    mut payload: impl FnMut(usize, &[u8]) -> Payload,
) -> Vec<Record> {
    // A name of its own for each call: the threads that read let go of them one by one, and must not share the count
    // with each other.
    let topic = TopicName::new(origin.topic.as_str()).unwrap_or_else(|_| origin.topic.clone());
    let mut headers = headers.into_iter();
    let mut records = Vec::with_capacity(messages.len());
    for (position, message) in messages.iter().enumerate() {
        let headers = headers.next().unwrap_or_default();
        let Ok(offset) = NextOffset::from_signed(message.offset()) else { continue };
        records.push(Record {
            partition: origin.partition,
            topic: topic.clone(),
            offset,
            timestamp_ms: message.timestamp_ms(),
            key: message.key().map(|key| payload(Lent::place_of_key(position), key)),
            value: message.value().map(|value| payload(Lent::place_of_value(position), value)),
            headers,
        });
    }
    records
}

/// Headers of each message; none at all where they are left out: librdkafka makes and frees a buffer for the look alone.
fn headers_of(origin: &Origin, messages: &mut [Message]) -> Vec<Headers> {
    let read = |message: &mut Message| {
        let mut headers = Vec::new();
        message.headers(|name, value| {
            headers.push((name.to_owned(), value.map(Bytes::copy_from_slice)));
        });
        headers
    };
    if origin.with_headers { messages.iter_mut().map(read).collect() } else { Vec::new() }
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
