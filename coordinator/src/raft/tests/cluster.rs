//! What a cluster promises while nodes come and go.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_is_applied_on_every_node_in_the_same_order() {
    let cluster = Cluster::of(3).await;
    let leader = cluster.node(cluster.leader().await);
    let texts = texts(50);
    let replies = join_all(texts.iter().map(|text| leader.propose(bytes(text), None))).await;
    let mut counts: Vec<usize> = replies.into_iter().map(|reply| reply.unwrap().1).collect();
    counts.sort_unstable();
    assert_eq!(counts, (1..=50).collect::<Vec<_>>());
    let mut agreed = cluster.agree_on(50).await;
    agreed.sort();
    let mut wanted: Vec<Bytes> = texts.iter().map(|text| bytes(text)).collect();
    wanted.sort();
    assert_eq!(agreed, wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_the_death_of_the_raft_leader() {
    let mut cluster = Cluster::of(3).await;
    let first = cluster.leader().await;
    let term = cluster.node(first).leadership().borrow().term;
    for text in texts(10) {
        cluster.write(&text).await;
    }
    cluster.kill(first).await;
    let second = cluster.leader().await;
    assert!(second != first && cluster.node(second).leadership().borrow().term > term);
    cluster.write("after").await;
    let mut wanted: Vec<Bytes> = texts(10).iter().map(|text| bytes(text)).collect();
    wanted.push(bytes("after"));
    assert_eq!(cluster.agree_on(11).await, wanted);
    cluster.restart(first).await;
    assert_eq!(cluster.agree_on(11).await, wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_was_killed_as_a_whole_comes_back_with_its_state() {
    let mut cluster = Cluster::of(3).await;
    for text in texts(10) {
        cluster.write(&text).await;
    }
    let before = cluster.agree_on(10).await;
    for at in 0..3 {
        cluster.kill(at).await;
    }
    for at in 0..3 {
        cluster.restart(at).await;
    }
    assert_eq!(cluster.agree_on(10).await, before);
    cluster.write("after").await;
    assert_eq!(cluster.agree_on(11).await.len(), 11);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_away_while_the_log_was_purged_gets_a_snapshot() {
    let mut cluster = Cluster::of(3).await;
    cluster.write("before").await;
    let away = (cluster.leader().await + 1) % 3;
    let seen = cluster.node(away).status().last_log;
    cluster.kill(away).await;
    // More than one piece of a snapshot.
    let large = "x".repeat(400_000);
    for _ in 0..5 {
        cluster.write(&large).await;
    }
    cluster.agree_on(6).await;
    for node in cluster.running() {
        node.write_snapshot().await;
        wait("the log to be purged", || (node.status().purged > seen).then_some(())).await;
    }
    cluster.restart(away).await;
    assert_eq!(cluster.agree_on(6).await.len(), 6);
    let came = || (cluster.node(away).status().snapshot > seen).then_some(());
    wait("the snapshot to be told of", came).await;
    // It is on its disk, too.
    cluster.kill(away).await;
    cluster.restart(away).await;
    assert_eq!(cluster.agree_on(6).await.len(), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raft_leader_without_a_quorum_neither_acknowledges_nor_reads() {
    let cluster = Plan::new(3).await.tune(|tuning| {
        tuning.propose_timeout = Duration::from_millis(700);
        tuning.proposals_max = 1;
    });
    let mut cluster = cluster.start().await;
    cluster.write("before").await;
    let leader = cluster.leader().await;
    cluster.kill((leader + 1) % 3).await;
    cluster.kill((leader + 2) % 3).await;
    let node = cluster.node(leader);
    let (first, second, read) = tokio::join!(
        node.propose(bytes("lost"), None),
        node.propose(bytes("too many"), None),
        node.linearize(Duration::from_millis(500)),
    );
    assert!(matches!(first, Err(ProposeError::Unknown | ProposeError::NoLeader)), "{first:?}");
    assert_eq!(second, Err(ProposeError::Overloaded));
    assert_eq!(read, Err(LinearizeError::TimedOut));
    assert_eq!(state(node), [bytes("before")]);
    // The leader's lease has run out by now: nothing is even appended.
    assert_eq!(node.propose(bytes("later"), None).await, Err(ProposeError::NoLeader));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_names_the_raft_leader_and_does_nothing() {
    let cluster = Cluster::of(3).await;
    cluster.write("before").await;
    let leader = cluster.leader().await;
    let follower = cluster.node((leader + 1) % 3);
    wait("the follower to know", || follower.leadership().borrow().leader).await;
    let address = Some(format!("client-of-{}", leader + 1));
    let refused = follower.propose(bytes("no"), None).await;
    assert_eq!(refused, Err(ProposeError::NotLeader { leader: address.clone() }));
    let refused = follower.linearize(PATIENCE).await;
    assert_eq!(refused, Err(LinearizeError::NotLeader { leader: address }));
    let read = cluster.node(leader).linearize(PATIENCE).await.unwrap();
    assert!(*cluster.node(leader).applied().borrow() >= read);
    assert_eq!(state(cluster.node(leader)).len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proposal_for_another_term_is_refused() {
    let cluster = Cluster::of(1).await;
    let node = cluster.node(cluster.leader().await);
    let term = node.leadership().borrow().term;
    let refused = node.propose(bytes("late"), Some(Term(term.0 - 1))).await;
    assert_eq!(refused, Err(ProposeError::NotLeader { leader: Some("client-of-1".to_owned()) }));
    node.propose(bytes("now"), Some(term)).await.unwrap();
    assert_eq!(state(node), [bytes("now")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leadership_moves_on_request_and_both_sides_hear_of_it() {
    let cluster = Cluster::of(3).await;
    cluster.write("before").await;
    let mut attempts = 0;
    let (old, new) = loop {
        attempts += 1;
        let old = cluster.leader().await;
        let term = cluster.node(old).leadership().borrow().term;
        let target = NodeId(((old + 1) % 3) as u64 + 1);
        let moved = cluster.node(old).transfer_leadership(Some(target), PATIENCE).await;
        let new = cluster.leader().await;
        let now = cluster.node(new).leadership().borrow().clone();
        // On a busy machine there may be an election that nobody asked for.
        if now.term > Term(term.0 + 1) && attempts < 5 {
            continue;
        }
        assert_eq!(moved, Ok(target));
        assert!(!leads(cluster.node(old)));
        assert_eq!(NodeId(new as u64 + 1), target);
        assert!(now.term > term, "{now:?}");
        break (old, new);
    };
    // Being the leader means that the first entry of the term is applied.
    let status = cluster.node(new).status();
    assert_eq!(status.applied, status.last_log);
    assert_eq!(
        cluster.node(old).transfer_leadership(None, PATIENCE).await,
        Err(TransferError::NotLeader)
    );
    cluster.write("after").await;
    cluster.agree_on(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leadership_is_not_handed_over_while_a_change_could_take_the_target_its_vote() {
    let cluster = Cluster::of(3).await;
    let old = cluster.leader().await;
    let leader = cluster.node(old);
    let turn = leader.0.changing.lock().await;
    let asked = leader.transfer_leadership(None, Duration::from_millis(50)).await;
    assert_eq!(asked, Err(TransferError::Busy));
    leader.propose(bytes("goes on"), None).await.expect("nobody was asked to take over");
    drop(turn);
    let moved = leader.transfer_leadership(None, PATIENCE).await.unwrap();
    assert_ne!(moved, NodeId(old as u64 + 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_cannot_go_on_stops_the_node_with_its_words() {
    for (payload, words) in [("fatal", "the toy broke"), ("panic", "the toy panicked")] {
        let cluster = Cluster::of(1).await;
        let node = cluster.node(cluster.leader().await);
        let outcome = node.propose(bytes(payload), None).await;
        assert!(matches!(outcome, Err(ProposeError::Unknown)), "{outcome:?}");
        let reason = timeout(PATIENCE, node.stopped()).await.unwrap();
        let StopReason::Failed(text) = &reason else { panic!("{reason:?}") };
        assert!(text.contains(words), "{text}");
        assert_eq!(node.propose(bytes("more"), None).await, Err(ProposeError::Stopped));
        assert!(!leads(node));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_frees_the_folder_and_is_told() {
    let mut cluster = Cluster::of(1).await;
    cluster.write("before").await;
    let node = cluster.nodes[0].take().unwrap();
    node.shutdown().await;
    assert_eq!(node.stopped().await, StopReason::Shutdown);
    cluster.restart(0).await;
    cluster.write("after").await;
    assert_eq!(state(cluster.node(0)), [bytes("before"), bytes("after")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_has_grown_is_replaced_by_a_snapshot() {
    let plan = Plan::new(1).await.tune(|tuning| {
        tuning.snapshot_wal_bytes = 200_000;
        tuning.wal_chunk_bytes = 50_000;
    });
    let mut cluster = plan.start().await;
    let text = "x".repeat(20_000);
    for _ in 0..15 {
        cluster.write(&text).await;
    }
    wait("a smaller log", || (cluster.node(0).status().wal_bytes < 150_000).then_some(())).await;
    cluster.kill(0).await;
    cluster.restart(0).await;
    assert_eq!(cluster.agree_on(15).await.len(), 15);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_largest_payload_gets_through_and_a_larger_one_is_refused() {
    let plan = Plan::new(3).await.tune(|tuning| tuning.propose_timeout = PATIENCE);
    let cluster = plan.start().await;
    let node = cluster.node(cluster.leader().await);
    // Takes longer than a heartbeat on its way, and must not delay one.
    let largest = Bytes::from(vec![7; PAYLOAD_BYTES_MAX]);
    let term = node.leadership().borrow().term;
    node.propose(largest.clone(), Some(term)).await.unwrap();
    assert_eq!(cluster.agree_on(1).await, [largest]);
    let size_bytes = PAYLOAD_BYTES_MAX + 1;
    let refused = node.propose(vec![0; size_bytes].into(), None).await;
    assert_eq!(refused, Err(ProposeError::TooLarge { size_bytes }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_voter_leads_again_without_waiting_for_an_election() {
    let plan = Plan::new(1).await.tune(|tuning| {
        tuning.heartbeat_interval = Duration::from_secs(10);
        tuning.election_timeout_min = Duration::from_secs(30);
        tuning.election_timeout_max = Duration::from_secs(60);
    });
    let mut cluster = plan.start().await;
    cluster.write("before").await;
    let term = cluster.node(0).leadership().borrow().term;
    cluster.kill(0).await;
    cluster.restart(0).await;
    cluster.write("after").await;
    assert!(cluster.node(0).leadership().borrow().term > term);
    assert_eq!(state(cluster.node(0)), [bytes("before"), bytes("after")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_names_all_nodes_and_how_far_they_are() {
    let cluster = Cluster::of(3).await;
    cluster.write("before").await;
    cluster.agree_on(1).await;
    let leader = cluster.node(cluster.leader().await);
    let caught_up = || {
        let status = leader.status();
        let all = status.nodes.iter().all(|node| node.matched == status.last_log);
        (all && status.applied == status.last_log).then_some(status)
    };
    let status = wait("all nodes to catch up", caught_up).await;
    let found: Vec<_> =
        status.nodes.iter().map(|node| (node.node, &node.addresses, node.is_voter)).collect();
    let planned =
        cluster.plan.settings.iter().map(|settings| (settings.node, &settings.addresses, true));
    assert_eq!(found, planned.collect::<Vec<_>>());
    assert_eq!(status.leader, Some(status.node));
    assert!(status.wal_bytes > 0 && status.quorum_acked_ago.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_voters_that_was_cut_off_half_way_is_completed() {
    let mut cluster = Cluster::of(3).await;
    cluster.write("before").await;
    let leader = cluster.leader().await;
    let gone = NodeId(((leader + 1) % 3) as u64 + 1);
    // As a raft leader does that dies between the two entries.
    let joint = openraft::Membership::new(
        vec![
            [1, 2, 3].into_iter().map(NodeId).collect(),
            [1, 2, 3].into_iter().map(NodeId).filter(|id| *id != gone).collect(),
        ],
        cluster
            .plan
            .settings
            .iter()
            .map(|settings| (settings.node, settings.addresses.clone()))
            .collect::<BTreeMap<_, _>>(),
    )
    .unwrap();
    let payload = openraft::EntryPayload::Membership(joint.clone());
    let appended = cluster.node(leader).0.library.append_membership(joint, payload, []).await;
    appended.unwrap();
    let voters = |node: &RaftNode<Toy>| {
        let status = node.status();
        let voters = status.nodes.iter().filter(|node| node.is_voter);
        (status.is_changing, voters.map(|node| node.node).collect::<Vec<_>>())
    };
    let wanted: Vec<NodeId> = [1, 2, 3].into_iter().map(NodeId).filter(|id| *id != gone).collect();
    let done = || {
        let level = |node: &RaftNode<Toy>| voters(node) == (false, wanted.clone());
        cluster.running().all(level).then_some(())
    };
    wait("the change to be completed", done).await;
    // What is left of the removal is done by a repetition.
    cluster.node(leader).remove(gone, PATIENCE).await.unwrap();
    assert_eq!(cluster.node(leader).status().nodes.len(), 2);
    cluster.kill(gone.0 as usize - 1).await;
    cluster.write("after").await;
    cluster.agree_on(2).await;
}
