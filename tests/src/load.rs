//! Members that commit offsets without a pause, and remember what was acknowledged.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tenure_model::{
    CommitSequence, GroupId, LeaseSettings, MemberId, NextOffset, Partition, TopicId, TopicName,
};
use tenure_sdk::grant::Grant;
use tenure_sdk::session::{
    CallError, CoordinatorClient, OffsetCommit, ReleaseReason, Session, SessionConfig,
    SessionEvent, SessionHandle,
};
use tenure_sdk::source::TopicInfo;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::servers::{unique_name, wait_until};

/// Longest wait for one commit; longer than any election here.
const CALL: Duration = Duration::from_secs(30);
/// Longest wait for the members to share the partitions.
const START: Duration = Duration::from_secs(60);
/// Time for a member to leave.
const LEAVE: Duration = Duration::from_secs(5);

/// What a load consists of.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Members of the group.
    pub members: usize,
    /// Partitions of the topic.
    pub partitions: u32,
    /// Ttl of every member, in milliseconds.
    pub ttl_ms: u64,
    /// Pause of a member between two commits.
    pub pause: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        let pause = Duration::from_millis(2);
        Self { members: 3, partitions: 12, ttl_ms: 2_000, pause }
    }
}

/// Members of one group, in this process. They leave when it is dropped.
pub struct Load {
    runtime: Runtime,
    group: GroupId,
    client: CoordinatorClient,
    told: Told,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

/// What the members were told.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// When commits were acknowledged, in order.
    pub acknowledged_at: Vec<Instant>,
    /// The last offset acknowledged of each partition.
    pub acknowledged: BTreeMap<Partition, u64>,
    /// Epochs under which each partition was held.
    pub epochs: BTreeMap<Partition, Vec<u64>>,
    /// Losses, ends and refusals: what a member that did nothing wrong should never see.
    pub complaints: Vec<String>,
}

#[derive(Clone, Default)]
struct Told(Arc<Mutex<Report>>);

impl Told {
    fn lock(&self) -> MutexGuard<'_, Report> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load").field("group", &self.group).finish_non_exhaustive()
    }
}

impl Load {
    /// Starts the members and waits until they hold every partition and commit.
    ///
    /// # Panics
    ///
    /// When they do not in time.
    #[must_use]
    pub fn start(addresses: &[String], shape: Shape) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let group: GroupId = unique_name("load").parse().expect("a name");
        let client = CoordinatorClient::new(addresses.to_vec());
        let told = Told::default();
        let (stop, stopped) = watch::channel(false);
        let tasks = (0..shape.members)
            .map(|_| {
                let member = Member::join(addresses, &group, shape, told.clone());
                runtime.spawn(member.run(stopped.clone()))
            })
            .collect();
        let load = Self { runtime, group, client, told, stop, tasks };
        let all = shape.partitions as usize;
        let shared = wait_until(START, || load.told.lock().acknowledged.len() == all);
        assert!(shared, "the members do not start: {:?}", load.report());
        // Those that came first have handed over: from here on nothing should move.
        let still = wait_until(START, || {
            let before = load.told.lock().epochs.clone();
            std::thread::sleep(Duration::from_millis(1_500));
            load.told.lock().epochs == before
        });
        assert!(still, "the members do not settle: {:?}", load.report());
        load
    }

    /// Group of the members.
    #[must_use]
    pub const fn group(&self) -> &GroupId {
        &self.group
    }

    /// What the members were told so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.told.lock().clone()
    }

    /// Waits until `count` more commits were acknowledged.
    ///
    /// # Panics
    ///
    /// When they are not in time.
    pub fn wait_for_more(&self, count: usize) {
        let before = self.told.lock().acknowledged_at.len();
        let more = || self.told.lock().acknowledged_at.len() >= before + count;
        assert!(wait_until(START, more), "no more commits: {:?}", self.told.lock().complaints);
    }

    /// Ends the commits, and compares what was acknowledged with what the coordinator has.
    ///
    /// # Panics
    ///
    /// When something acknowledged is not there.
    #[must_use]
    pub fn finish(mut self) -> Report {
        self.stop.send_replace(true);
        for task in std::mem::take(&mut self.tasks) {
            self.runtime.block_on(task).expect("a member does not panic");
        }
        let report = self.report();
        let found = self.runtime.block_on(self.client.fetch(&self.group, &[], CALL));
        let found: BTreeMap<Partition, u64> = found
            .expect("the offsets are read")
            .into_iter()
            .map(|offset| (offset.partition, offset.next_offset.map_or(0, NextOffset::get)))
            .collect();
        for (partition, acknowledged) in &report.acknowledged {
            let there = found.get(partition).copied().unwrap_or_default();
            assert!(
                there >= *acknowledged,
                "{partition}: {acknowledged} was acknowledged, {there} is there"
            );
        }
        report
    }
}

impl Report {
    /// Longest time without an acknowledged commit since `from`.
    #[must_use]
    pub fn longest_gap(&self, from: Instant) -> Duration {
        let later = self.acknowledged_at.iter().copied().filter(|at| *at > from);
        let times: Vec<Instant> = std::iter::once(from).chain(later).collect();
        let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
        gaps.max().unwrap_or(Duration::MAX)
    }
}

struct Member {
    id: MemberId,
    group: GroupId,
    shape: Shape,
    handle: SessionHandle,
    events: UnboundedReceiver<SessionEvent>,
    client: CoordinatorClient,
    held: BTreeMap<Partition, Grant>,
    sequence: u64,
    told: Told,
}

impl Member {
    fn join(addresses: &[String], group: &GroupId, shape: Shape, told: Told) -> Self {
        let topic: TopicName = "orders".parse().expect("a name");
        let id: MemberId = unique_name("member").parse().expect("a name");
        let mut config = SessionConfig::new(addresses.to_vec(), group.clone(), vec![topic.clone()]);
        config.member = Some(id.clone());
        config.lease = LeaseSettings::for_ttl(shape.ttl_ms);
        config.rejoin = false;
        let (handle, events) = Session::start(config);
        let topic_id = TopicId::of_name(&topic);
        let partition_count = shape.partitions;
        handle.report_topics(vec![TopicInfo { topic, topic_id, partition_count }]);
        let client = CoordinatorClient::new(addresses.to_vec());
        let held = BTreeMap::new();
        Self { id, group: group.clone(), shape, handle, events, client, held, sequence: 0, told }
    }

    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        while !*stop.borrow() {
            while let Ok(event) = self.events.try_recv() {
                self.take(event).await;
            }
            if self.held.is_empty() {
                tokio::select! {
                    event = self.events.recv() => match event {
                        Some(event) => self.take(event).await,
                        None => return,
                    },
                    _ = stop.changed() => {}
                }
                continue;
            }
            self.commit().await;
            tokio::time::sleep(self.shape.pause).await;
        }
        self.handle.leave(LEAVE).await;
    }

    async fn take(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Joined { .. }
            | SessionEvent::Prepare(_)
            | SessionEvent::PreparationEnded { .. }
            | SessionEvent::LeaseAtRisk { .. }
            | SessionEvent::LeaseRenewed => {}
            SessionEvent::Granted(grant) => self.acquire(grant).await,
            SessionEvent::Revoked { partition, epoch, .. } => {
                self.held.remove(&partition);
                let reason = ReleaseReason::Revoked;
                self.handle.release(partition, epoch, None, reason, String::new());
            }
            event @ (SessionEvent::Lost { .. } | SessionEvent::Ended { .. }) => {
                if let SessionEvent::Lost { partition, .. } = &event {
                    self.held.remove(partition);
                }
                self.complain(format!("{event:?}"));
            }
        }
    }

    async fn acquire(&mut self, grant: Grant) {
        let named = [(grant.partition, grant.epoch)];
        let verified = self.client.verify(&self.group, &self.id, &named, CALL).await;
        let verdict = verified.map(|mut verdicts| verdicts.remove(0));
        match verdict {
            Ok(Ok(verified)) => {
                let resume = verified.next_offset.unwrap_or(NextOffset::ZERO);
                self.handle.acquired(grant.partition, grant.epoch, true, resume);
                {
                    let mut told = self.told.lock();
                    told.epochs.entry(grant.partition).or_default().push(grant.epoch.get());
                    let known = told.acknowledged.get(&grant.partition).copied().unwrap_or(0);
                    if resume.get() < known {
                        told.complaints.push(format!(
                            "{} resumes {} at {resume}, {known} was acknowledged",
                            self.id, grant.partition
                        ));
                    }
                }
                self.held.insert(grant.partition, grant);
            }
            Ok(Err(refused)) => self.complain(format!("verify: {refused}")),
            Err(error) => self.complain(format!("verify: {error}")),
        }
    }

    /// Commits all that it holds by one request.
    async fn commit(&mut self) {
        self.sequence += 1;
        // Now and then with metadata: a rule of a later level is about what becomes of it.
        let metadata = if self.sequence.is_multiple_of(3) {
            self.sequence.to_string().into_bytes()
        } else {
            vec![]
        };
        let next = self.next_offset();
        let commits: Vec<OffsetCommit> = self
            .held
            .values()
            .map(|grant| OffsetCommit {
                partition: grant.partition,
                epoch: grant.epoch,
                sequence: CommitSequence(self.sequence),
                next_offset: next,
                metadata: metadata.clone(),
            })
            .collect();
        let answer = self.client.commit(&self.group, &self.id, commits.clone(), CALL).await;
        let mut told = self.told.lock();
        match answer {
            Ok(verdicts) => {
                for (commit, verdict) in commits.iter().zip(verdicts) {
                    match verdict {
                        Ok(()) => {
                            told.acknowledged.insert(commit.partition, commit.next_offset.get());
                        }
                        Err(refused) => told.complaints.push(format!("commit: {refused}")),
                    }
                }
                told.acknowledged_at.push(Instant::now());
            }
            Err(CallError::Refused(refused)) => told.complaints.push(format!("commit: {refused}")),
            Err(error @ CallError::Unknown { .. }) => {
                told.complaints.push(format!("commit: {error}"));
            }
        }
    }

    /// Above everything that was acknowledged of what it holds, also by an owner before it.
    fn next_offset(&self) -> NextOffset {
        let told = self.told.lock();
        let known = self.held.keys().filter_map(|partition| told.acknowledged.get(partition));
        let next = known.max().map_or(1, |offset| offset + 1);
        NextOffset::new(next.max(self.sequence)).expect("a small offset")
    }

    fn complain(&self, text: String) {
        self.told.lock().complaints.push(format!("{}: {text}", self.id));
    }
}
