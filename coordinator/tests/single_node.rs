//! One node, over real gRPC.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

mod common;
#[path = "single_node/old_sdk.rs"]
mod old_sdk;
#[path = "single_node/places.rs"]
mod places;
#[path = "single_node/standing.rs"]
mod standing;

use std::time::Duration;

use common::*;
use tenure_coordinator::Node;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tenure_proto::{error_of_status, v1};
use tonic::Code;

struct Rig {
    node: Node,
    client: Client,
    _folder: tempfile::TempDir,
}

async fn rig() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(lone(folder.path())).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let client = Client::of(&node).await;
    Rig { node, client, _folder: folder }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_joins_is_granted_acquires_commits_and_leaves() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(steady("ann", 2)).await.unwrap();
    assert_eq!((ann.joined.ttl_ms, ann.joined.heartbeat_interval_ms), (30_000, 9_000));
    assert_eq!(ann.joined.node_address, node.client_address().to_string());
    ann.until("both partitions", |assignment| assignment.partitions.len() == 2).await;
    let grants: Vec<v1::Assigned> = ann.assignment.partitions.clone();
    assert_eq!(grants[0].topic, TOPIC);

    let verified = client.ownership.verify(v1::VerifyRequest {
        group: GROUP.to_owned(),
        member: "ann".to_owned(),
        grants: vec![v1::GrantRef {
            partition: grants[0].partition.clone(),
            epoch: grants[0].epoch,
        }],
    });
    let verdict = verified.await.unwrap().into_inner().verdicts.remove(0);
    assert_eq!((verdict.error, verdict.next_offset, verdict.home_initialised), (None, None, false));

    ann.acquire(&grants[0]).await;
    assert_eq!(client.commit("ann", &grants[0], 1, 41).await, Ok(()));
    assert_eq!(client.commit("ann", &grants[0], 1, 41).await, Ok(()), "a lost answer is repeated");
    assert_eq!(client.commit("ann", &grants[0], 2, 40).await.unwrap_err().code, "OFFSET_REGRESSED");
    assert_eq!(
        client.committed(&partition(grants[0].partition.as_ref().unwrap().index)).await,
        Ok(Some(41))
    );

    let held = v1::HeldPartition {
        still_ms: 0,
        end_offset: None,
        partition: grants[0].partition.clone(),
        epoch: grants[0].epoch,
        phase: v1::Phase::Running.into(),
        position: 57,
        phase_ms: 12,
        error: String::new(),
    };
    ann.heartbeat_with(vec![held]).await.unwrap();
    let described = client.describe().await;
    let member = &described.members[0];
    assert!(member.lease_remaining_ms.is_some_and(|ms| ms <= 30_000 && ms > 0), "{member:?}");
    let running = described.partitions.iter().find(|p| p.partition == grants[0].partition).unwrap();
    assert_eq!((running.position, running.committed, running.acquired), (Some(57), Some(41), true));

    let leave = v1::Leave { request: 7, reason: "test ends".to_owned(), ..v1::Leave::default() };
    assert_eq!(ann.act(7, Up::Leave(leave)).await, Ok(()));
    assert!(matches!(ann.next().await, Ok(Some(Down::Ended(v1::Ended { error: None })))));
    assert!(matches!(ann.next().await, Ok(None)));
    let again = client.open(steady("ann", 2)).await.map(|_| ()).unwrap_err();
    assert_eq!(error_of_status(&again).code, "MEMBER_GONE");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_owner_is_expired_and_its_late_commit_is_fenced_by_the_current_epoch() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(join("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let old = ann.assigned(0).unwrap();
    ann.acquire(&old).await;
    assert_eq!(client.commit("ann", &old, 1, 10).await, Ok(()));

    // Ann sends nothing from here on, with her stream open; bob waits.
    let mut bob = client.open(join("bob", 1)).await.unwrap();
    bob.until("ann's partition", |assignment| !assignment.partitions.is_empty()).await;
    let new = bob.assigned(0).unwrap();
    assert!(new.epoch > old.epoch);

    let late = client.commit("ann", &old, 2, 11).await.unwrap_err();
    assert_eq!((late.code.as_str(), late.current_epoch), ("FENCED", new.epoch));
    assert!(late.message.contains(&format!("current is e{}", new.epoch)), "{}", late.message);
    assert_eq!(client.commit("bob", &new, 1, 12).await, Ok(()));
    assert_eq!(client.committed(&partition(0)).await, Ok(Some(12)));
    // The end was on its way all along.
    let ended = loop {
        match ann.next().await.unwrap() {
            Some(Down::Ended(ended)) => break ended,
            Some(_) => {}
            None => panic!("closed without a word"),
        }
    };
    assert_eq!(ended.error.unwrap().code, "MEMBER_GONE");
    let events = client.describe().await;
    assert_eq!(events.partitions[0].member, "bob");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commit_of_a_member_that_kept_its_partition_is_accepted_although_the_group_changed() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(steady("ann", 2)).await.unwrap();
    ann.until("both partitions", |assignment| assignment.partitions.len() == 2).await;
    for grant in ann.assignment.partitions.clone() {
        ann.acquire(&grant).await;
    }
    let before = client.describe().await.summary.unwrap().group_epoch;

    let mut bob = client.open(steady("bob", 2)).await.unwrap();
    ann.until("a revoke", |assignment| assignment.partitions.iter().any(|p| p.revoking)).await;
    let (asked, kept): (Vec<_>, Vec<_>) =
        ann.assignment.partitions.clone().into_iter().partition(|p| p.revoking);
    assert_eq!((asked.len(), kept.len()), (1, 1));
    let remaining = asked[0].drain_remaining_ms;
    // Longer than the drain where the heartbeat that is answered was received before the revoke.
    assert!((20_000..40_000).contains(&remaining), "{remaining}");
    assert!(client.describe().await.summary.unwrap().group_epoch > before);

    assert_eq!(client.commit("ann", &kept[0], 1, 5).await, Ok(()), "kept");
    assert_eq!(client.commit("ann", &asked[0], 1, 6).await, Ok(()), "revoking counts as holding");
    assert_eq!(ann.release(&asked[0], Some(7)).await, Ok(()));
    bob.until("the released one", |assignment| assignment.partitions.len() == 1).await;
    let fenced = client.commit("ann", &asked[0], 2, 8).await.unwrap_err();
    assert_eq!(
        (fenced.code.as_str(), fenced.current_epoch),
        ("FENCED", bob.assignment.partitions[0].epoch)
    );
    assert_eq!(client.committed(asked[0].partition.as_ref().unwrap()).await, Ok(Some(7)));
    assert_eq!(client.commit("ann", &kept[0], 2, 9).await, Ok(()), "still kept");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_that_does_not_release_loses_the_partition_at_the_drain_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = lone(folder.path());
    settings.deadlines.drain_deadline_ms = TTL_MS + 75;
    let node = Node::start(settings).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let mut client = Client::of(&node).await;
    let mut ann = client.open(join("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let old = ann.assigned(0).unwrap();
    ann.acquire(&old).await;
    let mut bob = client.open(join("bob", 1)).await.unwrap();
    let moved = client.operator.r#move(v1::MoveRequest {
        context: operator("test"),
        group: GROUP.to_owned(),
        partition: Some(partition(0)),
        to_member: "bob".to_owned(),
    });
    let moved = moved.await.unwrap().into_inner();
    assert_eq!(
        (moved.moves[0].from_member.as_str(), moved.moves[0].to_member.as_str()),
        ("ann", "bob")
    );
    // Ann goes on with heartbeats, but never lets go.
    together_until("the end of the drain", &mut ann, &mut bob, |ann, bob| {
        ann.partitions.is_empty() && !bob.partitions.is_empty()
    })
    .await;
    let cause = client.describe().await.partitions.remove(0).cause;
    assert!(cause.starts_with("acquiring"), "{cause}");
    assert_eq!(client.commit("ann", &old, 1, 1).await.unwrap_err().code, "FENCED");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_that_is_never_acquired_goes_back_and_is_granted_again_after_a_back_off() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = lone(folder.path());
    settings.deadlines.acquire_deadline_ms = 300;
    settings.deadlines.hold_ms = 100;
    let node = Node::start(settings).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let mut client = Client::of(&node).await;
    let mut ann = client.open(join("ann", 1)).await.unwrap();
    ann.until("the grant", |assignment| !assignment.partitions.is_empty()).await;
    let first = ann.assigned(0).unwrap().epoch;
    ann.until("a later grant", |assignment| {
        assignment.partitions.first().is_some_and(|assigned| assigned.epoch > first)
    })
    .await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_is_taken_up_again_with_the_same_grants() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(steady("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let (epoch, member_epoch) = (ann.assigned(0).unwrap().epoch, ann.member_epoch);
    drop(ann);
    let mut again = steady("ann", 1);
    again.member_epoch = member_epoch;
    let mut ann = client.open(again.clone()).await.unwrap();
    assert_eq!(ann.member_epoch, member_epoch);
    assert_eq!(ann.assigned(0).unwrap().epoch, epoch);
    ann.heartbeat().await.unwrap();
    // A second session of the same member ends the first.
    let _second = client.open(again).await.unwrap();
    assert!(matches!(ann.next().await, Ok(None)));
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_tells_the_moves_and_changes_nothing() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(steady("ann", 4)).await.unwrap();
    let mut bob = client.open(steady("bob", 4)).await.unwrap();
    // Ann may have been planned alone first.
    while ann.assignment.partitions.len() != 2 || bob.assignment.partitions.len() != 2 {
        ann.heartbeat().await.unwrap();
        bob.heartbeat().await.unwrap();
        let asked = ann.assignment.partitions.iter().find(|assigned| assigned.revoking).cloned();
        if let Some(asked) = asked {
            ann.release(&asked, None).await.unwrap();
        }
    }
    let before = state_of(&node);
    let context =
        |dry_run| operator("test").map(|context| v1::OperatorContext { dry_run, ..context });
    let drain = |dry_run| v1::DrainRequest {
        context: context(dry_run),
        group: GROUP.to_owned(),
        member: "ann".to_owned(),
        undrain: false,
    };
    let told = client.operator.drain(drain(true)).await.unwrap().into_inner();
    assert_eq!((told.moves.len(), told.group_epoch), (2, 0));
    assert!(told.moves.iter().all(|step| step.from_member == "ann" && step.to_member == "bob"));
    let request = v1::RebalanceRequest { context: context(true), group: GROUP.to_owned() };
    let told = client.operator.rebalance(request).await.unwrap().into_inner();
    assert_eq!(told.moves, vec![]);
    assert_eq!(state_of(&node).groups, before.groups);

    let done = client.operator.drain(drain(false)).await.unwrap().into_inner();
    assert!(done.group_epoch > 0 && done.request_id.starts_with("op-"));
    ann.until("revokes", |assignment| assignment.partitions.iter().all(|p| p.revoking)).await;
    for assigned in ann.assignment.partitions.clone() {
        ann.release(&assigned, None).await.unwrap();
    }
    bob.until("all", |assignment| assignment.partitions.len() == 4).await;
    let repeated =
        v1::OperatorContext { request_id: done.request_id.clone(), ..context(false).unwrap() };
    let again = v1::DrainRequest { context: Some(repeated), ..drain(false) };
    let again = client.operator.drain(again).await.unwrap().into_inner();
    assert_eq!((again.request_id, again.group_epoch), (done.request_id, done.group_epoch));
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floor_lifts_the_next_epoch_and_a_repetition_changes_nothing() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(steady("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let first = ann.assigned(0).unwrap();
    let raise = |dry_run, floor| v1::RaiseEpochFloorRequest {
        context: operator("founded anew").map(|context| v1::OperatorContext {
            dry_run,
            request_id: "floor-1".to_owned(),
            ..context
        }),
        floor,
    };
    let told = client.operator.raise_epoch_floor(raise(true, 500)).await.unwrap().into_inner();
    assert_eq!(told.epoch_counter, 500);
    assert_eq!(state_of(&node).epoch_counter, first.epoch);
    for _ in 0..2 {
        let done = client.operator.raise_epoch_floor(raise(false, 500)).await.unwrap();
        assert_eq!(done.into_inner().epoch_counter, 500);
    }
    let low = v1::RaiseEpochFloorRequest { context: operator("late"), floor: 3 };
    let low = client.operator.raise_epoch_floor(low).await.unwrap().into_inner();
    assert_eq!(low.epoch_counter, 500);
    // The grant of before stays what it is; the next one is above the floor.
    ann.acquire(&first).await;
    ann.release(&first, None).await.unwrap();
    ann.until("a grant above the floor", |assignment| {
        assignment.partitions.first().is_some_and(|assigned| assigned.epoch == 501)
    })
    .await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_reflection_answer() {
    let Rig { node, _folder, .. } = rig().await;
    let channel = channel(node.client_address()).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    for service in ["tenure.v1.Membership", "tenure.v1.Offsets", "tenure.v1.Ownership", ""] {
        let request = tonic_health::pb::HealthCheckRequest { service: service.to_owned() };
        let status = health.check(request).await.unwrap().into_inner().status;
        assert_eq!(status, 1, "{service}");
    }
    let unknown = tonic_health::pb::HealthCheckRequest { service: "nothing".to_owned() };
    assert_eq!(health.check(unknown).await.unwrap_err().code(), Code::NotFound);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_tells_sessions_and_calls_where_they_stand() {
    let Rig { node, mut client, _folder, .. } = rig().await;
    let mut ann = client.open(join("ann", 1)).await.unwrap();
    let stopping = tokio::spawn(async move {
        tokio::time::timeout(Duration::from_secs(20), node.shutdown()).await.unwrap();
    });
    let code = loop {
        match ann.heartbeat().await {
            Ok(_) => {}
            Err(code) => break code,
        }
    };
    assert!(["SHUTTING_DOWN", "NO_LEADER", "NOT_LEADER"].contains(&code.as_str()), "{code}");
    stopping.await.unwrap();
}
