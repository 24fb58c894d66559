//! The writing end of one partition's stream, bounded in records and bytes.

use std::collections::VecDeque;

use tenure_model::NextOffset;
use tenure_sdk::source::{Fetched, ReadAhead, RecordStream, SourceError};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::pack::Pack;

/// What is in the stream or waits for room in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

impl Load {
    pub(crate) fn add(&mut self, other: Self) {
        self.records += other.records;
        self.bytes += other.bytes;
    }

    pub(crate) fn subtract(&mut self, other: Self) {
        self.records -= other.records;
        self.bytes -= other.bytes;
    }
}

/// Records of one partition that go to its reader together.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) pack: Pack,
    pub(crate) load: Load,
    /// Offset after the last record.
    pub(crate) next: NextOffset,
}

/// How large a chunk may be; a single larger record is one of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkLimit {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

/// The reader is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone;

/// Writing end of a stream.
///
/// The channel counts chunks, not records. It is first in, first out, so the chunks still in it are the last ones that
/// were put in: their sizes tell the load without a word from the reader.
pub(crate) struct Outlet {
    sender: mpsc::Sender<Fetched>,
    limit: ReadAhead,
    chunks: VecDeque<Load>,
    load: Load,
}

impl Outlet {
    /// Makes both ends. One slot more than the limit, so that a failure always finds room.
    pub(crate) fn new(limit: ReadAhead) -> (Self, RecordStream) {
        let limit = ReadAhead { records: limit.records.max(1), bytes: limit.bytes.max(1) };
        let slots = limit.records.saturating_add(1).min(tokio::sync::Semaphore::MAX_PERMITS);
        let (sender, stream) = mpsc::channel(slots);
        (Self { sender, limit, chunks: VecDeque::new(), load: Load::default() }, stream)
    }

    pub(crate) fn limit(&self) -> ReadAhead {
        self.limit
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    /// What the reader has not taken yet.
    pub(crate) fn load(&mut self) -> Load {
        let inside = self.sender.max_capacity() - self.sender.capacity();
        while self.chunks.len() > inside {
            if let Some(taken) = self.chunks.pop_front() {
                self.load.subtract(taken);
            }
        }
        self.load
    }

    /// How large a chunk may be: half of the limit, so that one is read while the next one waits.
    pub(crate) fn chunk_limit(&self) -> ChunkLimit {
        ChunkLimit {
            records: (self.limit.records / 2).max(1),
            bytes: (self.limit.bytes / 2).max(1),
        }
    }

    /// Moves chunks from `held` into the stream while there is room, and says how much went. One larger than the limit
    /// passes alone.
    pub(crate) fn push(&mut self, held: &mut VecDeque<Chunk>) -> Result<Load, Gone> {
        let mut moved = Load::default();
        while let Some(size) = held.front().map(|chunk| chunk.load) {
            let load = self.load();
            let fits = load.records + size.records <= self.limit.records
                && load.bytes.saturating_add(size.bytes) <= self.limit.bytes;
            if !fits && load.records > 0 {
                break;
            }
            let Some(chunk) = held.pop_front() else { break };
            match self.sender.try_send(Fetched::Packed(Box::new(chunk.pack))) {
                Ok(()) => {}
                Err(TrySendError::Closed(_)) => return Err(Gone),
                Err(TrySendError::Full(_)) => {
                    unreachable!(
                        "each chunk has a record, and there is a slot for each record of the limit"
                    )
                }
            }
            self.chunks.push_back(size);
            self.load.add(size);
            moved.add(size);
        }
        if self.is_gone() { Err(Gone) } else { Ok(moved) }
    }

    /// Says that there is no record before `next` any more, if there is room for that; it counts as one record.
    pub(crate) fn pass(&mut self, next: NextOffset) -> bool {
        let load = self.load();
        let fits = load.records < self.limit.records;
        if !fits || self.sender.try_send(Fetched::Passed(next)).is_err() {
            return false;
        }
        let size = Load { records: 1, bytes: 0 };
        self.chunks.push_back(size);
        self.load.add(size);
        true
    }

    /// Puts the last item into the stream.
    pub(crate) fn fail(self, error: SourceError) -> Result<(), Gone> {
        self.sender.try_send(Fetched::Failed(error)).map_err(|_| Gone)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tenure_model::{NextOffset, Partition, PartitionIndex, TopicId, TopicName};
    use tenure_sdk::source::Record;

    use super::*;

    /// Chunks of `size` records each, with values of `size_bytes`; offsets from `first`.
    pub(crate) fn chunks(first: u64, count: u64, size: u64, size_bytes: usize) -> VecDeque<Chunk> {
        let topic = TopicName::new("t").unwrap();
        let index = PartitionIndex::new(0).unwrap();
        let partition = Partition { topic_id: TopicId::of_name(&topic), index };
        let record = |offset| Record {
            partition,
            topic: topic.clone(),
            offset: NextOffset::new(offset).unwrap(),
            timestamp_ms: None,
            key: None,
            value: Some(vec![0; size_bytes].into()),
            headers: Vec::new(),
        };
        let chunk = |number: u64| {
            let from = first + number * size;
            let records: Vec<Record> = (from..from + size).map(record).collect();
            let load = Load { records: records.len(), bytes: records.len() * size_bytes };
            let next = records.last().expect("a chunk is not empty").next();
            Chunk { pack: Pack::of_records(records, load), load, next }
        };
        (0..count).map(chunk).collect()
    }

    #[test]
    fn stream_takes_as_many_records_as_its_limit_and_more_once_some_were_read() {
        let (mut outlet, mut stream) = Outlet::new(ReadAhead { records: 100, bytes: 1 << 20 });
        let mut held = chunks(0, 6, 25, 10);
        assert_eq!(outlet.push(&mut held), Ok(Load { records: 100, bytes: 1000 }));
        assert_eq!(outlet.push(&mut held), Ok(Load::default()));
        assert_eq!(stream.try_recv().unwrap().into_records().unwrap().len(), 25);
        assert_eq!(outlet.load(), Load { records: 75, bytes: 750 });
        assert_eq!(outlet.push(&mut held), Ok(Load { records: 25, bytes: 250 }));
        assert_eq!(held.len(), 1);
    }

    #[test]
    fn stream_is_bounded_in_bytes_and_a_record_above_the_limit_passes_alone() {
        let (mut outlet, mut stream) = Outlet::new(ReadAhead { records: 100, bytes: 50 });
        let mut held = chunks(0, 2, 1, 80);
        assert_eq!(outlet.push(&mut held), Ok(Load { records: 1, bytes: 80 }));
        assert!(stream.try_recv().is_ok());
        assert_eq!(outlet.push(&mut held), Ok(Load { records: 1, bytes: 80 }));
        let mut small = chunks(2, 10, 1, 10);
        assert_eq!(outlet.push(&mut small), Ok(Load::default()));
        assert!(stream.try_recv().is_ok());
        assert_eq!(outlet.push(&mut small), Ok(Load { records: 5, bytes: 50 }));
    }

    #[test]
    fn failure_finds_room_in_a_full_stream_of_single_records() {
        let (mut outlet, mut stream) = Outlet::new(ReadAhead { records: 3, bytes: 1 << 20 });
        assert_eq!(outlet.push(&mut chunks(0, 9, 1, 1)), Ok(Load { records: 3, bytes: 3 }));
        assert_eq!(outlet.fail(SourceError::Transient("x".into())), Ok(()));
        for _ in 0..3 {
            assert!(matches!(stream.try_recv(), Ok(Fetched::Packed(_))));
        }
        assert!(matches!(stream.try_recv(), Ok(Fetched::Failed(_))));
    }

    #[test]
    fn reader_that_left_is_noticed() {
        let (mut outlet, stream) = Outlet::new(ReadAhead::default());
        drop(stream);
        assert_eq!(outlet.push(&mut chunks(0, 1, 1, 1)), Err(Gone));
        assert_eq!(outlet.push(&mut VecDeque::new()), Err(Gone), "with nothing to push as well");
    }
}
