//! Partitions that no owner could read stand still, visibly, and go on once the cause is gone.

use super::*;

impl Bench {
    /// A commit of somebody else, who owned the partition before.
    fn left_at(&self, index: usize, next: u64) {
        let bob = MemberId::new("bob").unwrap();
        let epoch = self.coordinator.take_for(&self.topic, self.partitions[index], &bob);
        let next = NextOffset::new(next).unwrap();
        self.coordinator.commit_as(&bob, self.partitions[index], epoch, next);
    }
}

#[tokio::test(start_paused = true)]
async fn offset_out_of_range_stands_still_and_is_never_reset() {
    let bench = Bench::new(2);
    bench.append(0, 3);
    bench.append(1, 3);
    bench.left_at(0, 10);
    let consumer = bench.builder().build().unwrap();
    let counters = consumer.counters();
    let _run = bench.run(consumer, doing_all(&bench)).await;
    bench.grant(0);
    let line = bench.coordinator.logged("phase 0 e2 Running: frozen").await;
    assert_eq!(
        line,
        "phase 0 e2 Running: frozen: source: offset 10 of t/0 is out of range: reset the offset by name"
    );
    bench.grant(1);
    bench.coordinator.logged("deliver 1 e3 0..3").await;
    tokio::time::sleep(SECOND * 600).await;
    assert_eq!(bench.lines(&["release", "deliver 0"]), Vec::<String>::new());
    assert_eq!((counters.frozen(), bench.committed(0)), (1, Some(10)));
    // The records are there again: it goes on by itself.
    bench.append(0, 9);
    bench.coordinator.logged("deliver 0 e2 10..12").await;
}

#[tokio::test(start_paused = true)]
async fn offset_that_the_stream_says_is_out_of_range_ends_one_ownership_and_freezes_the_next() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    bench.left_at(0, 10);
    let (source, coordinator) = (bench.source.clone(), bench.coordinator.clone());
    let (open_takes, close_takes) = (Duration::ZERO, Duration::ZERO);
    let tells_on_stream = true;
    let source = SlowSource { source, coordinator, open_takes, close_takes, tells_on_stream };
    let consumer = bench.builder_over(Arc::new(source)).build().unwrap();
    let counters = consumer.counters();
    let _run = bench.run(consumer, doing_all(&bench)).await;
    bench.grant(0);
    let text = "offset 10 of t/0 is out of range: reset the offset by name";
    let line = bench.coordinator.logged("release 0 e2").await;
    assert_eq!(line, format!("release 0 e2 HandlerFailed at 10: {text}"));
    bench.grant(0);
    let line = bench.coordinator.logged("phase 0 e3 Running: frozen").await;
    assert_eq!(line, format!("phase 0 e3 Running: frozen: source: {text}"));
    tokio::time::sleep(SECOND * 600).await;
    assert_eq!(bench.lines(&["release", "opened"]).len(), 2, "{:?}", bench.coordinator.log());
    assert_eq!((counters.frozen(), bench.committed(0)), (1, Some(10)));
    bench.append(0, 9);
    bench.coordinator.logged("deliver 0 e3 10..12").await;
}

#[tokio::test(start_paused = true)]
async fn policy_none_waits_for_an_offset_and_is_given_back_when_asked_for() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let consumer = bench.builder().reset_policy(ResetPolicy::Fail).build().unwrap();
    let _run = bench.run(consumer, doing_all(&bench)).await;
    let (epoch, _) = bench.grant(0);
    bench.coordinator.logged("phase 0 e1 Running: frozen: the home has no offset").await;
    bench.coordinator.logged("acquired 0 at e1 from 0").await;
    tokio::time::sleep(SECOND * 600).await;
    assert_eq!(bench.lines(&["release", "deliver", "commit"]), Vec::<String>::new());
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 30);
    let line = bench.coordinator.logged("release 0 e1").await;
    assert!(line.starts_with("release 0 e1 Revoked at -: frozen"), "{line}");
}

#[tokio::test(start_paused = true)]
async fn fresh_partition_starts_at_the_first_record_of_its_timestamp() {
    for (from_ms, first) in [(0, 0), (150, 2), (200, 2), (201, 3), (900, 4)] {
        let bench = Bench::new(1);
        for at in [50, 100, 200, 300] {
            bench.source.append_at(&bench.topic, 0, "x", Some(at)).unwrap();
        }
        let policy = ResetPolicy::Timestamp(from_ms);
        let consumer = bench.builder().reset_policy(policy).build().unwrap();
        let _run = bench.run(consumer, doing_all(&bench)).await;
        bench.grant(0);
        bench.coordinator.logged(&format!("acquired 0 at e1 from {first}")).await;
    }
}
