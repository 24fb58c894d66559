//! Records of one partition that were received and not handed out yet.

use std::collections::VecDeque;
use std::vec;

use tenure_model::NextOffset;

use crate::source::{Fetched, Payload, Record, SourceError};

/// Keeps records in the pieces that the source made, so that a piece that is wanted as it is moves as it is.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    pieces: VecDeque<Piece>,
    record_count: usize,
    size_bytes: usize,
    /// There is no record between the last one and here.
    passed: Option<NextOffset>,
}

/// Never empty.
#[derive(Debug)]
struct Piece {
    records: vec::IntoIter<Record>,
    size_bytes: usize,
}

/// How much is taken at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// At least 1.
    pub(super) records: usize,
    /// A first record that is larger is taken all the same.
    pub(super) bytes: usize,
    /// Nothing from here on.
    pub(super) before: Option<NextOffset>,
}

/// Bytes of key and value.
pub(super) fn size_of(record: &Record) -> usize {
    let length = |payload: &Option<Payload>| payload.as_deref().map_or(0, <[u8]>::len);
    length(&record.key) + length(&record.value)
}

impl Buffer {
    pub(super) fn push(&mut self, records: Vec<Record>) {
        if records.is_empty() {
            return;
        }
        let size_bytes = records.iter().map(size_of).sum();
        self.record_count += records.len();
        self.size_bytes += size_bytes;
        self.pieces.push_back(Piece { records: records.into_iter(), size_bytes });
        self.passed = None;
    }

    /// Notes that no record lies between the last one and `next`.
    pub(super) const fn pass(&mut self, next: NextOffset) {
        self.passed = Some(next);
    }

    /// Takes in what came, without what lies before `from`.
    pub(super) fn take_in(
        &mut self,
        fetched: Fetched,
        from: NextOffset,
    ) -> Result<(), SourceError> {
        if let Fetched::Passed(next) = fetched {
            self.pass(next);
            return Ok(());
        }
        let mut records = fetched.into_records()?;
        if records.first().is_some_and(|first| first.offset < from) {
            records.retain(|record| record.offset >= from);
        }
        self.push(records);
        Ok(())
    }

    /// Where reading goes on once nothing is left here, if that is further than the last record tells.
    pub(super) fn take_passed(&mut self) -> Option<NextOffset> {
        self.passed.take_if(|_| self.record_count == 0)
    }

    /// Where what was received ends; nothing before anything was.
    pub(super) fn end(&self) -> Option<NextOffset> {
        self.passed.or_else(|| self.back().map(Record::next))
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.record_count == 0
    }

    pub(super) const fn record_count(&self) -> usize {
        self.record_count
    }

    pub(super) const fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Record> {
        self.pieces.iter().flat_map(|piece| piece.records.as_slice())
    }

    pub(super) fn front(&self) -> Option<&Record> {
        self.pieces.front()?.records.as_slice().first()
    }

    fn back(&self) -> Option<&Record> {
        self.pieces.back()?.records.as_slice().last()
    }

    pub(super) fn pop(&mut self) -> Option<Record> {
        let piece = self.pieces.front_mut()?;
        let record = piece.records.next()?;
        let size_bytes = size_of(&record);
        piece.size_bytes -= size_bytes;
        if piece.records.as_slice().is_empty() {
            self.pieces.pop_front();
        }
        self.record_count -= 1;
        self.size_bytes -= size_bytes;
        Some(record)
    }

    /// Takes what there is room for, in order.
    pub(super) fn take(&mut self, room: Room) -> Vec<Record> {
        let (mut taken, mut bytes) = (Vec::new(), 0_usize);
        while let Some(piece) = self.pieces.front() {
            let (records, size_bytes) = (piece.records.as_slice(), piece.size_bytes);
            let fits = taken.len() + records.len() <= room.records
                && bytes.saturating_add(size_bytes) <= room.bytes
                && records.last().is_none_or(|last| is_before(last, room.before));
            if !fits {
                break;
            }
            let Some(piece) = self.pieces.pop_front() else { break };
            self.record_count -= piece.records.as_slice().len();
            self.size_bytes -= piece.size_bytes;
            bytes += piece.size_bytes;
            if taken.is_empty() {
                taken = piece.records.collect();
            } else {
                taken.extend(piece.records);
            }
        }
        let Some(piece) = self.pieces.front_mut() else { return taken };
        let (mut count, mut size_bytes) = (0, 0_usize);
        for next in piece.records.as_slice() {
            let with_it = size_bytes + size_of(next);
            let is_full =
                taken.len() + count >= room.records || bytes.saturating_add(with_it) > room.bytes;
            if is_full && taken.len() + count > 0 || !is_before(next, room.before) {
                break;
            }
            (count, size_bytes) = (count + 1, with_it);
        }
        taken.extend(piece.records.by_ref().take(count));
        piece.size_bytes -= size_bytes;
        self.record_count -= count;
        self.size_bytes -= size_bytes;
        if piece.records.as_slice().is_empty() {
            self.pieces.pop_front();
        }
        taken
    }
}

fn is_before(record: &Record, end: Option<NextOffset>) -> bool {
    end.is_none_or(|end| record.offset < end)
}

#[cfg(test)]
mod tests {
    use tenure_model::{Partition, PartitionIndex, TopicId, TopicName};

    use super::*;

    fn records(offsets: std::ops::Range<u64>) -> Vec<Record> {
        let index = PartitionIndex::new(0).unwrap();
        let record = |offset: u64| Record {
            partition: Partition { topic_id: TopicId::from_bits(1), index },
            topic: TopicName::new("t").unwrap(),
            offset: NextOffset::new(offset).unwrap(),
            timestamp_ms: None,
            key: None,
            value: Some(vec![0; 10].into()),
            headers: Vec::new(),
        };
        offsets.map(record).collect()
    }

    fn buffer(pieces: &[std::ops::Range<u64>]) -> Buffer {
        let mut buffer = Buffer::default();
        pieces.iter().for_each(|piece| buffer.push(records(piece.clone())));
        buffer
    }

    fn offsets(records: &[Record]) -> Vec<u64> {
        records.iter().map(|record| record.offset.get()).collect()
    }

    #[test]
    fn whole_pieces_and_a_part_of_the_next_fill_the_room() {
        let mut buffer = buffer(&[0..3, 3..5, 5..9]);
        let room = Room { records: 7, bytes: 1000, before: None };
        assert_eq!(offsets(&buffer.take(room)), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!((buffer.record_count(), buffer.size_bytes()), (2, 20));
        assert_eq!(offsets(&buffer.take(room)), [7, 8]);
        assert!(buffer.is_empty() && buffer.take(room).is_empty());
    }

    #[test]
    fn bytes_bound_what_is_taken_but_a_large_record_passes_alone() {
        let mut buffer = buffer(std::slice::from_ref(&(0..4)));
        assert_eq!(offsets(&buffer.take(Room { records: 9, bytes: 25, before: None })), [0, 1]);
        assert_eq!(offsets(&buffer.take(Room { records: 9, bytes: 1, before: None })), [2]);
        assert_eq!(buffer.pop().map(|record| record.offset.get()), Some(3));
        assert_eq!((buffer.record_count(), buffer.size_bytes()), (0, 0));
    }

    #[test]
    fn gap_at_the_end_is_passed_with_the_last_record_and_forgotten_with_the_next() {
        let mut buffer = buffer(std::slice::from_ref(&(0..2)));
        let at = |offset| NextOffset::new(offset).unwrap();
        assert_eq!(buffer.end(), Some(at(2)));
        buffer.take_in(Fetched::Passed(at(4)), at(0)).unwrap();
        assert_eq!((buffer.end(), buffer.take_passed()), (Some(at(4)), None));
        buffer.take_in(Fetched::Records(records(4..6)), at(5)).unwrap();
        assert_eq!(offsets(&buffer.take(Room { records: 9, bytes: 99, before: None })), [0, 1, 5]);
        assert_eq!((buffer.end(), buffer.take_passed()), (None, None));
        buffer.pass(at(7));
        assert_eq!((buffer.take_passed(), buffer.take_passed()), (Some(at(7)), None));
    }

    #[test]
    fn nothing_is_taken_from_the_end_on() {
        let mut buffer = buffer(&[0..2, 2..6]);
        let room = Room { records: 9, bytes: 1000, before: NextOffset::new(4).ok() };
        assert_eq!(offsets(&buffer.take(room)), [0, 1, 2, 3]);
        assert!(buffer.take(room).is_empty());
        assert_eq!(offsets(&buffer.iter().cloned().collect::<Vec<_>>()), [4, 5]);
    }
}
