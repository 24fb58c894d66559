//! From librdkafka's messages and errors to those of the source.

use bytes::{Bytes, BytesMut};
use rdkafka::types::RDKafkaErrorCode;
use tenure_model::{NextOffset, Partition, TopicName};
use tenure_sdk::source::{Record, SourceError};

use crate::ffi::Message;
use crate::outlet::Load;

/// Keys and values of neighbours share blocks of this size, in bytes: one that is kept keeps its block.
const BLOCK_BYTES: usize = 64 * 1024;

/// Records of one partition that go to its reader together.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    pub(crate) records: Vec<Record>,
    pub(crate) load: Load,
}

/// How large a chunk may be; a single larger record is one of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkLimit {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

/// Copies what one chunk takes of `messages`, those from offset `next` on; answers it and how many messages went.
///
/// A name and blocks of its own: the reader's thread lets go of them one by one, and must not share the counts with
/// the thread that fills the next chunk.
pub(crate) fn chunk(
    topic: &TopicName,
    partition: Partition,
    mut next: NextOffset,
    messages: &[Message],
    limit: ChunkLimit,
    with_headers: bool,
) -> (Chunk, usize) {
    let (mut load, mut used) = (Load::default(), 0);
    for message in messages {
        let size = Load { records: 1, bytes: message.size_bytes() };
        let is_full = load.records == limit.records || load.bytes + size.bytes > limit.bytes;
        if is_full && load.records > 0 {
            break;
        }
        used += 1;
        load.add(size);
    }
    let topic = TopicName::new(topic.as_str()).unwrap_or_else(|_| topic.clone());
    let mut blocks = Blocks { left_bytes: load.bytes, block: BytesMut::new() };
    let mut chunk = Chunk { records: Vec::with_capacity(load.records), load: Load::default() };
    for message in &messages[..used] {
        let Ok(offset) = NextOffset::from_signed(message.offset()) else { continue };
        if offset < next {
            continue;
        }
        let mut headers = Vec::new();
        // librdkafka makes and frees a buffer for the look alone.
        if with_headers {
            message.headers(|name, value| {
                headers.push((name.to_owned(), value.map(Bytes::copy_from_slice)));
            });
        }
        let record = Record {
            partition,
            topic: topic.clone(),
            offset,
            timestamp_ms: message.timestamp_ms(),
            key: message.key().map(|key| blocks.copy(key)),
            value: message.value().map(|value| blocks.copy(value)),
            headers,
        };
        next = record.next();
        chunk.load.add(Load { records: 1, bytes: message.size_bytes() });
        chunk.records.push(record);
    }
    (chunk, used)
}

/// Memory for the keys and values of one chunk.
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
