//! Latency, loss, falls and cuts at random; then everything is healed.

use std::time::Duration;

use super::world::{NODES, Plan, World};

/// How long things go wrong, in simulated time.
const FAULTS: Duration = Duration::from_secs(20);

/// Within which time after the last fault every partition is owned and moves on: sessions are found dead, an election,
/// leases of members that are gone, and moves.
const HEALED_WITHIN: Duration = Duration::from_secs(30);

pub(super) fn storm(plan: Plan) -> World {
    let mut world = World::start(Plan { members: 3, ..plan });
    let slowest = world.rng.within(15, 80);
    world.slow(Duration::from_millis(slowest));
    // In shares of a hundred thousand messages.
    let lost = world.rng.within(0, 60);
    #[allow(clippy::cast_precision_loss, reason = "it is small")]
    world.lose(lost as f64 / 100_000.0);
    let end = world.now() + FAULTS;
    while world.now() < end {
        let pause = world.rng.within(200, 2_500);
        world.pass(Duration::from_millis(pause));
        fault(&mut world);
    }
    heal(&mut world);
    world.wait("all to be owned", HEALED_WITHIN, World::is_settled);
    let before = world.commits();
    world.wait("more commits", HEALED_WITHIN, |world| world.commits() > before + 50);
    world.check_offsets();
    world
}

fn fault(world: &mut World) {
    let down: Vec<u64> = NODES.into_iter().filter(|node| !world.is_up(*node)).collect();
    if !down.is_empty() && world.rng.chance(40) {
        let node = down[world.rng.position(down.len())];
        return come_back(world, node);
    }
    let node = NODES[world.rng.position(NODES.len())];
    let host = world.host(node);
    let member = world.rng.within(1, world.members());
    let member = format!("member-{member}");
    match world.rng.below(10) {
        // Seldom two at a time.
        0 | 1 if down.is_empty() || world.rng.chance(20) => fell(world, node),
        0..=2 => {
            if let Some((leader, _)) = world.leader() {
                fell(world, leader);
            }
        }
        3 => {
            for other in World::others(node) {
                let other = world.host(other);
                world.cut(&host, &other);
            }
        }
        4 => {
            let other = world.host(World::others(node)[0]);
            world.part(&host, &other);
        }
        5 => world.part(&host, &member),
        6 => world.cut(&host, &member),
        7 => world.cut(&member, &host),
        8 => world.hold(&host, &member),
        _ => world.heal_all(),
    }
}

fn fell(world: &mut World, node: u64) {
    if world.is_up(node) {
        world.fell(node);
    }
}

/// On the same host, or on another one.
fn come_back(world: &mut World, node: u64) {
    if world.rng.chance(50) {
        world.bounce(node);
    } else {
        world.raise(node);
    }
}

fn heal(world: &mut World) {
    world.lose(0.0);
    world.slow(Duration::from_millis(15));
    for node in NODES {
        if !world.is_up(node) {
            come_back(world, node);
        }
    }
    world.heal_all();
}
