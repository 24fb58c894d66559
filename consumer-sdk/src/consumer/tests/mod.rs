//! The run loop against a coordinator in memory, on a paused clock.

mod acquire;
mod ends;
mod errors;
mod events;
mod frozen;
mod letters;
mod offsets;
mod patterns;
mod progress;
mod warm;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{GroupId, MemberId, NextOffset, Partition, TopicName};
use tokio::task::JoinHandle;

use super::*;
use crate::lease::LeaseCheck;
use crate::offsets::OffsetWriter;
use crate::source::{
    Fetched, ReadAhead, RecordSource, RecordStream, ResetPolicy, SourceError, TopicInfo,
};
use crate::testing::{MemoryCoordinator, MemorySource, RuntimeClock};

const SECOND: Duration = Duration::from_secs(1);

/// A group with one member and one topic.
struct Bench {
    coordinator: MemoryCoordinator,
    source: MemorySource,
    topic: TopicName,
    partitions: Vec<Partition>,
    member: MemberId,
    clock: Arc<RuntimeClock>,
}

type BoxHandler<S> =
    Box<dyn Fn(Owned<S>) -> BoxFuture<'static, Result<(), BoxError>> + Send + Sync>;

type Run = JoinHandle<Result<Stopped, ConsumerError>>;

impl Bench {
    fn new(partition_count: u32) -> Self {
        Self::with_check(partition_count, LeaseCheck::On)
    }

    fn with_check(partition_count: u32, check: LeaseCheck) -> Self {
        let clock = Arc::new(RuntimeClock::new());
        let group = GroupId::new("g").unwrap();
        let coordinator = MemoryCoordinator::new(group, clock.clone(), check);
        let source = MemorySource::new();
        let topic = TopicName::new("t").unwrap();
        let partitions = source.create_topic(&topic, partition_count);
        let member = MemberId::new("ann").unwrap();
        Self { coordinator, source, topic, partitions, member, clock }
    }

    fn builder(&self) -> ConsumerBuilder<CoordinatorOffsets> {
        self.builder_over(Arc::new(self.source.clone()))
    }

    fn builder_over(&self, source: Arc<dyn RecordSource>) -> ConsumerBuilder<CoordinatorOffsets> {
        let (group, topics) = (GroupId::new("g").unwrap(), vec![self.topic.clone()]);
        Consumer::builder(group, topics, source, vec!["nowhere:1".to_owned()])
            .clock(self.clock.clone())
    }

    /// Runs a consumer; answers once it has joined.
    async fn run<S, F, Fut>(&self, consumer: Consumer<S>, handler: F) -> Run
    where
        S: FencedSink,
        F: Fn(Owned<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let (coordinator, member) = (self.coordinator.clone(), self.member.clone());
        let run = tokio::spawn(async move { coordinator.run(&member, consumer, handler).await });
        self.coordinator.logged("ann joined").await;
        run
    }

    fn append(&self, index: u32, count: usize) {
        for number in 0..count {
            self.source.append(&self.topic, index, format!("{number}")).unwrap();
        }
    }

    fn grant(&self, index: usize) -> (tenure_model::Epoch, crate::lease::Lease) {
        self.coordinator.grant(&self.topic, self.partitions[index], &self.member)
    }

    fn committed(&self, index: usize) -> Option<u64> {
        self.coordinator.committed(self.partitions[index]).map(NextOffset::get)
    }

    /// Lines of the log that start with one of `starts`.
    fn lines(&self, starts: &[&str]) -> Vec<String> {
        let log = self.coordinator.log();
        log.into_iter().filter(|line| starts.iter().any(|start| line.starts_with(start))).collect()
    }
}

/// Source that takes its time, and notes when it is through.
struct SlowSource {
    source: MemorySource,
    coordinator: MemoryCoordinator,
    open_takes: Duration,
    close_takes: Duration,
    /// An offset that is out of range is told by the stream, as by Kafka, which learns of it from the first fetch.
    tells_on_stream: bool,
}

impl SlowSource {
    fn of(bench: &Bench, open_takes: Duration, close_takes: Duration) -> Arc<Self> {
        let (source, coordinator) = (bench.source.clone(), bench.coordinator.clone());
        Arc::new(Self { source, coordinator, open_takes, close_takes, tells_on_stream: false })
    }
}

impl RecordSource for SlowSource {
    fn topics<'a>(
        &'a self,
        names: &'a [TopicName],
    ) -> BoxFuture<'a, Result<Vec<TopicInfo>, SourceError>> {
        RecordSource::topics(&self.source, names)
    }

    fn start<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        policy: ResetPolicy,
    ) -> BoxFuture<'a, Result<NextOffset, SourceError>> {
        self.source.start(topic, partition, policy)
    }

    fn end_offset(&self, partition: Partition) -> Option<NextOffset> {
        self.source.end_offset(partition)
    }

    fn open<'a>(
        &'a self,
        topic: &'a TopicName,
        partition: Partition,
        from: NextOffset,
        read_ahead: ReadAhead,
    ) -> BoxFuture<'a, Result<RecordStream, SourceError>> {
        Box::pin(async move {
            tokio::time::sleep(self.open_takes).await;
            let stream = self.source.open(topic, partition, from, read_ahead).await;
            self.coordinator.note(format!("opened {} at {from}", partition.index));
            match stream {
                Err(error @ SourceError::OutOfRange { .. }) if self.tells_on_stream => {
                    let (sender, stream) = tokio::sync::mpsc::channel(1);
                    sender.send(Fetched::Failed(error)).await.unwrap();
                    Ok(stream)
                }
                stream => stream,
            }
        })
    }

    fn close(&self, partition: Partition) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            tokio::time::sleep(self.close_takes).await;
            self.source.close(partition).await;
            self.coordinator.note(format!("closed {}", partition.index));
        })
    }

    fn shutdown(&self, deadline: Duration) -> BoxFuture<'_, ()> {
        self.source.shutdown(deadline)
    }
}

/// Handler that does every record as soon as it comes, and notes each batch.
async fn do_all(
    coordinator: MemoryCoordinator,
    owned: Owned<CoordinatorOffsets>,
) -> Result<(), BoxError> {
    let (epoch, index) = (owned.grant().epoch, owned.grant().partition.index);
    let (mut input, mut offsets): (Input, OffsetWriter) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        coordinator.note(format!("deliver {index} {epoch} {}..{}", batch.first(), batch.next()));
        batch.iter().for_each(|record| offsets.done(record));
    }
    Ok(())
}

/// As [`do_all`], as a handler.
fn doing_all(bench: &Bench) -> BoxHandler<CoordinatorOffsets> {
    let coordinator = bench.coordinator.clone();
    Box::new(move |owned| Box::pin(do_all(coordinator.clone(), owned)))
}

#[tokio::test(start_paused = true)]
async fn contradicting_settings_are_refused_by_name() {
    let bench = Bench::new(1);
    let check = |builder: ConsumerBuilder<CoordinatorOffsets>, want: &str| {
        assert_eq!(builder.build().unwrap_err().to_string(), want);
    };
    check(bench.builder().partitions_max(0), "partitions_max is 0: give it a value above 0");
    check(
        bench.builder().takeover(tenure_model::Takeover::Fence),
        "takeover is fence, but no sink is named: name the sinks or use takeover = lease",
    );
    let label = tenure_model::LabelName::new("rack").unwrap();
    check(
        bench.builder().label(label, "x".repeat(250)),
        "label rack has 250 bytes: use at most 16 labels of at most 249 bytes",
    );
    let lease = tenure_model::LeaseSettings { heartbeat_interval_ms: 9_000, ..Default::default() };
    check(
        bench.builder().lease(lease),
        "heartbeat_interval_ms is 9000, more than a third of ttl_ms 10000: lower it to 3333 or raise ttl_ms",
    );
    let (group, source) = (GroupId::new("g").unwrap(), Arc::new(bench.source.clone()));
    check(
        Consumer::builder(group.clone(), vec![bench.topic.clone()], source.clone(), vec![]),
        "coordinators is empty: name at least one as host:port",
    );
    check(
        Consumer::builder(group, vec![], source, vec!["a:1".to_owned()]),
        "topics is empty: name at least one",
    );
}

#[tokio::test(start_paused = true)]
async fn topics_are_reported_at_join_and_again_when_they_grow() {
    let bench = Bench::new(2);
    let consumer = bench.builder().topics_interval(SECOND * 5).build().unwrap();
    let _run = bench.run(consumer, doing_all(&bench)).await;
    bench.coordinator.logged("topic t has 2").await;
    bench.source.create_topic(&bench.topic, 3);
    bench.coordinator.logged("topic t has 3").await;
}
