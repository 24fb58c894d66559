//! Planned restarts: leadership is handed over first.

use std::time::{Duration, Instant};

use tenure_tests::load::{Load, Shape};

use super::{assert_undisturbed, cluster, say};

/// Longest time without an acknowledged commit, beyond what this machine shows while nothing happens.
const GAP_MAX: Duration = Duration::from_millis(300);

#[test]
fn all_nodes_are_restarted_one_by_one_without_a_gap_and_nobody_loses_a_partition() {
    let mut cluster = cluster(3);
    let load = Load::start(cluster.addresses(), Shape::default());
    load.wait_for_more(100);
    let before = load.report();
    let started = Instant::now();
    for node in cluster.running() {
        if cluster.raft_leader().0 == node {
            cluster.change(&["transfer"]);
        }
        cluster.terminate(node);
        cluster.run(node);
        cluster.wait_until_level();
        load.wait_for_more(30);
    }
    let took = started.elapsed();
    let report = load.finish();
    let usual = before.longest_gap(before.acknowledged_at[0]);
    let gap = report.longest_gap(started);
    say(&format!(
        "rolling restart in {took:?}: {} acknowledged commits, longest gap {gap:?}, before it {usual:?}",
        report.acknowledged_at.len(),
    ));
    assert_undisturbed(&before, &report);
    assert!(gap <= GAP_MAX + usual, "{gap:?} without an acknowledged commit");
}
