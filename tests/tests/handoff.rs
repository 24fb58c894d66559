//! Handoffs over three coordinator processes that are killed: one owner in the end, and nothing that was acknowledged
//! is lost. Members are sessions of the SDK in the test's own process; there is no Kafka in it.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tenure_model::{
    CommitSequence, Epoch, ErrorCode, GroupId, LeaseSettings, MemberId, NextOffset, Partition,
    TopicId, TopicName,
};
use tenure_proto::v1;
use tenure_sdk::grant::Grant;
use tenure_sdk::session::{
    CoordinatorClient, OffsetCommit, Refused, ReleaseReason, Session, SessionConfig, SessionEvent,
    SessionHandle, VerifyOk,
};
use tenure_sdk::source::TopicInfo;
use tenure_tests::cluster::{Cluster, block_on};
use tenure_tests::figures::tell;
use tenure_tests::servers::{unique_name, wait_until};
use tokio::sync::mpsc::UnboundedReceiver;

const NODES: u64 = 3;
const PARTITIONS: u32 = 6;
/// Longer than any election here, and than a machine stands still that others fill: no membership ends.
const TTL_MS: u64 = 60_000;
const TIMEOUT: Duration = Duration::from_secs(60);
const CALL_MAX: Duration = Duration::from_secs(30);

fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

/// A member that does what it is told, and no more.
struct Member {
    id: MemberId,
    group: GroupId,
    handle: SessionHandle,
    events: UnboundedReceiver<SessionEvent>,
    client: CoordinatorClient,
    held: BTreeMap<Partition, Grant>,
    revoked: BTreeSet<Partition>,
    lost: Vec<String>,
    sequence: u64,
}

impl Member {
    fn join(cluster: &Cluster, group: &str, name: &str) -> Self {
        let topic: TopicName = "orders".parse().unwrap();
        let group: GroupId = group.parse().unwrap();
        let id: MemberId = unique_name(name).parse().unwrap();
        let mut config =
            SessionConfig::new(cluster.addresses().to_vec(), group.clone(), vec![topic.clone()]);
        config.member = Some(id.clone());
        config.lease = LeaseSettings::for_ttl(TTL_MS);
        config.rejoin = false;
        let (handle, events) = Session::start(config);
        let topic_id = TopicId::of_name(&topic);
        handle.report_topics(vec![TopicInfo { topic, topic_id, partition_count: PARTITIONS }]);
        let client = CoordinatorClient::new(cluster.addresses().to_vec());
        let (held, revoked, lost) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
        Self { id, group, handle, events, client, held, revoked, lost, sequence: 0 }
    }

    fn listen(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            match event {
                SessionEvent::Joined { .. }
                | SessionEvent::Prepare(_)
                | SessionEvent::PreparationEnded { .. }
                | SessionEvent::LeaseAtRisk { .. }
                | SessionEvent::LeaseRenewed => {}
                SessionEvent::Granted(grant) => {
                    self.held.insert(grant.partition, grant);
                }
                SessionEvent::Revoked { partition, .. } => {
                    self.revoked.insert(partition);
                }
                event @ (SessionEvent::Lost { .. } | SessionEvent::Ended { .. }) => {
                    self.lost.push(format!("{event:?}"));
                }
            }
        }
    }

    fn wait(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let done = wait_until(TIMEOUT, || {
            self.listen();
            condition(self)
        });
        assert!(done, "{} waits for {what}: {:?}, lost {:?}", self.id, self.held, self.lost);
    }

    fn verify(&self, partition: Partition, epoch: Epoch) -> Result<VerifyOk, Refused> {
        let grant = [(partition, epoch)];
        let verdicts = block_on(self.client.verify(&self.group, &self.id, &grant, CALL_MAX));
        verdicts.unwrap().remove(0)
    }

    fn commit(&mut self, grant: &Grant, next_offset: NextOffset) -> Result<(), Refused> {
        self.sequence += 1;
        let commit = OffsetCommit {
            partition: grant.partition,
            epoch: grant.epoch,
            sequence: CommitSequence(self.sequence),
            next_offset,
            metadata: Vec::new(),
        };
        let verdicts = self.client.commit(&self.group, &self.id, vec![commit], CALL_MAX);
        block_on(verdicts).unwrap().remove(0)
    }

    fn commit_all(&mut self, next_offset: NextOffset) {
        for grant in Vec::from_iter(self.held.values().cloned()) {
            self.commit(&grant, next_offset).unwrap();
        }
    }

    /// Verifies every grant, expects the resume point, and runs.
    fn take_up(&mut self, resume: Option<NextOffset>) {
        for grant in Vec::from_iter(self.held.values().cloned()) {
            let verified = self.verify(grant.partition, grant.epoch).unwrap();
            assert_eq!(verified.next_offset, resume, "{}", grant.partition);
            if resume.is_none() {
                self.commit(&grant, NextOffset::ZERO).unwrap();
            }
            let resume = resume.unwrap_or(NextOffset::ZERO);
            self.handle.acquired(grant.partition, grant.epoch, true, resume);
        }
    }

    fn release(&mut self, partition: Partition, last: NextOffset) -> Grant {
        let grant = self.held.remove(&partition).unwrap();
        let reason = ReleaseReason::Revoked;
        self.handle.release(partition, grant.epoch, Some(last), reason, String::new());
        grant
    }
}

/// When the raft leader is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// It is not.
    Never,
    /// The owner was asked for the partitions and has released none.
    Revoked,
    /// The owner has just said its releases.
    Released,
    /// The next owner has its grants and has verified none.
    Granted,
}

fn kill_the_raft_leader(cluster: &mut Cluster) {
    let (leader, _) = cluster.raft_leader();
    cluster.kill(leader);
}

/// Two members, half of the partitions on their way from one to the other, and the raft leader killed at `moment`.
fn hand_over(moment: Moment) {
    let mut cluster = Cluster::start(NODES);
    let group = unique_name("handoff");
    let mut ann = Member::join(&cluster, &group, "ann");
    ann.wait("all partitions", |ann| ann.held.len() == PARTITIONS as usize);
    ann.take_up(None);
    ann.commit_all(at(10));
    let mut bob = Member::join(&cluster, &group, "bob");
    ann.wait("half to be revoked", |ann| ann.revoked.len() == PARTITIONS as usize / 2);

    let killed = Instant::now();
    if moment == Moment::Revoked {
        kill_the_raft_leader(&mut cluster);
    }
    // The owner of a revoked partition may commit until it is cut over, the others all along.
    ann.commit_all(at(20));
    let moved: Vec<Grant> =
        ann.revoked.clone().into_iter().map(|partition| ann.release(partition, at(25))).collect();
    if moment == Moment::Released {
        kill_the_raft_leader(&mut cluster);
    }
    bob.wait("its half", |bob| bob.held.len() == moved.len());
    if moment == Moment::Granted {
        kill_the_raft_leader(&mut cluster);
    }
    bob.take_up(Some(at(25)));
    let took = killed.elapsed();

    for old in &moved {
        let new = &bob.held[&old.partition];
        assert!(new.epoch > old.epoch, "{:?} after {:?}", new.epoch, old.epoch);
        let refused = ann.commit(old, at(99)).unwrap_err();
        assert_eq!((refused.code, refused.current_epoch), (ErrorCode::Fenced, Some(new.epoch)));
        assert_eq!(ann.verify(old.partition, old.epoch).unwrap_err().code, ErrorCode::Fenced);
    }
    // The group has changed since these were granted; who kept its partition is not fenced.
    ann.commit_all(at(30));
    bob.commit_all(at(30));
    for grant in ann.held.values() {
        ann.verify(grant.partition, grant.epoch).unwrap();
    }
    ann.listen();
    assert!(ann.lost.is_empty() && bob.lost.is_empty(), "{:?} {:?}", ann.lost, bob.lost);

    let is_settled = |partition: &v1::PartitionInfo| {
        partition.state() == v1::OwnershipState::Held
            && partition.acquired
            && partition.committed == Some(30)
    };
    let mut described = v1::DescribeGroupResponse::default();
    let settled = wait_until(TIMEOUT, || {
        described = cluster.describe(&group).unwrap();
        described.partitions.iter().all(is_settled)
    });
    assert!(settled, "{described:#?}\n{}", cluster.output());
    assert_eq!(described.partitions.len(), PARTITIONS as usize);
    for member in [&ann, &bob] {
        let owned = described.partitions.iter().filter(|found| found.member == member.id.as_str());
        let owned: BTreeSet<u64> = owned.map(|found| found.epoch).collect();
        let held = member.held.values().map(|grant| grant.epoch.get()).collect();
        assert_eq!(owned, held, "{}", member.id);
    }
    let count = moved.len();
    tell(format_args!("{moment:?}: {count} partitions in {took:?} after the revocation"));
}

#[test]
fn after_a_handoff_the_old_epoch_is_refused_by_the_current_one_and_a_kept_one_is_accepted() {
    hand_over(Moment::Never);
}

#[test]
fn raft_leader_killed_after_the_revocation_leaves_one_owner_and_every_acknowledged_commit() {
    hand_over(Moment::Revoked);
}

#[test]
fn raft_leader_killed_at_the_release_leaves_one_owner_and_every_acknowledged_commit() {
    hand_over(Moment::Released);
}

#[test]
fn raft_leader_killed_before_the_acquire_leaves_one_owner_and_every_acknowledged_commit() {
    hand_over(Moment::Granted);
}

/// A group without what only the raft leader of the moment knows, and without the log's length.
fn lasting(cluster: &Cluster, group: &str) -> v1::DescribeGroupResponse {
    let mut described = cluster.describe(group).unwrap();
    described.revision = 0;
    for member in &mut described.members {
        member.lease_remaining_ms = None;
    }
    for partition in &mut described.partitions {
        partition.position = None;
        partition.error.clear();
    }
    described
}

#[test]
fn cluster_that_was_killed_and_started_from_disk_has_the_same_state() {
    let mut cluster = Cluster::start(NODES);
    let group = unique_name("restart");
    let mut ann = Member::join(&cluster, &group, "ann");
    ann.wait("all partitions", |ann| ann.held.len() == PARTITIONS as usize);
    ann.take_up(None);
    ann.commit_all(at(7));
    let mut bob = Member::join(&cluster, &group, "bob");
    ann.wait("half to be revoked", |ann| ann.revoked.len() == PARTITIONS as usize / 2);
    for partition in ann.revoked.clone() {
        ann.release(partition, at(8));
    }
    bob.wait("its half", |bob| bob.held.len() == PARTITIONS as usize / 2);
    bob.take_up(Some(at(8)));
    bob.commit_all(at(9));
    let is_acquired = |described: &v1::DescribeGroupResponse| {
        described.partitions.iter().all(|partition| partition.acquired)
    };
    assert!(wait_until(TIMEOUT, || is_acquired(&lasting(&cluster, &group))));
    let before = lasting(&cluster, &group);

    for node in cluster.running() {
        cluster.kill(node);
    }
    (1..=NODES).for_each(|node| cluster.run(node));
    // Until the election a node names the raft leader that it followed before: nothing is said of the term here.
    let _leader = cluster.raft_leader();
    assert_eq!(lasting(&cluster, &group), before);

    ann.commit_all(at(10));
    bob.commit_all(at(10));
    ann.listen();
    bob.listen();
    assert!(ann.lost.is_empty() && bob.lost.is_empty(), "{:?} {:?}", ann.lost, bob.lost);
}
