//! A session and the unary client against nodes on loopback.

#![allow(clippy::unwrap_used, reason = "the lint knows test functions, not their helpers")]

mod node;

use std::time::{Duration, Instant};

use tenure_model::{
    CommitSequence, Epoch, ErrorCode, GroupId, LeaseSettings, MemberId, NextOffset, Partition,
    PartitionIndex, TopicId, TopicName,
};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::v1;
use tenure_proto::v1::session_up::Up;
use tenure_sdk::grant::Grant;
use tenure_sdk::session::{
    CallError, CoordinatorClient, EndCause, OffsetCommit, ReleaseReason, Repeat, Session,
    SessionConfig, SessionEvent, SessionHandle,
};
use tokio::sync::mpsc::UnboundedReceiver;

use node::{Node, WAIT};

fn partition(index: u32) -> Partition {
    Partition { topic_id: TopicId::from_bits(1), index: PartitionIndex::new(index).unwrap() }
}

fn assigned(index: u32, epoch: u64) -> v1::Assigned {
    v1::Assigned {
        partition: Some(partition_to_wire(partition(index))),
        topic: "t".into(),
        epoch,
        revoking: false,
        drain_remaining_ms: 0,
        home_initialised: true,
        handoff: 3,
        token: "signed".into(),
    }
}

fn config(nodes: &[&Node], ttl_ms: u64) -> SessionConfig {
    let addresses = nodes.iter().map(|node| node.address.clone()).collect();
    let group = GroupId::new("g").unwrap();
    let mut config = SessionConfig::new(addresses, group, vec![TopicName::new("t").unwrap()]);
    config.lease = LeaseSettings::for_ttl(ttl_ms);
    config
}

async fn next(events: &mut UnboundedReceiver<SessionEvent>) -> SessionEvent {
    tokio::time::timeout(WAIT, events.recv()).await.expect("an event").expect("a live session")
}

async fn granted(events: &mut UnboundedReceiver<SessionEvent>) -> Grant {
    assert!(matches!(next(events).await, SessionEvent::Joined { .. }));
    let event = next(events).await;
    let SessionEvent::Granted(grant) = event else { panic!("not a grant: {event:?}") };
    grant
}

fn node_with(assigned: Vec<v1::Assigned>) -> Node {
    let node = Node::start();
    node.change(|state| {
        state.version = 5;
        state.assigned = assigned;
    });
    node
}

fn heartbeats(seen: &[(Instant, Up)]) -> Vec<Instant> {
    seen.iter().filter(|(_, up)| matches!(up, Up::Heartbeat(_))).map(|(at, _)| *at).collect()
}

fn joins(seen: &[(Instant, Up)]) -> Vec<u64> {
    let epoch = |up: &Up| if let Up::Join(join) = up { Some(join.member_epoch) } else { None };
    seen.iter().filter_map(|(_, up)| epoch(up)).collect()
}

fn release(handle: &SessionHandle, grant: &Grant, offset: u64) {
    let offset = NextOffset::new(offset).unwrap();
    let (partition, epoch) = (grant.partition, grant.epoch);
    handle.release(partition, epoch, Some(offset), ReleaseReason::Revoked, String::new());
}

#[tokio::test]
async fn answered_heartbeats_keep_a_lease_live_beyond_its_ttl() {
    let node = node_with(vec![assigned(0, 4)]);
    let (handle, mut events) = Session::start(config(&[&node], 2400));
    let grant = granted(&mut events).await;
    assert_eq!((grant.partition, grant.epoch.get()), (partition(0), 4));
    assert_eq!(grant.member, handle.member());
    let wanted = node.clone();
    tokio::task::spawn_blocking(move || {
        wanted.wait_for("5 heartbeats", |state| heartbeats(&state.seen).len() >= 5);
    })
    .await
    .unwrap();
    assert!(grant.lease.is_live() && handle.is_ready());
    handle.leave(Duration::from_secs(10)).await;
    assert!(!grant.lease.is_live() && !handle.is_ready());
}

#[tokio::test]
async fn broken_stream_is_taken_up_again_and_the_membership_lives_on() {
    let node = node_with(vec![assigned(0, 4)]);
    let (handle, mut events) = Session::start(config(&[&node], 6000));
    let grant = granted(&mut events).await;
    node.cut();
    let wanted = node.clone();
    tokio::task::spawn_blocking(move || {
        wanted.wait_for("another join", |state| joins(&state.seen).len() >= 2);
    })
    .await
    .unwrap();
    assert_eq!(node.change(|state| joins(&state.seen)), [0, 7]);
    assert!(grant.lease.is_live());
    assert!(events.try_recv().is_err(), "nothing happened to the grant");
    drop(handle);
}

#[tokio::test]
async fn redirect_leads_to_the_raft_leader() {
    let follower = Node::start();
    let leader = node_with(vec![assigned(0, 4)]);
    follower.change(|state| state.redirect = Some(leader.address.clone()));
    let (handle, mut events) = Session::start(config(&[&follower], 6000));
    granted(&mut events).await;
    assert_eq!(follower.change(|state| state.calls), 1);
    handle.leave(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn release_is_said_over_reconnects_until_it_is_answered() {
    let node = node_with(vec![assigned(0, 4)]);
    node.change(|state| state.releases_cut = 2);
    let (handle, mut events) = Session::start(config(&[&node], 6000));
    let grant = granted(&mut events).await;
    release(&handle, &grant, 41);
    assert!(
        !tokio::task::spawn_blocking({
            let (node, lease) = (node.clone(), grant.lease.clone());
            move || {
                node.wait_for("an answered release", |state| state.assigned.is_empty());
                lease.is_live()
            }
        })
        .await
        .unwrap()
    );
    let said = node.change(|state| {
        let released =
            |up: &Up| if let Up::Release(release) = up { Some(release.clone()) } else { None };
        state.seen.iter().filter_map(|(_, up)| released(up)).collect::<Vec<_>>()
    });
    assert_eq!(said.len(), 3);
    assert!(said.iter().all(|release| *release == said[0]));
    assert_eq!(said[0].partitions[0].next_offset, Some(41));
}

/// The test's own runtime is the blocked one; the node and the session have threads of their own.
#[tokio::test]
async fn blocked_runtime_does_not_delay_heartbeats() {
    const INTERVAL: Duration = Duration::from_secs(2);
    let node = node_with(vec![assigned(0, 4)]);
    let mut config = config(&[&node], 6000);
    config.lease.heartbeat_interval_ms = 2000;
    let (handle, mut events) = Session::start(config);
    let grant = granted(&mut events).await;
    let blocked = Instant::now();
    while blocked.elapsed() < Duration::from_millis(6500) {
        std::hint::spin_loop();
    }
    let sent = node.change(|state| {
        let mut sent = vec![state.seen[0].0];
        sent.extend(heartbeats(&state.seen));
        sent
    });
    assert!(sent.len() >= 4, "{} messages in {:?}", sent.len(), blocked.elapsed());
    for pair in sent.windows(2) {
        let late = (pair[1] - pair[0]).saturating_sub(INTERVAL);
        assert!(late < INTERVAL / 10, "late by {late:?}");
    }
    assert!(grant.lease.is_live());
    handle.leave(Duration::from_secs(10)).await;
}

#[tokio::test]
async fn leave_says_goodbye_with_what_was_queued() {
    let node = node_with(vec![assigned(0, 4), assigned(1, 5)]);
    let (handle, mut events) = Session::start(config(&[&node], 6000));
    let grant = granted(&mut events).await;
    node.change(|state| state.releases_cut = 1);
    release(&handle, &grant, 41);
    handle.leave(Duration::from_secs(10)).await;
    let left = node.change(|state| {
        state.seen.iter().find_map(|(_, up)| match up {
            Up::Leave(leave) => Some(leave.partitions.clone()),
            Up::Join(_)
            | Up::Heartbeat(_)
            | Up::Prepared(_)
            | Up::Acquired(_)
            | Up::Release(_)
            | Up::ReportTopics(_) => None,
        })
    });
    let left: Vec<_> = left
        .expect("a goodbye")
        .iter()
        .map(|released| (released.epoch, released.next_offset))
        .collect();
    assert_eq!(left, [(4, Some(41)), (5, None)]);
    let mut last = None;
    while let Some(event) = events.recv().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(SessionEvent::Ended { cause: EndCause::Left })), "{last:?}");
}

#[tokio::test]
async fn leave_returns_in_time_when_nobody_answers() {
    // Takes connections, and is silent.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let mut config = config(&[], 6000);
    config.coordinators = vec![address];
    let (handle, mut events) = Session::start(config);
    let _connection = tokio::task::spawn_blocking(move || silent.accept().unwrap()).await.unwrap();
    let asked = Instant::now();
    handle.leave(Duration::from_millis(500)).await;
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    let end = next(&mut events).await;
    let SessionEvent::Ended { cause } = end else { panic!("not an end: {end:?}") };
    assert!(matches!(cause, EndCause::LeaveUnanswered | EndCause::Left), "{cause:?}");
    assert!(events.recv().await.is_none(), "the thread is gone");
}

#[tokio::test]
async fn session_whose_handles_are_dropped_leaves() {
    let node = node_with(vec![assigned(0, 4)]);
    let (handle, mut events) = Session::start(config(&[&node], 6000));
    granted(&mut events).await;
    drop(handle);
    while let Some(event) = events.recv().await {
        assert!(!matches!(event, SessionEvent::Granted(_)));
    }
    node.change(|state| assert!(state.seen.iter().any(|(_, up)| matches!(up, Up::Leave(_)))));
}

#[tokio::test]
async fn contradicting_settings_end_the_session_at_once() {
    let (_handle, mut events) = Session::start(config(&[], 6000));
    let end = next(&mut events).await;
    let SessionEvent::Ended { cause: EndCause::Refused { code, .. } } = end else {
        panic!("not refused: {end:?}")
    };
    assert_eq!(code, ErrorCode::InvalidArgument);
}

fn names() -> (GroupId, MemberId) {
    (GroupId::new("g").unwrap(), MemberId::new("m").unwrap())
}

fn offset(index: u32, epoch: u64) -> OffsetCommit {
    OffsetCommit {
        partition: partition(index),
        epoch: Epoch::new(epoch).unwrap(),
        sequence: CommitSequence(3),
        next_offset: NextOffset::new(41).unwrap(),
        metadata: Vec::new(),
    }
}

#[tokio::test]
async fn commit_finds_the_raft_leader_and_repeats_a_lost_answer_with_the_same_sequence() {
    let follower = Node::start();
    let leader = Node::start();
    follower.change(|state| state.redirect = Some(leader.address.clone()));
    leader.change(|state| state.commits_lost = 1);
    // Nobody listens there.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let client = CoordinatorClient::new(vec![nobody.to_string(), follower.address.clone()]);
    let (group, member) = names();
    let commits = vec![offset(0, 4), offset(1, 1)];
    let verdicts = client.commit(&group, &member, commits.clone(), WAIT).await.unwrap();
    assert_eq!(verdicts[0], Ok(()));
    let refused = verdicts[1].as_ref().unwrap_err();
    assert_eq!((refused.code, refused.current_epoch), (ErrorCode::Fenced, Epoch::new(9).ok()));
    let seen = leader.change(|state| state.commits.clone());
    assert_eq!(seen.len(), 4, "said twice");
    assert_eq!(seen[..2], seen[2..]);
    let asked = follower.change(|state| state.calls);
    client.commit(&group, &member, commits, WAIT).await.unwrap();
    assert_eq!(follower.change(|state| state.calls), asked, "the raft leader is remembered");
}

#[tokio::test]
async fn call_that_may_have_happened_is_not_repeated_unless_that_is_safe() {
    let node = Node::start();
    node.change(|state| state.commits_lost = 1);
    let client = CoordinatorClient::new(vec![node.address.clone()]);
    let answer = client
        .call(Repeat::OnlyWhenNothingHappened, WAIT, |channel| async move {
            let mut client = v1::offsets_client::OffsetsClient::new(channel);
            client.commit(v1::CommitRequest::default()).await
        })
        .await;
    assert!(matches!(answer, Err(CallError::Unknown { attempts: 1, .. })), "{answer:?}");
    assert_eq!(node.change(|state| state.calls), 1);
}

/// A raft leader that answers commits late, a follower that knows it, and who comes after it.
fn late_leader(delay: Duration) -> (Node, Node, Node, CoordinatorClient) {
    let [leader, follower, next] = [Node::start(), Node::start(), Node::start()];
    leader.change(|state| state.commit_delay = delay);
    follower.change(|state| state.redirect = Some(leader.address.clone()));
    let addresses = vec![leader.address.clone(), follower.address.clone()];
    (leader, follower, next, CoordinatorClient::new(addresses))
}

#[tokio::test]
async fn raft_leader_that_stands_still_holds_a_commit_up_until_another_is_known_and_no_longer() {
    let (leader, follower, next, client) = late_leader(WAIT);
    let (group, member) = names();
    let asked = Instant::now();
    let elected = async {
        while follower.change(|state| state.calls) < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        follower.change(|state| state.redirect = Some(next.address.clone()));
        asked.elapsed()
    };
    let commits = vec![offset(0, 4)];
    let commit = client.commit(&group, &member, commits.clone(), WAIT);
    let (verdicts, elected_after) = tokio::join!(commit, elected);
    let took = asked.elapsed();
    assert_eq!(verdicts.unwrap(), [Ok(())]);
    // A pause between two questions is 400 ms at most.
    assert!(took < elected_after + Duration::from_secs(1), "{took:?} {elected_after:?}");
    assert_eq!(leader.change(|state| state.calls), 1, "nobody asked it again");
    client.commit(&group, &member, commits, WAIT).await.unwrap();
    assert_eq!(next.change(|state| state.calls), 2, "it is remembered");
}

#[tokio::test]
async fn slow_raft_leader_gets_a_commit_once() {
    let (leader, follower, _next, client) = late_leader(Duration::from_secs(2));
    let (group, member) = names();
    let verdicts = client.commit(&group, &member, vec![offset(0, 4)], WAIT).await.unwrap();
    assert_eq!(verdicts, [Ok(())]);
    assert_eq!(leader.change(|state| state.commits.len()), 1);
    assert!(follower.change(|state| state.calls) > 1, "it was asked meanwhile");
}

#[tokio::test]
async fn call_that_must_not_be_repeated_goes_nowhere_else_while_a_node_is_silent() {
    let (leader, follower, _next, client) = late_leader(WAIT);
    let answer = client
        .call(Repeat::OnlyWhenNothingHappened, Duration::from_secs(2), |channel| async move {
            let mut client = v1::offsets_client::OffsetsClient::new(channel);
            client.commit(v1::CommitRequest::default()).await
        })
        .await;
    assert!(matches!(answer, Err(CallError::Unknown { attempts: 1, .. })), "{answer:?}");
    assert_eq!(leader.change(|state| state.calls), 1);
    assert_eq!(follower.change(|state| state.calls), 0);
}

#[tokio::test]
async fn refusal_is_final_and_silence_is_never_a_no() {
    let node = Node::start();
    let client = CoordinatorClient::new(vec![node.address.clone()]);
    let (group, member) = names();
    let refused = client.fetch(&group, &[], WAIT).await.unwrap_err();
    assert!(matches!(&refused, CallError::Refused(no) if no.code == ErrorCode::UnknownGroup));
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = CoordinatorClient::new(vec![silent.local_addr().unwrap().to_string()]);
    let asked = Instant::now();
    let verdict =
        client.commit(&group, &member, vec![offset(0, 4)], Duration::from_millis(300)).await;
    assert!(matches!(verdict, Err(CallError::Unknown { .. })), "{verdict:?}");
    assert!(asked.elapsed() < Duration::from_secs(3));
}
