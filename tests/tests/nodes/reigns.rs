//! Raft leaders that are killed again and again: the dead are freed in time, the living stay.

use std::time::{Duration, Instant};

use tenure_model::{TopicId, TopicName};
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tenure_sdk::session::CallError;
use tenure_tests::cluster::{Cluster, block_on};
use tenure_tests::figures::tell;
use tenure_tests::load::{Load, Shape};
use tenure_tests::servers::wait_until;
use tenure_tests::tier;

use super::{PATIENCE, assert_undisturbed, beside_others};

const TTL: Duration = Duration::from_secs(12);
const HEARTBEAT: Duration = Duration::from_millis(2_400);
/// A busy machine takes some of it.
const SLACK: Duration = Duration::from_secs(1);
/// The longest election timeout and one round of votes.
const ELECTION: Duration = Duration::from_millis(1_500);
/// What two busy cores add.
const ROOM: Duration = Duration::from_secs(1);

#[test]
fn dead_member_is_freed_in_time_and_no_living_one_expires_though_raft_leaders_come_and_go_l01_l02()
{
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    let slack = format!("silence_slack_ms = {}", SLACK.as_millis());
    let settings = super::settings().replace("[deadlines]", &format!("[deadlines]\n{slack}"));
    let mut cluster = Cluster::start_with(3, &settings);
    let shape = Shape { ttl_ms: millis(TTL), ..Shape::default() };
    let load = Load::start(cluster.addresses(), shape);
    let before = load.report();
    let group = "short-lived";
    let died = block_on(live_and_die(&cluster, group));
    let mut reigns = 0;
    let freed = loop {
        // Each reign is just long enough to hear who is silent, and to log it.
        let reign = Instant::now() + HEARTBEAT + SLACK * 2;
        let freed = wait_until(reign.saturating_duration_since(Instant::now()), || {
            is_gone(&cluster, group)
        });
        if freed {
            break died.elapsed();
        }
        assert!(died.elapsed() < PATIENCE, "never freed:\n{}", cluster.output());
        let (leader, term) = cluster.raft_leader();
        tell(format_args!("after {:?} node {leader} is killed in term {term}", died.elapsed()));
        cluster.kill(leader);
        cluster.run(leader);
        reigns += 1;
        let elected = wait_until(PATIENCE, || cluster.raft_leader().1 > term);
        assert!(elected, "{}", cluster.output());
    };
    load.wait_for_more(30);
    let report = load.finish();
    tell(format_args!("freed after {freed:?} and {reigns} kills of the raft leader"));
    assert_undisturbed(&before, &report);
    assert!(reigns >= 2, "{reigns} kills are no test");
    let bound = TTL + HEARTBEAT + SLACK + ELECTION + ROOM;
    assert!(freed <= bound, "freed after {freed:?}, the bound is {bound:?}");
    assert!(freed >= TTL - ROOM, "freed after {freed:?}, before its lease ended");
}

fn millis(length: Duration) -> u64 {
    u64::try_from(length.as_millis()).unwrap()
}

/// Joins by hand and lets the stream go without a word. Gives the moment of its last sign of life.
async fn live_and_die(cluster: &Cluster, group: &str) -> Instant {
    let topic: TopicName = "orders".parse().unwrap();
    let join = v1::Join {
        group: group.to_owned(),
        member: "dead".to_owned(),
        topics: vec![topic.to_string()],
        ttl_ms: millis(TTL),
        heartbeat_interval_ms: millis(HEARTBEAT),
        report: vec![v1::TopicReport {
            topic: topic.to_string(),
            topic_id: TopicId::of_name(&topic).to_string(),
            partition_count: 4,
        }],
        ..v1::Join::default()
    };
    for address in cluster.addresses().iter().cycle().take(30) {
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"))
            .unwrap()
            .connect()
            .await
            .unwrap();
        let mut client = v1::membership_client::MembershipClient::new(channel);
        let first = v1::SessionUp { up: Some(Up::Join(join.clone())) };
        let messages = futures::stream::iter([first]);
        let messages = futures::StreamExt::chain(messages, futures::stream::pending());
        let Ok(answer) = client.session(messages).await else { continue };
        let mut down = answer.into_inner();
        if let Ok(Some(v1::SessionDown { down: Some(Down::Joined(_)) })) = down.message().await {
            return Instant::now();
        }
    }
    panic!("no node took the join");
}

fn is_gone(cluster: &Cluster, group: &str) -> bool {
    match cluster.describe(group) {
        Ok(described) => described.members.is_empty(),
        Err(CallError::Refused(_) | CallError::Unknown { .. }) => false,
    }
}
