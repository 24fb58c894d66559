//! Runs and handlers that are dropped wherever they wait: nothing goes on in their name.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tenure_sdk::lease::Lease;
use tokio::sync::Notify;
use tokio::time::{sleep_until, timeout};

use super::*;

const TTL_MS: u64 = 3_000;
const TTL: Duration = Duration::from_millis(TTL_MS);

/// For a busy machine.
const SLACK: Duration = Duration::from_millis(700);

/// Longest wait for a poll that may not come: whoever waits for it is dropped then.
const STEADY: Duration = Duration::from_secs(2);

/// At most so many places to wait at are tried.
const PLACES_MAX: usize = 24;

fn interval() -> Duration {
    Duration::from_millis(LeaseSettings::for_ttl(TTL_MS).heartbeat_interval_ms)
}

/// Goes no further than its `polls`-th wait, and says when it is there.
struct Halted<F> {
    future: Pin<Box<F>>,
    polls: usize,
    reached: Arc<Notify>,
}

impl<F: Future> Future for Halted<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        if self.polls == 0 {
            return Poll::Pending;
        }
        let done = self.future.as_mut().poll(context);
        self.polls -= 1;
        if self.polls == 0 && done.is_pending() {
            self.reached.notify_one();
        }
        done
    }
}

fn halted<F: Future>(future: F, polls: usize) -> (Halted<F>, Arc<Notify>) {
    let reached = Arc::new(Notify::new());
    (Halted { future: Box::pin(future), polls, reached: Arc::clone(&reached) }, reached)
}

impl Rig {
    /// A consumer of a group of its own.
    fn alone(&self, group: &GroupId) -> ConsumerBuilder<CoordinatorOffsets> {
        let coordinators = vec![self.node.client_address().to_string()];
        let source = Arc::new(self.source.reader());
        Consumer::builder(group.clone(), vec![self.topic.clone()], source, coordinators)
            .lease(LeaseSettings::for_ttl(TTL_MS))
    }

    /// Members of a group, and how many of its partitions are owned.
    fn left_over(&self, group: &GroupId) -> (usize, usize) {
        self.node.raft().with_machine(|machine| {
            machine.state().groups.get(group).map_or((0, 0), |found| {
                let owned = found.partitions.values().filter_map(|state| state.ownership.owner());
                (found.members.len(), owned.count())
            })
        })
    }

    /// Nobody has renewed after an interval, or there would still be a member a ttl later.
    async fn check_gone(&self, group: &GroupId, what: &str) {
        let dropped = Instant::now();
        sleep_until(dropped + interval() + TTL + SLACK).await;
        assert_eq!(self.left_over(group), (0, 0), "{what}: somebody renews, or owns something");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_that_is_dropped_wherever_it_waits_renews_nothing_and_owns_nothing_l15() {
    let rig = Arc::new(Rig::new().await);
    rig.append(100);
    let mut checks = tokio::task::JoinSet::new();
    let reached_all = Arc::new(AtomicUsize::new(0));
    for polls in 1..=PLACES_MAX {
        let (rig, reached_all) = (Arc::clone(&rig), Arc::clone(&reached_all));
        checks.spawn(async move {
            let group = GroupId::new(&format!("dropped-{polls}")).unwrap();
            let consumer = rig.alone(&group).build().unwrap();
            let counters = consumer.counters();
            let (run, reached) = halted(consumer.run(do_all), polls);
            let run = tokio::spawn(run);
            if timeout(STEADY, reached.notified()).await.is_ok() {
                reached_all.fetch_max(polls, Ordering::SeqCst);
            }
            let acquired = counters.acquired();
            run.abort();
            assert!(run.await.unwrap_err().is_cancelled());
            rig.check_gone(&group, &format!("dropped at its {polls}th wait")).await;
            acquired
        });
    }
    let acquired = checks.join_all().await;
    // From before the first answer to a run that owns everything and has nothing to do.
    assert!(acquired.contains(&0) && acquired.contains(&PARTITIONS.into()), "{acquired:?}");
    tell(format_args!("{} waits were reached", reached_all.load(Ordering::SeqCst)));
    rig.node.shutdown().await;
}

/// Sets its flag when it is dropped.
struct Guard(Arc<AtomicBool>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A grant's lease, and whether its handler is gone.
type Hold = (Lease, Arc<AtomicBool>);

/// Waits in every way that a handler can: for records, for a commit, for time, for nothing.
async fn wait_in_every_way(owned: Owned<CoordinatorOffsets>) -> Result<(), BoxError> {
    let limits = Limits { records: 1, ..Limits::DEFAULT };
    let (mut input, mut offsets) = owned.split();
    while let Some(batch) = input.next_batch(&limits).await {
        tokio::task::yield_now().await;
        batch.iter().for_each(|record| offsets.done(record));
        offsets.flush().await?;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handler_that_is_dropped_with_its_run_wherever_it_waits_leaves_nothing_behind_l15() {
    let rig = Arc::new(Rig::new().await);
    rig.append(400);
    let mut checks = tokio::task::JoinSet::new();
    for polls in 1..=PLACES_MAX {
        let rig = Arc::clone(&rig);
        checks.spawn(async move {
            let what = format!("handlers dropped at their {polls}th wait");
            let group = GroupId::new(&format!("handled-{polls}")).unwrap();
            let consumer = rig.alone(&group).build().unwrap();
            let reached = Arc::new(Notify::new());
            let leases: Arc<Mutex<Vec<Hold>>> = Arc::default();
            let (told, held) = (Arc::clone(&reached), Arc::clone(&leases));
            let run = tokio::spawn(consumer.run(move |owned: Owned<CoordinatorOffsets>| {
                let dropped = Arc::new(AtomicBool::new(false));
                held.lock().unwrap().push((owned.grant().lease.clone(), Arc::clone(&dropped)));
                let future = async move {
                    let _guard = Guard(dropped);
                    wait_in_every_way(owned).await
                };
                Halted { future: Box::pin(future), polls, reached: Arc::clone(&told) }
            }));
            timeout(LONGEST, reached.notified()).await.unwrap_or_else(|_| panic!("{what}: never"));
            run.abort();
            assert!(run.await.unwrap_err().is_cancelled());
            rig.check_gone(&group, &what).await;
            for (lease, dropped) in leases.lock().unwrap().iter() {
                assert!(dropped.load(Ordering::SeqCst), "{what}: a handler is still there");
                assert!(!lease.is_live(), "{what}: somebody could still write");
            }
        });
    }
    checks.join_all().await;
    rig.node.shutdown().await;
}
