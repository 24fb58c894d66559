//! Clients that commit offsets, each in a partition of its own, and read them back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use openraft::errors::{ClientWriteError, RaftError};
use openraft::{AsyncRuntime as _, ReadPolicy};
use openraft_rt_sim::SimRuntime;
use tenure_core::command::{
    CommitOffsets, InstallTarget, JoinGroup, OffsetCommit, OperatorContext, TopicReport,
};
use tenure_core::{Applied, Command, Reply};
use tenure_model::{
    CommitSequence, Epoch, GroupEpoch, GroupId, GroupSettings, MemberId, NextOffset, Partition,
    PartitionIndex, Timestamp, TopicId, TopicName,
};

use super::cluster::{Doors, NODES};
use super::oracle::Watched;
use super::types::{NodeId, Payload};
use super::{Library, Rng};
use crate::stored::encode_batch;

/// Partitions, each with a client.
pub(super) const CLIENTS: u32 = 3;

/// How long a client waits for one answer.
const PATIENCE: Duration = Duration::from_millis(800);

pub(super) fn group() -> GroupId {
    GroupId::new("g").expect("a name")
}

fn member() -> MemberId {
    MemberId::new("m").expect("a name")
}

fn topic() -> (TopicName, TopicId) {
    let name = TopicName::new("t").expect("a name");
    let id = TopicId::of_name(&name);
    (name, id)
}

fn partition(client: u32) -> Partition {
    let index = PartitionIndex::new(client).expect("a small number");
    Partition { topic_id: topic().1, index }
}

/// One member owns every partition from here on: the target is installed for its join.
pub(super) fn prepare() -> Vec<Command> {
    let (topic, topic_id) = topic();
    let report = TopicReport { topic: topic.clone(), topic_id, partition_count: CLIENTS };
    let join = JoinGroup {
        group: group(),
        member: member(),
        instance: None,
        topics: vec![topic],
        settings: GroupSettings::default(),
        ttl_ms: 10_000,
        heartbeat_interval_ms: 3_000,
        client: "sim".to_owned(),
        partitions_max: None,
        report: vec![report],
        rejoin: None,
        prepares: false,
        weight: 1,
    };
    let install = InstallTarget {
        group: group(),
        group_epoch: GroupEpoch(1),
        target: (0..CLIENTS).map(|client| (partition(client), member())).collect(),
        line_by_line: false,
    };
    vec![Command::JoinGroup(join), Command::InstallTarget(install)]
}

fn commit(client: u32, next: u64, metadata: Vec<u8>) -> Command {
    Command::CommitOffsets(CommitOffsets {
        group: group(),
        member: member(),
        commits: vec![OffsetCommit {
            partition: partition(client),
            epoch: Epoch::new(u64::from(client) + 1).expect("a small number"),
            sequence: CommitSequence(next),
            next_offset: NextOffset::new(next).expect("a small number"),
            metadata,
        }],
    })
}

/// What became of a proposal.
pub(super) enum Outcome {
    Done(Arc<[Applied]>),
    /// Nothing happened; that node may lead.
    Elsewhere(Option<NodeId>),
    Unknown,
}

/// Proposes at one node, as the proposer of production does.
pub(super) async fn propose(library: &Library, payload: Bytes) -> Outcome {
    let written = SimRuntime::timeout(PATIENCE, library.client_write(Payload(payload))).await;
    match written {
        Err(_elapsed) => Outcome::Unknown,
        Ok(Ok(response)) => {
            Outcome::Done(response.data.get().expect("every payload is answered by the machine"))
        }
        Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(refused)))) => {
            Outcome::Elsewhere(refused.leader_id)
        }
        Ok(Err(_)) => Outcome::Unknown,
    }
}

/// Proposes until it is done, at whatever node leads.
pub(super) async fn insist(doors: &Doors, commands: &[Command], rng: &mut Rng) -> Arc<[Applied]> {
    let payload = encode_batch(Timestamp(1), commands);
    let mut target = NODES[0];
    loop {
        match attempt(doors, target, payload.clone()).await {
            Outcome::Done(applied) => return applied,
            Outcome::Elsewhere(Some(leader)) => target = leader,
            Outcome::Elsewhere(None) | Outcome::Unknown => target = any(rng),
        }
        SimRuntime::sleep(Duration::from_millis(rng.within(5, 60))).await;
    }
}

fn any(rng: &mut Rng) -> NodeId {
    NODES[rng.position(NODES.len())]
}

async fn attempt(doors: &Doors, target: NodeId, payload: Bytes) -> Outcome {
    match doors.lines.node(target) {
        Some(up) => propose(&up.library, payload).await,
        None => Outcome::Elsewhere(None),
    }
}

/// Commits one offset after the other until it is told to stop. An offset whose outcome is unknown is committed again.
pub(super) async fn work(doors: Arc<Doors>, client: u32, mut rng: Rng, stop: Arc<AtomicBool>) {
    let mut target = any(&mut rng);
    let mut next = 1;
    while !stop.load(Ordering::Relaxed) {
        let most = if rng.chance(5) { 3_000 } else { 40 };
        let size = usize::try_from(rng.within(0, most)).expect("a small number");
        let command = commit(client, next, vec![b'x'; size]);
        match attempt(&doors, target, encode_batch(Timestamp(next), &[command])).await {
            Outcome::Done(applied) => {
                match &applied[0].result {
                    Ok(Reply::Verdicts(verdicts)) if verdicts.iter().all(Result::is_ok) => {
                        doors.oracle.acknowledged(partition(client), next);
                    }
                    other => doors.oracle.fail(&format!("client {client} is refused: {other:?}")),
                }
                next += 1;
            }
            Outcome::Elsewhere(leader) => target = leader.unwrap_or_else(|| any(&mut rng)),
            Outcome::Unknown => {
                doors.oracle.count(|counts| counts.unknown += 1);
                target = any(&mut rng);
            }
        }
        SimRuntime::sleep(Duration::from_millis(rng.within(1, 40))).await;
    }
}

/// Asks any node for a linearizable read until it is told to stop. What was acknowledged before must be there.
pub(super) async fn read(doors: Arc<Doors>, mut rng: Rng, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        SimRuntime::sleep(Duration::from_millis(rng.within(10, 120))).await;
        let target = any(&mut rng);
        let Some(up) = doors.lines.node(target) else { continue };
        let promises = doors.oracle.promises();
        let confirmed = up.library.ensure_linearizable(ReadPolicy::ReadIndex);
        if let Ok(Ok(_)) = SimRuntime::timeout(PATIENCE, confirmed).await {
            doors.oracle.count(|counts| counts.reads += 1);
            let who = format!("a linearizable read at node {target}");
            let look = |watched: &Watched| {
                doors.oracle.check_kept(&who, &promises, &watched.inner, &group());
            };
            up.replica.read(look);
        }
    }
}

/// Raises the floor of epochs now and then: a command that touches the state as a whole.
pub(super) fn raise_floor(count: u64) -> Command {
    Command::RaiseEpochFloor {
        operator: OperatorContext {
            request: format!("r{count}").parse().expect("a name"),
            reason: "simulation".to_owned(),
            actor: "sim".to_owned(),
        },
        floor: Epoch::new(1_000 + count).expect("a small number"),
    }
}
