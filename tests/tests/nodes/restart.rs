//! Planned restarts: leadership is handed over first.

use std::time::{Duration, Instant};

use tenure_tests::cluster::Cluster;
use tenure_tests::figures::tell;
use tenure_tests::load::{Load, Shape};
use tenure_tests::servers::wait_until;
use tenure_tests::tier::{self, Tier};

use super::{alone, assert_undisturbed, beside_others, cluster};

/// Longest time without an acknowledged commit, beyond what this machine shows while nothing happens.
const GAP_MAX: Duration = Duration::from_millis(300);

/// Rolls over all nodes; a busy machine adds pauses of its own, and the least disturbed roll counts.
const ROLLS_MAX: usize = 3;

/// With the default ttl.
const SHAPE: Shape =
    Shape { members: 3, partitions: 12, ttl_ms: 10_000, pause: Duration::from_millis(2) };

#[test]
fn all_nodes_are_restarted_one_by_one_without_a_gap_and_nobody_loses_a_partition() {
    if !tier::has_time() {
        return;
    }
    let _machine = alone();
    let mut cluster = cluster(3);
    let load = Load::start(cluster.addresses(), SHAPE);
    load.wait_for_more(100);
    let before = load.report();
    let usual = before.longest_gap(before.acknowledged_at[0]);
    let mut least = Duration::MAX;
    for _ in 0..ROLLS_MAX {
        let started = Instant::now();
        roll(&mut cluster, &load);
        let gap = load.report().longest_gap(started);
        tell(format_args!(
            "restarted in {:?}, longest gap {gap:?}, before it {usual:?}",
            started.elapsed()
        ));
        least = least.min(gap);
        if least <= GAP_MAX + usual {
            break;
        }
    }
    assert_undisturbed(&before, &load.finish());
    assert!(least <= GAP_MAX + usual, "{least:?} without an acknowledged commit");
}

fn roll(cluster: &mut Cluster, load: &Load) {
    for node in cluster.running() {
        if cluster.raft_leader().0 == node {
            cluster.change(&["transfer"]);
        }
        cluster.terminate(node);
        cluster.run(node);
        cluster.wait_until_level();
        load.wait_for_more(30);
    }
}

#[test]
fn raft_leaders_that_change_again_and_again_stop_no_partition_f05() {
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    let changes = Tier::current().repetitions(50);
    let cluster = cluster(3);
    let load = Load::start(cluster.addresses(), SHAPE);
    let before = load.report();
    for _ in 0..changes {
        cluster.change(&["transfer"]);
        load.wait_for_more(10);
    }
    let acknowledged = load.report().acknowledged;
    let all_advance = || {
        let now = load.report().acknowledged;
        acknowledged.iter().all(|(partition, offset)| now[partition] > *offset)
    };
    assert!(wait_until(Duration::from_secs(5), all_advance), "{:#?}", load.report());
    assert_undisturbed(&before, &load.finish());
}
