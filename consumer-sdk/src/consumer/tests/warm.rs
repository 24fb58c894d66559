//! Warm handoff: what is prepared early is a hint, and nothing of it needs or gives a right.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::testing::MemorySink;

/// State that a preparer loads: everything before `until`.
#[derive(Debug)]
struct Loaded {
    until: u64,
    early: bool,
}

impl Bench {
    /// Runs a consumer that prepares: it loads up to the hint, and its handler says what it got.
    async fn run_warm(&self, consumer: Consumer<CoordinatorOffsets>, load_takes: Duration) -> Run {
        let (coordinator, member) = (self.coordinator.clone(), self.member.clone());
        let (loads, owns) = (self.coordinator.clone(), self.coordinator.clone());
        let prepare = move |preparation: Preparation| {
            let loads = loads.clone();
            async move {
                let until = preparation.next_offset().map_or(0, NextOffset::get);
                let early = preparation.is_early();
                tokio::time::sleep(load_takes).await;
                loads.note(format!(
                    "loaded {} up to {until}, early: {early}",
                    preparation.partition().index
                ));
                Ok(Loaded { until, early })
            }
        };
        let own = move |owned: Owned<CoordinatorOffsets>, loaded: Loaded| {
            owns.note(format!(
                "own {} from {} with {} early: {}",
                owned.grant().epoch,
                owned.resume(),
                loaded.until,
                loaded.early
            ));
            do_all(owns.clone(), owned)
        };
        let run =
            tokio::spawn(
                async move { coordinator.run_warm(&member, consumer, prepare, own).await },
            );
        self.coordinator.logged("ann joined").await;
        run
    }

    /// A commit of somebody else, who owned the partition before.
    async fn committed_by_another(&self, index: usize, next: u64) {
        let bob = MemberId::new("bob").unwrap();
        let epoch = self.coordinator.take_for(&self.topic, self.partitions[index], &bob);
        let next = NextOffset::new(next).unwrap();
        self.coordinator.commit_as(&bob, self.partitions[index], epoch, next);
    }

    fn prepare(&self, index: usize, next: u64) {
        let next = NextOffset::new(next).unwrap();
        self.coordinator.prepare(&self.member, &self.topic, self.partitions[index], Some(next));
    }
}

#[tokio::test(start_paused = true)]
async fn prepared_partition_starts_with_what_was_loaded_and_goes_on_from_the_resume_point() {
    let bench = Bench::new(1);
    bench.append(0, 10);
    bench.committed_by_another(0, 4).await;
    let consumer = bench.builder().build().unwrap();
    let counters = consumer.counters();
    let _run = bench.run_warm(consumer, SECOND).await;
    bench.prepare(0, 4);
    bench.coordinator.logged("loaded 0 up to 4, early: true").await;
    bench.coordinator.logged("prepared 0").await;
    assert_eq!(bench.lines(&["grant", "verify", "acquired"]), ["grant 0 to bob at e1"], "no right");
    // The owner has gone on meanwhile.
    bench.committed_by_another(0, 7).await;
    bench.grant(0);
    bench.coordinator.logged("own e3 from 7 with 4 early: true").await;
    bench.coordinator.logged("deliver 0 e3 7..10").await;
    assert_eq!(counters.continued_early(), 1);
    assert_eq!(bench.lines(&["loaded"]).len(), 1, "nothing is loaded twice");
}

#[tokio::test(start_paused = true)]
async fn records_read_early_are_not_used_when_the_resume_point_lies_before_them() {
    let bench = Bench::new(1);
    bench.append(0, 10);
    bench.committed_by_another(0, 2).await;
    let consumer = bench.builder().build().unwrap();
    let counters = consumer.counters();
    let _run = bench.run_warm(consumer, SECOND).await;
    // The owner read ahead of what it had committed, and died.
    bench.prepare(0, 6);
    bench.coordinator.logged("prepared 0").await;
    bench.grant(0);
    bench.coordinator.logged("deliver 0 e2 2..10").await;
    assert_eq!(counters.continued_early(), 0);
}

#[tokio::test(start_paused = true)]
async fn records_that_were_dropped_for_the_limit_are_read_again() {
    let bench = Bench::new(1);
    bench.append(0, 500);
    let limits = ReadAhead { records: 50, ..ReadAhead::default() };
    let consumer = bench.builder().read_ahead(limits).build().unwrap();
    bench.committed_by_another(0, 3).await;
    let _run = bench.run_warm(consumer, SECOND).await;
    bench.prepare(0, 3);
    bench.coordinator.logged("prepared 0").await;
    bench.grant(0);
    let first = bench.coordinator.logged("deliver 0 e2 3..").await;
    assert!(first.starts_with("deliver 0 e2 3.."), "{first}");
    bench.coordinator.logged("commit 0 e2 #").await;
    let delivered = |line: &String| {
        let range = line.rsplit(' ').next().unwrap().split_once("..").unwrap();
        (range.0.parse::<u64>().unwrap(), range.1.parse::<u64>().unwrap())
    };
    while bench.lines(&["deliver"]).last().map(delivered).is_none_or(|(_, next)| next < 500) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut next = 3;
    for (from, to) in bench.lines(&["deliver"]).iter().map(delivered) {
        assert_eq!(from, next, "a gap, or a record twice");
        next = to;
    }
}

#[tokio::test(start_paused = true)]
async fn partition_without_a_preparation_is_prepared_once_it_is_verified() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let _run = bench.run_warm(bench.builder().build().unwrap(), SECOND).await;
    bench.grant(0);
    bench.coordinator.logged("own e1 from 0 with 0 early: false").await;
    let lines = bench.lines(&["verify", "loaded", "own"]);
    assert!(lines[0].starts_with("verify 0 e1: current"), "{lines:?}");
    assert_eq!(lines[1], "loaded 0 up to 0, early: false");
}

#[tokio::test(start_paused = true)]
async fn preparation_that_is_not_through_at_the_grant_is_waited_for() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let _run = bench.run_warm(bench.builder().build().unwrap(), SECOND * 20).await;
    bench.prepare(0, 0);
    bench.grant(0);
    bench.coordinator.logged("own e1 from 0 with 0 early: true").await;
    assert_eq!(bench.lines(&["loaded"]), ["loaded 0 up to 0, early: true"]);
}

#[tokio::test(start_paused = true)]
async fn early_preparation_that_fails_lets_the_move_go_on_and_is_made_good_once_owned() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let (coordinator, member) = (bench.coordinator.clone(), bench.member.clone());
    let consumer = bench.builder().build().unwrap();
    let notes = bench.coordinator.clone();
    let prepare = |preparation: Preparation| async move {
        assert!(!preparation.is_early(), "the state is not there yet");
        Ok(())
    };
    let _run = tokio::spawn(async move {
        let own = move |owned, ()| do_all(notes.clone(), owned);
        coordinator.run_warm(&member, consumer, prepare, own).await
    });
    bench.coordinator.logged("ann joined").await;
    bench.prepare(0, 0);
    bench.coordinator.logged("prepared 0: panicked: the state is not there yet").await;
    bench.grant(0);
    bench.coordinator.logged("deliver 0 e1 0..3").await;
}

#[tokio::test(start_paused = true)]
async fn preparation_that_is_called_off_ends_and_frees_the_source() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let _run = bench.run_warm(bench.builder().build().unwrap(), SECOND * 20).await;
    bench.prepare(0, 0);
    tokio::time::sleep(SECOND).await;
    bench.coordinator.call_off(&bench.member, bench.partitions[0]);
    tokio::time::sleep(SECOND * 60).await;
    assert!(bench.lines(&["loaded", "prepared"]).is_empty(), "{:?}", bench.lines(&[""]));
    bench.grant(0);
    bench.coordinator.logged("own e1 from 0 with 0 early: false").await;
    bench.coordinator.logged("deliver 0 e1 0..3").await;
}

#[tokio::test(start_paused = true)]
async fn next_owner_never_registers_at_a_sink_while_it_prepares() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let sink = MemorySink::new("mem");
    let consumer = bench.builder().home(sink.clone()).build().unwrap();
    let resource =
        crate::grant::Resource::of_partition(&GroupId::new("g").unwrap(), bench.partitions[0]);
    let (coordinator, member) = (bench.coordinator.clone(), bench.member.clone());
    let seen = Arc::new(AtomicU64::new(0));
    let (seen_there, watched, of) = (seen.clone(), sink.clone(), resource.clone());
    let prepare = move |_preparation: Preparation| {
        let fence = watched.fence(&of).map_or(0, |epoch| epoch.get());
        seen_there.store(fence + 1, Ordering::SeqCst);
        async { Ok(()) }
    };
    let _run = tokio::spawn(async move {
        let own = |owned: Owned<MemorySink>, ()| async move {
            let (input, _writer) = owned.split();
            input.ended().await;
            Ok(())
        };
        coordinator.run_warm(&member, consumer, prepare, own).await
    });
    bench.coordinator.logged("ann joined").await;
    bench.prepare(0, 0);
    bench.coordinator.logged("prepared 0").await;
    assert_eq!(seen.load(Ordering::SeqCst), 1, "the preparer saw no fence");
    assert_eq!(sink.fence(&resource), None);
    bench.grant(0);
    bench.coordinator.logged("acquired 0 at e1").await;
    assert!(sink.fence(&resource).is_some());
}

#[tokio::test(start_paused = true)]
async fn member_is_prepared_once_the_records_that_there_are_were_read() {
    let bench = Bench::new(1);
    bench.append(0, 10);
    bench.committed_by_another(0, 4).await;
    let source = SlowSource::of(&bench, SECOND / 10, Duration::ZERO);
    let _run = bench.run_warm(bench.builder_over(source).build().unwrap(), Duration::ZERO).await;
    bench.prepare(0, 4);
    bench.coordinator.logged("prepared 0").await;
    assert_eq!(
        bench.lines(&["loaded", "opened", "prepared"]),
        ["loaded 0 up to 4, early: true", "opened 0 at 4", "prepared 0"]
    );
}

#[tokio::test(start_paused = true)]
async fn source_that_does_not_open_does_not_hold_up_a_move() {
    let bench = Bench::new(1);
    bench.append(0, 10);
    bench.committed_by_another(0, 4).await;
    let source = SlowSource::of(&bench, SECOND * 5, Duration::ZERO);
    let _run = bench.run_warm(bench.builder_over(source).build().unwrap(), Duration::ZERO).await;
    let asked = tokio::time::Instant::now();
    bench.prepare(0, 4);
    bench.coordinator.logged("prepared 0").await;
    assert!(asked.elapsed() < SECOND, "{:?}", asked.elapsed());
    bench.grant(0);
    bench.coordinator.logged("deliver 0 e2 4..10").await;
}
