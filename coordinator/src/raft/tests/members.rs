//! Voters that become learners and voters again.

use std::collections::BTreeSet;

use openraft::ChangeMembers;

use super::*;

/// Promotions and demotions; the full tier takes the thousand of the report.
fn cycles() -> usize {
    match std::env::var("TENURE_TEST_TIER").as_deref() {
        Ok("full") => 1_000,
        Ok(_) | Err(_) => 40,
    }
}

/// Nodes that do not elect anew while a machine is busy.
async fn calm(nodes: u64) -> Cluster {
    let plan = Plan::new(nodes).await.tune(|tuning| {
        tuning.election_timeout_min = Duration::from_secs(2);
        tuning.election_timeout_max = Duration::from_secs(4);
    });
    plan.start().await
}

/// Takes a voter's vote and leaves it as a learner: no call of an operator does only this.
async fn demote(leader: &RaftNode<Toy>, node: NodeId) {
    let until = Instant::now() + PATIENCE;
    loop {
        let change = ChangeMembers::RemoveVoters(BTreeSet::from([node]));
        match Box::pin(leader.0.library.change_membership(change, true)).await {
            Ok(_) => break,
            // No quorum has answered yet, or the change before is not through.
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        sleep(Duration::from_millis(20)).await;
    }
    wait("the vote to be gone", || (!voters(leader).contains(&node.0)).then_some(())).await;
}

fn voters(node: &RaftNode<Toy>) -> Vec<u64> {
    let nodes = node.status().nodes.into_iter();
    nodes.filter(|node| node.is_voter).map(|node| node.node.0).collect()
}

fn matched(leader: &RaftNode<Toy>, node: NodeId) -> Option<Index> {
    leader.status().nodes.iter().find(|known| known.node == node)?.matched
}

#[tokio::test]
async fn voter_that_is_demoted_and_promoted_again_and_again_keeps_what_it_has_m03() {
    let cluster = calm(3).await;
    let leader = cluster.leader().await;
    let node = cluster.node(leader);
    let changing = NodeId((leader as u64 + 1) % 3 + 1);
    let mut known = None;
    let mut written = 0;
    for cycle in 0..cycles() {
        demote(node, changing).await;
        cluster.write(&format!("demoted {cycle}")).await;
        node.promote(changing, PATIENCE).await.unwrap();
        cluster.write(&format!("promoted {cycle}")).await;
        written += 2;
        assert_eq!(voters(node), [1, 2, 3], "cycle {cycle}");
        let matched = matched(node, changing);
        assert!(matched >= known, "cycle {cycle}: it had {known:?}, and has {matched:?}");
        known = matched;
    }
    assert!(leads(node), "it led all the time");
    cluster.agree_on(written).await;
}

#[tokio::test]
async fn learner_that_a_change_is_not_about_goes_on_learning_m04() {
    let cluster = calm(4).await;
    let leader = cluster.leader().await;
    let node = cluster.node(leader);
    let me = leader as u64 + 1;
    let others: Vec<u64> = (1..=4).filter(|other| *other != me).collect();
    for other in &others {
        demote(node, NodeId(*other)).await;
    }
    assert_eq!(voters(node), [me], "all others learn");
    let [first, second, bystander] = others[..] else { panic!("four nodes") };
    for promoted in [first, second] {
        node.promote(NodeId(promoted), PATIENCE).await.unwrap();
    }
    for text in texts(100) {
        cluster.write(&text).await;
    }
    cluster.agree_on(100).await;
    let mut expected = vec![me, first, second];
    expected.sort_unstable();
    assert_eq!(voters(node), expected, "node {bystander} still learns");
    assert_eq!(matched(node, NodeId(bystander)), matched(node, NodeId(first)));

    // A voter that goes takes nobody along.
    node.remove(NodeId(second), PATIENCE).await.unwrap();
    let mut expected = vec![me, first];
    expected.sort_unstable();
    assert_eq!(voters(node), expected);
    cluster.write("one more").await;
    let learner = cluster.node(usize::try_from(bystander).unwrap() - 1);
    wait("the learner to have it", || (state(learner).len() == 101).then_some(())).await;
}
