//! Dead processes, and static members that come back.

use tokio::time::Instant;

use super::*;

const FENCE: i32 = v1::Takeover::Fence as i32;

fn fenced(join: v1::Join) -> v1::Join {
    let settings = v1::GroupSettings {
        home: v1::Home::Sink.into(),
        takeover: FENCE,
        sinks: vec![v1::Sink { name: "pg".to_owned(), enforces_epoch: true }],
    };
    v1::Join { settings: Some(settings), ..join }
}

fn of_instance(join: v1::Join) -> v1::Join {
    v1::Join { instance_id: "x".to_owned(), client: "host:7".to_owned(), ..join }
}

/// Ann and bob with two partitions each, on connections of their own.
async fn two(node: &Node, wish: impl Fn(v1::Join) -> v1::Join) -> (Session, Session, Client) {
    let mut client = Client::of(node).await;
    let mut ann = client.open(wish(of_instance(join("ann", 4)))).await.unwrap();
    let mut bob = Client::of(node).await.open(wish(steady("bob", 4))).await.unwrap();
    together_until("two partitions each", &mut ann, &mut bob, |ann, bob| {
        ann.partitions.len() == 2 && bob.partitions.len() == 2
    })
    .await;
    for assigned in ann.assignment.partitions.clone() {
        ann.acquire(&assigned).await;
    }
    for assigned in bob.assignment.partitions.clone() {
        bob.acquire(&assigned).await;
    }
    (ann, bob, client)
}

fn lines(assignment: &v1::Assignment) -> Vec<(u32, u64)> {
    let line =
        |assigned: &v1::Assigned| (assigned.partition.as_ref().unwrap().index, assigned.epoch);
    assignment.partitions.iter().map(line).collect()
}

fn indexes(assignment: &v1::Assignment) -> Vec<u32> {
    lines(assignment).into_iter().map(|(index, _)| index).collect()
}

/// Joins again and again until it is taken in; answers the refusals on the way.
async fn join_until_taken(client: &mut Client, wish: &v1::Join) -> (Session, Vec<v1::Error>) {
    let mut refusals: Vec<v1::Error> = Vec::new();
    let end = Instant::now() + PATIENCE;
    loop {
        match client.open(wish.clone()).await {
            Ok(session) => return (session, refusals),
            Err(status) => refusals.push(error_of_status(&status)),
        }
        assert!(Instant::now() < end, "not in time: {refusals:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_of_a_process_that_died_are_owned_again_within_a_second_under_fence() {
    let Rig { node, _folder, .. } = rig().await;
    // A lease of 30 s: nothing but the closed connection can be the reason.
    let mut client = Client::of(&node).await;
    let mut ann = client.open(fenced(steady("ann", 2))).await.unwrap();
    let mut bob = Client::of(&node).await.open(fenced(steady("bob", 2))).await.unwrap();
    together_until("one partition each", &mut ann, &mut bob, |ann, bob| {
        ann.partitions.len() == 1 && bob.partitions.len() == 1
    })
    .await;
    let died = Instant::now();
    drop((ann, client));
    while bob.assignment.partitions.len() < 2 {
        bob.next().await.unwrap();
    }
    let taken = died.elapsed();
    assert!(taken < Duration::from_secs(1), "after {taken:?}");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn static_member_that_was_killed_is_followed_by_one_with_its_partitions_and_nobody_elses() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let (ann, mut bob, ann_client) = two(&node, |join| join).await;
    let (before, of_bob) = (indexes(&ann.assignment), lines(&bob.assignment));
    let epochs: Vec<u64> = lines(&ann.assignment).into_iter().map(|(_, epoch)| epoch).collect();
    drop((ann, ann_client));

    let wish = of_instance(steady("cat", 4));
    let (mut cat, refusals) = join_until_taken(&mut client, &wish).await;
    assert!(!refusals.is_empty(), "it had to wait for the lease of the dead process");
    assert!(refusals.iter().all(|error| error.code == "INSTANCE_WAITS"), "{refusals:?}");
    cat.until("the partitions of ann", |assignment| assignment.partitions.len() == 2).await;
    assert_eq!(indexes(&cat.assignment), before);
    let raised = lines(&cat.assignment).into_iter().all(|(_, epoch)| epoch > epochs[1]);
    assert!(raised, "{:?} after {epochs:?}", cat.assignment);
    let plan = |client: &v1::DescribeGroupResponse| {
        client.target_epoch == client.summary.as_ref().unwrap().group_epoch
    };
    while !plan(&client.describe().await) {
        bob.heartbeat().await.unwrap();
    }
    bob.heartbeat().await.unwrap();
    cat.heartbeat().await.unwrap();
    assert_eq!(lines(&bob.assignment), of_bob, "nothing of bob's has moved");
    assert_eq!(indexes(&cat.assignment), before);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_process_with_a_live_instance_id_is_refused_once_the_first_is_heard() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(of_instance(steady("ann", 1))).await.unwrap();
    let wish = of_instance(steady("cat", 1));
    let code = |refused: Result<Session, tonic::Status>| {
        error_of_status(&refused.map(|_| ()).unwrap_err()).code
    };
    assert_eq!(code(client.open(wish.clone()).await), "INSTANCE_WAITS");
    let waiting = &client.describe().await.members[0];
    assert_eq!((waiting.instance_id.as_str(), waiting.awaited_by.as_str()), ("x", "host:7"));
    assert_eq!(code(client.open(wish.clone()).await), "INSTANCE_WAITS");
    ann.heartbeat().await.unwrap();
    assert_eq!(code(client.open(wish).await), "INSTANCE_IN_USE");
    ann.heartbeat().await.unwrap();
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_will_return_finds_its_partitions_and_the_offsets_it_left() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let (mut ann, mut bob, _ann_client) = two(&node, |join| join).await;
    let (before, of_bob) = (lines(&ann.assignment), lines(&bob.assignment));
    let released = v1::Released {
        partition: ann.assignment.partitions[0].partition.clone(),
        epoch: before[0].1,
        next_offset: Some(42),
        reason: v1::ReleaseReason::Shutdown.into(),
        error: String::new(),
    };
    let leave = v1::Leave {
        request: 9,
        partitions: vec![released],
        reason: "restart".to_owned(),
        returning_within_ms: 60_000,
    };
    assert_eq!(ann.act(9, Up::Leave(leave)).await, Ok(()));
    assert!(matches!(ann.next().await, Ok(Some(Down::Ended(v1::Ended { error: None })))));

    let described = client.describe().await;
    let away = described.members.iter().find(|member| member.member == "ann").unwrap();
    assert_eq!((away.returning_within_ms, away.owned), (Some(60_000), 0));
    let kept: Vec<&str> = described
        .partitions
        .iter()
        .filter(|found| found.state() == v1::OwnershipState::Free)
        .map(|found| found.cause.as_str())
        .collect();
    assert_eq!(kept.len(), 2);
    assert!(kept.iter().all(|cause| cause.ends_with("kept for instance x")), "{kept:?}");

    let mut cat = client.open(of_instance(steady("cat", 4))).await.unwrap();
    cat.until("the partitions of ann", |assignment| assignment.partitions.len() == 2).await;
    let after = lines(&cat.assignment);
    assert!(before.iter().zip(&after).all(|(old, new)| old.0 == new.0 && old.1 < new.1));
    assert_eq!(client.committed(&partition(before[0].0)).await, Ok(Some(42)));
    bob.heartbeat().await.unwrap();
    assert_eq!(lines(&bob.assignment), of_bob, "nothing of bob's has moved");
    node.shutdown().await;
}
