//! Whether a partition goes on, and what is left to read.

use tokio::sync::Notify;

use super::*;
use crate::session::{LostCause, Progress};

/// What the coordinator was last told of partition 0.
fn told(bench: &Bench) -> Progress {
    bench.coordinator.progress(bench.partitions[0]).expect("something was told").1
}

/// Waits until what was told is as wanted.
async fn tells(bench: &Bench, what: &str, wanted: impl Fn(Progress) -> bool) {
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        if bench.coordinator.progress(bench.partitions[0]).is_some_and(|told| wanted(told.1)) {
            return;
        }
    }
    panic!("not told that {what}: {:?}", told(bench));
}

/// Handler that takes one record after the other, each when it is let.
fn one_by_one(bench: &Bench, let_go: &Arc<Notify>) -> BoxHandler<CoordinatorOffsets> {
    let (coordinator, let_go) = (bench.coordinator.clone(), Arc::clone(let_go));
    Box::new(move |owned| {
        let (coordinator, let_go) = (coordinator.clone(), Arc::clone(&let_go));
        Box::pin(async move {
            let (mut input, mut offsets) = owned.split();
            while let Some(record) = input.next_record().await {
                coordinator.note(format!("took {}, lag {:?}", record.offset, input.lag()));
                let_go.notified().await;
                offsets.done(&record);
            }
            coordinator.note(format!("ended: {:?}", input.ending()));
            Ok(())
        })
    })
}

#[tokio::test(start_paused = true)]
async fn handler_without_records_is_idle_and_one_that_holds_a_record_is_not() {
    let bench = Bench::new(1);
    let let_go = Arc::new(Notify::new());
    let handler = one_by_one(&bench, &let_go);
    let _run = bench.run(bench.builder().build().unwrap(), handler).await;
    bench.grant(0);
    tells(&bench, "it is idle", |told| told.is_idle).await;
    assert_eq!(told(&bench).end_offset, Some(NextOffset::ZERO));
    // It holds the last record there is.
    bench.append(0, 1);
    bench.coordinator.logged("took 0").await;
    tells(&bench, "it holds a record", |told| !told.is_idle).await;
    let (position, end_offset) = (NextOffset::new(1).unwrap(), NextOffset::new(1).ok());
    assert_eq!(told(&bench), Progress { position, end_offset, is_idle: false });
    let_go.notify_one();
    tells(&bench, "it is idle again", |told| told.is_idle).await;
}

#[tokio::test(start_paused = true)]
async fn handler_that_never_asks_is_not_idle_while_records_wait() {
    let bench = Bench::new(1);
    let consumer = bench.builder().build().unwrap();
    let (run, inspector) =
        (|_owned: Owned<CoordinatorOffsets>| std::future::pending(), consumer.inspector());
    let _run = bench.run(consumer, run).await;
    bench.grant(0);
    // Nothing to read: as a job that only leads.
    tells(&bench, "it is idle", |told| told.is_idle).await;
    bench.append(0, 1);
    tells(&bench, "a record waits", |told| !told.is_idle).await;
    tokio::time::sleep(SECOND * 20).await;
    let dump = inspector.dump();
    assert!(dump.contains(", position 0, still for 2"), "{dump}");
    assert!(dump.contains("s, lag 1, lease"), "{dump}");
}

#[tokio::test(start_paused = true)]
async fn handler_that_loads_is_shown_as_loading_until_it_takes_a_record() {
    let bench = Bench::new(1);
    let (let_go, coordinator) = (Arc::new(Notify::new()), bench.coordinator.clone());
    let go_on = Arc::clone(&let_go);
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let (coordinator, go_on) = (coordinator.clone(), Arc::clone(&go_on));
        async move {
            let (mut input, _offsets) = owned.split();
            input.report(HandlerPhase::Loading(0.4));
            go_on.notified().await;
            coordinator.note("loaded");
            while input.next_batch(&Limits::DEFAULT).await.is_some() {}
            Ok(())
        }
    };
    let consumer = bench.builder().build().unwrap();
    let inspector = consumer.inspector();
    let _run = bench.run(consumer, handler).await;
    bench.append(0, 1);
    bench.grant(0);
    bench.coordinator.logged("phase 0 e1 Resuming").await;
    tokio::time::sleep(SECOND * 20).await;
    let dump = inspector.dump();
    assert!(dump.contains("e1 handoff 1: Resuming, position 0, lag 1, lease"), "{dump}");
    let_go.notify_one();
    tells(&bench, "it runs", |told| told.position.get() == 1).await;
    assert!(inspector.dump().contains("e1 handoff 1: Running"), "{}", inspector.dump());
}

#[tokio::test(start_paused = true)]
async fn input_tells_how_many_records_are_left() {
    let bench = Bench::new(1);
    let let_go = Arc::new(Notify::new());
    let handler = one_by_one(&bench, &let_go);
    let _run = bench.run(bench.builder().build().unwrap(), handler).await;
    bench.append(0, 3);
    bench.grant(0);
    bench.coordinator.logged("took 0, lag Some(2)").await;
    bench.append(0, 2);
    let_go.notify_one();
    bench.coordinator.logged("took 1, lag Some(3)").await;
}

#[tokio::test(start_paused = true)]
async fn lags_of_all_partitions_are_summed_and_gone_with_them() {
    let bench = Bench::new(2);
    let consumer = bench.builder().build().unwrap();
    let lags = consumer.inspector().grants;
    assert_eq!(lags.lags(), None, "nothing was told");
    let _run =
        bench.run(consumer, |_owned: Owned<CoordinatorOffsets>| std::future::pending()).await;
    for (index, count) in [(0, 3), (1, 5)] {
        bench.append(index, count);
        bench.grant(usize::try_from(index).unwrap());
    }
    tokio::time::sleep(SECOND * 2).await;
    assert_eq!(lags.lags(), Some((5, 8)));
    for partition in &bench.partitions {
        let (epoch, _) = bench.coordinator.progress(*partition).unwrap();
        bench.coordinator.lose(&bench.member, *partition, epoch, LostCause::LeaseEnded);
    }
    tokio::time::sleep(SECOND * 5).await;
    assert_eq!(lags.lags(), Some((0, 0)));
}

#[tokio::test(start_paused = true)]
async fn with_the_check_off_a_lease_that_has_ended_is_left_to_the_sinks() {
    let bench = Bench::with_check(1, LeaseCheck::Off);
    let let_go = Arc::new(Notify::new());
    let handler = one_by_one(&bench, &let_go);
    let _run = bench.run(bench.builder().build().unwrap(), handler).await;
    bench.append(0, 2);
    let (_, lease) = bench.grant(0);
    bench.coordinator.logged("took 0").await;
    lease.shorten(tenure_model::Tick(1));
    let_go.notify_one();
    bench.coordinator.logged("took 1").await;
}
