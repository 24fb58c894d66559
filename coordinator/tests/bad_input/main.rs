//! Bad input to every call: a stable code, a message with the next step, and nothing changes.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

#[path = "../common/mod.rs"]
mod common;
mod operators;
mod others;

use common::*;
use tenure_coordinator::Node;
use tenure_core::State;
use tenure_model::limits::NAME_BYTES_MAX;
use tenure_proto::v1::session_up::Up;
use tenure_proto::{error_of_status, v1};

/// What input could have changed.
fn digest(node: &Node) -> State {
    State { applied: Default::default(), now: Default::default(), ..state_of(node) }
}

fn long() -> String {
    "x".repeat(NAME_BYTES_MAX + 1)
}

fn huge() -> String {
    "x".repeat(10 * 1024 * 1024)
}

fn odd(index: u32, topic_id: &str) -> Option<v1::Partition> {
    Some(v1::Partition { topic_id: topic_id.to_owned(), index })
}

/// One refused call: what it was, the code wanted, and what came.
struct Case(String, &'static str, v1::Error);

fn refused<T>(what: &str, code: &'static str, answer: Result<T, tonic::Status>) -> Case {
    match answer {
        Ok(_) => panic!("{what} was accepted"),
        Err(status) => Case(what.to_owned(), code, error_of_status(&status)),
    }
}

fn check(cases: Vec<Case>) {
    for Case(what, code, error) in cases {
        assert_eq!(error.code, code, "{what}: {}", error.message);
        let has_step = [": ", "is missing", "is empty", "not known", "outside"];
        assert!(
            has_step.iter().any(|mark| error.message.contains(mark)),
            "{what}: no next step in {:?}",
            error.message
        );
        assert!(error.message.len() < 1_000, "{what}: a message of {} bytes", error.message.len());
    }
}

struct Rig {
    node: Node,
    client: Client,
    ann: Session,
    before: State,
    _folder: tempfile::TempDir,
}

/// A node with one member that holds a partition, in a group that stands still.
async fn rig() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = lone(folder.path());
    settings.lease.ttl_ms = 60_000;
    settings.lease.heartbeat_interval_ms = 20_000;
    settings.deadlines.drain_deadline_ms = 90_000;
    let node = Node::start(settings).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let mut client = Client::of(&node).await;
    let mut ann = client.open(join("ann", 1)).await.unwrap();
    ann.until("the partition", |assignment| !assignment.partitions.is_empty()).await;
    let grant = ann.assigned(0).unwrap();
    ann.acquire(&grant).await;
    client.commit("ann", &grant, 5, 50).await.unwrap();
    let before = digest(&node);
    Rig { node, client, ann, before, _folder: folder }
}

/// The next commit of a grant.
fn line_of(grant: &v1::Assigned, next_offset: u64) -> v1::OffsetCommit {
    v1::OffsetCommit {
        partition: grant.partition.clone(),
        epoch: grant.epoch,
        sequence: 6,
        next_offset,
        metadata: vec![],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_commits_and_fetches_change_nothing() {
    let Rig { node, mut client, ann, before, _folder, .. } = rig().await;
    let grant = ann.assigned(0).unwrap();
    let line = line_of(&grant, 51);
    let with =
        |commits| v1::CommitRequest { group: GROUP.to_owned(), member: "ann".to_owned(), commits };
    let one = |change: &dyn Fn(&mut v1::OffsetCommit)| {
        let mut line = line.clone();
        change(&mut line);
        with(vec![line])
    };
    let good = || with(vec![line.clone()]);
    let bad = vec![
        ("nothing", "INVALID_ARGUMENT", v1::CommitRequest::default()),
        ("no lines", "INVALID_ARGUMENT", with(vec![])),
        ("long group", "INVALID_ARGUMENT", v1::CommitRequest { group: long(), ..good() }),
        ("odd group", "INVALID_ARGUMENT", v1::CommitRequest { group: "a b".into(), ..good() }),
        ("odd member", "INVALID_ARGUMENT", v1::CommitRequest { member: "ä\0".into(), ..good() }),
        ("unknown group", "UNKNOWN_GROUP", v1::CommitRequest { group: "no".into(), ..good() }),
        ("no partition", "INVALID_ARGUMENT", one(&|line| line.partition = None)),
        ("odd topic id", "INVALID_ARGUMENT", one(&|line| line.partition = odd(0, "../../x"))),
        (
            "index too high",
            "INVALID_ARGUMENT",
            one(&|line| {
                line.partition = odd(u32::MAX, &topic_id().to_string());
            }),
        ),
        ("epoch 0", "INVALID_ARGUMENT", one(&|line| line.epoch = 0)),
        ("epoch overflow", "INVALID_ARGUMENT", one(&|line| line.epoch = u64::MAX)),
        ("sequence 0", "INVALID_ARGUMENT", one(&|line| line.sequence = 0)),
        ("negative offset", "INVALID_ARGUMENT", one(&|line| line.next_offset = -1_i64 as u64)),
        ("metadata", "TOO_LARGE", one(&|line| line.metadata = vec![0; 4097])),
        ("twice", "INVALID_ARGUMENT", with(vec![line.clone(), line.clone()])),
        ("many", "TOO_LARGE", with(vec![line.clone(); 10_001])),
        ("10 MB", "TOO_LARGE", v1::CommitRequest { member: huge(), ..good() }),
    ];
    let mut cases = Vec::new();
    for (what, code, request) in bad {
        cases.push(refused(what, code, client.offsets.commit(request).await));
    }
    let fetch = |partitions| v1::FetchRequest { group: GROUP.to_owned(), partitions };
    let bad = vec![
        ("fetch of nothing", "INVALID_ARGUMENT", v1::FetchRequest::default()),
        ("fetch, unknown partition", "UNKNOWN_PARTITION", fetch(vec![partition(7)])),
        ("fetch, twice", "INVALID_ARGUMENT", fetch(vec![partition(0), partition(0)])),
        ("fetch, 10 MB", "TOO_LARGE", v1::FetchRequest { group: huge(), partitions: vec![] }),
    ];
    for (what, code, request) in bad {
        cases.push(refused(what, code, client.offsets.fetch(request).await));
    }
    check(cases);

    // Well-formed, but not true: a verdict of its own for each.
    let mut unknown = line.clone();
    unknown.partition = Some(partition(9));
    let mut stale = line.clone();
    stale.sequence = 4;
    let mut ahead = line.clone();
    ahead.epoch = grant.epoch + 1;
    for (what, line, code) in [
        ("unknown partition", unknown, "UNKNOWN_PARTITION"),
        ("stale sequence", stale, "STALE_COMMIT"),
        ("epoch never granted", ahead, "NOT_OWNED"),
    ] {
        let answer = client.offsets.commit(with(vec![line])).await.unwrap().into_inner();
        assert_eq!(answer.verdicts[0].error.as_ref().unwrap().code, code, "{what}");
    }
    let stranger = v1::CommitRequest { member: "bob".into(), ..good() };
    let answer = client.offsets.commit(stranger).await.unwrap().into_inner();
    assert_eq!(answer.verdicts[0].error.as_ref().unwrap().code, "NOT_OWNED");
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_joins_change_nothing() {
    let Rig { node, mut client, before, _folder, .. } = rig().await;
    let good = || join("bob", 1);
    let report = |topic: &str, topic_id: &str, partition_count| v1::TopicReport {
        topic: topic.to_owned(),
        topic_id: topic_id.to_owned(),
        partition_count,
    };
    let id = topic_id().to_string();
    let fence = v1::GroupSettings { takeover: v1::Takeover::Fence.into(), ..Default::default() };
    let unknown = v1::GroupSettings { home: 99, ..Default::default() };
    let other = v1::GroupSettings { home: v1::Home::Sink.into(), ..Default::default() };
    let bad: Vec<(&str, &'static str, v1::Join)> = vec![
        ("nothing", "INVALID_ARGUMENT", v1::Join::default()),
        ("long member", "INVALID_ARGUMENT", v1::Join { member: long(), ..good() }),
        ("odd group", "INVALID_ARGUMENT", v1::Join { group: "a/b".into(), ..good() }),
        ("odd instance", "INVALID_ARGUMENT", v1::Join { instance_id: "é".into(), ..good() }),
        ("no topics", "INVALID_ARGUMENT", v1::Join { topics: vec![], ..good() }),
        ("topic twice", "INVALID_ARGUMENT", v1::Join { topics: vec!["t".into(); 2], ..good() }),
        ("many topics", "TOO_LARGE", v1::Join { topics: vec!["t".into(); 1_001], ..good() }),
        ("ttl overflow", "INVALID_ARGUMENT", v1::Join { ttl_ms: u64::MAX, ..good() }),
        ("ttl 1", "INVALID_ARGUMENT", v1::Join { ttl_ms: 1, ..good() }),
        (
            "slow heartbeat",
            "INVALID_ARGUMENT",
            v1::Join { ttl_ms: 3_000, heartbeat_interval_ms: 1_001, ..good() },
        ),
        ("weight", "INVALID_ARGUMENT", v1::Join { weight: 21, ..good() }),
        ("long client", "INVALID_ARGUMENT", v1::Join { client: "x".repeat(1_025), ..good() }),
        ("fence without sinks", "INVALID_ARGUMENT", v1::Join { settings: Some(fence), ..good() }),
        ("unknown home", "INVALID_ARGUMENT", v1::Join { settings: Some(unknown), ..good() }),
        ("other home", "SETTINGS_CONFLICT", v1::Join { settings: Some(other), ..good() }),
        (
            "odd topic id",
            "INVALID_ARGUMENT",
            v1::Join { report: vec![report(TOPIC, "x", 1)], ..good() },
        ),
        (
            "no partitions",
            "INVALID_ARGUMENT",
            v1::Join { report: vec![report(TOPIC, &id, 0)], ..good() },
        ),
        (
            "too many partitions",
            "INVALID_ARGUMENT",
            v1::Join { report: vec![report(TOPIC, &id, u32::MAX)], ..good() },
        ),
        (
            "topic id twice",
            "INVALID_ARGUMENT",
            v1::Join { report: vec![report(TOPIC, &id, 1), report("other", &id, 1)], ..good() },
        ),
        (
            "another name for a topic id",
            "INVALID_ARGUMENT",
            v1::Join { report: vec![report("other", &id, 1)], ..good() },
        ),
        ("membership that never was", "MEMBER_GONE", v1::Join { member_epoch: 77, ..good() }),
        ("another membership", "STALE_MEMBER", v1::Join { member_epoch: 77, ..join("ann", 1) }),
        ("10 MB", "TOO_LARGE", v1::Join { client: huge(), ..good() }),
    ];
    let mut cases = Vec::new();
    for (what, code, join) in bad {
        cases.push(refused(what, code, client.open(join).await.map(|_| ())));
    }
    // A stream that does not begin with a join.
    for (what, up) in [
        ("heartbeat first", Some(Up::Heartbeat(v1::Heartbeat::default()))),
        ("empty message first", None),
    ] {
        let mut session = client.stream().await.unwrap();
        session.up.send(v1::SessionUp { up }).await.unwrap();
        cases.push(refused(what, "INVALID_ARGUMENT", session.next().await));
    }
    check(cases);
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_acts_are_answered_and_the_session_goes_on() {
    let Rig { node, mut ann, before, _folder, .. } = rig().await;
    let grant = ann.assigned(0).unwrap();
    let released = |change: &dyn Fn(&mut v1::Released)| {
        let mut released = v1::Released {
            partition: grant.partition.clone(),
            epoch: grant.epoch,
            next_offset: None,
            reason: v1::ReleaseReason::Revoked.into(),
            error: String::new(),
        };
        change(&mut released);
        released
    };
    let release = |partitions| Up::Release(v1::Release { request: 1, partitions });
    let acquired = |partition, epoch| {
        Up::Acquired(v1::Acquired { request: 1, partition, epoch, ..Default::default() })
    };
    let topics = |topics| Up::ReportTopics(v1::ReportTopics { request: 1, topics });
    let report = |count| v1::TopicReport {
        topic: TOPIC.to_owned(),
        topic_id: topic_id().to_string(),
        partition_count: count,
    };
    let same = released(&|_| {});
    let bad = vec![
        ("acquired nothing", "INVALID_ARGUMENT", acquired(None, 0)),
        ("acquired epoch 0", "INVALID_ARGUMENT", acquired(Some(partition(0)), 0)),
        ("acquired unknown", "UNKNOWN_PARTITION", acquired(Some(partition(3)), 1)),
        ("acquired another epoch", "NOT_OWNED", acquired(Some(partition(0)), grant.epoch + 9)),
        ("release twice", "INVALID_ARGUMENT", release(vec![same.clone(), same])),
        ("release reason", "INVALID_ARGUMENT", release(vec![released(&|r| r.reason = 42)])),
        ("release no reason", "INVALID_ARGUMENT", release(vec![released(&|r| r.reason = 0)])),
        (
            "release overflow",
            "INVALID_ARGUMENT",
            release(vec![released(&|r| {
                r.next_offset = Some(u64::MAX);
            })]),
        ),
        (
            "release long error",
            "INVALID_ARGUMENT",
            release(vec![released(&|r| {
                r.error = "x".repeat(2_049);
            })]),
        ),
        ("release another epoch", "NOT_OWNED", release(vec![released(&|r| r.epoch += 9)])),
        ("report 0", "INVALID_ARGUMENT", topics(vec![report(0)])),
        ("report twice", "INVALID_ARGUMENT", topics(vec![report(1), report(1)])),
        (
            "prepared nothing",
            "INVALID_ARGUMENT",
            Up::Prepared(v1::Prepared { request: 1, ..v1::Prepared::default() }),
        ),
        (
            "prepared, long error",
            "INVALID_ARGUMENT",
            Up::Prepared(v1::Prepared {
                request: 1,
                partition: Some(partition(0)),
                error: "x".repeat(2_049),
            }),
        ),
        (
            "leave, back too late",
            "INVALID_ARGUMENT",
            Up::Leave(v1::Leave {
                request: 1,
                returning_within_ms: u64::MAX,
                ..v1::Leave::default()
            }),
        ),
        (
            "leave, long reason",
            "INVALID_ARGUMENT",
            Up::Leave(v1::Leave { request: 1, reason: "x".repeat(1_025), ..v1::Leave::default() }),
        ),
    ];
    let mut cases = Vec::new();
    for (what, code, up) in bad {
        cases.push(Case(what.to_owned(), code, ann.act(1, up).await.unwrap_err()));
    }
    check(cases);
    ann.heartbeat().await.unwrap();
    assert_eq!(digest(&node), before);

    // A heartbeat has no answer of its own to refuse it: the stream ends, the membership stays.
    let held = v1::HeldPartition { phase: 99, ..Default::default() };
    assert_eq!(ann.heartbeat_with(vec![held]).await, Err("INVALID_ARGUMENT".to_owned()));
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}
