//! Real nodes and real members over real gRPC, on a simulated network: `turmoil`.
//!
//! Every run is a process of its own, so that it is a function of its seed: what the system draws at random is preloaded
//! away (`entropy.c`), and nothing is left from a run before it.

#![allow(
    clippy::print_stdout,
    reason = "a run says how it went, and the process around it reads that"
)]

mod controls;
mod line;
mod member;
mod outages;
mod process;
mod scenes;
mod shared;
mod storm;
mod world;

use tenure_tests::tier;

use process::{Played, play_apart};
use scenes::Scene;

/// Seeds of the storm in a full run, each played twice.
const SEEDS_FULL: usize = 20;

/// Seeds of the other simulator that take as long as one here: `tests/run --seeds N` sets the number of both.
const SEEDS_PER_STORM: usize = 100;

fn holds(scene: Scene) {
    if !tier::has_time() {
        return;
    }
    let seed = tier::seed();
    let played = play_apart(scene, seed);
    assert!(played.is_good(), "{played}");
    println!("{played}");
}

#[test]
fn follower_sends_callers_and_members_to_the_raft_leader() {
    holds(Scene::Redirect);
}

#[test]
fn half_open_connections_are_let_go_within_two_keepalives_at_both_ends() {
    holds(Scene::HalfOpen);
}

#[test]
fn raft_leader_and_member_that_are_cut_off_one_way_are_replaced() {
    holds(Scene::OneWay);
}

#[test]
fn sessions_that_break_in_the_middle_of_answers_go_on_and_nothing_happens_twice() {
    holds(Scene::Broken);
}

#[test]
fn node_that_comes_back_at_another_address_is_found_by_its_name() {
    holds(Scene::Moved);
}

#[test]
fn outage_of_four_tenths_of_a_ttl_costs_nobody_a_grant_l06() {
    holds(Scene::ShortOutages);
}

#[test]
fn outage_longer_than_a_ttl_ends_every_lease_first_at_its_member_and_what_comes_back_is_renewed_l06_l11()
 {
    holds(Scene::LongOutages);
}

#[test]
fn member_without_partitions_stays_for_three_ttls_and_takes_over_what_is_freed_l12() {
    holds(Scene::Idle);
}

#[test]
fn every_storm_is_survived_and_plays_the_same_twice() {
    if !tier::has_time() {
        return;
    }
    let count = tier::seed_count(SEEDS_FULL * SEEDS_PER_STORM).div_ceil(SEEDS_PER_STORM) as u64;
    let first = tier::seed();
    println!("{count} seeds from {first} (TENURE_SEED)");
    for position in 0..count {
        let seed = first.wrapping_add(position);
        let [one, other] = std::thread::scope(|scope| {
            let plays = [(); 2].map(|()| scope.spawn(|| play_apart(Scene::Storm, seed)));
            plays.map(|play| play.join().expect("it was started"))
        });
        assert!(one.is_good(), "{one}");
        println!("{one}");
        assert_eq!(one.trace, other.trace, "the same seed played otherwise:\n{one}\n{other}");
    }
}

/// Plays the run that `TENURE_WIRE` names, as `scene:seed`; without it, one that is quick.
#[test]
fn one_run_plays() {
    let (scene, seed) = process::asked_for().unwrap_or((Scene::Redirect, 1));
    if process::is_inside() {
        return process::play_here(scene, seed);
    }
    let played: Played = play_apart(scene, seed);
    println!("{}\n{played}", played.output);
    assert!(played.is_good(), "{played}");
}
