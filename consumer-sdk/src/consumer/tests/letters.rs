//! Dead letters at the home: the letter and the offset in one step.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;

use super::*;
use crate::grant::Resource;
use crate::memory::MemoryWriter;
use crate::testing::MemorySink;

/// Offsets of letters, in the order in which they were put.
type Letters = Arc<Mutex<Vec<u64>>>;

fn policy() -> ErrorPolicy {
    let first = Duration::from_millis(100);
    ErrorPolicy::retry(1, Backoff { first, max: SECOND }).then(Then::DeadLetterAtHome)
}

/// Handler that cannot do the record at `bad`, and writes batches of any size.
async fn copy(owned: Owned<MemorySink>, bad: u64) -> Result<(), BoxError> {
    let mut position = owned.resume();
    let (mut input, mut out) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        if batch.iter().any(|record| record.offset.get() == bad) {
            return Err("bad row".into());
        }
        out.write(batch.records(), position, batch.next())?;
        position = batch.next();
    }
    Ok(())
}

/// Writes the letter as a row and moves the offset, after `fails` errors.
fn putting(
    letters: &Letters,
    fails: usize,
) -> impl for<'a> Fn(DeadLetter, &'a mut MemoryWriter) -> BoxFuture<'a, Result<(), BoxError>>
+ Send
+ Sync
+ 'static {
    let (letters, tried) = (Arc::clone(letters), Arc::new(AtomicUsize::new(0)));
    move |letter, writer| {
        let (letters, tried) = (Arc::clone(&letters), Arc::clone(&tried));
        async move {
            if tried.fetch_add(1, Ordering::SeqCst) < fails {
                return Err("letter box is full".into());
            }
            let (at, next) = (letter.record.offset, letter.record.next());
            letters.lock().unwrap().push(at.get());
            Ok(writer.write(&[letter.record], at, next)?)
        }
        .boxed()
    }
}

async fn copied(bench: &Bench, sink: &MemorySink, end: u64) -> Vec<u64> {
    let resource = Resource::of_partition(&GroupId::new("g").unwrap(), bench.partitions[0]);
    for _ in 0..3_000 {
        if sink.next_offset(&resource).map(NextOffset::get) == Some(end) {
            return sink.rows(&resource).iter().map(|row| row.offset.get()).collect();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!(
        "not at {end}: {:?}\n{}",
        sink.next_offset(&resource),
        bench.coordinator.log().join("\n")
    );
}

#[tokio::test(start_paused = true)]
async fn letter_and_offset_move_in_one_step_and_the_rest_stays_in_order() {
    for fails in [0, 2] {
        let bench = Bench::new(1);
        bench.append(0, 6);
        let (sink, letters) = (MemorySink::new("mem"), Letters::default());
        let consumer = bench
            .builder()
            .home(sink.clone())
            .on_error(policy())
            .dead_letters_at_home(putting(&letters, fails))
            .build()
            .unwrap();
        let counters = consumer.counters();
        let _run = bench.run(consumer, |owned| copy(owned, 3)).await;
        bench.grant(0);
        assert_eq!(copied(&bench, &sink, 6).await, [0, 1, 2, 3, 4, 5], "{fails} errors");
        assert_eq!(*letters.lock().unwrap(), [3], "{fails} errors");
        assert_eq!((counters.dead_letters(), bench.lines(&["release"]).len()), (1, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn letter_that_does_not_move_the_offset_is_tried_again_and_never_passed_over() {
    let bench = Bench::new(1);
    bench.append(0, 2);
    let sink = MemorySink::new("mem");
    let tried = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tried);
    let consumer = bench
        .builder()
        .home(sink.clone())
        .on_error(policy())
        .dead_letters_at_home(move |_letter, _writer| {
            counted.fetch_add(1, Ordering::SeqCst);
            async { Ok(()) }.boxed()
        })
        .build()
        .unwrap();
    let _run = bench.run(consumer, |owned| copy(owned, 0)).await;
    bench.grant(0);
    let line = bench.coordinator.logged("phase 0 e1 Running: dead letter 0").await;
    assert_eq!(line, "phase 0 e1 Running: dead letter 0: it did not move the offset");
    tokio::time::sleep(SECOND * 10).await;
    assert!(tried.load(Ordering::SeqCst) > 2);
    let resource = Resource::of_partition(&GroupId::new("g").unwrap(), bench.partitions[0]);
    assert_eq!(sink.next_offset(&resource), Some(NextOffset::ZERO));
}

#[tokio::test(start_paused = true)]
async fn newer_owner_at_the_home_ends_the_grant_and_its_letter_is_refused() {
    let bench = Bench::with_check(1, LeaseCheck::Off);
    bench.append(0, 2);
    let (sink, letters) = (MemorySink::new("mem"), Letters::default());
    let (put, theirs) = (putting(&letters, 0), sink.clone());
    let resource = Resource::of_partition(&GroupId::new("g").unwrap(), bench.partitions[0]);
    let consumer = bench
        .builder()
        .home(sink.clone())
        .on_error(policy())
        .dead_letters_at_home(move |letter, writer| {
            // The next owner registers right before the letter is written.
            let newer = crate::grant::Grant {
                resource: letter.grant.resource.clone(),
                ..crate::testing::grant_for_tests(9)
            };
            let registered = theirs.register(&newer).now_or_never().expect("it waits for nothing");
            assert!(registered.is_ok());
            put(letter, writer)
        })
        .build()
        .unwrap();
    let _run = bench.run(consumer, |owned| copy(owned, 0)).await;
    bench.grant(0);
    bench.coordinator.logged("release 0 e1 Fenced").await;
    assert!(sink.rows(&resource).is_empty(), "{:?}", sink.rows(&resource));
}

#[tokio::test(start_paused = true)]
async fn letters_to_the_home_need_a_sink_and_a_function_that_writes_them() {
    let bench = Bench::new(1);
    let built = bench.builder().home(MemorySink::new("mem")).on_error(policy()).build();
    assert_eq!(
        built.unwrap_err().to_string(),
        "on_error is DeadLetterAtHome, but nothing writes them: set dead_letters_at_home after home"
    );
    let built = bench.builder().on_error(policy()).build();
    assert_eq!(
        built.unwrap_err().to_string(),
        "on_error is DeadLetterAtHome, but the offsets are at the coordinator: use dead_letter, or a sink as home"
    );
}
