//! Offsets whose home is the coordinator.

use tenure_model::{Epoch, RequestId};
use tokio::sync::mpsc;

use super::*;
use crate::lease::Lease;
use crate::session::LostCause;
use crate::source::Record;

/// Parts of an owned partition, in the hands of the test. The handler waits until its partition ends.
type Taken = (Owned<CoordinatorOffsets>, tokio::sync::oneshot::Sender<()>);

/// Handler that hands its partition to the test and ends when the test says so.
fn handing_over() -> (BoxHandler<CoordinatorOffsets>, mpsc::UnboundedReceiver<Taken>) {
    let (sender, taken) = mpsc::unbounded_channel();
    let handler: BoxHandler<CoordinatorOffsets> = Box::new(move |owned| {
        let sender = sender.clone();
        Box::pin(async move {
            let (end, ended) = tokio::sync::oneshot::channel();
            sender.send((owned, end)).map_err(|_| "the test is over")?;
            ended.await.map_err(|_| "the test is over")?;
            Ok(())
        })
    });
    (handler, taken)
}

/// A partition of one's own, opened. What a test does not take out of it stays open until its end.
struct Open {
    bench: Bench,
    counters: Arc<Counters>,
    taken: mpsc::UnboundedReceiver<Taken>,
    epoch: Epoch,
    _lease: Lease,
    end: tokio::sync::oneshot::Sender<()>,
    input: Input,
    offsets: OffsetWriter,
    _run: Run,
}

impl Open {
    /// Opens partition 0 with `count` records in it.
    async fn with(count: usize) -> Self {
        let bench = Bench::new(1);
        bench.append(0, count);
        let (handler, mut taken) = handing_over();
        let consumer = bench.builder().build().unwrap();
        let counters = consumer.counters();
        let _run = bench.run(consumer, handler).await;
        let (epoch, _lease) = bench.grant(0);
        let (owned, end) = taken.recv().await.unwrap();
        let (input, offsets) = owned.split();
        Self { bench, counters, taken, epoch, _lease, end, input, offsets, _run }
    }
}

async fn records(input: &mut Input, count: usize) -> Vec<Record> {
    let mut records = Vec::new();
    while records.len() < count {
        let left = count - records.len();
        let limits = Limits { records: left, bytes: usize::MAX, wait: SECOND };
        records.extend(input.next_batch(&limits).await.unwrap());
    }
    records
}

#[tokio::test(start_paused = true)]
async fn records_done_in_any_order_commit_the_low_water_mark() {
    let open = Open::with(4).await;
    let Open { bench, mut input, mut offsets, .. } = open;
    let got = records(&mut input, 4).await;
    let mut check = async |done: usize, want: u64| {
        offsets.done(&got[done]);
        assert_eq!(offsets.flush().await.unwrap().get(), want, "after record {done}");
    };
    check(2, 0).await;
    check(0, 1).await;
    check(3, 1).await;
    check(0, 1).await;
    check(1, 4).await;
    assert_eq!(bench.committed(0), Some(4));
}

#[tokio::test(start_paused = true)]
async fn commits_are_coalesced_and_their_sequence_rises() {
    let open = Open::with(500).await;
    let Open { bench, mut input, mut offsets, .. } = open;
    for record in &records(&mut input, 500).await {
        offsets.done(record);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    offsets.flush().await.unwrap();
    let commits = bench.lines(&["commit"]);
    // The start, then at most one per interval of 100 ms in 500 ms, and the flush.
    assert!(commits.len() <= 8, "{commits:?}");
    let numbers = |line: &String| -> Vec<u64> {
        let digits = line.split(['#', ' ', ':']).filter_map(|word| word.parse().ok());
        digits.skip(1).collect()
    };
    assert!(commits.iter().map(numbers).is_sorted(), "{commits:?}");
    assert_eq!(bench.committed(0), Some(500));
}

#[tokio::test(start_paused = true)]
async fn fenced_commit_is_sticky_and_names_both_epochs() {
    let open = Open::with(2).await;
    let Open { bench, counters, epoch: ours, end, mut input, mut offsets, .. } = open;
    let got = records(&mut input, 2).await;
    let bob = MemberId::new("bob").unwrap();
    let current = bench.coordinator.take_for(&bench.topic, bench.partitions[0], &bob);
    offsets.done(&got[0]);
    let fenced = crate::offsets::CommitError::Fenced { ours, current: Some(current) };
    assert_eq!(offsets.flush().await.unwrap_err(), fenced);
    assert_eq!(
        fenced.to_string(),
        "offset commit fenced: given e1, current is e2: stop working on the partition"
    );
    offsets.done(&got[1]);
    assert_eq!(offsets.flush().await.unwrap_err(), fenced);
    assert!(!input.ended().await.may_commit(), "the partition itself learns of it");
    end.send(()).unwrap();
    bench.coordinator.logged("release 0 e1 Fenced at -").await;
    assert_eq!(counters.refused_by_coordinator(), 1);
    assert_eq!(bench.committed(0), Some(0));
}

#[tokio::test(start_paused = true)]
async fn done_after_the_release_does_not_move_the_offset() {
    let open = Open::with(3).await;
    let Open { bench, epoch, end, mut input, mut offsets, .. } = open;
    let got = records(&mut input, 3).await;
    offsets.done(&got[0]);
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    assert!(input.ended().await.may_commit());
    offsets.done(&got[1]);
    end.send(()).unwrap();
    let released = bench.coordinator.logged("release 0 e1").await;
    assert_eq!(released, "release 0 e1 Revoked at 2: ", "what was done in the drain counts");
    offsets.done(&got[2]);
    assert!(matches!(offsets.flush().await, Err(crate::offsets::CommitError::Released)));
    tokio::time::sleep(SECOND).await;
    assert_eq!(bench.committed(0), Some(2));
}

#[tokio::test(start_paused = true)]
async fn commit_whose_outcome_is_unknown_is_repeated_with_the_same_sequence() {
    let open = Open::with(1).await;
    let Open { bench, mut input, mut offsets, .. } = open;
    let got = records(&mut input, 1).await;
    bench.coordinator.set_answers(false);
    offsets.done(&got[0]);
    bench.coordinator.logged("commit 0 e1 #2 1: unanswered").await;
    bench.coordinator.set_answers(true);
    assert_eq!(offsets.flush().await.unwrap().get(), 1);
    let commits = bench.lines(&["commit"]);
    assert_eq!(commits.last().unwrap(), "commit 0 e1 #2 1: committed", "{commits:?}");
}

#[tokio::test(start_paused = true)]
async fn ended_lease_refuses_locally_and_with_the_check_off_the_coordinator_does() {
    for (check, local, remote) in [(LeaseCheck::On, 1, 0), (LeaseCheck::Off, 0, 1)] {
        let bench = Bench::with_check(1, check);
        bench.append(0, 1);
        let (handler, mut taken) = handing_over();
        let consumer = bench.builder().build().unwrap();
        let counters = consumer.counters();
        let _run = bench.run(consumer, handler).await;
        let (_epoch, lease) = bench.grant(0);
        let (owned, _end) = taken.recv().await.unwrap();
        let (mut input, mut offsets) = owned.split();
        let got = records(&mut input, 1).await;
        let bob = MemberId::new("bob").unwrap();
        bench.coordinator.take_for(&bench.topic, bench.partitions[0], &bob);
        lease.stop();
        offsets.done(&got[0]);
        offsets.flush().await.unwrap_err();
        assert_eq!(counters.refused_locally(), local, "{check:?}");
        assert_eq!(counters.refused_by_coordinator(), remote, "{check:?}");
        let sent = bench.lines(&["commit 0 e1 #2"]);
        assert_eq!(sent.len() as u64, remote, "{check:?}: {sent:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn batch_that_was_not_awaited_to_its_end_is_not_lost() {
    let open = Open::with(2).await;
    let Open { bench, mut input, .. } = open;
    let limits = Limits { records: 3, bytes: usize::MAX, wait: SECOND * 60 };
    let first = input.next_batch(&limits).await.unwrap();
    assert_eq!(first.len(), 2, "the first batch of an ownership does not wait for more");
    bench.append(0, 2);
    for _ in 0..3 {
        let cancelled = tokio::time::timeout(SECOND, input.next_batch(&limits)).await;
        assert!(cancelled.is_err());
    }
    bench.append(0, 1);
    let batch = input.next_batch(&limits).await.unwrap();
    assert_eq!((batch.first().get(), batch.next().get(), batch.len()), (2, 5, 3));
}

#[tokio::test(start_paused = true)]
async fn records_one_by_one_mix_with_batches_and_end_with_the_partition() {
    let open = Open::with(250).await;
    let Open { bench, epoch, mut input, mut offsets, .. } = open;
    for offset in 0..150 {
        let record = input.next_record().await.unwrap();
        assert_eq!(record.offset.get(), offset);
        assert_eq!(input.position(), record.next());
        offsets.done(&record);
    }
    let batch = records(&mut input, 60).await;
    assert_eq!(batch[0].offset.get(), 150);
    assert_eq!(input.next_record().await.unwrap().offset.get(), 210);
    offsets.done_before(NextOffset::new(211).unwrap());
    assert_eq!(offsets.flush().await.unwrap().get(), 211);
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND);
    input.ended().await;
    assert_eq!(input.next_record().await, None, "39 records were received and not delivered");
}

#[tokio::test(start_paused = true)]
async fn batch_keeps_to_its_limits() {
    let open = Open::with(250).await;
    let Open { mut input, .. } = open;
    let mut lengths = Vec::new();
    while lengths.iter().sum::<usize>() < 250 {
        let limits = Limits { records: 120, bytes: 64, wait: Duration::from_millis(1) };
        let batch = input.next_batch(&limits).await.unwrap();
        let bytes: usize = batch.iter().map(|record| record.value.as_ref().unwrap().len()).sum();
        assert!(bytes <= 64 && batch.len() <= 120, "{bytes} bytes, {} records", batch.len());
        lengths.push(batch.len());
    }
    assert_eq!(lengths.iter().sum::<usize>(), 250);
}

#[tokio::test(start_paused = true)]
async fn input_waits_while_too_many_records_are_not_done() {
    let open = Open::with(crate::offsets::UNDONE_RECORDS_MAX + 1).await;
    let Open { mut input, mut offsets, .. } = open;
    let limits =
        Limits { records: crate::offsets::UNDONE_RECORDS_MAX, bytes: usize::MAX, wait: SECOND };
    let delivered = records(&mut input, crate::offsets::UNDONE_RECORDS_MAX).await;
    assert!(tokio::time::timeout(SECOND * 9, input.next_batch(&limits)).await.is_err());
    assert!(tokio::time::timeout(SECOND * 9, input.next_record()).await.is_err());
    offsets.done(&delivered[0]);
    assert_eq!(input.next_batch(&limits).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn records_of_another_partition_and_unknown_ones_change_nothing() {
    let open = Open::with(2).await;
    let Open { mut input, mut offsets, .. } = open;
    let got = records(&mut input, 2).await;
    let mut foreign = got[0].clone();
    foreign.partition.index = tenure_model::PartitionIndex::new(7).unwrap();
    offsets.done(&foreign);
    let mut unknown = got[0].clone();
    unknown.offset = NextOffset::new(99).unwrap();
    offsets.done(&unknown);
    assert_eq!(offsets.low_water().get(), 0);
    assert_eq!(offsets.commit(NextOffset::new(99).unwrap()).await.unwrap().get(), 2);
}

#[tokio::test(start_paused = true)]
async fn task_that_the_handler_left_behind_gets_no_more_records() {
    let open = Open::with(5).await;
    let Open { bench, end, mut input, .. } = open;
    records(&mut input, 1).await;
    end.send(()).unwrap();
    bench.coordinator.logged("release 0 e1 HandlerFailed").await;
    let limits = Limits { records: 1, ..Limits::DEFAULT };
    assert!(input.next_batch(&limits).await.is_none(), "4 records were received and not delivered");
}

#[tokio::test(start_paused = true)]
async fn rewind_runs_the_handler_again_from_there_and_happens_once_for_its_name() {
    let bench = Bench::new(1);
    bench.append(0, 6);
    let notes = bench.coordinator.clone();
    let again = tenure_model::RequestId::new("again").unwrap();
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let (notes, again) = (notes.clone(), again.clone());
        async move {
            notes.note(format!("run from {}", owned.resume()));
            let (mut input, mut offsets) = owned.split();
            while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                batch.iter().for_each(|record| offsets.done(record));
                if batch.next().get() == 6 {
                    let to = NextOffset::new(2).unwrap();
                    return Err(offsets.rewind(to, &again).await?.into());
                }
            }
            Ok(())
        }
    };
    let consumer = bench.builder().build().unwrap();
    let counters = consumer.counters();
    let _run = bench.run(consumer, handler).await;
    bench.grant(0);
    bench.coordinator.logged("rewind again 0 e1 to 2: done before").await;
    bench.coordinator.logged("run from 6").await;
    assert_eq!(bench.lines(&["run from"]), ["run from 0", "run from 2", "run from 6"]);
    assert_eq!((bench.committed(0), counters.handler_failures()), (Some(6), 0));
    assert_eq!(bench.lines(&["release"]), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn offset_reaches_the_end_of_a_partition_that_ends_in_no_record() {
    let bench = Bench::new(1);
    let marker = || bench.source.append_marker(&bench.topic, 0).unwrap();
    bench.append(0, 2);
    marker();
    let (handler, mut taken) = handing_over();
    let _run = bench.run(bench.builder().build().unwrap(), handler).await;
    let (epoch, _lease) = bench.grant(0);
    let (owned, end) = taken.recv().await.unwrap();
    let (mut input, mut offsets) = owned.split();
    let got = records(&mut input, 2).await;
    let next = async |input: &mut Input| {
        tokio::time::timeout(SECOND, input.next_record()).await.ok().flatten()
    };
    assert_eq!(next(&mut input).await, None);
    assert_eq!((input.position().get(), input.lag()), (3, Some(0)), "nothing is left to read");
    offsets.done(&got[1]);
    assert_eq!(offsets.flush().await.unwrap().get(), 0);
    offsets.done(&got[0]);
    assert_eq!(offsets.flush().await.unwrap().get(), 3, "past the marker");
    marker();
    assert_eq!(next(&mut input).await, None);
    assert_eq!(offsets.flush().await.unwrap().get(), 4, "a transaction without a record for us");

    bench.append(0, 1);
    marker();
    marker();
    assert_eq!(next(&mut input).await.unwrap().offset.get(), 4);
    assert_eq!(next(&mut input).await, None);
    offsets.done_before(NextOffset::new(5).unwrap());
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    assert!(input.ended().await.may_commit());
    end.send(()).unwrap();
    bench.coordinator.logged("release 0 e1 Revoked at 7").await;
}

#[tokio::test(start_paused = true)]
async fn batch_counts_the_gap_behind_it_if_that_is_known() {
    let open = Open::with(2).await;
    let Open { bench, mut input, mut offsets, .. } = open;
    let limits = Limits { records: 2, bytes: usize::MAX, wait: SECOND };
    let first = input.next_batch(&limits).await.unwrap();
    assert_eq!((first.len(), first.next().get()), (2, 2));
    bench.append(0, 1);
    bench.source.append_marker(&bench.topic, 0).unwrap();
    let second = input.next_batch(&limits).await.unwrap();
    assert_eq!((second.first().get(), second.len(), second.next().get()), (2, 1, 4));
    assert_eq!(offsets.commit(second.next()).await.unwrap().get(), 4);
    assert_eq!(input.position().get(), 4);
}

#[tokio::test(start_paused = true)]
async fn marker_that_is_read_after_a_rewind_does_not_undo_it() {
    let open = Open::with(3).await;
    let Open { bench, mut input, mut offsets, .. } = open;
    records(&mut input, 3).await;
    offsets.done_before(NextOffset::new(3).unwrap());
    let name = RequestId::new("again").unwrap();
    let _again = offsets.rewind(NextOffset::new(1).unwrap(), &name).await.unwrap();
    bench.source.append_marker(&bench.topic, 0).unwrap();
    assert!(tokio::time::timeout(SECOND, input.next_record()).await.is_err());
    assert_eq!((input.position().get(), bench.committed(0)), (4, Some(1)));
}

#[tokio::test(start_paused = true)]
async fn metadata_goes_with_the_offset_and_with_the_last_one_before_the_release() {
    let open = Open::with(3).await;
    let Open { bench, mut taken, epoch, end, mut input, mut offsets, .. } = open;
    assert_eq!(offsets.committed_metadata().await.unwrap(), b"");
    let got = records(&mut input, 3).await;
    offsets.set_metadata("first").unwrap();
    offsets.done(&got[0]);
    offsets.flush().await.unwrap();
    assert_eq!(offsets.committed_metadata().await.unwrap(), b"first");
    offsets.set_metadata("alone").unwrap();
    assert_eq!(offsets.flush().await.unwrap().get(), 1, "no record is done since");
    assert_eq!(offsets.committed_metadata().await.unwrap(), b"alone");

    let refused = offsets.set_metadata(vec![0; 4097]).unwrap_err();
    assert_eq!(refused.to_string(), "offset metadata has 4097 bytes: use at most 4096");
    offsets.done(&got[1]);
    offsets.flush().await.unwrap();
    assert_eq!(offsets.committed_metadata().await.unwrap(), b"alone", "goes with every offset");

    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    assert!(input.ended().await.may_commit());
    offsets.set_metadata(vec![7; 4096]).unwrap();
    offsets.done(&got[2]);
    end.send(()).unwrap();
    bench.coordinator.logged("release 0 e1 Revoked at 3").await;
    let lines = bench.lines(&["commit 0 e1", "release"]);
    assert!(lines[lines.len() - 2].ends_with(" 3: committed"), "{lines:?}");
    bench.grant(0);
    let (owned, _end) = taken.recv().await.unwrap();
    let (_input, offsets) = owned.split();
    assert_eq!(offsets.committed_metadata().await.unwrap(), vec![7; 4096], "the next owner's");
}

#[tokio::test(start_paused = true)]
async fn release_without_metadata_takes_the_last_offset_along_without_a_commit() {
    let open = Open::with(1).await;
    let Open { bench, epoch, end, mut input, mut offsets, .. } = open;
    let got = records(&mut input, 1).await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    input.ended().await;
    bench.coordinator.set_answers(false);
    offsets.done(&got[0]);
    end.send(()).unwrap();
    bench.coordinator.logged("release 0 e1 Revoked at 1").await;
}

#[tokio::test(start_paused = true)]
async fn records_that_this_process_had_done_are_counted_when_they_come_again() {
    let open = Open::with(5).await;
    let Open { bench, counters, mut taken, epoch, end, mut input, mut offsets, .. } = open;
    let got = records(&mut input, 5).await;
    offsets.done(&got[0]);
    offsets.flush().await.unwrap();
    // Two more are done, one is in hand, and the coordinator learns of none of them.
    bench.coordinator.set_answers(false);
    offsets.done_before(got[2].next());
    bench.coordinator.logged("commit 0 e1 #3 3: unanswered").await;
    bench.coordinator.lose(&bench.member, bench.partitions[0], epoch, LostCause::LeaseEnded);
    assert!(!input.ended().await.may_commit());
    end.send(()).unwrap();
    bench.coordinator.logged("release 0 e1").await;
    bench.coordinator.set_answers(true);
    assert_eq!(counters.handled_twice(), 0);

    let (epoch, _lease) = bench.grant(0);
    let (owned, end) = taken.recv().await.unwrap();
    assert_eq!(owned.resume().get(), 1);
    let (mut input, mut offsets) = owned.split();
    records(&mut input, 4).await;
    assert_eq!(counters.handled_twice(), 2, "1 and 2; nobody had done 3 and 4");
    offsets.commit(NextOffset::new(5).unwrap()).await.unwrap();
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    input.ended().await;
    end.send(()).unwrap();
    bench.coordinator.logged("release 0 e2").await;

    bench.append(0, 1);
    bench.grant(0);
    let (owned, _end) = taken.recv().await.unwrap();
    let (mut input, _offsets) = owned.split();
    assert_eq!(records(&mut input, 1).await[0].offset.get(), 5);
    assert_eq!(counters.handled_twice(), 2, "a grant that goes on counts nothing");
}
