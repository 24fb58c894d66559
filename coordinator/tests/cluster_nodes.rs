//! Nodes join, are promoted, moved and removed, over real gRPC.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

mod common;

use std::collections::BTreeMap;

use common::*;
use tenure_coordinator::settings::StartMode;
use tenure_coordinator::{Node, NodeSettings, StartError};
use tenure_proto::v1::cluster_client::ClusterClient;
use tenure_proto::{error_of_status, v1};
use tokio::time::{Instant, timeout};
use tonic::transport::Channel;

/// Nodes by id; those that were removed or stopped are gone from it.
struct Rig {
    nodes: BTreeMap<u64, Node>,
    settings: Vec<NodeSettings>,
    folder: tempfile::TempDir,
}

impl Rig {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let settings = cluster(folder.path(), 3);
        let nodes = (1..).zip(start_all(&settings).await).collect();
        let rig = Self { nodes, settings, folder };
        rig.leader().await;
        rig
    }

    /// Id of the raft leader.
    async fn leader(&self) -> u64 {
        until("a raft leader", || async {
            let leads = |node: &Node| node.raft().leadership().borrow().is_me;
            self.nodes.iter().find(|(_, node)| leads(node)).map(|(id, _)| *id)
        })
        .await
    }

    /// Id of a node that follows the raft leader, and knows it.
    async fn follower(&self) -> u64 {
        let leader = self.leader().await;
        let (id, node) = self.nodes.iter().find(|(id, _)| **id != leader).unwrap();
        knows_the_leader(node).await;
        *id
    }

    async fn nodes_client(&self) -> ClusterClient<Channel> {
        client_of(&self.nodes[&self.leader().await]).await
    }

    async fn client(&self) -> Client {
        Client::of(&self.nodes[&self.leader().await]).await
    }

    /// Settings of a node that is to join those that run.
    fn joining(&self, node: u64) -> NodeSettings {
        let folder = self.folder.path().join("more");
        let mut settings = cluster(&folder, node).pop().unwrap();
        settings.start = StartMode::Join;
        settings.peers.clone_from(&self.settings[0].peers);
        settings
    }

    /// Starts `node` and makes it a voter.
    async fn join(&mut self, settings: &NodeSettings) {
        let node = settings.node;
        let joined = timeout(PATIENCE, Node::start(settings.clone())).await.unwrap().unwrap();
        let request = v1::AddLearnerRequest {
            change: change("more room"),
            node,
            raft_address: joined.raft_address().to_string(),
            client_address: joined.client_address().to_string(),
        };
        self.nodes.insert(node, joined);
        let mut client = self.nodes_client().await;
        client.add_learner(request).await.unwrap();
        promote(&mut client, node).await.unwrap();
    }

    /// Waits until all nodes have applied the same.
    async fn level(&self) {
        until("all nodes to be level", || async {
            let states: Vec<_> = self.nodes.values().map(state_of).collect();
            states.windows(2).all(|pair| pair[0] == pair[1]).then_some(())
        })
        .await;
    }

    async fn voters(&self) -> Vec<u64> {
        let status = self.nodes[&self.leader().await].raft().status();
        assert!(!status.is_changing);
        status.nodes.iter().filter(|node| node.is_voter).map(|node| node.node.0).collect()
    }

    async fn stop(self) {
        futures::future::join_all(self.nodes.values().map(Node::stop)).await;
    }
}

async fn client_of(node: &Node) -> ClusterClient<Channel> {
    ClusterClient::new(channel(node.client_address()).await)
}

fn change(reason: &str) -> Option<v1::ClusterChange> {
    Some(v1::ClusterChange { reason: reason.to_owned(), actor: "test".to_owned() })
}

/// Repeats what may be repeated: a learner may still be behind.
async fn promote(client: &mut ClusterClient<Channel>, node: u64) -> Result<u64, v1::Error> {
    until("an answer to a promotion", || {
        let mut client = client.clone();
        async move {
            let request = v1::PromoteRequest { change: change("it has the log"), node };
            let answer = client.promote(request).await;
            let answer = answer.map(|answer| answer.into_inner().index);
            match answer.map_err(|status| error_of_status(&status)) {
                Err(error) if error.code == "OVERLOADED" => None,
                answer => Some(answer),
            }
        }
    })
    .await
}

async fn remove(client: &mut ClusterClient<Channel>, node: u64) -> Result<u64, v1::Error> {
    let answer = client.remove(v1::RemoveRequest { change: change("it goes"), node }).await;
    answer.map(|answer| answer.into_inner().index).map_err(|status| error_of_status(&status))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fourth_node_replaces_one_of_three_and_commits_go_on() {
    let mut rig = Rig::start().await;
    let mut client = rig.client().await;
    let mut ann = client.open(steady("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let grant = ann.assigned(0).unwrap();
    ann.acquire(&grant).await;
    assert_eq!(client.commit("ann", &grant, 1, 10).await, Ok(()));

    rig.join(&rig.joining(4)).await;
    assert_eq!(rig.voters().await, [1, 2, 3, 4]);
    rig.level().await;
    assert_eq!(client.commit("ann", &grant, 2, 20).await, Ok(()));

    let gone = rig.follower().await;
    let mut nodes = rig.nodes_client().await;
    let index = remove(&mut nodes, gone).await.unwrap();
    assert_eq!(remove(&mut nodes, gone).await, Ok(index), "a repetition changes nothing");
    assert_eq!(promote(&mut nodes, 4).await, Ok(index));
    let refused = promote(&mut nodes, gone).await.unwrap_err();
    assert_eq!(refused.code, "INVALID_ARGUMENT");
    assert!(!rig.voters().await.contains(&gone));
    assert_eq!(client.commit("ann", &grant, 3, 30).await, Ok(()));

    // The removed node never leads, even alone with another one, and sends everybody elsewhere.
    let removed = rig.nodes.remove(&gone).unwrap();
    assert!(removed.raft().status().nodes.iter().all(|node| node.node.0 != gone || !node.is_voter));
    let refused = Client::of(&removed).await.open(join("bob", 1)).await.map(|_| ()).unwrap_err();
    let code = error_of_status(&refused).code;
    assert!(code == "NOT_LEADER" || code == "NO_LEADER", "{code}");
    rig.level().await;
    assert_eq!(client.committed(&partition(0)).await, Ok(Some(30)));
    assert!(!removed.raft().leadership().borrow().is_me);
    removed.stop().await;
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wiped_voter_comes_back_under_a_new_id_and_nothing_acknowledged_is_lost() {
    let mut rig = Rig::start().await;
    let mut client = rig.client().await;
    let mut ann = client.open(steady("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let grant = ann.assigned(0).unwrap();
    ann.acquire(&grant).await;
    assert_eq!(client.commit("ann", &grant, 1, 10).await, Ok(()));
    let wiped = rig.follower().await;
    let settings = rig.settings[wiped as usize - 1].clone();
    rig.nodes.remove(&wiped).unwrap().stop().await;
    std::fs::remove_dir_all(&settings.data_dir).unwrap();
    assert_eq!(client.commit("ann", &grant, 2, 20).await, Ok(()));

    // Under its old id it could vote with an empty log.
    let old = NodeSettings { start: StartMode::Join, ..settings };
    let refused = timeout(PATIENCE, Node::start(old)).await.unwrap().map(|_| ()).unwrap_err();
    assert!(matches!(refused, StartError::Open(_)), "{refused}");

    let mut nodes = rig.nodes_client().await;
    remove(&mut nodes, wiped).await.unwrap();
    rig.join(&rig.joining(4)).await;
    rig.level().await;
    // The new one counts: with it and one other, the third may go.
    let other = *rig.nodes.keys().find(|id| **id != 4).unwrap();
    rig.nodes.remove(&other).unwrap().stop().await;
    let mut client = rig.client().await;
    assert_eq!(client.committed(&partition(0)).await, Ok(Some(20)));
    assert_eq!(client.commit("ann", &grant, 3, 30).await, Ok(()));
    rig.level().await;
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_changes_at_once_are_done_one_after_the_other() {
    let mut rig = Rig::start().await;
    rig.join(&rig.joining(4)).await;
    rig.join(&rig.joining(5)).await;
    let leader = rig.leader().await;
    let followers: Vec<u64> = rig.nodes.keys().copied().filter(|id| *id != leader).collect();
    let mut one = rig.nodes_client().await;
    let mut other = one.clone();
    let mut again = one.clone();
    let outcomes = tokio::join!(
        remove(&mut one, followers[0]),
        remove(&mut other, followers[1]),
        remove(&mut again, followers[0]),
    );
    for outcome in [outcomes.0, outcomes.1, outcomes.2] {
        assert!(outcome.is_ok(), "{outcome:?}");
    }
    let mut left = vec![leader, followers[2], followers[3]];
    left.sort_unstable();
    assert_eq!(rig.voters().await, left);
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raft_leader_moves_on_request_and_commits_go_on() {
    let rig = Rig::start().await;
    let mut client = rig.client().await;
    let mut ann = client.open(steady("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let grant = ann.assigned(0).unwrap();
    ann.acquire(&grant).await;
    assert_eq!(client.commit("ann", &grant, 1, 10).await, Ok(()));
    let (old, to) = (rig.leader().await, rig.follower().await);
    let request = v1::TransferLeaderRequest { change: change("a restart"), to };
    let asked = Instant::now();
    let mut nodes = rig.nodes_client().await;
    let moved = nodes.transfer_leader(request.clone()).await.unwrap().into_inner();
    assert_eq!(moved.leader, to);
    let mut client = Client::of(&rig.nodes[&to]).await;
    assert_eq!(client.commit("ann", &grant, 2, 20).await, Ok(()));
    // Without an election: that would take a second at least.
    let took = asked.elapsed();
    assert!(took.as_millis() < 900, "{took:?}");
    // The old one refers to the new one, which has nothing to do.
    let error = error_of_status(&nodes.transfer_leader(request.clone()).await.unwrap_err());
    let address = rig.nodes[&to].client_address().to_string();
    assert_eq!((error.code.as_str(), error.leader_address), ("NOT_LEADER", address));
    let mut nodes = client_of(&rig.nodes[&to]).await;
    assert_eq!(nodes.transfer_leader(request).await.unwrap().into_inner().leader, to);
    // A raft leader that is to be removed hands over first.
    let error = remove(&mut nodes, to).await.unwrap_err();
    assert_eq!(error.code, "NOT_LEADER");
    let next = rig.leader().await;
    assert_ne!(next, to);
    remove(&mut client_of(&rig.nodes[&next]).await, to).await.unwrap();
    assert!(rig.voters().await.contains(&old));
    assert_eq!(rig.client().await.commit("ann", &grant, 3, 30).await, Ok(()));
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn minority_cannot_change_the_cluster() {
    let mut rig = Rig::start().await;
    let leader = rig.leader().await;
    let others: Vec<u64> = rig.nodes.keys().copied().filter(|id| *id != leader).collect();
    // One of three is away: without the other one that answers there would be no majority of two.
    rig.nodes.remove(&others[0]).unwrap().stop().await;
    let mut nodes = rig.nodes_client().await;
    until("the missing node to be noticed", || async {
        let status = rig.nodes[&leader].raft().status();
        let away = status.nodes.iter().find(|node| node.node.0 == others[0]).unwrap();
        away.acked_ago.is_none_or(|ago| ago.as_millis() > 2_000).then_some(())
    })
    .await;
    assert_eq!(remove(&mut nodes, others[1]).await.unwrap_err().code, "OVERLOADED");
    rig.nodes.remove(&others[1]).unwrap().stop().await;
    let refused = remove(&mut nodes, others[0]).await.unwrap_err();
    assert_eq!(refused.code, "NO_LEADER");
    let status = nodes.status(v1::ClusterStatusRequest { local: true }).await.unwrap().into_inner();
    assert_eq!(status.nodes.iter().filter(|node| node.voter).count(), 3);
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn voter_that_was_removed_while_it_was_away_never_leads_and_disturbs_nobody() {
    let mut rig = Rig::start().await;
    let gone = rig.follower().await;
    rig.nodes.remove(&gone).unwrap().stop().await;
    remove(&mut rig.nodes_client().await, gone).await.unwrap();
    let mut client = rig.client().await;
    let mut ann = client.open(steady("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let leader = rig.leader().await;
    let term = rig.nodes[&leader].raft().leadership().borrow().term;

    // It still believes to vote, and asks for an election again and again.
    let removed = Node::start(rig.settings[gone as usize - 1].clone()).await.unwrap();
    let mut leads = removed.raft().leadership();
    let three_elections = std::time::Duration::from_secs(6);
    let led = timeout(three_elections, leads.wait_for(|now| now.is_me)).await;
    assert!(led.is_err());
    let refused = Client::of(&removed).await.open(join("bob", 1)).await.map(|_| ()).unwrap_err();
    let code = error_of_status(&refused).code;
    assert!(code == "NOT_LEADER" || code == "NO_LEADER", "{code}");
    let now = rig.nodes[&leader].raft().leadership().borrow().clone();
    assert_eq!((now.is_me, now.term), (true, term));
    ann.heartbeat().await.unwrap();
    removed.stop().await;
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_that_moved_is_found_at_its_new_address() {
    let mut rig = Rig::start().await;
    let moved = rig.follower().await;
    rig.nodes.remove(&moved).unwrap().stop().await;
    let mut settings = rig.joining(9);
    let old = &rig.settings[moved as usize - 1];
    settings.node = moved;
    settings.data_dir.clone_from(&old.data_dir);
    settings.start = StartMode::Existing;
    settings.peers = Vec::new();
    let node = Node::start(settings).await.unwrap();
    let mut nodes = rig.nodes_client().await;
    let request = v1::AddLearnerRequest {
        change: change("another rack"),
        node: moved,
        raft_address: node.raft_address().to_string(),
        client_address: node.client_address().to_string(),
    };
    let first = nodes.add_learner(request.clone()).await.unwrap().into_inner();
    let again = nodes.add_learner(request.clone()).await.unwrap().into_inner();
    assert_eq!(first, again);
    let taken = v1::AddLearnerRequest { node: 7, ..request };
    let refused = error_of_status(&nodes.add_learner(taken).await.unwrap_err());
    assert_eq!(refused.code, "INVALID_ARGUMENT");
    rig.nodes.insert(moved, node);
    assert_eq!(rig.voters().await, [1, 2, 3], "its vote is as it was");
    rig.level().await;
    until("the status to say that it answers", || {
        let mut nodes = nodes.clone();
        async move {
            let status = nodes.status(v1::ClusterStatusRequest::default()).await.unwrap();
            let status = status.into_inner();
            let found = status.nodes.into_iter().find(|node| node.node == moved).unwrap();
            (found.lag == Some(0) && found.acked_ago_ms.is_some()).then_some(())
        }
    })
    .await;
    // It counts: with it, the other follower may go.
    let leader = rig.leader().await;
    let other = *rig.nodes.keys().find(|id| **id != leader && **id != moved).unwrap();
    rig.nodes.remove(&other).unwrap().stop().await;
    rig.client().await.open(join("ann", 1)).await.unwrap();
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_without_reason_or_at_a_follower_is_refused() {
    let rig = Rig::start().await;
    let mut follower = client_of(&rig.nodes[&rig.follower().await]).await;
    assert_eq!(remove(&mut follower, 1).await.unwrap_err().code, "NOT_LEADER");
    let answer = follower.status(v1::ClusterStatusRequest::default()).await;
    assert_eq!(error_of_status(&answer.unwrap_err()).code, "NOT_LEADER");
    let local = follower.status(v1::ClusterStatusRequest { local: true }).await.unwrap();
    let local = local.into_inner();
    assert_eq!((local.nodes.len(), local.nodes[0].lag), (3, None));
    let mut leader = rig.nodes_client().await;
    for (reason, actor, node) in [("", "test", 1), ("why", " ", 1), ("why", "test", 0)] {
        let change = Some(v1::ClusterChange { reason: reason.to_owned(), actor: actor.to_owned() });
        let answer = leader.remove(v1::RemoveRequest { change, node }).await;
        assert_eq!(error_of_status(&answer.unwrap_err()).code, "INVALID_ARGUMENT");
    }
    rig.stop().await;
}
