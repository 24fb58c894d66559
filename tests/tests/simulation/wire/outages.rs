//! A coordinator that members do not reach for a while, and a member that owns nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_core::state::PartitionState;
use tenure_model::{LeaseSettings, Partition};

use super::member::Shape;
use super::scenes::{SLACK, assert_undisturbed};
use super::world::{CALM, NODES, Plan, World};

/// With which an outage of 0.4 of it, an election and a heartbeat interval are over before a lease is.
const SHORT_TTL_MS: u64 = 20_000;
const SHORT: Duration = Duration::from_millis(SHORT_TTL_MS * 4 / 10);

const LONG_TTL_MS: u64 = 10_000;
const LONG: Duration = Duration::from_millis(LONG_TTL_MS * 11 / 10);

/// How long members are watched after it.
const AFTERWARDS: Duration = Duration::from_millis(LONG_TTL_MS * 3);

/// How the coordinator is out of reach.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// Nothing that is sent arrives.
    Silent,
    /// Every node has fallen: connections are refused.
    Fallen,
}

impl Outage {
    fn begin(self, world: &mut World) {
        for node in NODES {
            match self {
                Self::Silent => {
                    for member in 1..=world.members() {
                        let host = world.host(node);
                        world.part(&host, &format!("member-{member}"));
                    }
                }
                Self::Fallen => world.fell(node),
            }
        }
    }

    fn end(self, world: &mut World) {
        for node in NODES {
            match self {
                Self::Silent => {
                    for member in 1..=world.members() {
                        let host = world.host(node);
                        world.heal(&host, &format!("member-{member}"));
                    }
                }
                Self::Fallen => world.bounce(node),
            }
        }
    }
}

/// Grants of all members whose leases are live, by partition.
fn live(world: &World) -> BTreeMap<Partition, (String, u64)> {
    world.told(|told| {
        let held = told
            .members
            .iter()
            .flat_map(|(name, seat)| seat.held.values().map(move |grant| (name, grant)));
        let live = held.filter(|(_, grant)| grant.lease.is_live());
        live.map(|(name, grant)| (grant.partition, (name.clone(), grant.epoch.get()))).collect()
    })
}

/// How many grants members were told that they had lost.
fn losses(world: &World) -> u64 {
    world.told(|told| told.members.values().map(|seat| seat.losses).sum())
}

/// Identities of all memberships so far, by member.
fn memberships(world: &World) -> BTreeMap<String, Vec<u64>> {
    world.told(|told| {
        let members = told.members.iter();
        members.map(|(name, seat)| (name.clone(), seat.memberships.clone())).collect()
    })
}

/// How many partitions have an owner, as the raft leader has applied it; nothing while nobody leads.
fn owned(world: &World) -> Option<usize> {
    let is_owned = |state: &&PartitionState| state.ownership.owner().is_some();
    world.group(|group| group.partitions.values().filter(is_owned).count())
}

/// Lets time pass in which every grant stays with its owner, under its epoch.
fn pass_unmoved(world: &mut World, length: Duration) {
    let (before, end) = (live(world), world.now() + length);
    world.wait("nothing to move", length + SLACK, |world| {
        assert_eq!(live(world), before);
        world.now() >= end
    });
}

fn wait_until_shared(world: &mut World) {
    let owned = |world: &World| world.leader().is_some() && world.is_settled() && world.is_even();
    world.wait("everyone to have a share", 2 * CALM, owned);
}

/// Renewals are tried again until the lease is over, and no shorter outage costs a grant.
pub(super) fn short_outages(plan: Plan) -> World {
    let shape = Shape { ttl_ms: SHORT_TTL_MS, ..plan.shape };
    let mut world = World::start(Plan { shape, ..plan });
    let given = world.epochs_given();
    for outage in [Outage::Silent, Outage::Fallen] {
        world.say(&format!("{outage:?} for {SHORT:?}"));
        outage.begin(&mut world);
        pass_unmoved(&mut world, SHORT);
        outage.end(&mut world);
        pass_unmoved(&mut world, Duration::from_millis(SHORT_TTL_MS));
        wait_until_shared(&mut world);
    }
    assert_undisturbed(&world);
    assert_eq!(world.epochs_given(), given, "nothing has moved");
    world.check_offsets();
    world
}

/// Members stop first, come back by themselves, and then keep what they have.
pub(super) fn long_outages(plan: Plan) -> World {
    let shape = Shape { ttl_ms: LONG_TTL_MS, ..plan.shape };
    let mut world = World::start(Plan { shape, ..plan });
    for outage in [Outage::Silent, Outage::Fallen] {
        world.say(&format!("{outage:?} for {LONG:?}"));
        let lost = losses(&world);
        let begun = world.now();
        outage.begin(&mut world);
        let ended = world.wait("all leases to end", Duration::from_millis(LONG_TTL_MS), |world| {
            live(world).is_empty()
        });
        // What the last answered heartbeat was worth: it left at most one interval before.
        let lease = LeaseSettings::for_ttl(LONG_TTL_MS);
        let least = LONG_TTL_MS - lease.heartbeat_interval_ms - lease.clock_drift_max_ms;
        let least = Duration::from_millis(least).saturating_sub(SLACK);
        assert!(ended >= least, "given up after {ended:?}, not before {least:?}");
        if let Some(owned) = owned(&world) {
            let held = plan.shape.partitions as usize;
            assert_eq!(owned, held, "the coordinator took something away before it was given up");
        }
        let rest = (begun + LONG).saturating_sub(world.now());
        world.pass(rest);
        outage.end(&mut world);
        wait_until_shared(&mut world);
        assert!(losses(&world) > lost, "nobody was told of a loss");
        let joined = memberships(&world);
        pass_unmoved(&mut world, AFTERWARDS);
        assert_eq!(memberships(&world), joined, "somebody joined again");
        wait_until_shared(&mut world);
    }
    world.check_offsets();
    world
}

/// A member without partitions stays, and takes over when one is free.
pub(super) fn idle_member(plan: Plan) -> World {
    let shape = Shape { partitions: 2, ..plan.shape };
    let mut world = World::start(Plan { members: 3, shape, ..plan });
    let ttl = Duration::from_millis(shape.ttl_ms);
    let owners: BTreeMap<Partition, (String, u64)> = live(&world);
    let names = (1..=3).map(|member| format!("member-{member}"));
    let is_idle = |name: &String| owners.values().all(|(owner, _)| owner != name);
    let idle: Vec<String> = names.filter(is_idle).collect();
    let [idle] = &idle[..] else { panic!("one of three has nothing: {owners:?}") };
    let given = world.epochs_given();
    pass_unmoved(&mut world, 3 * ttl);
    assert_eq!(world.group(|group| group.members.len()), Some(3));
    assert_undisturbed(&world);
    assert_eq!(world.epochs_given(), given);

    let (freed, (gone, _)) = owners.first_key_value().expect("two are owned");
    world.crash_member(gone);
    let is_taken = |world: &World| {
        let taken = live(world).get(freed).cloned();
        taken.is_some_and(|(owner, _)| owner == *idle) && world.is_settled()
    };
    let interval = LeaseSettings::for_ttl(shape.ttl_ms).heartbeat_interval_ms;
    // Expiry, and one rebalance: its settling and its target.
    let limit = ttl + Duration::from_millis(interval) + Duration::from_secs(3);
    world.wait("the idle member to have it", limit, is_taken);
    assert_eq!(world.epochs_given(), given + 1, "only what was free has moved");
    world.check_offsets();
    world
}
