//! Watch and history over real gRPC, on three nodes in this process, while raft leaders change, a node is wiped, logs
//! are purged and that node comes back under a new id, by a snapshot.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

mod changes;
mod rig;
mod watcher;

use std::collections::BTreeMap;
use std::time::Duration;

use changes::{Driver, Truth};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rig::{PATIENCE, Rig, client, until, watching};
use tenure_core::Command;
use tenure_model::{Index, Term};
use tenure_proto::v1::history_request::At;
use tenure_proto::v1::watch_response::Message;
use tenure_proto::{error_of_status, v1};
use tenure_tests::figures::tell;
use tenure_tests::tier::{Tier, seed};
use watcher::{BRIEFLY, FOR_EVER, Watcher};

/// Entries that a raft log keeps beyond a snapshot; a node that is further behind is sent the snapshot.
const ENTRIES_KEPT: u64 = 1_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_that_change_nodes_every_200_ms_see_each_change_exactly_once_and_in_order() {
    let seed = seed();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let wanted = match Tier::current() {
        Tier::Full => 10_000,
        Tier::Ci => 1_000,
        Tier::Fast => 200,
    };
    let mut rig = Rig::start().await;
    let watchers: Vec<Watcher> =
        [(None, BRIEFLY), (None, BRIEFLY), (Some("g0"), BRIEFLY), (None, FOR_EVER)]
            .into_iter()
            .map(|(group, stay)| Watcher::start(rig.addresses(), group, stay, random.random()))
            .collect();
    let mut driver = Driver::new(random.random());
    driver.found(&rig).await;
    driver.run_until(&rig, wanted * 3 / 10).await;

    let first = rig.leader().await;
    rig.hand_over(first).await;
    let away = rig.a_follower().await;
    let last_seen = rig.node(away).raft().status().last_log.unwrap();
    rig.stop(away).await;
    rig.wipe(away);
    driver.run_until(&rig, wanted * 6 / 10).await;
    driver.idle_entries(&rig, ENTRIES_KEPT + 200).await;
    rig.write_snapshots().await;
    let beyond = |purged: Option<Index>| purged.is_some_and(|purged| purged > last_seen);
    until("the logs to be purged beyond the node that is away", || async {
        rig.running().all(|node| beyond(node.raft().status().purged)).then_some(())
    })
    .await;
    rig.rejoin(away).await;
    rig.until_level().await;
    let status = rig.node(away).raft().status();
    assert!(beyond(status.purged), "it came back by a snapshot, not by the log: {status:?}");

    driver.run_until(&rig, wanted * 8 / 10).await;
    let second = rig.leader().await;
    rig.stop(second).await;
    driver.run_until(&rig, wanted).await;
    rig.restart(second).await;
    rig.until_level().await;
    let truth = driver.finish();
    tell(format_args!(
        "{} changes of ownership up to revision {}",
        truth.ownership_changes(),
        truth.last_revision()
    ));
    assert!(truth.ownership_changes() > wanted);

    let last = truth.last_revision();
    for watcher in watchers {
        let (group, stay) = (watcher.group, watcher.stay);
        let seen = watcher.finish(last).await;
        tell(format_args!(
            "watcher of {}: {} changes over {} connections, {} revisions taken up in their middle",
            group.unwrap_or("all"),
            seen.changes.len(),
            seen.connections,
            seen.resumed_within
        ));
        assert!(stay == FOR_EVER || seen.connections > 5, "it did reconnect");
        let wanted = truth.of_group(group);
        for (found, wanted) in seen.changes.iter().zip(&wanted) {
            assert_eq!(found, wanted);
        }
        assert_eq!(seen.changes.len(), wanted.len());
    }
    check_histories(&rig, &truth, &mut random).await;
    rig.stop_all().await;
}

/// Every node, the one that was rebuilt among them, tells the same history, and it is what happened.
async fn check_histories(rig: &Rig, truth: &Truth, random: &mut StdRng) {
    for (group, partition, wanted) in truth.grants().iter().take(40) {
        let mut answers = Vec::new();
        for node in rig.running() {
            let mut client = client(node.client_address()).await;
            let request = |at| v1::HistoryRequest {
                group: group.clone(),
                partition: Some(partition.clone()),
                at,
            };
            let answer = client.history(request(None)).await.unwrap().into_inner();
            let found: Vec<_> = answer
                .grants
                .iter()
                .map(|grant| {
                    let end = grant.end.as_ref().map(|end| end.revision);
                    (grant.member.clone(), grant.epoch, grant.granted_revision, end)
                })
                .collect();
            assert_eq!(&found, wanted, "{group} {partition:?}");
            answers.push((answer.grants, answer.known_from_revision));
            for _ in 0..5 {
                let revision = random.random_range(1..=truth.last_revision());
                let at = request(Some(At::Revision(revision)));
                let found = client.history(at).await.unwrap().into_inner().grants;
                let owner = wanted.iter().find(|(_, _, granted, end)| {
                    *granted <= revision && end.is_none_or(|end| end > revision)
                });
                assert_eq!(
                    found.first().map(|grant| (&grant.member, grant.epoch)),
                    owner.map(|(member, epoch, ..)| (member, *epoch)),
                    "at {revision}"
                );
            }
        }
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "all nodes say the same");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watcher_that_comes_too_late_is_told_so_and_goes_on_from_a_list() {
    let rig = Rig::start().await;
    let mut driver = Driver::new(1);
    driver.found_large(&rig, 30_000).await;
    let client = client(rig.running().next().unwrap().client_address()).await;
    let watch = |from_revision| v1::WatchRequest { group: String::new(), from_revision };
    let mut stream = watching(&client, watch(1)).await;
    let Some(Message::Compacted(compacted)) = stream.message().await.unwrap().unwrap().message
    else {
        panic!("the first revisions are forgotten");
    };
    let ended = error_of_status(&stream.message().await.unwrap_err());
    assert_eq!(ended.code, "COMPACTED");

    let listed = until("a list that is new enough", || async {
        let mut client = client.clone();
        let listed = client.list_groups(v1::ListGroupsRequest {}).await.ok()?.into_inner();
        (listed.revision >= compacted.list_from).then_some(listed)
    })
    .await;
    let mut stream = watching(&client, watch(listed.revision + 1)).await;
    let index = driver.entry(&rig, vec![driver.join("late")]).await;
    loop {
        match stream.message().await.unwrap().unwrap().message.unwrap() {
            Message::Progress(progress) => assert!(progress.revision <= index.0),
            Message::Revision(found) => {
                assert_eq!((found.revision, found.changes[0].member.as_str()), (index.0, "late"));
                break;
            }
            Message::Compacted(compacted) => panic!("{compacted:?}"),
        }
    }
    rig.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watcher_that_does_not_read_is_cut_and_resumes_without_a_gap() {
    let rig = Rig::start().await;
    let mut driver = Driver::new(2);
    let first = driver.found_large(&rig, 20_000).await;
    let client = client(rig.running().next().unwrap().client_address()).await;
    let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
    let mut from_revision = first.0;
    let mut cuts = 0;
    // More than the connection and the queue hold: the node has to wait for room, and waits 10 s for it.
    loop {
        let request = v1::WatchRequest { group: String::new(), from_revision };
        let mut stream = watching(&client, request).await;
        if cuts == 0 {
            tokio::time::sleep(Duration::from_secs(13)).await;
        }
        let ended = loop {
            match tokio::time::timeout(PATIENCE, stream.message()).await.unwrap() {
                Ok(Some(response)) => match response.message.unwrap() {
                    Message::Revision(part) => {
                        for change in &part.changes {
                            let next = counts.entry(part.revision).or_default();
                            // What was seen of a revision before the cut comes again.
                            assert!(change.position <= *next, "a gap at {}", part.revision);
                            *next = (*next).max(change.position + 1);
                        }
                        from_revision = part.revision + u64::from(part.last_of_revision);
                    }
                    Message::Progress(progress) if progress.revision >= driver.last().0 => {
                        break None;
                    }
                    Message::Progress(_) => {}
                    Message::Compacted(compacted) => panic!("{compacted:?}"),
                },
                Ok(None) => panic!("a watch ends with a status"),
                Err(status) => break Some(error_of_status(&status).code),
            }
        };
        match ended {
            None => break,
            Some(code) => assert_eq!(code, "SLOW_WATCHER"),
        }
        cuts += 1;
    }
    assert_eq!(cuts, 1);
    let truth = driver.finish();
    let mut wanted: BTreeMap<u64, u32> = BTreeMap::new();
    for change in truth.of_group(None).iter().filter(|change| change.revision >= first.0) {
        *wanted.entry(change.revision).or_default() += 1;
    }
    assert_eq!(counts, wanted);
    rig.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_without_changes_move_progress_and_not_the_stream() {
    let rig = Rig::start().await;
    let mut driver = Driver::new(3);
    let index = driver.entry(&rig, vec![driver.join("ann")]).await;
    let late = Command::MarkMembersHeard { term: Term(0), members: vec![] };
    let idle = driver.entry(&rig, vec![late]).await;
    let request = v1::WatchRequest { group: String::new(), from_revision: 0 };
    let leader = rig.leader().await;
    let mut client = client(rig.node(leader).client_address()).await;
    let mut stream = watching(&client, request).await;
    let first = stream.message().await.unwrap().unwrap().message;
    assert_eq!(first, Some(Message::Progress(v1::Progress { revision: idle.0 })));
    let far = At::Revision(idle.0 + 1_000_000);
    let request = v1::HistoryRequest {
        group: driver.group(0).to_string(),
        partition: Some(changes::partition_to_wire(0)),
        at: Some(far),
    };
    let refused = client.history(request).await.unwrap_err();
    assert_eq!(error_of_status(&refused).code, "INVALID_ARGUMENT", "{refused:?}");
    assert!(index < idle);
    rig.stop_all().await;
}
