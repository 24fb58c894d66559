//! Nodes that stand still, and lines that work one way only.

use std::time::{Duration, Instant};

use tenure_tests::cluster::Cluster;
use tenure_tests::figures::tell;
use tenure_tests::load::{Load, Shape};
use tenure_tests::proxy::Direction;
use tenure_tests::servers::wait_until;
use tenure_tests::tier;

use super::{PATIENCE, assert_undisturbed, beside_others, cluster, settings};

/// Longest time without a commit once the raft leader stands still: the others' wait of 1 s and an election of at most
/// another, one short wait at the silent node, and a second for a machine that is busy.
const COMMIT_GAP_MAX: Duration = Duration::from_millis(3_500);

#[test]
fn raft_leader_that_stood_still_for_three_ttls_revokes_nothing_when_it_wakes_l03() {
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    const TTL_MS: u64 = 7_000;
    let cluster = cluster(3);
    let load = Load::start(cluster.addresses(), Shape { ttl_ms: TTL_MS, ..Shape::default() });
    let before = load.report();
    let (old, term) = cluster.raft_leader();
    let paused = Instant::now();
    cluster.node(old).pause();
    let is_other = |(leader, now): (u64, u64)| leader != old && now > term;
    assert!(wait_until(PATIENCE, || is_other(cluster.raft_leader())), "{}", cluster.output());
    load.wait_for_more(30);
    std::thread::sleep(Duration::from_millis(3 * TTL_MS).saturating_sub(paused.elapsed()));
    cluster.node(old).resume();
    cluster.wait_until_level();
    // Whatever it had in mind would be done by now.
    std::thread::sleep(Duration::from_millis(TTL_MS / 2));
    load.wait_for_more(30);
    let report = load.finish();
    let gap = report.longest_gap(paused);
    tell(format_args!("longest gap of commits {gap:?}"));
    assert_undisturbed(&before, &report);
    assert!(gap <= COMMIT_GAP_MAX, "{gap:?} without a commit");
}

fn proxied() -> Cluster {
    Cluster::start_proxied(3, &settings())
}

#[test]
fn raft_leader_that_is_heard_and_does_not_hear_is_replaced_m02() {
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    let cluster = proxied();
    let load = Load::start(cluster.addresses(), Shape { ttl_ms: 20_000, ..Shape::default() });
    let before = load.report();
    let (old, term) = cluster.raft_leader();
    let cut = Instant::now();
    for node in cluster.running().into_iter().filter(|node| *node != old) {
        cluster.proxy(node).hold(Direction::ToClient);
    }
    // The two others still reach it, and do not reach each other's answers: whoever is elected needs the old one's
    // vote, which comes back.
    let is_other = |(leader, now): (u64, u64)| leader != old && now > term;
    let replaced = wait_until(PATIENCE, || is_other(cluster.raft_leader()));
    let after = cut.elapsed();
    for node in cluster.running() {
        cluster.proxy(node).release();
    }
    tell(format_args!("replaced: {replaced}, after {after:?}"));
    cluster.wait_until_level();
    load.wait_for_more(30);
    let report = load.finish();
    assert_undisturbed(&before, &report);
    assert!(replaced, "{}", cluster.output());
}

#[test]
fn raft_leader_that_hears_only_answers_goes_on() {
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    let cluster = proxied();
    let load = Load::start(cluster.addresses(), Shape { ttl_ms: 10_000, ..Shape::default() });
    let before = load.report();
    let (leader, term) = cluster.raft_leader();
    let cut = Instant::now();
    cluster.proxy(leader).hold(Direction::ToServer);
    load.wait_for_more(200);
    std::thread::sleep(Duration::from_secs(3));
    load.wait_for_more(30);
    let report = load.report();
    assert_eq!(cluster.raft_leader(), (leader, term));
    cluster.proxy(leader).release();
    assert_undisturbed(&before, &report);
    tell(format_args!("longest gap of commits {:?}", report.longest_gap(cut)));
    assert_undisturbed(&before, &load.finish());
}
