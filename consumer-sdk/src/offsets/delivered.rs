//! Which delivered records are done.

use std::collections::{BTreeSet, VecDeque};

use tenure_model::NextOffset;

use crate::source::Record;

/// Records that were delivered and lie at or after the low-water mark, as runs of consecutive offsets.
///
/// Work in order costs a run, not an entry for each record; what is done out of order is kept one by one.
#[derive(Debug, Default)]
pub(super) struct Delivered {
    runs: VecDeque<Run>,
    /// Done, and after a record that is not.
    done_early: BTreeSet<u64>,
    count: usize,
    /// Nothing lies between the last record and here.
    passed: Option<u64>,
}

/// Offsets `first` to before `end`, all delivered.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: u64,
    end: u64,
}

impl Delivered {
    /// Number of records at or after the low-water mark.
    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Notes records with rising offsets, all higher than those before.
    pub(super) fn add(&mut self, records: &[Record]) {
        let (Some(first), Some(last)) = (records.first(), records.last()) else { return };
        let (first, end) = (first.offset.get(), last.next().get());
        // Offsets rise, so that as many as there is room for are all of them.
        if usize::try_from(end - first) == Ok(records.len()) {
            self.add_run(Run { first, end });
        } else {
            for record in records {
                self.add_run(Run { first: record.offset.get(), end: record.next().get() });
            }
        }
        self.count += records.len();
        // Behind them now, as any gap between records is.
        self.passed = None;
    }

    /// Notes that no record lies before `next` beyond those that were delivered. Answers the new low-water mark, if it
    /// moved.
    pub(super) fn pass(&mut self, next: NextOffset) -> Option<NextOffset> {
        if self.runs.is_empty() {
            return Some(next);
        }
        self.passed = Some(next.get());
        None
    }

    fn add_run(&mut self, next: Run) {
        match self.runs.back_mut().filter(|run| run.end == next.first) {
            Some(run) => run.end = next.end,
            None => self.runs.push_back(next),
        }
    }

    /// Marks one record; one that is not here changes nothing. Answers the new low-water mark, if it moved.
    pub(super) fn done(&mut self, offset: NextOffset) -> Option<NextOffset> {
        let offset = offset.get();
        let at = self.runs.partition_point(|run| run.end <= offset);
        let run = self.runs.get_mut(at).filter(|run| run.first <= offset)?;
        if at > 0 || run.first < offset {
            self.done_early.insert(offset);
            return None;
        }
        run.first += 1;
        self.count -= 1;
        self.pass_over(offset + 1)
    }

    /// Marks every record before `next`. Answers the new low-water mark, if it moved.
    pub(super) fn done_before(&mut self, next: NextOffset) -> Option<NextOffset> {
        let next = next.get();
        let mut low_water = None;
        while let Some(run) = self.runs.front_mut().filter(|run| run.first < next) {
            let end = run.end.min(next);
            self.count -= usize::try_from(end - run.first).unwrap_or(usize::MAX);
            run.first = end;
            low_water = Some(end);
            if run.first < run.end {
                break;
            }
            self.runs.pop_front();
        }
        self.pass_over(low_water?)
    }

    /// Passes over what was done early and follows now without a hole; everything before `low_water` is done.
    fn pass_over(&mut self, mut low_water: u64) -> Option<NextOffset> {
        loop {
            match self.runs.front_mut() {
                Some(run) if run.first == run.end => {
                    self.runs.pop_front();
                }
                Some(run) if self.done_early.remove(&run.first) => {
                    run.first += 1;
                    low_water = run.first;
                    self.count -= 1;
                }
                Some(_) | None => break,
            }
        }
        if !self.done_early.is_empty() {
            self.done_early = self.done_early.split_off(&low_water);
        }
        if self.runs.is_empty()
            && let Some(passed) = self.passed.take()
        {
            low_water = passed;
        }
        NextOffset::new(low_water).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;
    use tenure_model::{Partition, PartitionIndex, TopicId, TopicName};

    use super::*;

    fn record(offset: u64) -> Record {
        let index = PartitionIndex::new(0).unwrap();
        Record {
            partition: Partition { topic_id: TopicId::from_bits(1), index },
            topic: TopicName::new("t").unwrap(),
            offset: NextOffset::new(offset).unwrap(),
            timestamp_ms: None,
            key: None,
            value: None,
            headers: Vec::new(),
        }
    }

    /// One entry for each record, and a gap at the end: what the runs must agree with.
    #[derive(Default)]
    struct Plain(Vec<(u64, bool)>, Option<u64>);

    impl Plain {
        fn advance(&mut self) -> Option<NextOffset> {
            let undone = self.0.iter().position(|(_, done)| !done).unwrap_or(self.0.len());
            let done: Vec<_> = self.0.drain(..undone).collect();
            let next = done.last().map(|(offset, _)| offset + 1);
            let gap = self.1.take_if(|_| self.0.is_empty());
            gap.or(next).map(|next| NextOffset::new(next).unwrap())
        }
    }

    #[test]
    fn gap_at_the_end_is_passed_once_all_before_it_is_done() {
        let mut delivered = Delivered::default();
        let at = |offset| NextOffset::new(offset).unwrap();
        assert_eq!(delivered.pass(at(3)), Some(at(3)), "nothing is before it");
        delivered.add(&[record(4), record(5)]);
        assert_eq!(delivered.pass(at(8)), None);
        assert_eq!(delivered.done(at(5)), None);
        assert_eq!(delivered.done(at(4)), Some(at(8)));
        assert_eq!(delivered.pass(at(9)), Some(at(9)));
    }

    proptest! {
        #[test]
        fn runs_answer_as_one_entry_for_each_record_does(
            offsets in btree_set(0_u64..120, 1..80),
            steps in vec((any::<bool>(), 0_u64..125), 0..120),
            at_once in 1_usize..20,
        ) {
            let (mut runs, mut plain) = (Delivered::default(), Plain::default());
            let records: Vec<Record> = offsets.iter().map(|offset| record(*offset)).collect();
            let mut batches = records.chunks(at_once);
            for (number, (one, offset)) in steps.into_iter().enumerate() {
                if number % 3 == 0 && let Some(batch) = batches.next() {
                    runs.add(batch);
                    plain.1 = None;
                    plain.0.extend(batch.iter().map(|record| (record.offset.get(), false)));
                }
                if number % 7 == 0 && let Some(last) = plain.0.last() {
                    let gap = last.0 + 5;
                    prop_assert_eq!(runs.pass(NextOffset::new(gap).unwrap()), None);
                    plain.1 = Some(gap);
                }
                let at = NextOffset::new(offset).unwrap();
                let moved = if one { runs.done(at) } else { runs.done_before(at) };
                for (found, done) in &mut plain.0 {
                    *done |= if one { *found == offset } else { *found < offset };
                }
                prop_assert_eq!(moved, plain.advance());
                prop_assert_eq!(runs.count(), plain.0.len());
            }
        }
    }
}
