//! A node that lost its folder comes back as `docs/operations.md` says.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tenure_tests::figures::tell;
use tenure_tests::load::{Load, Shape};
use tenure_tests::tier::{self, Tier, seed};

use super::{assert_undisturbed, beside_others, cluster};

#[test]
fn any_node_that_was_killed_and_wiped_rejoins_under_load_and_nothing_acknowledged_is_lost() {
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    let seed = seed();
    tell(format_args!("seed {seed}"));
    let mut random = StdRng::seed_from_u64(seed);
    let rounds = Tier::current().repetitions(30);
    let mut cluster = cluster(3);
    let load = Load::start(cluster.addresses(), Shape { ttl_ms: 10_000, ..Shape::default() });
    let before = load.report();
    let mut leaders = 0;
    for (round, new) in (0..rounds).zip(4_u64..) {
        let running = cluster.running();
        let victim = running[random.random_range(0..running.len())];
        leaders += usize::from(cluster.raft_leader().0 == victim);
        cluster.kill(victim);
        cluster.wipe(victim);
        cluster.change(&["remove", &victim.to_string()]);
        cluster.join(new, victim);
        let (raft, client) = (cluster.raft_address(new), cluster.client_address(new));
        let addresses = ["--raft-address", &raft, "--client-address", &client];
        let new = new.to_string();
        cluster.change(&[&["add-learner", &new][..], &addresses].concat());
        cluster.change(&["promote", &new]);
        cluster.wait_until_level();
        load.wait_for_more(30);
        tell(format_args!("round {round}: node {victim} came back as {new}"));
    }
    let report = load.finish();
    tell(format_args!(
        "{rounds} nodes wiped, {leaders} of them the raft leader; {} acknowledged commits",
        report.acknowledged_at.len()
    ));
    assert_undisturbed(&before, &report);
}
