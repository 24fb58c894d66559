//! Three nodes in one process, each with its own folder, over real gRPC.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

mod common;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::*;
use tenure_coordinator::Node;
use tenure_coordinator::stored::encode_batch;
use tenure_core::command::{CommitOffsets, JoinGroup, OffsetCommit, TopicReport};
use tenure_core::{Applied, Command};
use tenure_model::limits::{MEMBERS_MAX, REASON_BYTES_MAX, TTL_MS_MAX};
use tenure_model::{CommitSequence, GroupSettings, NextOffset, Timestamp};
use tenure_proto::v1::session_up::Up;
use tenure_proto::{error_of_status, v1};
use tokio::time::timeout;

struct Rig {
    settings: Vec<tenure_coordinator::NodeSettings>,
    nodes: Vec<Node>,
    _folder: tempfile::TempDir,
}

async fn rig() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let settings = cluster(folder.path(), 3);
    let nodes = start_all(&settings).await;
    leader_of(&nodes).await;
    Rig { settings, nodes, _folder: folder }
}

async fn stop_all(nodes: Vec<Node>) {
    futures::future::join_all(nodes.iter().map(Node::stop)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_answers_with_the_address_of_the_raft_leader() {
    let Rig { nodes, _folder, .. } = rig().await;
    let leader = leader_of(&nodes).await;
    let address = nodes[leader].client_address().to_string();
    let follower = &nodes[(leader + 1) % 3];
    knows_the_leader(follower).await;
    let mut client = Client::of(follower).await;
    let refused = [
        client.open(join("ann", 1)).await.map(|_| ()).unwrap_err(),
        client
            .offsets
            .fetch(v1::FetchRequest { group: GROUP.to_owned(), partitions: vec![] })
            .await
            .unwrap_err(),
        client
            .operator
            .rebalance(v1::RebalanceRequest { context: operator("test"), group: GROUP.to_owned() })
            .await
            .unwrap_err(),
    ];
    for status in refused {
        let error = error_of_status(&status);
        assert_eq!((error.code.as_str(), &error.leader_address), ("NOT_LEADER", &address));
    }
    // Anyone may look at what a follower has.
    let listed = client.ownership.list_groups(v1::ListGroupsRequest {}).await.unwrap();
    assert_eq!(listed.into_inner().groups, vec![]);
    let cluster = client.ownership.describe_cluster(v1::DescribeClusterRequest {}).await.unwrap();
    let cluster = cluster.into_inner();
    assert_eq!((cluster.nodes.len(), cluster.leader), (3, leader as u64 + 1));
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handoff_survives_the_end_of_the_raft_leader_with_one_owner_and_no_lost_commit() {
    let Rig { mut nodes, _folder, .. } = rig().await;
    let leader = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[leader]).await;
    let mut ann = client.open(steady("ann", 2)).await.unwrap();
    ann.until("both partitions", |assignment| assignment.partitions.len() == 2).await;
    let grants = ann.assignment.partitions.clone();
    for grant in &grants {
        ann.acquire(grant).await;
        client.commit("ann", grant, 1, 100).await.unwrap();
    }
    let mut bob = client.open(steady("bob", 2)).await.unwrap();
    ann.until("a revoke", |assignment| assignment.partitions.iter().any(|p| p.revoking)).await;
    let asked = ann.assignment.partitions.iter().find(|p| p.revoking).unwrap().clone();
    let kept = ann.assignment.partitions.iter().find(|p| !p.revoking).unwrap().clone();
    client.commit("ann", &asked, 2, 150).await.unwrap();
    client.commit("ann", &kept, 2, 160).await.unwrap();

    // In the middle of the handoff.
    nodes.remove(leader).stop().await;
    assert!(ann.heartbeat().await.is_err() && bob.heartbeat().await.is_err());
    let leader = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[leader]).await;
    let rejoin = |member: &str, member_epoch| v1::Join { member_epoch, ..steady(member, 2) };
    let mut ann = client.open(rejoin("ann", ann.member_epoch)).await.unwrap();
    let mut bob = client.open(rejoin("bob", bob.member_epoch)).await.unwrap();
    let same = |session: &Session, grant: &v1::Assigned| {
        let found = session.assignment.partitions.iter().find(|p| p.partition == grant.partition);
        found.map(|assigned| (assigned.epoch, assigned.revoking))
    };
    assert_eq!(same(&ann, &asked), Some((asked.epoch, true)), "the handoff goes on");
    assert_eq!(same(&ann, &kept), Some((kept.epoch, false)));
    assert_eq!(client.commit("ann", &kept, 3, 170).await, Ok(()));
    assert_eq!(ann.release(&asked, Some(155)).await, Ok(()));
    bob.until("the released one", |assignment| assignment.partitions.len() == 1).await;
    let new = bob.assignment.partitions[0].clone();
    assert_eq!(new.partition, asked.partition);
    assert!(new.epoch > asked.epoch);
    let fenced = client.commit("ann", &asked, 3, 151).await.unwrap_err();
    assert_eq!((fenced.code.as_str(), fenced.current_epoch), ("FENCED", new.epoch));

    assert_eq!(client.committed(asked.partition.as_ref().unwrap()).await, Ok(Some(155)));
    assert_eq!(client.committed(kept.partition.as_ref().unwrap()).await, Ok(Some(170)));
    let owners: BTreeMap<u32, String> = client
        .describe()
        .await
        .partitions
        .into_iter()
        .map(|info| (info.partition.unwrap().index, info.member))
        .collect();
    let index = |assigned: &v1::Assigned| assigned.partition.as_ref().unwrap().index;
    assert_eq!(owners[&index(&asked)], "bob");
    assert_eq!(owners[&index(&kept)], "ann");
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn living_member_keeps_its_grant_over_the_election_of_another_raft_leader() {
    let Rig { mut nodes, _folder, .. } = rig().await;
    let leader = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[leader]).await;
    let mut ann = client.open(join("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let (grant, member_epoch) = (ann.assigned(0).unwrap(), ann.member_epoch);
    nodes.remove(leader).stop().await;
    let leader = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[leader]).await;
    let again = v1::Join { member_epoch, ..join("ann", 1) };
    let mut ann = client.open(again).await.unwrap();
    ann.heartbeat().await.unwrap();
    assert_eq!(ann.assigned(0).unwrap().epoch, grant.epoch);
    assert_eq!(client.commit("ann", &grant, 1, 3).await, Ok(()));
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_never_comes_back_is_expired_by_the_next_raft_leader() {
    let Rig { mut nodes, _folder, .. } = rig().await;
    let leader = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[leader]).await;
    let mut ann = client.open(join("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let old = ann.assigned(0).unwrap();
    nodes.remove(leader).stop().await;
    let leader = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[leader]).await;
    let mut bob = client.open(join("bob", 1)).await.unwrap();
    bob.until("ann's partition", |assignment| !assignment.partitions.is_empty()).await;
    let late = client.commit("ann", &old, 1, 5).await.unwrap_err();
    assert_eq!(
        (late.code.as_str(), late.current_epoch),
        ("FENCED", bob.assigned(0).unwrap().epoch)
    );
    stop_all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_restarted_from_disk_has_the_same_state() {
    let Rig { settings, nodes, _folder, .. } = rig().await;
    let leader = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[leader]).await;
    let mut ann = client.open(steady("ann", 3)).await.unwrap();
    ann.until("all", |assignment| assignment.partitions.len() == 3).await;
    for (grant, offset) in ann.assignment.partitions.clone().iter().zip(10..) {
        ann.acquire(grant).await;
        client.commit("ann", grant, 1, offset).await.unwrap();
    }
    let topics = v1::TopicReport {
        topic: TOPIC.to_owned(),
        topic_id: topic_id().to_string(),
        partition_count: 3,
    };
    let report = v1::ReportTopics { request: 9, topics: vec![topics] };
    assert_eq!(ann.act(9, Up::ReportTopics(report)).await, Ok(()));
    until("all nodes to be level", || async {
        let states: Vec<_> = nodes.iter().map(state_of).collect();
        (states[0] == states[1] && states[1] == states[2]).then_some(())
    })
    .await;
    let before = state_of(&nodes[leader]);
    stop_all(nodes).await;

    let nodes = timeout(PATIENCE, start_all(&settings)).await.unwrap();
    let leader = leader_of(&nodes).await;
    let after = state_of(&nodes[leader]);
    assert_eq!(after.groups, before.groups);
    assert_eq!(after.epoch_counter, before.epoch_counter);
    let mut client = Client::of(&nodes[leader]).await;
    for (index, offset) in (0..3).zip(10..) {
        assert_eq!(client.committed(&partition(index)).await, Ok(Some(offset)));
    }
    stop_all(nodes).await;
}

/// Members of the largest group here, and partitions, one for each: as many as there may be. The fast tier, whose tests
/// run side by side, takes a tenth.
fn large() -> u32 {
    let is_fast = std::env::var("TENURE_TEST_TIER").is_ok_and(|tier| tier == "fast");
    u32::try_from(MEMBERS_MAX).unwrap() / if is_fast { 10 } else { 1 }
}

/// Longest time from the end of the raft leader to the next answer about such a group, and of such a group's load.
const LARGE_WITHIN: Duration = Duration::from_secs(10);

fn large_join(number: u32) -> Command {
    let report = TopicReport {
        topic: TOPIC.parse().unwrap(),
        topic_id: topic_id(),
        partition_count: large(),
    };
    Command::JoinGroup(JoinGroup {
        group: GROUP.parse().unwrap(),
        member: format!("member-{number}").parse().unwrap(),
        instance: None,
        topics: vec![TOPIC.parse().unwrap()],
        settings: GroupSettings::default(),
        ttl_ms: TTL_MS_MAX,
        heartbeat_interval_ms: TTL_MS_MAX / 3,
        client: "x".repeat(REASON_BYTES_MAX),
        partitions_max: None,
        report: if number == 0 { vec![report] } else { vec![] },
        rejoin: None,
        prepares: false,
        weight: 1,
    })
}

/// Each owner commits an offset with 1 KiB beside it.
fn large_commits(node: &Node) -> Vec<Command> {
    let state = state_of(node);
    let group = &state.groups[&GROUP.parse().unwrap()];
    let commits = group.partitions.iter().filter_map(|(partition, found)| {
        Some(Command::CommitOffsets(CommitOffsets {
            group: GROUP.parse().unwrap(),
            member: found.ownership.owner()?.clone(),
            commits: vec![OffsetCommit {
                partition: *partition,
                epoch: found.epoch?,
                sequence: CommitSequence(1),
                next_offset: NextOffset::new(u64::from(partition.index.get()) + 1).unwrap(),
                metadata: vec![7; 1_024],
            }],
        }))
    });
    commits.collect()
}

/// Each batch again until a raft leader has applied it: a busy machine may elect another one meanwhile.
async fn propose_all(nodes: &[Node], commands: &[Command]) {
    for batch in commands.chunks(1_000) {
        let outcomes: std::sync::Arc<[Applied]> = until("a batch to be applied", || async {
            let leader = &nodes[leader_of(nodes).await];
            let proposed = leader.raft().propose(encode_batch(Timestamp(1), batch), None).await;
            proposed.ok().map(|(_, outcomes)| outcomes)
        })
        .await;
        assert!(outcomes.iter().all(|outcome| outcome.result.is_ok()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn largest_group_is_served_by_the_next_raft_leader_and_loaded_in_time_f02() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = cluster(folder.path(), 3);
    for settings in &mut settings {
        // Nobody acquires anything, and nobody is to be asked for that.
        settings.deadlines.acquire_deadline_ms = 600_000;
        // A build with checks applies entries of this size for longer than the others' elections take.
        settings.raft.election_timeout_min_ms = 1_000;
        settings.raft.election_timeout_max_ms = 1_500;
    }
    let mut nodes = start_all(&settings).await;
    let joins: Vec<Command> = (0..large()).map(large_join).collect();
    propose_all(&nodes, &joins).await;
    let owned = until("every partition to be owned", || async {
        let commits = large_commits(&nodes[leader_of(&nodes).await]);
        (commits.len() == large() as usize).then_some(commits)
    })
    .await;
    propose_all(&nodes, &owned).await;
    let leader = leader_of(&nodes).await;
    let before = state_of(&nodes[leader]).groups;
    let level = |nodes: &[Node]| nodes.iter().all(|node| state_of(node).groups == before);
    until("all nodes to be level", || async { level(&nodes).then_some(()) }).await;

    let since = Instant::now();
    let gone = nodes.remove(leader);
    gone.stop().await;
    let next = leader_of(&nodes).await;
    let mut client = Client::of(&nodes[next]).await;
    let last = large() - 1;
    assert_eq!(client.committed(&partition(last)).await, Ok(Some(large().into())));
    let served = since.elapsed();
    assert!(served < LARGE_WITHIN, "served after {served:?}");

    // What it wrote of the group is read again: from a snapshot.
    let id = nodes[next].raft().status().node;
    nodes[next].raft().write_snapshot().await;
    nodes.remove(next).stop().await;
    drop(gone);
    let since = Instant::now();
    let own = settings.iter().find(|settings| settings.node == id.0).unwrap();
    nodes.push(Node::start(own.clone()).await.unwrap());
    leader_of(&nodes).await;
    let loaded = since.elapsed();
    assert!(loaded < LARGE_WITHIN, "loaded after {loaded:?}");
    assert_eq!(nodes[1].raft().with_machine(|machine| machine.state().groups.clone()), before);
    println!("served after {served:?}, loaded after {loaded:?}");
    stop_all(nodes).await;
}
