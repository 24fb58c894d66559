//! Rewinds, watches, the past, leases by single calls, and the nodes of the cluster.

use tenure_proto::v1::cluster_client::ClusterClient;
use tenure_proto::v1::history_request::At;
use tenure_proto::v1::leases_client::LeasesClient;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_rewinds_change_nothing() {
    let Rig { node, mut client, ann, before, _folder, .. } = rig().await;
    let grant = ann.assigned(0).unwrap();
    let line = line_of(&grant, 7);
    let with = |commit| v1::RewindRequest {
        group: GROUP.to_owned(),
        member: "ann".to_owned(),
        commit: Some(commit),
        request: "again".to_owned(),
    };
    let good = || with(line.clone());
    let one = |change: &dyn Fn(&mut v1::OffsetCommit)| {
        let mut line = line.clone();
        change(&mut line);
        with(line)
    };
    let mut cases = Vec::new();
    for (what, code, request) in [
        ("nothing", "INVALID_ARGUMENT", v1::RewindRequest::default()),
        ("no offset", "INVALID_ARGUMENT", v1::RewindRequest { commit: None, ..good() }),
        ("no request", "INVALID_ARGUMENT", v1::RewindRequest { request: String::new(), ..good() }),
        ("odd request", "INVALID_ARGUMENT", v1::RewindRequest { request: "a b".into(), ..good() }),
        ("long request", "INVALID_ARGUMENT", v1::RewindRequest { request: long(), ..good() }),
        ("long group", "INVALID_ARGUMENT", v1::RewindRequest { group: long(), ..good() }),
        ("odd member", "INVALID_ARGUMENT", v1::RewindRequest { member: "\0".into(), ..good() }),
        ("unknown group", "UNKNOWN_GROUP", v1::RewindRequest { group: "no".into(), ..good() }),
        ("a stranger", "NOT_OWNED", v1::RewindRequest { member: "bob".into(), ..good() }),
        ("no partition", "INVALID_ARGUMENT", one(&|line| line.partition = None)),
        (
            "unknown partition",
            "UNKNOWN_PARTITION",
            one(&|line| line.partition = Some(partition(9))),
        ),
        ("epoch 0", "INVALID_ARGUMENT", one(&|line| line.epoch = 0)),
        ("epoch overflow", "INVALID_ARGUMENT", one(&|line| line.epoch = u64::MAX)),
        ("epoch never granted", "NOT_OWNED", one(&|line| line.epoch += 1)),
        ("sequence 0", "INVALID_ARGUMENT", one(&|line| line.sequence = 0)),
        ("sequence of before", "STALE_COMMIT", one(&|line| line.sequence = 4)),
        ("negative offset", "INVALID_ARGUMENT", one(&|line| line.next_offset = -1_i64 as u64)),
        ("metadata", "TOO_LARGE", one(&|line| line.metadata = vec![0; 4097])),
        ("10 MB", "TOO_LARGE", v1::RewindRequest { request: huge(), ..good() }),
    ] {
        cases.push(refused(what, code, client.offsets.rewind(request).await));
    }
    check(cases);
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_questions_about_the_past_and_the_future_change_nothing() {
    let Rig { node, mut client, before, _folder, .. } = rig().await;
    let mut cases = Vec::new();
    let watch =
        |group: &str, from_revision| v1::WatchRequest { group: group.into(), from_revision };
    for (what, code, request) in [
        ("watch, odd group", "INVALID_ARGUMENT", watch("a b", 0)),
        ("watch, long group", "INVALID_ARGUMENT", watch(&long(), 0)),
        ("watch, 10 MB", "TOO_LARGE", watch(&huge(), 0)),
        ("watch from far ahead", "INVALID_ARGUMENT", watch("", u64::MAX)),
    ] {
        let opened = client.ownership.watch(request).await;
        let answer = match opened {
            Ok(stream) => stream.into_inner().message().await,
            Err(status) => Err(status),
        };
        cases.push(refused(what, code, answer));
    }
    let history =
        |group: &str, partition, at| v1::HistoryRequest { group: group.to_owned(), partition, at };
    let known = || Some(partition(0));
    for (what, code, request) in [
        ("history of nothing", "INVALID_ARGUMENT", v1::HistoryRequest::default()),
        ("history, odd group", "INVALID_ARGUMENT", history("a b", known(), None)),
        ("history, unknown group", "UNKNOWN_GROUP", history("no", known(), None)),
        ("history, no partition", "INVALID_ARGUMENT", history(GROUP, None, None)),
        ("history, odd topic", "INVALID_ARGUMENT", history(GROUP, odd(0, "x"), None)),
        ("history, unknown", "UNKNOWN_PARTITION", history(GROUP, Some(partition(9)), None)),
        ("history, 10 MB", "TOO_LARGE", history(&huge(), known(), None)),
        (
            "history of the future",
            "INVALID_ARGUMENT",
            history(GROUP, known(), Some(At::Revision(u64::MAX))),
        ),
    ] {
        cases.push(refused(what, code, client.ownership.history(request).await));
    }
    check(cases);
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_leases_change_nothing() {
    let Rig { node, before, _folder, .. } = rig().await;
    let mut leases = LeasesClient::new(channel(node.client_address()).await);
    let mut cases = Vec::new();
    let acquire = || v1::AcquireRequest {
        group: "jobs".to_owned(),
        resource: "report".to_owned(),
        holder: "bob".to_owned(),
        ..v1::AcquireRequest::default()
    };
    for (what, code, request) in [
        ("acquire nothing", "INVALID_ARGUMENT", v1::AcquireRequest::default()),
        ("long holder", "INVALID_ARGUMENT", v1::AcquireRequest { holder: long(), ..acquire() }),
        ("ttl 1", "INVALID_ARGUMENT", v1::AcquireRequest { ttl_ms: 1, ..acquire() }),
        ("ttl overflow", "INVALID_ARGUMENT", v1::AcquireRequest { ttl_ms: u64::MAX, ..acquire() }),
        (
            "long client",
            "INVALID_ARGUMENT",
            v1::AcquireRequest { client: "x".repeat(1_025), ..acquire() },
        ),
        ("10 MB", "TOO_LARGE", v1::AcquireRequest { client: huge(), ..acquire() }),
    ] {
        cases.push(refused(what, code, leases.acquire(request).await));
    }
    let renew = || v1::RenewRequest {
        group: "jobs".to_owned(),
        resource: "report".to_owned(),
        holder: "bob".to_owned(),
        member_epoch: 1,
        epoch: 1,
    };
    for (what, code, request) in [
        ("renew nothing", "INVALID_ARGUMENT", v1::RenewRequest::default()),
        ("renew epoch 0", "INVALID_ARGUMENT", v1::RenewRequest { epoch: 0, ..renew() }),
        ("renew membership 0", "INVALID_ARGUMENT", v1::RenewRequest { member_epoch: 0, ..renew() }),
        ("renew what never was", "MEMBER_GONE", renew()),
        ("renew, 10 MB", "TOO_LARGE", v1::RenewRequest { holder: huge(), ..renew() }),
    ] {
        cases.push(refused(what, code, leases.renew(request).await));
    }
    let verify = v1::VerifyLeaseRequest {
        group: "jobs".to_owned(),
        resource: "report".to_owned(),
        holder: "bob".to_owned(),
        epoch: 1,
    };
    for (what, code, request) in [
        ("verify nothing", "INVALID_ARGUMENT", v1::VerifyLeaseRequest::default()),
        (
            "verify epoch overflow",
            "INVALID_ARGUMENT",
            v1::VerifyLeaseRequest { epoch: u64::MAX, ..verify.clone() },
        ),
        ("verify what never was", "UNKNOWN_GROUP", verify),
    ] {
        cases.push(refused(what, code, leases.verify_lease(request).await));
    }
    let release = v1::ReleaseLeaseRequest {
        group: "jobs".to_owned(),
        resource: "report".to_owned(),
        holder: "bob".to_owned(),
        epoch: 1,
    };
    for (what, code, request) in [
        ("release nothing", "INVALID_ARGUMENT", v1::ReleaseLeaseRequest::default()),
        (
            "release epoch overflow",
            "INVALID_ARGUMENT",
            v1::ReleaseLeaseRequest { epoch: u64::MAX, ..release.clone() },
        ),
        ("release, 10 MB", "TOO_LARGE", v1::ReleaseLeaseRequest { holder: huge(), ..release }),
    ] {
        cases.push(refused(what, code, leases.release_lease(request).await));
    }
    check(cases);
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_changes_of_the_cluster_change_nothing() {
    let Rig { node, before, _folder, .. } = rig().await;
    let mut nodes = ClusterClient::new(channel(node.client_address()).await);
    let mut cases = Vec::new();
    let change = |reason: &str, actor: &str| {
        Some(v1::ClusterChange { reason: reason.to_owned(), actor: actor.to_owned() })
    };
    let good = || change("a test", "test");
    for (what, code, change) in [
        ("no change", "INVALID_ARGUMENT", None),
        ("no reason", "INVALID_ARGUMENT", change("", "test")),
        ("blank reason", "INVALID_ARGUMENT", change("  ", "test")),
        ("long reason", "INVALID_ARGUMENT", change(&"x".repeat(1_025), "test")),
        ("no actor", "INVALID_ARGUMENT", change("why", "")),
        ("long actor", "INVALID_ARGUMENT", change("why", &long())),
        ("10 MB of reason", "TOO_LARGE", change(&huge(), "test")),
    ] {
        let add = v1::AddLearnerRequest {
            change: change.clone(),
            node: 9,
            raft_address: "127.0.0.1:1".to_owned(),
            client_address: "127.0.0.1:2".to_owned(),
        };
        cases.push(refused(what, code, nodes.add_learner(add).await));
        let promote = v1::PromoteRequest { change: change.clone(), node: 1 };
        cases.push(refused(what, code, nodes.promote(promote).await));
        let remove = v1::RemoveRequest { change: change.clone(), node: 1 };
        cases.push(refused(what, code, nodes.remove(remove).await));
        let transfer = v1::TransferLeaderRequest { change, to: 1 };
        cases.push(refused(what, code, nodes.transfer_leader(transfer).await));
    }
    let add = |node, raft: &str, client: &str| v1::AddLearnerRequest {
        change: good(),
        node,
        raft_address: raft.to_owned(),
        client_address: client.to_owned(),
    };
    for (what, node, raft, client) in [
        ("node 0", 0, "127.0.0.1:1", "127.0.0.1:2"),
        ("node overflow", u64::MAX, "127.0.0.1:1", "127.0.0.1:2"),
        ("no raft address", 9, "", "127.0.0.1:2"),
        ("no port", 9, "127.0.0.1", "127.0.0.1:2"),
        ("port 0", 9, "127.0.0.1:0", "127.0.0.1:2"),
        ("port overflow", 9, "127.0.0.1:65536", "127.0.0.1:2"),
        ("no host", 9, ":1", "127.0.0.1:2"),
        ("odd host", 9, "a b:1", "127.0.0.1:2"),
        ("no client address", 9, "127.0.0.1:1", ""),
        ("one address for both", 9, "127.0.0.1:1", "127.0.0.1:1"),
    ] {
        let answer = nodes.add_learner(add(node, raft, client)).await;
        cases.push(refused(what, "INVALID_ARGUMENT", answer));
    }
    for (what, node) in [("node 0", 0), ("node overflow", u64::MAX), ("unknown node", 7)] {
        let promote = v1::PromoteRequest { change: good(), node };
        cases.push(refused(what, "INVALID_ARGUMENT", nodes.promote(promote).await));
        if node != 0 {
            let transfer = v1::TransferLeaderRequest { change: good(), to: node };
            let answer = nodes.transfer_leader(transfer).await;
            cases.push(refused(what, "INVALID_ARGUMENT", answer));
        }
    }
    let last = v1::RemoveRequest { change: good(), node: 1 };
    cases.push(refused("the last voter", "INVALID_ARGUMENT", nodes.remove(last).await));
    check(cases);
    let status = nodes.status(v1::ClusterStatusRequest::default()).await.unwrap().into_inner();
    assert_eq!(status.nodes.len(), 1);
    assert_eq!(digest(&node), before);
    node.shutdown().await;
}
