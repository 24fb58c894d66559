//! Consumers of the SDK on a real coordinator node: records, source and sink in memory, the rest over gRPC.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

#[path = "consumer/cancel.rs"]
mod cancel;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure_coordinator::{Node, NodeSettings};
use tenure_model::{GroupId, LeaseSettings, MemberId, NextOffset, Partition, RequestId, TopicName};
use tenure_proto::v1;
use tenure_proto::v1::cluster_client::ClusterClient;
use tenure_proto::v1::operator_client::OperatorClient;
use tenure_proto::v1::ownership_client::OwnershipClient;
use tenure_sdk::consumer::{
    Backoff, ConsumerError, Counters, ErrorPolicy, Preparation, Stopped, Then,
};
use tenure_sdk::grant::Resource;
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::resource::Singleton;
use tenure_sdk::session::CoordinatorClient;
use tenure_sdk::sink::BoxError;
use tenure_sdk::source::ResetPolicy;
use tenure_sdk::testing::{MemorySink, MemorySource};
use tenure_sdk::{Consumer, ConsumerBuilder, Limits, Owned, Stopper};
use tenure_tests::figures::tell;
use tokio::task::JoinHandle;
use tokio::time::Instant;

const PARTITIONS: u32 = 4;
const LONGEST: Duration = Duration::from_secs(20);

struct Rig {
    node: Node,
    group: GroupId,
    topic: TopicName,
    partitions: Vec<Partition>,
    source: MemorySource,
    _folder: tempfile::TempDir,
}

struct Running {
    run: JoinHandle<Result<Stopped, ConsumerError>>,
    stopper: Stopper,
    counters: Arc<Counters>,
}

impl Rig {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut settings =
            NodeSettings { data_dir: folder.path().to_owned(), ..NodeSettings::dev() };
        settings.deadlines.settle_ms = 50;
        let node = Node::start(settings).await.unwrap();
        let topic = TopicName::new("orders").unwrap();
        let source = MemorySource::new();
        let partitions = source.create_topic(&topic, PARTITIONS);
        let group = GroupId::new("billing").unwrap();
        Self { node, group, topic, partitions, source, _folder: folder }
    }

    fn append(&self, count: u32) {
        for number in 0..count {
            self.source.append(&self.topic, number % PARTITIONS, number.to_string()).unwrap();
        }
    }

    fn builder(&self, member: &str) -> ConsumerBuilder<CoordinatorOffsets> {
        let coordinators = vec![self.node.client_address().to_string()];
        let source = Arc::new(self.source.reader());
        Consumer::builder(self.group.clone(), vec![self.topic.clone()], source, coordinators)
            .member(MemberId::new(member).unwrap())
            .lease(LeaseSettings::for_ttl(3_000))
    }

    fn with_sink(&self, member: &str, sink: &MemorySink) -> Running {
        let consumer = self.builder(member).home(sink.clone()).build().unwrap();
        let (stopper, counters) = (consumer.stopper(), consumer.counters());
        Running { run: tokio::spawn(consumer.run(write_all)), stopper, counters }
    }

    fn with_coordinator(&self, member: &str) -> Running {
        let consumer = self.builder(member).build().unwrap();
        let (stopper, counters) = (consumer.stopper(), consumer.counters());
        Running { run: tokio::spawn(consumer.run(do_all)), stopper, counters }
    }

    fn rows(&self, sink: &MemorySink) -> Vec<Vec<u64>> {
        let resources =
            self.partitions.iter().map(|partition| Resource::of_partition(&self.group, *partition));
        resources
            .map(|resource| sink.rows(&resource).iter().map(|row| row.offset.get()).collect())
            .collect()
    }
}

impl Running {
    async fn stop(self) -> Stopped {
        self.stopper.stop(Duration::from_secs(10));
        self.run.await.unwrap().unwrap()
    }
}

/// Rows and offset in one step.
async fn write_all(owned: Owned<MemorySink>) -> Result<(), BoxError> {
    let mut position = owned.resume();
    let (mut input, mut out) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        out.write(batch.records(), position, batch.next())?;
        position = batch.next();
    }
    Ok(())
}

async fn do_all(owned: Owned<CoordinatorOffsets>) -> Result<(), BoxError> {
    let (mut input, mut offsets) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        batch.iter().for_each(|record| offsets.done(record));
    }
    Ok(())
}

async fn until(what: &str, met: impl Fn() -> bool) -> Duration {
    let started = Instant::now();
    while !met() {
        assert!(started.elapsed() < LONGEST, "no {what} within {LONGEST:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    started.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_move_between_consumers_and_every_record_is_written_once() {
    let rig = Rig::new().await;
    let sink = MemorySink::new("rows");
    let written = || rig.rows(&sink).iter().map(Vec::len).sum::<usize>();
    rig.append(400);
    let ann = rig.with_sink("ann", &sink);
    let first = until("first rows", || written() == 400).await;
    let bob = rig.with_sink("bob", &sink);
    let moved = until("partitions at bob", || bob.counters.acquired() == 2).await;
    assert_eq!(ann.counters.handoffs(), 2, "ann gives up no more than bob takes");
    rig.append(400);
    until("rows of both", || written() == 800).await;
    assert!(bob.counters.records_delivered() > 0);
    let stopped = ann.stop().await;
    assert!(stopped.clean, "{stopped:?}");
    rig.append(400);
    let taken = until("rows of bob alone", || written() == 1200).await;
    assert_eq!(bob.counters.acquired(), 4);
    let stopped = bob.stop().await;
    assert!(stopped.clean, "{stopped:?}");
    for offsets in rig.rows(&sink) {
        assert_eq!(offsets, (0..300).collect::<Vec<_>>(), "each once, in order");
    }
    tell(format_args!(
        "first rows after {first:?}, two moves after {moved:?}, the rest after {taken:?}"
    ));
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offsets_at_the_coordinator_carry_over_from_consumer_to_consumer() {
    let rig = Rig::new().await;
    rig.append(400);
    let ann = rig.with_coordinator("ann");
    until("all records", || ann.counters.records_delivered() == 400).await;
    assert!(ann.counters.commits() >= u64::from(PARTITIONS));
    let stopped = ann.stop().await;
    assert!(stopped.clean, "{stopped:?}");
    let state = rig.node.raft().with_machine(|machine| machine.state().clone());
    for partition in &rig.partitions {
        let committed = state.committed(&rig.group, *partition).unwrap().map(|c| c.next_offset);
        assert_eq!(committed, Some(NextOffset::new(100).unwrap()));
    }
    rig.append(40);
    let bob = rig.with_coordinator("bob");
    until("the new records", || bob.counters.records_delivered() == 40).await;
    assert_eq!(bob.counters.refused_by_coordinator(), 0);
    bob.stop().await;
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_of_an_offset_is_read_by_the_next_owner_and_by_anyone_who_fetches() {
    let rig = Rig::new().await;
    rig.append(PARTITIONS);
    let found = Arc::new(Mutex::new(Vec::new()));
    let run = |member: &str, metadata: &'static str| {
        let consumer = rig.builder(member).build().unwrap();
        let (stopper, counters) = (consumer.stopper(), consumer.counters());
        let found = Arc::clone(&found);
        let handler = move |owned: Owned<CoordinatorOffsets>| {
            let found = Arc::clone(&found);
            async move {
                let (mut input, mut offsets) = owned.split();
                let before = offsets.committed_metadata().await?;
                found.lock().unwrap().push(String::from_utf8(before)?);
                while let Some(record) = input.next_record().await {
                    offsets.done(&record);
                }
                // The last offset is on its way already, without it.
                Ok(offsets.set_metadata(metadata)?)
            }
        };
        Running { run: tokio::spawn(consumer.run(handler)), stopper, counters }
    };
    let owners = [("ann", "of ann", "", 4), ("bob", "of bob", "of ann", 0)];
    for (member, metadata, before, delivered) in owners {
        let running = run(member, metadata);
        until("all partitions and records", || {
            found.lock().unwrap().len() == PARTITIONS as usize
                && running.counters.records_delivered() == delivered
        })
        .await;
        assert!(found.lock().unwrap().drain(..).all(|found| found == before), "{member}");
        assert!(running.stop().await.clean);
    }
    let client = CoordinatorClient::new(vec![rig.node.client_address().to_string()]);
    let fetched = client.fetch(&rig.group, &rig.partitions, LONGEST).await.unwrap();
    assert_eq!(fetched.len(), PARTITIONS as usize);
    for offset in fetched {
        assert_eq!(
            (offset.metadata.as_slice(), offset.next_offset),
            (&b"of bob"[..], NextOffset::new(1).ok())
        );
    }
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partition_that_appears_later_starts_at_its_earliest_record_whatever_the_policy() {
    let rig = Rig::new().await;
    let sink = MemorySink::new("rows");
    rig.append(40);
    let consumer = rig
        .builder("ann")
        .reset_policy(ResetPolicy::Latest)
        .topics_interval(Duration::from_millis(50))
        .home(sink.clone())
        .build()
        .unwrap();
    let (stopper, counters) = (consumer.stopper(), consumer.counters());
    let ann = Running { run: tokio::spawn(consumer.run(write_all)), stopper, counters };
    until("all partitions acquired", || ann.counters.acquired() == u64::from(PARTITIONS)).await;
    assert_eq!(
        rig.rows(&sink).iter().map(Vec::len).sum::<usize>(),
        0,
        "known ones start at the end"
    );
    // The records are there before anybody owns the new partition.
    let grown = rig.source.create_topic(&rig.topic, PARTITIONS + 1)[PARTITIONS as usize];
    for number in 0..10 {
        rig.source.append(&rig.topic, PARTITIONS, number.to_string()).unwrap();
    }
    let resource = Resource::of_partition(&rig.group, grown);
    until("rows of the new partition", || sink.rows(&resource).len() == 10).await;
    assert!(ann.stop().await.clean);
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_handlers_go_on_under_the_same_grant_and_their_commits_are_taken() {
    let rig = Rig::new().await;
    rig.append(400);
    let backoff = Backoff { first: Duration::from_millis(5), max: Duration::from_millis(20) };
    let letters = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&letters);
    let policy = ErrorPolicy::retry(2, backoff).then(Then::dead_letter(move |letter| {
        kept.lock().unwrap().push(letter.record.offset.get());
        std::future::ready(Ok(()))
    }));
    let consumer = rig.builder("ann").on_error(policy).build().unwrap();
    let (stopper, counters) = (consumer.stopper(), consumer.counters());
    let failed_once = Arc::new(Mutex::new(BTreeSet::new()));
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let failed_once = Arc::clone(&failed_once);
        async move {
            let (mut input, mut offsets) = owned.split();
            while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                for record in &batch {
                    let offset = record.offset.get();
                    let is_new = || failed_once.lock().unwrap().insert(record.idempotency_key());
                    if offset == 50 || (offset % 20 == 7 && is_new()) {
                        return Err("no connection".into());
                    }
                    offsets.done(record);
                }
            }
            Ok::<(), BoxError>(())
        }
    };
    let ann = Running { run: tokio::spawn(consumer.run(handler)), stopper, counters };
    let committed = |partition: &Partition| {
        let state = rig.node.raft().with_machine(|machine| machine.state().clone());
        state.committed(&rig.group, *partition).ok().flatten().map(|c| c.next_offset.get())
    };
    until("all offsets committed", || rig.partitions.iter().all(|p| committed(p) == Some(100)))
        .await;
    assert_eq!(*letters.lock().unwrap(), [50; PARTITIONS as usize]);
    assert_eq!(ann.counters.acquired(), u64::from(PARTITIONS), "no partition was given back");
    assert_eq!(ann.counters.refused_by_coordinator(), 0);
    // Five records of each partition fail once, and one always: it is tried three times.
    assert_eq!(ann.counters.handler_failures(), u64::from(PARTITIONS) * (5 + 3));
    assert!(ann.stop().await.clean);
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_goes_on_until_the_next_one_is_prepared_and_nothing_is_read_twice() {
    let rig = Rig::new().await;
    rig.append(400);
    let ann = rig.with_coordinator("ann");
    let committed = || {
        let state = rig.node.raft().with_machine(|machine| machine.state().clone());
        let of = |partition: &Partition| {
            state.committed(&rig.group, *partition).ok().flatten().map(|c| c.next_offset.get())
        };
        rig.partitions.iter().filter_map(of).sum::<u64>()
    };
    until("first records", || committed() == 400).await;
    let go = Arc::new(tokio::sync::Semaphore::new(0));
    let (waits, begun) = (Arc::clone(&go), Arc::new(Mutex::new(0)));
    let begins = Arc::clone(&begun);
    let prepare = move |preparation: Preparation| {
        let waits = Arc::clone(&waits);
        *begins.lock().unwrap() += 1;
        async move {
            waits.acquire().await?.forget();
            Ok(preparation.is_early())
        }
    };
    let own = |owned: Owned<CoordinatorOffsets>, early: bool| async move {
        if early { do_all(owned).await } else { Err("was not prepared early".into()) }
    };
    let consumer = rig.builder("bob").build().unwrap();
    let (stopper, counters) = (consumer.stopper(), consumer.counters());
    let run = tokio::spawn(consumer.run_warm(prepare, own));
    let bob = Running { run, stopper, counters };
    until("two preparations", || *begun.lock().unwrap() == 2).await;
    rig.append(400);
    until("records of ann, who still owns all", || committed() == 800).await;
    assert_eq!((ann.counters.handoffs(), bob.counters.acquired()), (0, 0));
    go.add_permits(2);
    let moved = until("partitions at bob", || bob.counters.acquired() == 2).await;
    rig.append(400);
    until("records of both", || committed() == 1200).await;
    assert_eq!(bob.counters.continued_early(), 2, "what was read ahead went on");
    assert_eq!(bob.counters.handler_failures(), 0);
    let delivered = ann.counters.records_delivered() + bob.counters.records_delivered();
    assert_eq!(delivered, 1200, "each once");
    tell(format_args!("two prepared moves after {moved:?}"));
    ann.stop().await;
    bob.stop().await;
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_at_a_time_leads_and_the_next_one_follows_under_a_higher_epoch() {
    let rig = Rig::new().await;
    let led = Arc::new(Mutex::new(Vec::new()));
    let election = |member: &str| {
        let nodes = vec![rig.node.client_address().to_string()];
        let name = TopicName::new("reindex").unwrap();
        let member = MemberId::new(member).unwrap();
        let election = Singleton::new(GroupId::new("jobs").unwrap(), name, nodes)
            .with(|consumer| consumer.member(member).lease(LeaseSettings::for_ttl(3_000)))
            .build()
            .unwrap();
        let (stopper, led) = (election.stopper(), Arc::clone(&led));
        let run = tokio::spawn(election.run(move |leading| {
            let led = Arc::clone(&led);
            async move {
                led.lock().unwrap().push((leading.grant().member.clone(), leading.grant().epoch));
                leading.ended().await;
                Ok(())
            }
        }));
        (stopper, run)
    };
    let (ann_stops, ann) = election("ann");
    until("a leader", || led.lock().unwrap().len() == 1).await;
    let (bob_stops, bob) = election("bob");
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(led.lock().unwrap().len(), 1, "one leads");
    ann_stops.stop(Duration::from_secs(5));
    assert!(ann.await.unwrap().unwrap().clean);
    until("the next leader", || led.lock().unwrap().len() == 2).await;
    let led = led.lock().unwrap().clone();
    assert_eq!((led[0].0.as_str(), led[1].0.as_str()), ("ann", "bob"));
    assert!(led[0].1 < led[1].1, "{led:?}");
    bob_stops.stop(Duration::from_secs(5));
    assert!(bob.await.unwrap().unwrap().clean);
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pattern_takes_topics_in_as_they_appear_and_moves_nothing_else() {
    let rig = Rig::new().await;
    rig.append(40);
    let consumer = Consumer::builder(
        rig.group.clone(),
        vec![],
        Arc::new(rig.source.reader()),
        vec![rig.node.client_address().to_string()],
    )
    .topics_matching("orders.*")
    .topics_interval(Duration::from_millis(50))
    .lease(LeaseSettings::for_ttl(3_000))
    .build()
    .unwrap();
    let (stopper, counters) = (consumer.stopper(), consumer.counters());
    let ann = Running { run: tokio::spawn(consumer.run(do_all)), stopper, counters };
    until("the first records", || ann.counters.records_delivered() == 40).await;
    let later = TopicName::new("orders-later").unwrap();
    rig.source.create_topic(&later, 2);
    rig.source.append(&later, 1, "x").unwrap();
    until("the record of the new topic", || ann.counters.records_delivered() == 41).await;
    until("both of its partitions", || ann.counters.acquired() >= u64::from(PARTITIONS) + 2).await;
    assert_eq!(ann.counters.acquired(), u64::from(PARTITIONS) + 2, "none was acquired twice");
    assert!(ann.stop().await.clean);
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_by_name_moves_the_offset_back_once_and_the_handler_reads_on_from_there() {
    let rig = Rig::new().await;
    rig.append(40);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    let first = rig.partitions[0];
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let notes = Arc::clone(&notes);
        async move {
            let is_first = owned.grant().partition == first;
            if is_first {
                notes.lock().unwrap().push(owned.resume().get());
            }
            let (mut input, mut offsets) = owned.split();
            while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                batch.iter().for_each(|record| offsets.done(record));
                if is_first && batch.next().get() == 10 {
                    let name = RequestId::new("prices-were-wrong").unwrap();
                    let to = NextOffset::new(4).unwrap();
                    return Err(offsets.rewind(to, &name).await?.into());
                }
            }
            Ok::<(), BoxError>(())
        }
    };
    let consumer = rig.builder("ann").build().unwrap();
    let (stopper, counters) = (consumer.stopper(), consumer.counters());
    let ann = Running { run: tokio::spawn(consumer.run(handler)), stopper, counters };
    until("three runs", || seen.lock().unwrap().len() == 3).await;
    assert_eq!(*seen.lock().unwrap(), [0, 4, 10], "back once, then on");
    assert_eq!(ann.counters.handler_failures(), 0);
    assert_eq!(ann.counters.acquired(), u64::from(PARTITIONS), "under one grant");
    assert!(ann.stop().await.clean);
    let state = rig.node.raft().with_machine(|machine| machine.state().clone());
    let committed = state.committed(&rig.group, first).unwrap().map(|c| c.next_offset.get());
    assert_eq!(committed, Some(10));
    rig.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sink_that_remembers_a_lost_cluster_refuses_the_new_one_until_the_epoch_floor_is_raised() {
    let sink = MemorySink::new("rows");
    let lost = Rig::new().await;
    raise_floor(&lost, 40_000).await;
    lost.append(40);
    let ann = lost.with_sink("ann", &sink);
    until("rows of the lost cluster", || lost.rows(&sink).concat().len() == 40).await;
    ann.stop().await;
    // The same records, the same sink, and a cluster that has forgotten what it gave.
    let Rig { topic, group, partitions, source, node, .. } = lost;
    node.shutdown().await;
    let rig = Rig { topic, group, partitions, source, ..Rig::new().await };
    rig.append(40);
    let bob = rig.with_sink("bob", &sink);
    until("refused grants", || bob.counters.refused_by_sink() >= u64::from(PARTITIONS)).await;
    assert_eq!(bob.counters.acquired(), 0);
    let seen = rig.node.raft().with_machine(|machine| machine.state().epoch_counter);
    assert!(seen < 1_000, "{seen} epochs: a refused grant is given again and again");
    // Whoever looks is told what has happened and what to do; each partition names what its own fence has seen.
    let highest = 40_000 + u64::from(PARTITIONS);
    let steps = |seen: u64| {
        let told = format!("epoch above the counter: a sink has seen e{seen}, ");
        (told, format!("`tenure raise-epoch-floor {seen}`"))
    };
    for seen in 40_001..=highest {
        let (told, step) = steps(seen);
        let is_told = |cause: &String| cause.starts_with(&told) && cause.contains(&step);
        let started = Instant::now();
        while !causes(&rig).await.iter().any(is_told) {
            assert!(started.elapsed() < LONGEST, "e{seen}: {:?}", causes(&rig).await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert_eq!(status(&rig).await.epoch_seen, highest);
    raise_floor(&rig, highest).await;
    until("rows of the new cluster", || rig.rows(&sink).concat().len() == 80).await;
    assert_eq!(status(&rig).await.epoch_seen, 0);
    let causes = causes(&rig).await;
    assert!(causes.iter().all(|cause| !cause.contains("above the counter")), "{causes:?}");
    bob.stop().await;
    rig.node.shutdown().await;
}

async fn status(rig: &Rig) -> v1::ClusterStatusResponse {
    let address = format!("http://{}", rig.node.client_address());
    let mut cluster = ClusterClient::connect(address).await.unwrap();
    cluster.status(v1::ClusterStatusRequest { local: false }).await.unwrap().into_inner()
}

async fn causes(rig: &Rig) -> Vec<String> {
    let address = format!("http://{}", rig.node.client_address());
    let mut ownership = OwnershipClient::connect(address).await.unwrap();
    let request = v1::DescribeGroupRequest { group: rig.group.to_string() };
    let described = ownership.describe_group(request).await.unwrap().into_inner();
    described.partitions.into_iter().map(|partition| partition.cause).collect()
}

async fn raise_floor(rig: &Rig, floor: u64) {
    let address = format!("http://{}", rig.node.client_address());
    let mut operator = OperatorClient::connect(address).await.unwrap();
    let context = Some(v1::OperatorContext {
        reason: "all nodes were lost".to_owned(),
        actor: "test".to_owned(),
        ..v1::OperatorContext::default()
    });
    operator.raise_epoch_floor(v1::RaiseEpochFloorRequest { context, floor }).await.unwrap();
}
