//! Named resources by single calls, over real gRPC.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

mod common;

use std::time::Duration;

use common::*;
use tenure_coordinator::Node;
use tenure_proto::v1::leases_client::LeasesClient;
use tenure_proto::{error_of_status, v1};
use tokio::time::{Instant, sleep};
use tonic::Status;
use tonic::transport::Channel;

const GROUP: &str = "jobs";
const RESOURCE: &str = "nightly-report";

/// Longer than any test: these leases do not run out by themselves.
const LONG_MS: u64 = 30_000;

struct Rig {
    node: Node,
    leases: LeasesClient<Channel>,
    _folder: tempfile::TempDir,
}

async fn rig() -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(lone(folder.path())).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let leases = LeasesClient::new(channel(node.client_address()).await);
    Rig { node, leases, _folder: folder }
}

fn ask(resource: &str, holder: &str) -> v1::AcquireRequest {
    v1::AcquireRequest {
        group: GROUP.to_owned(),
        resource: resource.to_owned(),
        holder: holder.to_owned(),
        ttl_ms: LONG_MS,
        wait_ms: 500,
        client: "test".to_owned(),
    }
}

async fn acquire(leases: &LeasesClient<Channel>, holder: &str) -> v1::AcquireResponse {
    leases.clone().acquire(ask(RESOURCE, holder)).await.unwrap().into_inner()
}

/// Asks for a lease that runs out soon, until it is given.
async fn get_short(leases: &LeasesClient<Channel>, resource: &str, holder: &str) -> v1::Lease {
    let request = v1::AcquireRequest { ttl_ms: TTL_MS, ..ask(resource, holder) };
    until("a lease", || async {
        leases.clone().acquire(request.clone()).await.unwrap().into_inner().lease
    })
    .await
}

/// Asks until it is given.
async fn get(leases: &LeasesClient<Channel>, holder: &str) -> v1::Lease {
    until("a lease", || async { acquire(leases, holder).await.lease }).await
}

async fn renew(
    leases: &LeasesClient<Channel>,
    lease: &v1::Lease,
) -> Result<v1::RenewResponse, Status> {
    let request = v1::RenewRequest {
        group: lease.group.clone(),
        resource: lease.resource.clone(),
        holder: lease.holder.clone(),
        member_epoch: lease.member_epoch,
        epoch: lease.epoch,
    };
    Ok(leases.clone().renew(request).await?.into_inner())
}

async fn verify(leases: &LeasesClient<Channel>, lease: &v1::Lease) -> Result<(), Status> {
    let request = v1::VerifyLeaseRequest {
        group: lease.group.clone(),
        resource: lease.resource.clone(),
        holder: lease.holder.clone(),
        epoch: lease.epoch,
    };
    leases.clone().verify_lease(request).await.map(drop)
}

async fn release(leases: &LeasesClient<Channel>, lease: &v1::Lease) -> Result<(), Status> {
    let request = v1::ReleaseLeaseRequest {
        group: lease.group.clone(),
        resource: lease.resource.clone(),
        holder: lease.holder.clone(),
        epoch: lease.epoch,
    };
    leases.clone().release_lease(request).await.map(drop)
}

fn code(status: &Status) -> String {
    error_of_status(status).code
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resource_goes_from_holder_to_holder_under_rising_epochs() {
    let Rig { leases, node: _node, _folder } = rig().await;
    let ann = get(&leases, "ann").await;
    assert_eq!((ann.valid_ms, ann.renew_every_ms), (LONG_MS - 75, 9_000));
    assert!(ann.fence.starts_with("jobs/") && ann.fence.ends_with("/0"), "{}", ann.fence);
    let again = get(&leases, "ann").await;
    assert_eq!(again, ann, "a lost answer is asked for again");
    verify(&leases, &ann).await.unwrap();

    let waiting = acquire(&leases, "bob").await;
    assert_eq!((waiting.lease, waiting.owner.as_str()), (None, "ann"));
    release(&leases, &ann).await.unwrap();
    release(&leases, &ann).await.unwrap();
    let bob = get(&leases, "bob").await;
    assert!(bob.epoch > ann.epoch, "{} after {}", bob.epoch, ann.epoch);
    verify(&leases, &bob).await.unwrap();
    let stale = error_of_status(&verify(&leases, &ann).await.unwrap_err());
    assert_eq!(stale.code, "FENCED");
    assert!(stale.message.contains(&format!("e{}", bob.epoch)), "{}", stale.message);
    assert_eq!(code(&renew(&leases, &ann).await.unwrap_err()), "MEMBER_GONE");
    let used_up = leases.clone().acquire(ask(RESOURCE, "ann")).await.unwrap_err();
    assert_eq!(code(&used_up), "MEMBER_GONE");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_lease_outlives_its_ttl_and_another_resource_does_not_disturb_it() {
    let Rig { leases, node: _node, _folder } = rig().await;
    let ann = get_short(&leases, RESOURCE, "ann").await;
    let other = get_short(&leases, "weekly-report", "bob").await;
    let end = Instant::now() + Duration::from_millis(3 * TTL_MS);
    while Instant::now() < end {
        for lease in [&ann, &other] {
            let renewed = renew(&leases, lease).await.unwrap();
            assert_eq!(renewed.lease.as_ref(), Some(lease));
            assert_eq!(renewed.release_within_ms, None);
        }
        // The client's own pace is what is tested.
        sleep(Duration::from_millis(ann.renew_every_ms / 2)).await;
    }
    verify(&leases, &ann).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_that_stops_renewing_loses_the_resource_to_the_one_that_waits() {
    let Rig { leases, node: _node, _folder } = rig().await;
    let ann = get_short(&leases, RESOURCE, "ann").await;
    let since = Instant::now();
    let bob = get_short(&leases, RESOURCE, "bob").await;
    assert!(bob.epoch > ann.epoch);
    assert!(since.elapsed() + Duration::from_millis(200) >= Duration::from_millis(TTL_MS / 2));
    assert_eq!(code(&renew(&leases, &ann).await.unwrap_err()), "MEMBER_GONE");
    verify(&leases, &ann).await.unwrap_err();
    // Late: neither takes anything from the new holder.
    release(&leases, &ann).await.unwrap();
    verify(&leases, &bob).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn epoch_that_was_never_given_is_refused_and_bad_input_by_the_field() {
    let Rig { leases, node: _node, _folder } = rig().await;
    let ann = get(&leases, "ann").await;
    let wrong = v1::Lease { epoch: ann.epoch + 1_000, ..ann.clone() };
    assert_eq!(code(&verify(&leases, &wrong).await.unwrap_err()), "NOT_OWNED");
    assert_eq!(code(&renew(&leases, &wrong).await.unwrap_err()), "NOT_OWNED");
    let stranger = v1::Lease { member_epoch: ann.member_epoch + 7, ..ann.clone() };
    assert_eq!(code(&renew(&leases, &stranger).await.unwrap_err()), "MEMBER_GONE");
    let long = "x".repeat(250);
    for (request, field) in [
        (ask("", "ann"), "resource"),
        (ask("a b", "ann"), "resource"),
        (ask(&long, "ann"), "resource"),
        (ask(RESOURCE, ""), "holder"),
        (v1::AcquireRequest { group: String::new(), ..ask(RESOURCE, "cid") }, "group"),
        (v1::AcquireRequest { ttl_ms: 1, ..ask(RESOURCE, "cid") }, "ttl_ms"),
        (v1::AcquireRequest { ttl_ms: u64::MAX, ..ask(RESOURCE, "cid") }, "ttl_ms"),
    ] {
        let refused = leases.clone().acquire(request).await.unwrap_err();
        let error = error_of_status(&refused);
        assert_eq!(error.code, "INVALID_ARGUMENT", "{field}");
        assert!(error.message.contains(field), "{field}: {}", error.message);
    }
    let nothing = v1::Lease { epoch: 0, ..ann.clone() };
    assert_eq!(code(&renew(&leases, &nothing).await.unwrap_err()), "INVALID_ARGUMENT");
    verify(&leases, &ann).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_survives_the_loss_of_the_raft_leader_and_a_follower_names_the_leader() {
    let folder = tempfile::tempdir().unwrap();
    let mut nodes = start_all(&cluster(folder.path(), 3)).await;
    let leader = leader_of(&nodes).await;
    let leases = LeasesClient::new(channel(nodes[leader].client_address()).await);
    let ann = get(&leases, "ann").await;
    let follower = &nodes[(leader + 1) % 3];
    knows_the_leader(follower).await;
    let follower = LeasesClient::new(channel(follower.client_address()).await);
    let redirected = error_of_status(&verify(&follower, &ann).await.unwrap_err());
    assert_eq!(redirected.code, "NOT_LEADER");
    assert_eq!(redirected.leader_address, nodes[leader].client_address().to_string());

    nodes.remove(leader).shutdown().await;
    let leader = leader_of(&nodes).await;
    let leases = LeasesClient::new(channel(nodes[leader].client_address()).await);
    let renewed = until("a renewal", || async { renew(&leases, &ann).await.ok() }).await;
    assert_eq!(renewed.lease, Some(ann));
}
