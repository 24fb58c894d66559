//! Nodes in this process, and a raw client of theirs over real gRPC.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use tenure_coordinator::settings::{LeaseLengths, Peer, StartMode};
use tenure_coordinator::{Node, NodeSettings};
use tenure_core::State;
use tenure_model::{TopicId, TopicName};
use tenure_proto::v1::membership_client::MembershipClient;
use tenure_proto::v1::offsets_client::OffsetsClient;
use tenure_proto::v1::operator_client::OperatorClient;
use tenure_proto::v1::ownership_client::OwnershipClient;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tenure_proto::{error_of_status, v1};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// No condition of these tests takes longer on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const TTL_MS: u64 = 1_500;

/// Waits until `look` finds something.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut look: impl FnMut() -> F,
) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < end, "not in time: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Settings of one node that founds its own cluster.
pub(crate) fn lone(folder: &Path) -> NodeSettings {
    let mut settings = NodeSettings { data_dir: folder.to_owned(), ..NodeSettings::dev() };
    hasten(&mut settings);
    settings
}

fn hasten(settings: &mut NodeSettings) {
    settings.lease =
        LeaseLengths { ttl_ms: TTL_MS, heartbeat_interval_ms: 400, clock_drift_max_ms: 75 };
    settings.deadlines.settle_ms = 50;
    settings.deadlines.silence_slack_ms = 200;
    settings.deadlines.drain_deadline_ms = 5_000;
}

/// A port that was free a moment ago, below those that outgoing connections take meanwhile.
fn free_port() -> SocketAddr {
    loop {
        let port = 10_000 + rand::random::<u16>() % 20_000;
        if let Ok(listener) = std::net::TcpListener::bind(("127.0.0.1", port)) {
            return listener.local_addr().unwrap();
        }
    }
}

/// Settings of `count` nodes of one cluster, each with a folder of its own below `folder`.
pub(crate) fn cluster(folder: &Path, count: u64) -> Vec<NodeSettings> {
    let addresses: Vec<(SocketAddr, SocketAddr)> =
        (0..count).map(|_| (free_port(), free_port())).collect();
    let peers: Vec<Peer> = (1..)
        .zip(&addresses)
        .map(|(node, (client, raft))| Peer {
            node,
            raft_address: raft.to_string(),
            client_address: client.to_string(),
        })
        .collect();
    (1..)
        .zip(addresses)
        .map(|(node, (client, raft))| {
            let mut settings = NodeSettings {
                node,
                data_dir: folder.join(format!("node-{node}")),
                client_listen: client,
                raft_listen: raft,
                peers: peers.clone(),
                start: StartMode::Bootstrap,
                ..NodeSettings::dev()
            };
            hasten(&mut settings);
            settings
        })
        .collect()
}

/// Starts all nodes at once: founders wait for each other.
pub(crate) async fn start_all(settings: &[NodeSettings]) -> Vec<Node> {
    let starts = settings.iter().map(|settings| Node::start(settings.clone()));
    // The first that fails says why; the others would wait for it.
    let started = timeout(PATIENCE, futures::future::try_join_all(starts)).await;
    started.expect("all nodes start in time").unwrap()
}

/// Position of the node that leads.
pub(crate) async fn leader_of(nodes: &[Node]) -> usize {
    until("a raft leader", || async {
        nodes.iter().position(|node| node.raft().leadership().borrow().is_me)
    })
    .await
}

/// Waits until a node knows the raft leader: it may hear of it later than the leader itself.
pub(crate) async fn knows_the_leader(node: &Node) {
    until("the node to know the raft leader", || async {
        node.raft().leadership().borrow().leader_client_address.clone()
    })
    .await;
}

/// The replicated state of a node, without what only says how far it is.
pub(crate) fn state_of(node: &Node) -> State {
    node.raft().with_machine(|machine| machine.state().clone())
}

pub(crate) async fn channel(address: SocketAddr) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    until("a connection", || async { endpoint.connect().await.ok() }).await
}

/// Clients of all services of one node.
pub(crate) struct Client {
    pub(crate) membership: MembershipClient<Channel>,
    pub(crate) offsets: OffsetsClient<Channel>,
    pub(crate) ownership: OwnershipClient<Channel>,
    pub(crate) operator: OperatorClient<Channel>,
}

impl Client {
    pub(crate) async fn of(node: &Node) -> Self {
        let channel = channel(node.client_address()).await;
        Self {
            membership: MembershipClient::new(channel.clone()),
            offsets: OffsetsClient::new(channel.clone()),
            ownership: OwnershipClient::new(channel.clone()),
            operator: OperatorClient::new(channel),
        }
    }

    pub(crate) async fn open(&mut self, join: v1::Join) -> Result<Session, Status> {
        let mut session = self.stream().await?;
        session.send(Up::Join(join)).await;
        match session.next().await? {
            Some(Down::Joined(joined)) => {
                session.member_epoch = joined.member_epoch;
                session.assignment = joined.assignment.clone().unwrap();
                session.joined = joined;
                Ok(session)
            }
            other => panic!("a join is answered with joined, not {other:?}"),
        }
    }

    /// A session without a join.
    pub(crate) async fn stream(&mut self) -> Result<Session, Status> {
        let (up, messages) = mpsc::channel(64);
        let answer = self.membership.session(ReceiverStream::new(messages)).await?;
        Ok(Session {
            up,
            down: answer.into_inner(),
            sequence: 0,
            member_epoch: 0,
            assignment: v1::Assignment::default(),
            joined: v1::Joined::default(),
        })
    }

    pub(crate) async fn commit(
        &mut self,
        member: &str,
        assigned: &v1::Assigned,
        sequence: u64,
        next_offset: u64,
    ) -> Result<(), v1::Error> {
        let request = v1::CommitRequest {
            group: GROUP.to_owned(),
            member: member.to_owned(),
            commits: vec![v1::OffsetCommit {
                partition: assigned.partition.clone(),
                epoch: assigned.epoch,
                sequence,
                next_offset,
                metadata: vec![],
            }],
        };
        let answer = self.offsets.commit(request).await;
        let mut answer = answer.map_err(|status| error_of_status(&status))?.into_inner();
        answer.verdicts.remove(0).error.map_or(Ok(()), Err)
    }

    pub(crate) async fn committed(
        &mut self,
        partition: &v1::Partition,
    ) -> Result<Option<u64>, v1::Error> {
        let request =
            v1::FetchRequest { group: GROUP.to_owned(), partitions: vec![partition.clone()] };
        let answer = self.offsets.fetch(request).await;
        let mut answer = answer.map_err(|status| error_of_status(&status))?.into_inner();
        Ok(answer.offsets.remove(0).next_offset)
    }

    pub(crate) async fn describe(&mut self) -> v1::DescribeGroupResponse {
        let request = v1::DescribeGroupRequest { group: GROUP.to_owned() };
        self.ownership.describe_group(request).await.unwrap().into_inner()
    }
}

pub(crate) const GROUP: &str = "orders";
pub(crate) const TOPIC: &str = "orders-topic";

pub(crate) fn topic_id() -> TopicId {
    TopicId::of_name(&TopicName::new(TOPIC).unwrap())
}

pub(crate) fn partition(index: u32) -> v1::Partition {
    v1::Partition { topic_id: topic_id().to_string(), index }
}

pub(crate) fn join(member: &str, partition_count: u32) -> v1::Join {
    v1::Join {
        group: GROUP.to_owned(),
        member: member.to_owned(),
        topics: vec![TOPIC.to_owned()],
        report: vec![v1::TopicReport {
            topic: TOPIC.to_owned(),
            topic_id: topic_id().to_string(),
            partition_count,
        }],
        ..v1::Join::default()
    }
}

/// A join whose lease no busy machine outlasts.
pub(crate) fn steady(member: &str, partition_count: u32) -> v1::Join {
    v1::Join { ttl_ms: 30_000, ..join(member, partition_count) }
}

pub(crate) fn operator(reason: &str) -> Option<v1::OperatorContext> {
    Some(v1::OperatorContext {
        request_id: String::new(),
        reason: reason.to_owned(),
        actor: "test".to_owned(),
        dry_run: false,
    })
}

/// Waits, with heartbeats of both, until their assignments are as wanted.
pub(crate) async fn together_until(
    what: &str,
    one: &mut Session,
    other: &mut Session,
    wanted: impl Fn(&v1::Assignment, &v1::Assignment) -> bool,
) {
    let end = Instant::now() + PATIENCE;
    while !wanted(&one.assignment, &other.assignment) {
        assert!(Instant::now() < end, "not in time: {what}");
        one.heartbeat().await.unwrap();
        other.heartbeat().await.unwrap();
    }
}

/// One member's stream.
pub(crate) struct Session {
    pub(crate) up: mpsc::Sender<v1::SessionUp>,
    pub(crate) down: Streaming<v1::SessionDown>,
    pub(crate) sequence: u64,
    pub(crate) member_epoch: u64,
    pub(crate) assignment: v1::Assignment,
    pub(crate) joined: v1::Joined,
}

impl Session {
    pub(crate) async fn send(&mut self, up: Up) {
        // A session that has ended answers by its end.
        drop(self.up.send(v1::SessionUp { up: Some(up) }).await);
    }

    /// The next message; nothing at the end of the stream.
    pub(crate) async fn next(&mut self) -> Result<Option<Down>, Status> {
        let next = timeout(PATIENCE, self.down.message()).await.expect("an answer in time");
        let down = next?.map(|message| message.down.expect("this version knows the message"));
        if let Some(Down::Assignment(assignment)) = &down {
            self.take(assignment.clone());
        }
        Ok(down)
    }

    fn take(&mut self, assignment: v1::Assignment) {
        if assignment.version >= self.assignment.version {
            self.assignment = assignment;
        }
    }

    /// Sends a heartbeat and waits for its answer.
    pub(crate) async fn heartbeat(&mut self) -> Result<v1::HeartbeatAnswer, String> {
        let held = self.assignment.partitions.iter().map(|assigned| v1::HeldPartition {
            partition: assigned.partition.clone(),
            epoch: assigned.epoch,
            phase: v1::Phase::Running.into(),
            ..v1::HeldPartition::default()
        });
        let held = held.collect();
        self.heartbeat_with(held).await
    }

    pub(crate) async fn heartbeat_with(
        &mut self,
        held: Vec<v1::HeldPartition>,
    ) -> Result<v1::HeartbeatAnswer, String> {
        self.sequence += 1;
        let sequence = self.sequence;
        let assignment_version = self.assignment.version;
        let beat = v1::Heartbeat { sequence, held, assignment_version, ..v1::Heartbeat::default() };
        self.send(Up::Heartbeat(beat)).await;
        loop {
            match self.next().await {
                Ok(Some(Down::HeartbeatAnswer(answer))) if answer.sequence == sequence => {
                    self.take(answer.assignment.clone().unwrap());
                    return Ok(answer);
                }
                Ok(Some(Down::Ended(ended))) => {
                    return Err(ended.error.map_or("ENDED".to_owned(), |error| error.code));
                }
                Ok(Some(_)) => {}
                Ok(None) => return Err("CLOSED".to_owned()),
                Err(status) => return Err(error_of_status(&status).code),
            }
        }
    }

    /// Waits, with heartbeats, until the assignment is as wanted.
    pub(crate) async fn until(
        &mut self,
        what: &str,
        wanted: impl Fn(&v1::Assignment) -> bool,
    ) -> v1::Assignment {
        let end = Instant::now() + PATIENCE;
        while !wanted(&self.assignment) {
            assert!(Instant::now() < end, "not in time: {what}; {:?}", self.assignment);
            self.heartbeat().await.unwrap();
        }
        self.assignment.clone()
    }

    pub(crate) fn assigned(&self, index: u32) -> Option<v1::Assigned> {
        let found = |assigned: &&v1::Assigned| assigned.partition == Some(partition(index));
        self.assignment.partitions.iter().find(found).cloned()
    }

    /// Sends an act and waits for its verdict.
    pub(crate) async fn act(&mut self, request: u64, up: Up) -> Result<(), v1::Error> {
        self.send(up).await;
        loop {
            match self.next().await.unwrap() {
                Some(Down::ActAnswer(answer)) if answer.request == request => {
                    return answer.error.map_or(Ok(()), Err);
                }
                Some(Down::Ended(ended)) => panic!("ended before the answer: {ended:?}"),
                Some(_) => {}
                None => panic!("closed before the answer"),
            }
        }
    }

    pub(crate) async fn acquire(&mut self, assigned: &v1::Assigned) {
        let acquired = v1::Acquired {
            request: 1_000 + assigned.epoch,
            partition: assigned.partition.clone(),
            epoch: assigned.epoch,
            home_initialised: false,
            resume: 0,
        };
        self.act(acquired.request, Up::Acquired(acquired)).await.unwrap();
    }

    pub(crate) async fn release(
        &mut self,
        assigned: &v1::Assigned,
        next_offset: Option<u64>,
    ) -> Result<(), v1::Error> {
        let released = v1::Released {
            partition: assigned.partition.clone(),
            epoch: assigned.epoch,
            next_offset,
            reason: v1::ReleaseReason::Revoked.into(),
            error: String::new(),
        };
        let request = 2_000 + assigned.epoch;
        self.act(request, Up::Release(v1::Release { request, partitions: vec![released] })).await
    }
}
