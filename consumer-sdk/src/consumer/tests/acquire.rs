//! From a grant to the first record.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::grant::Grant;
use crate::session::LostCause;
use crate::sink::{Capabilities, FencedWriter, Registered, Resolved, SinkError, Verified};
use crate::testing::{MemorySink, MemoryWriter};

/// Sink that writes down in which order it is called, and fails its first registrations.
struct Recording {
    sink: MemorySink,
    coordinator: MemoryCoordinator,
    failures: AtomicUsize,
}

struct RecordingWriter {
    writer: MemoryWriter,
    coordinator: MemoryCoordinator,
    epoch: tenure_model::Epoch,
}

impl Recording {
    fn new(bench: &Bench, name: &str, failures: usize) -> Self {
        let coordinator = bench.coordinator.clone();
        Self { sink: MemorySink::new(name), coordinator, failures: AtomicUsize::new(failures) }
    }
}

impl FencedSink for Recording {
    type Writer = RecordingWriter;

    fn name(&self) -> &str {
        FencedSink::name(&self.sink)
    }

    fn capabilities(&self) -> Capabilities {
        FencedSink::capabilities(&self.sink)
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<RecordingWriter>, SinkError> {
        let name = FencedSink::name(self);
        let failing = self.failures.load(Ordering::SeqCst);
        if failing > 0 {
            self.failures.store(failing - 1, Ordering::SeqCst);
            let source = "no connection".into();
            return Err(SinkError::Transient { retry_after: None, source });
        }
        self.coordinator.note(format!("register {name} {}", grant.epoch));
        let Registered { writer, displaced } = self.sink.register(grant).await?;
        let (coordinator, epoch) = (self.coordinator.clone(), grant.epoch);
        Ok(Registered { writer: RecordingWriter { writer, coordinator, epoch }, displaced })
    }
}

impl FencedWriter for RecordingWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.coordinator.note(format!("resume {}", self.epoch));
        self.writer.resume(verified).await
    }

    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.coordinator.note(format!("initialise {} at {start}", self.epoch));
        self.writer.initialise(start).await
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        self.writer.resolve().await
    }

    async fn retire(self) -> Result<(), SinkError> {
        self.writer.retire().await
    }
}

async fn deliver_one(
    coordinator: MemoryCoordinator,
    owned: Owned<Recording>,
) -> Result<(), BoxError> {
    let epoch = owned.grant().epoch;
    let mut position = owned.resume();
    let (mut input, mut out) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        coordinator.note(format!("deliver {epoch} {}..{}", batch.first(), batch.next()));
        out.writer.write(batch.records(), position, batch.next())?;
        position = batch.next();
    }
    Ok(())
}

fn delivering(bench: &Bench) -> BoxHandler<Recording> {
    let coordinator = bench.coordinator.clone();
    Box::new(move |owned| Box::pin(deliver_one(coordinator.clone(), owned)))
}

const STEPS: [&str; 7] =
    ["register", "verify", "resume", "initialise", "acquired", "deliver", "release"];

#[tokio::test(start_paused = true)]
async fn every_sink_is_registered_before_verify_and_read_only_after_it() {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let beside = Arc::new(Recording::new(&bench, "beside", 0));
    let home = Recording::new(&bench, "home", 0);
    let consumer = bench.builder().also(beside).home(home).build().unwrap();
    let _run = bench.run(consumer, delivering(&bench)).await;
    let (first, _lease) = bench.grant(0);
    bench.coordinator.logged("deliver e1").await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], first, SECOND * 10);
    bench.coordinator.logged("release 0 e1").await;
    bench.append(0, 2);
    bench.grant(0);
    bench.coordinator.logged("deliver e2").await;
    assert_eq!(
        bench.lines(&STEPS),
        [
            "register beside e1",
            "register home e1",
            "verify 0 e1: current",
            "resume e1",
            "initialise e1 at 0",
            "acquired 0 at e1 from 0",
            "deliver e1 0..3",
            "release 0 e1 Revoked at -: ",
            "register beside e2",
            "register home e2",
            "verify 0 e2: current",
            "resume e2",
            "acquired 0 at e2 from 3",
            "deliver e2 3..5",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn grant_that_is_not_current_any_more_never_reads_the_resume_point() {
    let bench = Bench::new(1);
    let (coordinator, topic, partition) =
        (bench.coordinator.clone(), bench.topic.clone(), bench.partitions[0]);
    let member = bench.member.clone();
    // Between registration and verify, the partition goes on to the next epoch of the same member.
    let once = Arc::new(AtomicUsize::new(0));
    let consumer = bench
        .builder()
        .home(Recording::new(&bench, "home", 0))
        .on_acquire_step(move |step, _grant| {
            if step == AcquireStep::Verify && once.fetch_add(1, Ordering::SeqCst) == 0 {
                coordinator.grant(&topic, partition, &member);
            }
            std::future::ready(())
        })
        .build()
        .unwrap();
    let _run = bench.run(consumer, delivering(&bench)).await;
    bench.grant(0);
    bench.coordinator.logged("acquired 0 at e2").await;
    let lines = bench.lines(&["verify", "resume", "release"]);
    assert!(!lines.contains(&"resume e1".to_owned()), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("release 0 e1 Fenced at -")), "{lines:?}");
}

#[tokio::test(start_paused = true)]
async fn registration_is_tried_again_until_the_acquire_deadline() {
    let bench = Bench::new(2);
    let consumer = bench.builder().home(Recording::new(&bench, "home", 3)).build().unwrap();
    let _run = bench.run(consumer, delivering(&bench)).await;
    bench.grant(0);
    bench.coordinator.logged("acquired 0 at e1").await;
    bench.coordinator.logged("phase 0 e1 Registering: sink home: failed for now").await;
}

#[tokio::test(start_paused = true)]
async fn sink_that_stays_away_gives_the_partition_back_with_its_error() {
    let bench = Bench::new(1);
    let consumer = bench
        .builder()
        .home(Recording::new(&bench, "home", usize::MAX))
        .acquire_deadline(SECOND * 4)
        .build()
        .unwrap();
    let _run = bench.run(consumer, delivering(&bench)).await;
    let started = tokio::time::Instant::now();
    bench.grant(0);
    let line = bench.coordinator.logged("release 0 e1").await;
    assert_eq!(
        line,
        "release 0 e1 AcquireFailed at -: sink home: failed for now, nothing was written: no connection"
    );
    assert!(started.elapsed() <= SECOND * 4, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn sink_that_saw_a_newer_epoch_ends_the_grant_as_fenced() {
    let bench = Bench::new(1);
    let home = Recording::new(&bench, "home", 0);
    let sink = home.sink.clone();
    let consumer = bench.builder().home(home).build().unwrap();
    let counters = consumer.counters();
    let _run = bench.run(consumer, delivering(&bench)).await;
    let mut newer = crate::testing::grant_for_tests(9);
    newer.resource = crate::grant::Resource::of_partition(&newer.group, bench.partitions[0]);
    sink.register(&newer).await.unwrap();
    bench.grant(0);
    let line = bench.coordinator.logged("release 0 e1").await;
    let want = "release 0 e1 Fenced at -: sink home: fenced: given e1, current is e9: stop writing";
    assert_eq!(line, want);
    assert_eq!(counters.refused_by_sink(), 1);
    assert_eq!(bench.lines(&["verify"]), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn revoke_and_loss_end_an_acquire_that_hangs() {
    let bench = Bench::new(2);
    let consumer =
        bench.builder().on_acquire_step(|_step, _grant| std::future::pending()).build().unwrap();
    let _run = bench.run(consumer, doing_all(&bench)).await;
    let (first, _lease) = bench.grant(0);
    let (second, _lease) = bench.grant(1);
    bench.coordinator.logged("phase 1 e2 Registering").await;
    bench.coordinator.revoke(&bench.member, bench.partitions[0], first, SECOND * 10);
    bench.coordinator.logged("release 0 e1 Revoked at -").await;
    bench.coordinator.lose(&bench.member, bench.partitions[1], second, LostCause::LeaseEnded);
    bench.coordinator.logged("release 1 e2 LeaseLost at -").await;
    assert_eq!(bench.lines(&["verify", "acquired"]), Vec::<String>::new());
}

/// What becomes of a grant whose lease ends just before a step of its acquire is answered.
async fn log_when_lease_ends_at(step: AcquireStep) -> Vec<String> {
    let bench = Bench::new(1);
    bench.append(0, 3);
    let home = Recording::new(&bench, "home", 0);
    let ending = move |at: AcquireStep, grant: Grant| async move {
        if at == step {
            grant.lease.shorten(grant.lease.clock().now());
        }
    };
    let consumer = bench.builder().home(home).on_acquire_step(ending).build().unwrap();
    let _run = bench.run(consumer, delivering(&bench)).await;
    bench.grant(0);
    bench.coordinator.logged("release 0 e1 LeaseLost").await;
    bench.lines(&["verify", "resume", "acquired", "deliver"])
}

#[tokio::test(start_paused = true)]
async fn answer_that_comes_after_the_lease_begins_nothing() {
    let none: [&str; 0] = [];
    assert_eq!(log_when_lease_ends_at(AcquireStep::Register).await, none);
    assert_eq!(log_when_lease_ends_at(AcquireStep::Verify).await, ["verify 0 e1: current"]);
    let read = ["verify 0 e1: current", "resume e1"];
    assert_eq!(log_when_lease_ends_at(AcquireStep::Resume).await, read);
    assert_eq!(log_when_lease_ends_at(AcquireStep::Open).await, read);
}
