//! Resources, singletons and scheduled jobs against a coordinator in memory, on a paused clock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_model::{MemberId, NextOffset, Partition, PartitionIndex, TopicId};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::*;
use crate::consumer::{ConsumerError, ErrorPolicy, Stopped};
use crate::lease::{Lease, LeaseCheck};
use crate::session::LostCause;
use crate::testing::{MemoryCoordinator, RuntimeClock};

type Run = JoinHandle<Result<Stopped, ConsumerError>>;

const MINUTE: Duration = Duration::from_secs(60);
const PERIOD: Duration = Duration::from_secs(20);

struct Bench {
    coordinator: MemoryCoordinator,
    name: TopicName,
    partition: Partition,
    clock: Arc<RuntimeClock>,
    started: Instant,
}

impl Bench {
    fn new() -> Self {
        let clock = Arc::new(RuntimeClock::new());
        let group = GroupId::new("g").unwrap();
        let name = TopicName::new("job").unwrap();
        let index = PartitionIndex::new(0).unwrap();
        Self {
            coordinator: MemoryCoordinator::new(group, clock.clone(), LeaseCheck::On),
            partition: Partition { topic_id: TopicId::of_name(&name), index },
            name,
            clock,
            started: Instant::now(),
        }
    }

    fn grant_to(&self, member: &str) -> (tenure_model::Epoch, Lease) {
        let member = MemberId::new(member).unwrap();
        self.coordinator.grant(&self.name, self.partition, &member)
    }

    fn singleton(&self) -> Singleton {
        let group = GroupId::new("g").unwrap();
        Singleton::new(group, self.name.clone(), vec!["nowhere:1".to_owned()])
            .with(|consumer| consumer.clock(self.clock.clone()))
    }

    /// Job with a tick each 20 s, on a wall clock that stood at 1 010 000 ms when the bench was made.
    fn job(&self, missed: Missed) -> ScheduledJob {
        let group = GroupId::new("g").unwrap();
        let started = self.started;
        let wall_clock = move || 1_010_000 + u64::try_from(started.elapsed().as_millis()).unwrap();
        let (name, nodes) = (self.name.clone(), vec!["nowhere:1".to_owned()]);
        ScheduledJob::on_clock(group, name, nodes, Every::new(PERIOD), Arc::new(wall_clock))
            .missed(missed)
            .with(|consumer| consumer.clock(self.clock.clone()))
    }

    async fn start<F, Fut>(&self, member: &str, job: ScheduledJob, fire: F) -> Run
    where
        F: Fn(JobTick) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), crate::sink::BoxError>> + Send + 'static,
    {
        let (consumer, handler) = job.build().unwrap().into_parts(fire);
        let (coordinator, name) = (self.coordinator.clone(), MemberId::new(member).unwrap());
        let run = tokio::spawn(async move {
            coordinator.run(&name, consumer, move |owned| handler(owned)).await
        });
        self.coordinator.logged(&format!("{member} joined")).await;
        run
    }

    /// What was fired, in order.
    fn fired(&self) -> Vec<String> {
        let log = self.coordinator.log();
        log.iter().filter_map(|line| line.strip_prefix("fired ")).map(str::to_owned).collect()
    }

    fn committed(&self) -> Option<u64> {
        self.coordinator.committed(self.partition).map(NextOffset::get)
    }
}

/// Notes each tick.
fn noting(
    coordinator: &MemoryCoordinator,
    by: &'static str,
) -> impl Fn(JobTick) -> futures::future::BoxFuture<'static, Result<(), crate::sink::BoxError>>
+ Send
+ Sync
+ 'static {
    let coordinator = coordinator.clone();
    move |tick| {
        coordinator.note(format!("fired {} by {by}", tick.key()));
        Box::pin(async { Ok(()) })
    }
}

#[tokio::test(start_paused = true)]
async fn job_runs_while_it_leads_and_again_under_a_new_epoch() {
    let bench = Bench::new();
    let notes = bench.coordinator.clone();
    let (consumer, handler) = bench.singleton().build().unwrap().into_parts(move |leading| {
        let notes = notes.clone();
        async move {
            notes.note(format!("leads at {}", leading.grant().epoch));
            let end = leading.ended().await;
            notes.note(format!(
                "ends at {}, may commit: {}",
                leading.grant().epoch,
                end.may_commit()
            ));
            Ok(())
        }
    });
    let ann = MemberId::new("ann").unwrap();
    let (coordinator, member) = (bench.coordinator.clone(), ann.clone());
    let run = tokio::spawn(async move {
        coordinator.run(&member, consumer, move |owned| handler(owned)).await
    });
    bench.coordinator.logged("ann joined").await;
    let (first, _) = bench.grant_to("ann");
    bench.coordinator.logged("leads at e1").await;
    bench.coordinator.revoke(&ann, bench.partition, first, MINUTE);
    bench.coordinator.logged("ends at e1, may commit: true").await;
    bench.coordinator.logged("release 0 e1 Revoked").await;
    let (second, _) = bench.grant_to("ann");
    bench.coordinator.logged("leads at e2").await;
    bench.coordinator.lose(&ann, bench.partition, second, LostCause::LeaseEnded);
    bench.coordinator.logged("ends at e2, may commit: false").await;
    assert!(!run.is_finished(), "the process goes on taking part");
    run.abort();
}

#[tokio::test(start_paused = true)]
async fn job_that_is_done_leaves_the_election() {
    let bench = Bench::new();
    let (consumer, handler) =
        bench.singleton().build().unwrap().into_parts(|_leading| async { Ok(()) });
    let (coordinator, ann) = (bench.coordinator.clone(), MemberId::new("ann").unwrap());
    let run =
        tokio::spawn(
            async move { coordinator.run(&ann, consumer, move |owned| handler(owned)).await },
        );
    bench.coordinator.logged("ann joined").await;
    bench.grant_to("ann");
    let stopped = run.await.unwrap().unwrap();
    assert_eq!(stopped, Stopped { clean: true, handlers_aborted: 0 });
    bench.coordinator.logged("release 0 e1 Shutdown").await;
    bench.coordinator.logged("ann left").await;
}

#[tokio::test(start_paused = true)]
async fn each_tick_fires_once_whoever_owns_the_job() {
    let bench = Bench::new();
    let ann = MemberId::new("ann").unwrap();
    let first = noting(&bench.coordinator, "ann");
    let second = noting(&bench.coordinator, "bob");
    let _ann = bench.start("ann", bench.job(Missed::All), first).await;
    let _bob = bench.start("bob", bench.job(Missed::All), second).await;
    let (epoch, _) = bench.grant_to("ann");
    bench.coordinator.logged("fired job@1040000 by ann").await;
    bench.coordinator.revoke(&ann, bench.partition, epoch, MINUTE);
    bench.coordinator.logged("release 0 e1 Revoked").await;
    bench.grant_to("bob");
    bench.coordinator.logged("fired job@1080000").await;
    let want =
        ["job@1020000 by ann", "job@1040000 by ann", "job@1060000 by bob", "job@1080000 by bob"];
    assert_eq!(bench.fired(), want);
}

#[tokio::test(start_paused = true)]
async fn tick_in_flight_at_its_owners_death_is_fired_again_under_the_same_key() {
    for missed in [Missed::All, Missed::Latest] {
        let bench = Bench::new();
        let notes = bench.coordinator.clone();
        let stuck = move |tick: JobTick| {
            notes.note(format!("fired {} by ann", tick.key()));
            futures::future::pending::<Result<(), crate::sink::BoxError>>()
        };
        let ann = bench.start("ann", bench.job(missed), stuck).await;
        let _bob = bench.start("bob", bench.job(missed), noting(&bench.coordinator, "bob")).await;
        bench.grant_to("ann");
        bench.coordinator.logged("fired job@1020000 by ann").await;
        ann.abort();
        // Nobody has the job for a while.
        tokio::time::sleep(PERIOD * 3).await;
        bench.grant_to("bob");
        bench.coordinator.logged("fired job@1100000 by bob").await;
        let again = "job@1020000 by bob";
        let want = match missed {
            Missed::All => {
                vec![
                    "job@1020000 by ann",
                    again,
                    "job@1040000 by bob",
                    "job@1060000 by bob",
                    "job@1080000 by bob",
                    "job@1100000 by bob",
                ]
            }
            Missed::Latest => {
                vec!["job@1020000 by ann", again, "job@1080000 by bob", "job@1100000 by bob"]
            }
        };
        assert_eq!(bench.fired(), want, "{missed:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn tick_that_fails_is_fired_again_before_any_other() {
    let bench = Bench::new();
    let (notes, fails) = (bench.coordinator.clone(), AtomicBool::new(true));
    let fire = move |tick: JobTick| {
        notes.note(format!("fired {}", tick.key()));
        let failed = fails.swap(false, Ordering::SeqCst);
        async move { if failed { Err("not now".into()) } else { Ok(()) } }
    };
    let policy = ErrorPolicy::retry(3, crate::consumer::Backoff::default());
    let policy = policy.then(crate::consumer::Then::Fail);
    let job = bench.job(Missed::All).with(|consumer| consumer.on_error(policy));
    let _run = bench.start("ann", job, fire).await;
    bench.grant_to("ann");
    bench.coordinator.logged("fired job@1040000").await;
    assert_eq!(bench.fired(), ["job@1020000", "job@1020000", "job@1040000"]);
    bench.coordinator.logged("commit 0 e1 #3 1040001: committed").await;
    assert_eq!(bench.committed(), Some(1_040_001));
}

#[tokio::test(start_paused = true)]
async fn name_of_a_resource_is_the_one_that_single_calls_use() {
    let name = TopicName::new("orders").unwrap();
    let (source, names) = (ResourceSource::new(), [name.clone()]);
    let topics = crate::source::RecordSource::topics(&source, &names).await.unwrap();
    assert_eq!(topics[0].topic_id, TopicId::of_name(&name));
    assert_eq!(topics[0].partition_count, 1);
}
