//! What the error policy does about a handler that fails.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::grant::Resource;
use crate::session::LostCause;
use crate::source::Record;
use crate::testing::MemorySink;

/// What a test's handler does with a record, by its partition and offset and how often it was tried, from 1.
type Verdict = Arc<dyn Fn(&Record, usize) -> Result<(), BoxError> + Send + Sync>;

/// Tries so far, in order: partition and offset.
type Tries = Arc<Mutex<Vec<(u32, u64)>>>;

fn tries_of(tries: &Tries, record: &Record) -> usize {
    let tried = (record.partition.index.get(), record.offset.get());
    let mut tries = tries.lock().unwrap();
    tries.push(tried);
    tries.iter().filter(|other| **other == tried).count()
}

/// Handler that does record by record as `verdict` says, and notes each run and each record that is done.
fn judging(
    bench: &Bench,
    verdict: impl Fn(&Record, usize) -> Result<(), BoxError> + Send + Sync + 'static,
) -> BoxHandler<CoordinatorOffsets> {
    let (coordinator, verdict) = (bench.coordinator.clone(), Arc::new(verdict) as Verdict);
    let tries = Tries::default();
    Box::new(move |owned| {
        let (coordinator, verdict) = (coordinator.clone(), Arc::clone(&verdict));
        let tries = Arc::clone(&tries);
        Box::pin(async move {
            let (epoch, index) = (owned.grant().epoch, owned.grant().partition.index);
            coordinator.note(format!("start {index} {epoch} at {}", owned.resume()));
            let (mut input, mut offsets) = owned.split();
            while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                for record in &batch {
                    verdict(record, tries_of(&tries, record))?;
                    offsets.done(record);
                    coordinator.note(format!("done {index} {}", record.offset));
                }
            }
            Ok(())
        })
    })
}

fn at(record: &Record, index: u32, offset: u64) -> bool {
    record.partition.index.get() == index && record.offset.get() == offset
}

fn quick(count: u32) -> ErrorPolicy {
    let first = Duration::from_millis(100);
    ErrorPolicy::retry(count, Backoff { first, max: SECOND })
}

/// Dead letters go to the coordinator's log.
fn noting(bench: &Bench) -> Then {
    let coordinator = bench.coordinator.clone();
    Then::dead_letter(move |letter| {
        let DeadLetter { record, error, attempts, .. } = letter;
        coordinator.note(format!("dead {} after {attempts}: {error}", record.offset));
        std::future::ready(Ok(()))
    })
}

#[tokio::test(start_paused = true)]
async fn failed_handler_is_run_again_from_what_is_committed_and_its_neighbour_goes_on() {
    let bench = Bench::new(2);
    bench.append(0, 1);
    // Long: what the failed run has done is committed because it failed, not because it is due.
    let builder = bench.builder().commit_interval(SECOND * 60);
    let consumer = builder.on_error(quick(3)).build().unwrap();
    let counters = consumer.counters();
    let handler = judging(&bench, |record, tries| match at(record, 0, 2) && tries < 3 {
        true => Err("no connection".into()),
        false => Ok(()),
    });
    let _run = bench.run(consumer, handler).await;
    let (epoch, _lease) = bench.grant(0);
    bench.grant(1);
    bench.append(1, 2);
    bench.coordinator.logged("commit 0 e1 #2 1: committed").await;
    bench.append(0, 3);
    bench.coordinator.logged("phase 0 e1 Running: retry 2 of 3: no connection").await;
    bench.coordinator.logged("done 0 3").await;
    bench.coordinator.logged("done 1 1").await;
    let starts = bench.lines(&["start"]);
    assert_eq!(
        starts.iter().filter(|line| line.starts_with("start 0")).collect::<Vec<_>>(),
        ["start 0 e1 at 0", "start 0 e1 at 2", "start 0 e1 at 2"]
    );
    assert_eq!(starts.iter().filter(|line| line.starts_with("start 1")).count(), 1);
    assert_eq!(bench.lines(&["done 0"]), ["done 0 0", "done 0 1", "done 0 2", "done 0 3"]);
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    bench.coordinator.logged("release 0 e1 Revoked at 4").await;
    assert_eq!(bench.committed(0), Some(4));
    assert_eq!(bench.lines(&["acquired 0"]).len(), 1, "it is acquired once");
    assert_eq!((counters.handler_failures(), counters.handler_retries()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn retries_are_counted_anew_once_the_handler_got_further() {
    let bench = Bench::new(1);
    bench.append(0, 6);
    let consumer = bench.builder().on_error(quick(1)).build().unwrap();
    let counters = consumer.counters();
    // Every record fails once: six failures, never two at the same place.
    let handler = judging(&bench, |_record, tries| match tries {
        1 => Err("once".into()),
        _ => Ok(()),
    });
    let _run = bench.run(consumer, handler).await;
    bench.grant(0);
    bench.coordinator.logged("done 0 5").await;
    assert_eq!(counters.handler_retries(), 6);
    assert_eq!(bench.lines(&["release"]), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn partition_is_given_back_after_the_last_retry_and_a_panic_counts() {
    let bench = Bench::new(1);
    bench.append(0, 2);
    let consumer = bench.builder().on_error(quick(2)).build().unwrap();
    let counters = consumer.counters();
    let handler = judging(&bench, |record, tries| {
        assert!(!at(record, 0, 1) || tries != 2, "index out of bounds");
        if at(record, 0, 1) { Err("no".into()) } else { Ok(()) }
    });
    let _run = bench.run(consumer, handler).await;
    bench.grant(0);
    let line = bench.coordinator.logged("release 0 e1").await;
    assert_eq!(line, "release 0 e1 HandlerFailed at 1: no");
    bench.coordinator.logged("phase 0 e1 Running: retry 1 of 2: no").await;
    bench
        .coordinator
        .logged("phase 0 e1 Running: retry 2 of 2: handler panicked: index out of bounds")
        .await;
    assert_eq!(bench.lines(&["start"]).len(), 3);
    assert_eq!((counters.handler_failures(), counters.handler_retries()), (3, 2));
}

#[tokio::test(start_paused = true)]
async fn parked_partition_stays_owned_shows_its_error_and_ends_when_revoked() {
    for retries in [0, 1] {
        let bench = Bench::new(1);
        bench.append(0, 3);
        let policy = quick(retries).then(Then::Park);
        let consumer = bench.builder().on_error(policy).build().unwrap();
        let counters = consumer.counters();
        let handler = judging(&bench, |record, _tries| match at(record, 0, 1) {
            true => Err("bad row".into()),
            false => Ok(()),
        });
        let _run = bench.run(consumer, handler).await;
        let (epoch, lease) = bench.grant(0);
        bench.coordinator.logged("phase 0 e1 Running: parked: bad row").await;
        tokio::time::sleep(SECOND * 3600).await;
        assert!(lease.is_live());
        assert_eq!(bench.lines(&["release"]), Vec::<String>::new());
        assert_eq!(bench.lines(&["start"]).len(), 1 + retries as usize);
        bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND);
        let line = bench.coordinator.logged("release 0 e1").await;
        assert_eq!(line, "release 0 e1 Revoked at 1: bad row");
        assert_eq!((counters.parked(), bench.committed(0)), (1, Some(1)));
    }
}

#[tokio::test(start_paused = true)]
async fn dead_letters_are_passed_over_and_the_rest_stays_in_order() {
    let bench = Bench::new(1);
    bench.append(0, 7);
    let policy = quick(1).then(noting(&bench));
    let consumer = bench.builder().on_error(policy).build().unwrap();
    let counters = consumer.counters();
    let handler = judging(&bench, |record, _tries| match record.offset.get() {
        2 | 3 | 6 => Err(format!("bad {}", record.offset).into()),
        _ => Ok(()),
    });
    let _run = bench.run(consumer, handler).await;
    let (epoch, _lease) = bench.grant(0);
    bench.coordinator.logged("dead 6").await;
    tokio::time::sleep(SECOND).await;
    // The last one is passed by the commit as well, though nothing comes after it.
    assert_eq!(bench.committed(0), Some(7));
    bench.append(0, 1);
    bench.coordinator.logged("done 0 7").await;
    assert_eq!(
        bench.lines(&["done", "dead"]),
        [
            "done 0 0",
            "done 0 1",
            "dead 2 after 2: bad 2",
            "dead 3 after 2: bad 3",
            "done 0 4",
            "done 0 5",
            "dead 6 after 2: bad 6",
            "done 0 7",
        ]
    );
    assert_eq!(counters.dead_letters(), 3);
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND);
    bench.coordinator.logged("release 0 e1 Revoked at 8").await;
}

#[tokio::test(start_paused = true)]
async fn offset_stays_until_the_dead_letter_was_taken() {
    let bench = Bench::new(1);
    bench.append(0, 2);
    let (coordinator, calls) = (bench.coordinator.clone(), AtomicUsize::new(0));
    let sink = Then::dead_letter(move |letter| {
        let call = calls.fetch_add(1, Ordering::SeqCst);
        coordinator.note(format!("letter {} call {call}", letter.record.offset));
        async move {
            match call {
                0 => Err("queue is full".into()),
                1 => panic!("no queue"),
                _ => Ok(()),
            }
        }
    });
    let consumer = bench.builder().on_error(quick(0).then(sink)).build().unwrap();
    let handler = judging(&bench, |record, _tries| match at(record, 0, 0) {
        true => Err("bad row".into()),
        false => Ok(()),
    });
    let _run = bench.run(consumer, handler).await;
    bench.grant(0);
    bench.coordinator.logged("phase 0 e1 Running: dead letter 0: queue is full").await;
    assert_eq!(bench.committed(0), Some(0));
    bench.coordinator.logged("phase 0 e1 Running: dead letter 0: panicked: no queue").await;
    assert_eq!(bench.committed(0), Some(0));
    bench.coordinator.logged("letter 0 call 2").await;
    bench.coordinator.logged("done 0 1").await;
    tokio::time::sleep(SECOND).await;
    assert_eq!(bench.committed(0), Some(2));
}

#[tokio::test(start_paused = true)]
async fn named_record_is_the_dead_letter_and_not_the_first_that_is_undone() {
    let bench = Bench::new(1);
    bench.append(0, 5);
    let consumer = bench.builder().on_error(quick(0).then(noting(&bench))).build().unwrap();
    let coordinator = bench.coordinator.clone();
    // Nothing is done before the whole batch is.
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let coordinator = coordinator.clone();
        async move {
            let (mut input, mut offsets) = owned.split();
            while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                if let Some(record) = batch.iter().find(|record| record.offset.get() == 3) {
                    return Err(HandlerError::failed_at(record, "bad row").into());
                }
                coordinator.note(format!("did {}..{}", batch.first(), batch.next()));
                offsets.done_before(batch.next());
            }
            Ok::<(), BoxError>(())
        }
    };
    let _run = bench.run(consumer, handler).await;
    bench.grant(0);
    bench.coordinator.logged("did 4..5").await;
    assert_eq!(
        bench.lines(&["did", "dead"]),
        ["dead 3 after 1: record 3: bad row", "did 0..1", "did 1..2", "did 2..3", "did 4..5"]
    );
}

#[tokio::test(start_paused = true)]
async fn failure_without_a_record_to_blame_gives_the_partition_back() {
    let bench = Bench::new(1);
    bench.append(0, 1);
    let consumer = bench.builder().on_error(quick(1).then(noting(&bench))).build().unwrap();
    let handler = |_owned: Owned<CoordinatorOffsets>| {
        std::future::ready(Err::<(), BoxError>("no such table".into()))
    };
    let _run = bench.run(consumer, handler).await;
    bench.grant(0);
    let line = bench.coordinator.logged("release 0 e1").await;
    assert_eq!(line, "release 0 e1 HandlerFailed at 0: no such table");
    assert_eq!(bench.lines(&["dead"]), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn pause_is_no_failure_however_often_it_is_asked_for() {
    let bench = Bench::new(1);
    bench.append(0, 2);
    let consumer = bench.builder().build().unwrap();
    let counters = consumer.counters();
    let handler = judging(&bench, |record, tries| match at(record, 0, 1) && tries <= 20 {
        true => Err(HandlerError::pause_for(SECOND * 60, "rate limit").into()),
        false => Ok(()),
    });
    let _run = bench.run(consumer, handler).await;
    let started = tokio::time::Instant::now();
    bench.grant(0);
    bench.coordinator.logged("phase 0 e1 Running: paused for 60s: rate limit").await;
    tokio::time::sleep(SECOND * (60 * 19 + 30)).await;
    bench.coordinator.logged("done 0 1").await;
    assert!(started.elapsed() >= SECOND * 60 * 20, "{:?}", started.elapsed());
    assert_eq!(counters.handler_failures(), 0);
    assert_eq!(bench.lines(&["release"]), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_run_again_after_the_partition_was_lost_or_revoked() {
    let bench = Bench::new(2);
    let consumer = bench.builder().on_error(quick(100)).build().unwrap();
    let coordinator = bench.coordinator.clone();
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let coordinator = coordinator.clone();
        async move {
            coordinator.note(format!("start {}", owned.grant().epoch));
            let (input, _offsets) = owned.split();
            input.ended().await;
            Err::<(), BoxError>("interrupted".into())
        }
    };
    let _run = bench.run(consumer, handler).await;
    let (first, _lease) = bench.grant(0);
    let (second, _lease) = bench.grant(1);
    bench.coordinator.logged("start e2").await;
    bench.coordinator.logged("start e1").await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], first, SECOND * 10);
    bench.coordinator.lose(&bench.member, bench.partitions[1], second, LostCause::LeaseEnded);
    bench.coordinator.logged("release 0 e1 Revoked at 0: interrupted").await;
    bench.coordinator.logged("release 1 e2 LeaseLost at -: interrupted").await;
    tokio::time::sleep(SECOND * 60).await;
    assert_eq!(bench.lines(&["start"]).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn end_of_the_lease_or_a_revoke_ends_the_back_off() {
    let bench = Bench::new(2);
    let long = Backoff { first: SECOND * 3600, max: SECOND * 3600 };
    let consumer = bench.builder().on_error(ErrorPolicy::retry(9, long)).build().unwrap();
    let handler = judging(&bench, |_record, _tries| Err("bad row".into()));
    let _run = bench.run(consumer, handler).await;
    bench.append(0, 1);
    bench.append(1, 1);
    let (_epoch, lease) = bench.grant(0);
    let (second, _lease) = bench.grant(1);
    bench.coordinator.logged("phase 0 e1 Running: retry 1 of 9").await;
    bench.coordinator.logged("phase 1 e2 Running: retry 1 of 9").await;
    let started = tokio::time::Instant::now();
    lease.stop();
    bench.coordinator.revoke(&bench.member, bench.partitions[1], second, SECOND);
    bench.coordinator.logged("release 0 e1 LeaseLost at -: retry 1 of 9: bad row").await;
    bench.coordinator.logged("release 1 e2 Revoked at 0: bad row").await;
    assert!(started.elapsed() <= SECOND, "{:?}", started.elapsed());
    assert_eq!(bench.lines(&["start"]).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn sink_as_home_goes_on_at_its_own_offset_and_each_row_is_there_once() {
    let bench = Bench::new(1);
    bench.append(0, 6);
    let sink = MemorySink::new("mem");
    let policy = quick(1).then(noting(&bench));
    let consumer = bench.builder().on_error(policy).home(sink.clone()).build().unwrap();
    let failed_once = Arc::new(AtomicUsize::new(0));
    let handler = move |owned: Owned<MemorySink>| {
        let failed_once = Arc::clone(&failed_once);
        async move {
            let mut position = owned.resume();
            let (mut input, mut out) = owned.split();
            while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                if batch.iter().any(|record| record.offset.get() == 3) {
                    return Err("bad row".into());
                }
                out.write(batch.records(), position, batch.next())?;
                position = batch.next();
                // The write is in, and its handler fails all the same.
                if batch.first().get() == 1 && failed_once.fetch_add(1, Ordering::SeqCst) == 0 {
                    return Err("too late".into());
                }
            }
            Ok::<(), BoxError>(())
        }
    };
    let _run = bench.run(consumer, handler).await;
    bench.grant(0);
    bench.coordinator.logged("dead 3 after 2: bad row").await;
    let resource = Resource::of_partition(&GroupId::new("g").unwrap(), bench.partitions[0]);
    while sink.next_offset(&resource).map(NextOffset::get) != Some(6) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let offsets: Vec<_> = sink.rows(&resource).iter().map(|row| row.offset.get()).collect();
    assert_eq!(offsets, [0, 1, 2, 4, 5]);
}
