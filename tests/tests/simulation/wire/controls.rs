//! Without the pings of one end its half-open connections are found to stay: `tests/run controls`.

use tenure_tests::tier;

use super::process::play_apart;
use super::scenes::Scene;

fn is_found(scene: Scene, who: &str) {
    if !tier::has_time() {
        return;
    }
    let seed = tier::seed();
    println!("seed {seed} (TENURE_SEED)");
    let played = play_apart(scene, seed);
    assert!(played.missed(&format!("{who} on ")), "nobody missed them: {played}");
}

#[test]
fn pings_of_clients_are_missed() {
    is_found(Scene::HalfOpenWithoutClientPings, "Client");
}

#[test]
fn pings_of_nodes_are_missed() {
    is_found(Scene::HalfOpenWithoutNodePings, "Server");
}
