//! How the ownership of a partition, and a consumer, ends.

use std::sync::atomic::{AtomicBool, Ordering};

use tenure_model::Epoch;

use super::*;
use crate::session::{EndCause, LostCause};

#[tokio::test(start_paused = true)]
async fn nothing_is_delivered_after_the_release() {
    let bench = Bench::new(1);
    bench.append(0, 5);
    let _run = bench.run(bench.builder().build().unwrap(), doing_all(&bench)).await;
    let (epoch, lease) = bench.grant(0);
    bench.coordinator.logged("deliver 0 e1 0..5").await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    bench.append(0, 5);
    bench.coordinator.logged("release 0 e1 Revoked at 5").await;
    bench.append(0, 5);
    tokio::time::sleep(SECOND).await;
    let log = bench.lines(&["deliver", "release"]);
    assert_eq!(log.last().unwrap(), "release 0 e1 Revoked at 5: ", "{log:?}");
    assert!(!lease.is_live(), "a released grant writes nothing");
    assert_eq!(bench.committed(0), Some(5));
}

/// What a pause of the whole process leaves: the lease is over, and nobody has said so yet.
fn let_lease_run_out(bench: &Bench, lease: &crate::lease::Lease) {
    lease.shorten(bench.clock.now());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_delivered_after_the_lease_even_if_nobody_has_said_so() {
    let bench = Bench::new(1);
    bench.append(0, 5);
    let _run = bench.run(bench.builder().build().unwrap(), doing_all(&bench)).await;
    let (_epoch, lease) = bench.grant(0);
    bench.coordinator.logged("deliver 0 e1 0..5").await;
    let_lease_run_out(&bench, &lease);
    bench.append(0, 5);
    bench.coordinator.logged("release 0 e1 LeaseLost").await;
    assert_eq!(bench.lines(&["deliver"]), ["deliver 0 e1 0..5"]);
}

#[tokio::test(start_paused = true)]
async fn record_that_waits_in_the_buffer_is_not_delivered_after_the_lease() {
    let bench = Bench::new(1);
    bench.append(0, 5);
    let coordinator = bench.coordinator.clone();
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let coordinator = coordinator.clone();
        async move {
            let lease = owned.grant().lease.clone();
            let (mut input, _offsets) = owned.split();
            while let Some(record) = input.next_record().await {
                coordinator.note(format!("took {}", record.offset));
                lease.shorten(lease.clock().now());
            }
            Ok(())
        }
    };
    let _run = bench.run(bench.builder().build().unwrap(), handler).await;
    bench.grant(0);
    bench.coordinator.logged("release 0 e1 LeaseLost").await;
    assert_eq!(bench.lines(&["took"]), ["took 0"]);
}

#[tokio::test(start_paused = true)]
async fn next_epoch_goes_on_where_the_last_one_stopped() {
    let bench = Bench::new(1);
    bench.append(0, 5);
    let _run = bench.run(bench.builder().build().unwrap(), doing_all(&bench)).await;
    let (epoch, _lease) = bench.grant(0);
    bench.coordinator.logged("deliver 0 e1 0..5").await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 10);
    bench.coordinator.logged("release 0 e1").await;
    bench.append(0, 2);
    bench.grant(0);
    bench.coordinator.logged("deliver 0 e2 5..7").await;
}

#[tokio::test(start_paused = true)]
async fn handler_that_does_not_return_is_aborted_at_the_deadline_and_its_neighbour_goes_on() {
    let bench = Bench::new(2);
    bench.append(0, 1);
    let coordinator = bench.coordinator.clone();
    let consumer = bench.builder().build().unwrap();
    let counters = consumer.counters();
    let _run = bench
        .run(consumer, move |owned: Owned<CoordinatorOffsets>| {
            let coordinator = coordinator.clone();
            async move {
                if owned.grant().partition.index.get() == 1 {
                    return do_all(coordinator, owned).await;
                }
                coordinator.note("stuck");
                std::future::pending().await
            }
        })
        .await;
    let (stuck, lease) = bench.grant(0);
    bench.grant(1);
    bench.coordinator.logged("stuck").await;
    let started = tokio::time::Instant::now();
    bench.coordinator.revoke(&bench.member, bench.partitions[0], stuck, SECOND * 5);
    bench.coordinator.logged("phase 0 e1 Draining").await;
    bench.append(1, 1);
    bench.coordinator.logged("deliver 1 e2 0..1").await;
    assert!(started.elapsed() < SECOND, "the neighbour does not wait for it");
    let line = bench.coordinator.logged("release 0 e1").await;
    assert_eq!(line, "release 0 e1 Revoked at 0: handler did not return in time, aborted; ");
    assert!((SECOND * 5..SECOND * 6).contains(&started.elapsed()), "{:?}", started.elapsed());
    assert!(!lease.is_live());
    assert_eq!(counters.handlers_aborted(), 1);
    bench.append(1, 1);
    bench.coordinator.logged("deliver 1 e2 1..2").await;
}

#[tokio::test]
async fn handler_stuck_without_an_await_is_left_behind_and_its_partition_given_back() {
    static FREE: AtomicBool = AtomicBool::new(false);
    let bench = Bench::new(1);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let consumer = bench.builder().build().unwrap();
    let (coordinator, member) = (bench.coordinator.clone(), bench.member.clone());
    runtime.spawn(async move {
        let noted = coordinator.clone();
        let handler = move |owned: Owned<CoordinatorOffsets>| {
            let noted = noted.clone();
            async move {
                noted.note(format!("stuck {}", owned.grant().epoch));
                while !FREE.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                Ok(())
            }
        };
        coordinator.run(&member, consumer, handler).await
    });
    bench.coordinator.logged("ann joined").await;
    let (epoch, lease) = bench.grant(0);
    bench.coordinator.logged("stuck e1").await;
    let drain = Duration::from_millis(50);
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, drain);
    bench.coordinator.logged("release 0 e1 Revoked at 0: handler did not return in time").await;
    assert!(!lease.is_live(), "what it writes from now on is refused");
    FREE.store(true, Ordering::SeqCst);
    runtime.shutdown_background();
}

/// Runs a handler that ends at once in some way; answers what is released.
async fn released_after(handler: fn() -> Result<(), BoxError>) -> String {
    let bench = Bench::new(2);
    let coordinator = bench.coordinator.clone();
    let _run = bench
        .run(bench.builder().build().unwrap(), move |owned: Owned<CoordinatorOffsets>| {
            let coordinator = coordinator.clone();
            async move {
                if owned.grant().partition.index.get() == 1 {
                    return do_all(coordinator, owned).await;
                }
                handler()
            }
        })
        .await;
    bench.grant(1);
    bench.grant(0);
    let line = bench.coordinator.logged("release 0 e2").await;
    bench.append(1, 1);
    bench.coordinator.logged("deliver 1 e1 0..1").await;
    line
}

#[tokio::test(start_paused = true)]
async fn failure_of_a_handler_is_contained_and_said() {
    assert_eq!(
        released_after(|| Err("no such table".into())).await,
        "release 0 e2 HandlerFailed at 0: no such table"
    );
    assert_eq!(
        released_after(|| panic!("index out of bounds")).await,
        "release 0 e2 HandlerFailed at 0: handler panicked: index out of bounds"
    );
    assert_eq!(
        released_after(|| Ok(())).await,
        "release 0 e2 HandlerFailed at 0: handler returned early: its input had not ended"
    );
}

#[tokio::test(start_paused = true)]
async fn panic_before_the_handlers_first_step_is_contained_too() {
    let bench = Bench::new(1);
    let handler = |_owned: Owned<CoordinatorOffsets>| -> std::future::Ready<Result<(), BoxError>> {
        panic!("no settings")
    };
    let _run = bench.run(bench.builder().build().unwrap(), handler).await;
    bench.grant(0);
    let line = bench.coordinator.logged("release 0 e1").await;
    assert_eq!(line, "release 0 e1 HandlerFailed at 0: handler panicked: no settings");
}

#[derive(Debug, thiserror::Error)]
#[error("row 7 was not written")]
struct Wrapped(#[source] crate::sink::SinkError);

#[tokio::test(start_paused = true)]
async fn fence_inside_a_handlers_error_is_a_quiet_end() {
    let line = released_after(|| {
        let seen = Epoch::new(9).ok();
        Err(Wrapped(crate::sink::SinkError::Fenced { ours: Epoch::FIRST, seen }).into())
    })
    .await;
    assert_eq!(line, "release 0 e2 Fenced at -: fenced: given e1, current is e9: stop writing");
}

#[tokio::test(start_paused = true)]
async fn late_event_for_an_old_epoch_does_not_touch_the_new_grant() {
    let bench = Bench::new(1);
    let _run = bench.run(bench.builder().build().unwrap(), doing_all(&bench)).await;
    let partition = bench.partitions[0];
    let (first, _lease) = bench.grant(0);
    bench.coordinator.logged("acquired 0 at e1").await;
    bench.coordinator.lose(&bench.member, partition, first, LostCause::LeaseEnded);
    bench.coordinator.logged("release 0 e1").await;
    let bob = MemberId::new("bob").unwrap();
    bench.coordinator.take_for(&bench.topic, partition, &bob);
    let (third, lease) = bench.grant(0);
    bench.coordinator.logged("acquired 0 at e3").await;
    bench.coordinator.revoke(&bench.member, partition, first, SECOND);
    bench.coordinator.lose(&bench.member, partition, first, LostCause::Gone);
    bench.append(0, 1);
    bench.coordinator.logged("deliver 0 e3 0..1").await;
    tokio::time::sleep(SECOND * 5).await;
    assert!(lease.is_live());
    assert_eq!(bench.lines(&["release 0 e3"]), Vec::<String>::new());
    bench.coordinator.revoke(&bench.member, partition, third, SECOND);
    bench.coordinator.logged("release 0 e3 Revoked at 1").await;
}

#[tokio::test(start_paused = true)]
async fn new_grant_waits_until_the_old_one_of_the_same_partition_has_ended() {
    let bench = Bench::new(1);
    bench.append(0, 1);
    let coordinator = bench.coordinator.clone();
    let _run = bench
        .run(bench.builder().build().unwrap(), move |owned: Owned<CoordinatorOffsets>| {
            let coordinator = coordinator.clone();
            async move {
                let epoch = owned.grant().epoch;
                coordinator.note(format!("start {epoch}"));
                let (input, _offsets) = owned.split();
                input.ended().await;
                tokio::time::sleep(Duration::from_millis(300)).await;
                coordinator.note(format!("end {epoch}"));
                Ok(())
            }
        })
        .await;
    bench.grant(0);
    bench.coordinator.logged("start e1").await;
    bench.grant(0);
    let (third, _lease) = bench.grant(0);
    bench.coordinator.logged("start e3").await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], third, SECOND);
    bench.coordinator.logged("release 0 e3").await;
    assert_eq!(bench.lines(&["start", "end"]), ["start e1", "end e1", "start e3", "end e3"]);
}

#[tokio::test(start_paused = true)]
async fn lost_partition_ends_its_handler_within_the_grace() {
    let bench = Bench::new(1);
    let coordinator = bench.coordinator.clone();
    let consumer = bench.builder().lost_grace(SECOND * 2).build().unwrap();
    let _run = bench
        .run(consumer, move |owned: Owned<CoordinatorOffsets>| {
            let coordinator = coordinator.clone();
            async move {
                let (input, _offsets) = owned.split();
                coordinator.note(format!("lost: may commit {}", input.lost().await.may_commit()));
                std::future::pending().await
            }
        })
        .await;
    let (epoch, lease) = bench.grant(0);
    bench.coordinator.logged("acquired 0 at e1").await;
    let cause = LostCause::Fenced { current: Epoch::new(4).ok() };
    bench.coordinator.lose(&bench.member, bench.partitions[0], epoch, cause);
    bench.coordinator.logged("lost: may commit false").await;
    assert!(!lease.is_live());
    let started = tokio::time::Instant::now();
    bench.coordinator.logged("release 0 e1 Fenced at -").await;
    assert!(started.elapsed() < SECOND * 3, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn shutdown_drains_releases_and_leaves() {
    let bench = Bench::new(2);
    bench.append(0, 3);
    let consumer = bench.builder().build().unwrap();
    let (stopper, readiness) = (consumer.stopper(), consumer.readiness());
    let run = bench.run(consumer, doing_all(&bench)).await;
    assert!(readiness.is_ready());
    bench.grant(0);
    bench.grant(1);
    bench.coordinator.logged("deliver 0 e1 0..3").await;
    bench.coordinator.logged("acquired 1 at e2").await;
    stopper.stop(SECOND * 10);
    let stopped = run.await.unwrap().unwrap();
    assert_eq!(stopped, Stopped { clean: true, handlers_aborted: 0 });
    let lines = bench.lines(&["release", "ann left"]);
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines.contains(&"release 0 e1 Shutdown at 3: ".to_owned()), "{lines:?}");
    assert_eq!(lines.last().unwrap(), "ann left");
    assert!(!readiness.is_ready());
}

#[tokio::test(start_paused = true)]
async fn shutdown_returns_by_its_deadline_whatever_hangs() {
    let bench = Bench::new(2);
    let consumer = bench.builder().build().unwrap();
    let stopper = consumer.stopper();
    let run = bench.run(consumer, |_owned: Owned<CoordinatorOffsets>| std::future::pending()).await;
    bench.grant(0);
    bench.grant(1);
    bench.coordinator.logged("acquired 0 at e1").await;
    bench.coordinator.logged("acquired 1 at e2").await;
    bench.source.set_hangs(true);
    bench.coordinator.set_answers(false);
    let started = tokio::time::Instant::now();
    stopper.stop(SECOND * 8);
    let stopped = run.await.unwrap().unwrap();
    assert!(started.elapsed() <= SECOND * 8, "{:?}", started.elapsed());
    assert_eq!(stopped, Stopped { clean: false, handlers_aborted: 2 });
    assert_eq!(bench.lines(&["release"]).len(), 2, "they are given back all the same");
}

#[tokio::test(start_paused = true)]
async fn end_of_the_membership_ends_the_consumer_and_its_handlers() {
    let bench = Bench::new(1);
    let run = bench.run(bench.builder().build().unwrap(), doing_all(&bench)).await;
    let (_epoch, lease) = bench.grant(0);
    bench.coordinator.logged("acquired 0 at e1").await;
    bench.coordinator.end(&bench.member, EndCause::Left);
    let error = run.await.unwrap().unwrap_err();
    assert_eq!(error, ConsumerError::MembershipEnded(EndCause::Left));
    assert!(!lease.is_live());
}

#[tokio::test(start_paused = true)]
async fn dropped_run_stops_its_handlers() {
    let bench = Bench::new(1);
    let (gone, dropped) = tokio::sync::oneshot::channel::<()>();
    let gone = std::sync::Mutex::new(Some(gone));
    let run = bench
        .run(bench.builder().build().unwrap(), move |owned: Owned<CoordinatorOffsets>| {
            let held = gone.lock().unwrap().take();
            async move {
                let (input, _offsets) = owned.split();
                input.ended().await;
                drop(held);
                Ok(())
            }
        })
        .await;
    bench.grant(0);
    bench.coordinator.logged("acquired 0 at e1").await;
    run.abort();
    let dropped = tokio::time::timeout(SECOND, dropped).await.expect("the handler is aborted");
    assert!(dropped.is_err(), "the handler and what it held are dropped");
    bench.coordinator.logged("ann left").await;
}

#[tokio::test(start_paused = true)]
async fn source_that_closes_slowly_delays_the_next_grant_here_and_no_release() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let source = SlowSource::of(&bench, Duration::ZERO, SECOND);
    let consumer = bench.builder_over(source).build().unwrap();
    let _run = bench.run(consumer, doing_all(&bench)).await;
    let (first, _lease) = bench.grant(0);
    bench.coordinator.logged("deliver 0 e1 0..3").await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], first, SECOND * 10);
    bench.coordinator.logged("release 0 e1").await;
    bench.append(0, 2);
    bench.grant(0);
    bench.coordinator.logged("deliver 0 e2 3..5").await;
    assert_eq!(
        bench.lines(&["opened", "deliver", "release", "closed"]),
        [
            "opened 0 at 0",
            "deliver 0 e1 0..3",
            "release 0 e1 Revoked at 3: ",
            "closed 0",
            "opened 0 at 3",
            "deliver 0 e2 3..5",
        ]
    );
}
