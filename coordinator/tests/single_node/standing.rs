//! What heartbeats tell of partitions that stand still, and what members say of themselves.

use super::*;

/// Settings under which a partition is said to stand still after 400 ms.
async fn quick() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = lone(folder.path());
    settings.deadlines.not_advancing_ms = 400;
    let node = Node::start(settings).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let client = Client::of(&node).await;
    Rig { node, client, _folder: folder }
}

async fn standing(client: &mut Client) -> u32 {
    let listed = client.ownership.list_groups(v1::ListGroupsRequest {}).await.unwrap();
    listed.into_inner().groups[0].not_advancing
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partition_whose_owner_lives_and_stands_still_is_not_advancing_until_it_goes_on() {
    let Rig { node, mut client, _folder, .. } = quick().await;
    let mut ann = client.open(steady("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let grant = ann.assigned(0).unwrap();
    ann.acquire(&grant).await;
    for (phase, still_ms, stands_still) in [
        (v1::Phase::Running, 399, false),
        (v1::Phase::Running, 400, true),
        (v1::Phase::Draining, 90_000, false),
        (v1::Phase::Running, 90_000, true),
        (v1::Phase::Running, 0, false),
    ] {
        let held = v1::HeldPartition {
            partition: grant.partition.clone(),
            epoch: grant.epoch,
            phase: phase.into(),
            position: 7,
            still_ms,
            end_offset: Some(12),
            ..v1::HeldPartition::default()
        };
        ann.heartbeat_with(vec![held]).await.unwrap();
        let described = client.describe().await;
        let found = &described.partitions[0];
        let what = format!("{phase:?} for {still_ms} ms: {found:?}");
        assert_eq!((found.not_advancing, found.end_offset), (stands_still, Some(12)), "{what}");
        let counted = described.summary.unwrap().not_advancing;
        assert_eq!(counted, u32::from(stands_still), "{what}");
        assert_eq!(standing(&mut client).await, u32::from(stands_still), "{what}");
        // It is its owner's all the while.
        assert_eq!((found.member.as_str(), found.epoch), ("ann", grant.epoch), "{what}");
    }
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_of_a_member_are_shown_and_bad_ones_refused() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let label = |name: &str, value: &str| v1::Label { name: name.into(), value: value.into() };
    let labels = vec![label("rack", "r1"), label("zone", "north west")];
    let wish = v1::Join { labels: labels.clone(), ..steady("ann", 1) };
    let mut ann = client.open(wish).await.unwrap();
    ann.heartbeat().await.unwrap();
    assert_eq!(client.describe().await.members[0].labels, labels);
    let many = (0..17).map(|at| label(&format!("l{at}"), "x")).collect();
    for (code, labels) in [
        ("INVALID_ARGUMENT", vec![label("a b", "x")]),
        ("INVALID_ARGUMENT", vec![label("", "x")]),
        ("INVALID_ARGUMENT", vec![label("rack", "a"), label("rack", "b")]),
        ("INVALID_ARGUMENT", vec![label("rack", &"x".repeat(250))]),
        ("TOO_LARGE", many),
    ] {
        let refused = client.open(v1::Join { labels, ..steady("bob", 1) }).await;
        assert_eq!(error_of_status(&refused.map(|_| ()).unwrap_err()).code, code);
    }
    assert_eq!(client.describe().await.members.len(), 1, "a refused join changes nothing");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sink_that_no_member_reaches_is_said_to_be_unreachable_and_the_partition_does_not_go_round()
{
    let folder = tempfile::tempdir().unwrap();
    let mut settings = lone(folder.path());
    (settings.deadlines.hold_ms, settings.deadlines.hold_max_ms) = (300, 60_000);
    let node = Node::start(settings).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let mut client = Client::of(&node).await;
    let mut sessions = Vec::new();
    for name in ["ann", "bob", "cid", "dan"] {
        sessions.push((name, client.open(steady(name, 1)).await.unwrap()));
    }
    let mut failed = Vec::new();
    let started = tokio::time::Instant::now();
    while failed.len() < 3 {
        let described = client.describe().await.partitions.remove(0);
        assert!(!described.cause.starts_with("sink unreachable"), "too early: {described:?}");
        for (name, session) in &mut sessions {
            session.heartbeat().await.unwrap();
            let Some(grant) = session.assigned(0).filter(|grant| !grant.revoking) else { continue };
            if failed.contains(&(*name, grant.epoch)) {
                continue;
            }
            let released = v1::Released {
                partition: grant.partition.clone(),
                epoch: grant.epoch,
                reason: v1::ReleaseReason::AcquireFailed.into(),
                error: "sink orders-db: connection refused".to_owned(),
                ..v1::Released::default()
            };
            failed.push((*name, grant.epoch));
            let request = failed.len() as u64;
            let release = Up::Release(v1::Release { request, partitions: vec![released] });
            assert_eq!(session.act(request, release).await, Ok(()));
        }
    }
    let names: std::collections::BTreeSet<&str> = failed.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), 3, "another member each time: {failed:?}");
    assert!(
        started.elapsed() >= Duration::from_millis(300 + 600),
        "each waits longer than the last"
    );
    let found = client.describe().await.partitions.remove(0);
    assert!(found.cause.starts_with("sink unreachable; "), "{found:?}");
    assert_eq!(found.error, "sink orders-db: connection refused");
    node.shutdown().await;
}
