//! What is played: each scene is a run of its own, and fails by a panic.

use std::time::Duration;

use super::member::{Shape, group};
use super::outages;
use super::shared::{End, Keepalive, LineRecord};
use super::world::{
    CALM, CLIENT_PORT, NODE_KEEPALIVE, NODES, Plan, RAFT_PORT, World, boxed, client_address,
};

/// Names of the scenes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scene {
    /// A follower sends callers and members to the raft leader.
    Redirect,
    /// Connections whose other end is gone without a word.
    HalfOpen,
    /// As `HalfOpen`, with no pings of clients: must fail.
    HalfOpenWithoutClientPings,
    /// As `HalfOpen`, with no pings of nodes: must fail.
    HalfOpenWithoutNodePings,
    /// The raft leader is heard and hears nothing; then a member.
    OneWay,
    /// Connections that break in the middle of answers.
    Broken,
    /// A node that falls and comes back on another host.
    Moved,
    /// A coordinator out of reach for less than a ttl.
    ShortOutages,
    /// A coordinator out of reach for more than a ttl.
    LongOutages,
    /// A member that owns nothing.
    Idle,
    /// All of it at random.
    Storm,
}

impl Scene {
    pub(super) const ALL: [Self; 11] = [
        Self::Redirect,
        Self::HalfOpen,
        Self::HalfOpenWithoutClientPings,
        Self::HalfOpenWithoutNodePings,
        Self::OneWay,
        Self::Broken,
        Self::Moved,
        Self::ShortOutages,
        Self::LongOutages,
        Self::Idle,
        Self::Storm,
    ];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Redirect => "redirect",
            Self::HalfOpen => "half-open",
            Self::HalfOpenWithoutClientPings => "half-open-without-client-pings",
            Self::HalfOpenWithoutNodePings => "half-open-without-node-pings",
            Self::OneWay => "one-way",
            Self::Broken => "broken",
            Self::Moved => "moved",
            Self::ShortOutages => "short-outages",
            Self::LongOutages => "long-outages",
            Self::Idle => "idle",
            Self::Storm => "storm",
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scene| scene.as_str() == text)
    }

    /// Plays it; gives the world as it is at the end.
    pub(super) fn play(self, seed: u64) -> World {
        let plan = Plan::new(seed);
        match self {
            Self::Redirect => redirect(plan),
            Self::HalfOpen => half_open(plan),
            Self::HalfOpenWithoutClientPings => {
                let keepalive = Keepalive { at_client: false, at_server: true };
                half_open(Plan { keepalive, ..plan })
            }
            Self::HalfOpenWithoutNodePings => {
                let keepalive = Keepalive { at_client: true, at_server: false };
                half_open(Plan { keepalive, ..plan })
            }
            Self::OneWay => one_way(plan),
            Self::Broken => broken(plan),
            Self::Moved => moved(plan),
            Self::ShortOutages => outages::short_outages(plan),
            Self::LongOutages => outages::long_outages(plan),
            Self::Idle => outages::idle_member(plan),
            Self::Storm => super::storm::storm(plan),
        }
    }
}

/// Asks for the offsets of all partitions, which only the raft leader tells; gives the host that asked.
fn ask(world: &mut World, coordinators: &[String]) -> String {
    let (host, answer) = world
        .call(coordinators, |client| boxed(async move { client.fetch(&group(), &[], CALM).await }));
    let offsets = answer.expect("nothing disturbs it");
    assert!(!offsets.is_empty(), "members commit");
    host
}

/// Where a host has opened connections, in order.
fn ways_of(world: &World, host: &str) -> Vec<String> {
    let lines = world.lines();
    let opened = lines.iter().filter(|line| line.end == End::Client && line.host == host);
    opened.map(|line| line.peer.clone()).collect()
}

fn redirect(plan: Plan) -> World {
    let mut world = World::start(Plan { members: 1, ..plan });
    let (leader, _) = world.leader().expect("it has started");
    let [follower, other] = World::others(leader);
    let known = [client_address(follower)];

    let caller = ask(&mut world, &known);
    assert_eq!(ways_of(&world, &caller), [world.host(follower), world.host(leader)]);

    world.add_member(2, &known);
    let joined = |world: &World| {
        world.told(|told| told.members.get("member-2").is_some_and(|m| !m.held.is_empty()))
    };
    world.wait("a member that knows a follower has its share", CALM, joined);
    let ways = ways_of(&world, "member-2");
    assert_eq!(ways[..2], [world.host(follower), world.host(leader)], "its session");
    let strays = ways.iter().filter(|way| **way == world.host(other)).count();
    assert_eq!(strays, 0, "nobody named it: {ways:?}");

    // The one that led is gone: the only node that this member was told of says who leads now.
    world.fell(leader);
    let at = world.now();
    world.wait("another raft leader", CALM, |world| world.leader().is_some());
    let before = world.commits();
    world.wait("more commits", CALM, |world| world.commits() > before + 20);
    let gap = world.longest_gap(at);
    assert!(gap <= GAP_MAX, "{gap:?} without a commit");
    world.wait("all to be owned", CALM, World::is_settled);
    assert_undisturbed(&world);
    world.check_offsets();
    world
}

/// Longest time without a commit when the raft leader falls: its lease and an election of at most 1.2 s each, a split
/// vote, and the client's patience.
const GAP_MAX: Duration = Duration::from_secs(4);

/// Within this after a raft leader is there, every member has found it and a heartbeat was answered: the ways back to
/// the fallen one, pauses, and an interval.
const FOUND: Duration = Duration::from_secs(3);

/// No member lost anything, and nobody was refused.
pub(super) fn assert_undisturbed(world: &World) {
    world.told(|told| {
        for (name, seat) in &told.members {
            assert_eq!(seat.memberships.len(), 1, "{name} joined more than once");
            assert_eq!((seat.losses, seat.refused), (0, 0), "{name} lost something");
        }
    });
}

/// What a step, the latency and the order of hosts may add to a bound.
pub(super) const SLACK: Duration = Duration::from_millis(100);

/// Pause and wait of the pings on connections between nodes.
const RAFT_KEEPALIVE: Duration = Duration::from_secs(1);

/// Pause and wait of the pings of the client for unary calls.
const CLIENT_KEEPALIVE: Duration = Duration::from_secs(2);

/// How long after `cut` the last of the `lines` that were open then was let go by its end; nothing: one still is not.
fn let_go(lines: &[LineRecord], cut: Duration) -> Option<Duration> {
    let open =
        lines.iter().filter(|line| line.opened < cut && line.closed.is_none_or(|at| at > cut));
    let closed: Option<Vec<Duration>> = open.map(|line| line.closed).collect();
    let closed = closed?;
    assert!(!closed.is_empty(), "there is a line");
    closed.into_iter().max().map(|last| last - cut)
}

fn lines_between(world: &World, end: End, host: &str, peer: &str, port: u16) -> Vec<LineRecord> {
    let lines = world.lines().into_iter();
    let is_one = |line: &LineRecord| {
        line.end == end && line.host == host && line.peer == peer && line.port == port
    };
    lines.filter(is_one).collect()
}

/// Every end of every connection that was cut without a word is let go within two keepalives, also where nothing is said.
fn half_open(plan: Plan) -> World {
    let mut world = World::start(plan);
    let (leader, _) = world.leader().expect("it has started");
    let [follower, _] = World::others(leader);
    let caller = ask(&mut world, &[client_address(leader)]);
    world.pass(Duration::from_secs(1));
    let (leads, follows) = (world.host(leader), world.host(follower));
    let cut = world.now();
    world.part(&caller, &leads);
    world.part(&follows, &leads);
    world.pass(2 * NODE_KEEPALIVE + SLACK);

    let mut bounds = Vec::new();
    for (end, host, peer, port, pause) in [
        (End::Client, &caller, &leads, CLIENT_PORT, CLIENT_KEEPALIVE),
        (End::Server, &leads, &caller, CLIENT_PORT, NODE_KEEPALIVE),
        (End::Client, &leads, &follows, RAFT_PORT, RAFT_KEEPALIVE),
        (End::Server, &follows, &leads, RAFT_PORT, RAFT_KEEPALIVE),
    ] {
        let after = let_go(&lines_between(&world, end, host, peer, port), cut);
        let line = format!("{end:?} on {host}, towards {peer}:{port}");
        world.say(&format!("{line}: {after:?}"));
        bounds.push((line, after, 2 * pause + SLACK));
    }
    for (line, after, bound) in bounds {
        let in_time = after.is_some_and(|after| after <= bound);
        assert!(in_time, "{line}: let go after {after:?}, not within {bound:?}");
    }

    world.heal(&caller, &leads);
    world.heal(&follows, &leads);
    let caught_up = |world: &World| {
        let applied = |node| world.node(node).map(|node| *node.raft().applied().borrow());
        applied(follower) >= applied(leader)
    };
    world.wait("the follower to have the log", CALM, caught_up);
    assert_undisturbed(&world);
    world.check_offsets();
    world
}

fn one_way(plan: Plan) -> World {
    let shape = Shape { ttl_ms: 9_000, ..plan.shape };
    let mut world = World::start(Plan { shape, ..plan });
    let given = world.epochs_given();

    // The raft leader is heard by nobody, and hears the other nodes. Members still reach it.
    let (old, term) = world.leader().expect("it has started");
    let others = World::others(old);
    let at = world.now();
    for other in others {
        let (from, to) = (world.host(old), world.host(other));
        world.cut(&from, &to);
    }
    let is_other =
        |world: &World| world.leader().is_some_and(|(now, newer)| now != old && newer > term);
    world.wait("another raft leader", CALM, is_other);
    let before = world.commits();
    world.wait("more commits", CALM, |world| world.commits() > before + 20);
    let gap = world.longest_gap(at);
    assert!(gap <= GAP_MAX, "{gap:?} without a commit");
    for other in others {
        let (from, to) = (world.host(old), world.host(other));
        world.heal(&from, &to);
    }
    world.pass(Duration::from_secs(3));
    assert_undisturbed(&world);
    assert_eq!(world.epochs_given(), given, "nothing has moved");

    // A member is heard, and hears nothing: its own lease ends, and the others get what it had.
    let (leader, _) = world.leader().expect("there is one");
    let cut = world.now();
    for node in NODES {
        let host = world.host(node);
        world.cut(&host, "member-1");
    }
    let ttl = Duration::from_millis(shape.ttl_ms);
    let has_nothing = |world: &World| {
        world
            .told(|told| told.members["member-1"].held.values().all(|grant| !grant.lease.is_live()))
    };
    world.wait("its leases to end", ttl + SLACK, has_nothing);
    let all = shape.partitions as usize;
    let is_taken = move |world: &World| {
        world.told(|told| {
            let held = &told.members["member-2"].held;
            held.len() == all && held.values().all(|grant| grant.lease.is_live())
        })
    };
    // Until the node's pings are missed the line counts as alive, and the member as heard.
    let bound = 2 * NODE_KEEPALIVE + 2 * ttl + Duration::from_secs(3);
    world.wait("the other to have everything", bound, is_taken);
    world.say(&format!("after {:?}; node {leader} led", world.now() - cut));
    for node in NODES {
        let host = world.host(node);
        world.heal(&host, "member-1");
    }
    let is_back = |world: &World| {
        let has_some = world.told(|told| !told.members["member-1"].held.is_empty());
        has_some && world.is_settled()
    };
    world.wait("both to have some", 2 * CALM, is_back);
    world.check_offsets();
    world
}

/// How many bytes come down a connection at most before it breaks: an answer with its head has about fifty, that to a
/// join several hundred. With fewer a session is sometimes broken for so long that its lease ends.
const BREAKS_WITHIN_BYTES: u64 = 1_000;

/// Least number of breaks that a run must be worth.
const BREAKS_LEAST: u64 = 8;

/// Sessions, commits, releases and acquisitions over connections that break all the time.
fn broken(plan: Plan) -> World {
    let shape = Shape { ttl_ms: 10_000, ..plan.shape };
    let mut world = World::start(Plan { shape, ..plan });
    let seed = world.rng.draw();
    world.shared.break_lines(seed, Some(BREAKS_WITHIN_BYTES));
    // Those of the start have no limit: they go first.
    for node in NODES {
        let host = world.host(node);
        for member in 1..=world.members() {
            world.part(&host, &format!("member-{member}"));
        }
    }
    world.pass(Duration::from_millis(50));
    world.heal_all();
    world.pass(Duration::from_secs(8));
    // Revokes, releases and grants go over such connections, too.
    world.add_member(3, &NODES.map(client_address));
    let has_some = |world: &World| {
        world.told(|told| told.members.get("member-3").is_some_and(|m| !m.held.is_empty()))
    };
    world.wait("the third member to have its share", 2 * CALM, has_some);
    world.pass(Duration::from_secs(8));
    let breaks = world.shared.broken();
    world.say(&format!("{breaks} connections broke in the middle"));
    world.shared.break_lines(seed, None);
    world.wait("all to be owned", CALM, World::is_settled);
    assert!(breaks >= BREAKS_LEAST, "only {breaks} connections broke");
    // `Shared::granted` has each epoch once; here, that no grant was made that no member was told of.
    assert_eq!(world.told(|told| told.granted.len() as u64), world.epochs_given());
    assert_undisturbed(&world);
    world.check_offsets();
    world
}

/// A node falls, and its name stands for another host when it is back.
fn moved(plan: Plan) -> World {
    let mut world = World::start(plan);
    let given = world.epochs_given();
    let mut back = 0;
    for _ in 0..2 {
        let (leader, _) = world.leader().expect("there is one");
        back = leader;
        let before = world.host(leader);
        let (fallen, commits) = (world.now(), world.commits());
        world.fell(leader);
        world.wait("another raft leader", CALM, |world| world.leader().is_some());
        world.raise(leader);
        assert_ne!(world.host(leader), before);
        let is_level = |world: &World| {
            let applied = |node| world.node(node).map(|node| *node.raft().applied().borrow());
            let now = world.leader().and_then(|(leads, _)| applied(leads));
            now.is_some() && applied(leader).map(|index| index.0 + 5) >= now.map(|index| index.0)
        };
        world.wait("it to have the log, at its new address", CALM, is_level);
        world.wait("more commits", CALM, |world| world.commits() > commits + 20);
        let gap = world.longest_gap(fallen);
        assert!(gap <= GAP_MAX, "{gap:?} without a commit");
        // Leases last over one election, not over two in a row: every session is answered before the next one.
        world.pass(FOUND);
    }
    // Whoever knows only a name that stands for another host now finds the raft leader by it.
    let caller = ask(&mut world, &[client_address(back)]);
    assert_eq!(ways_of(&world, &caller)[0], world.host(back));
    world.pass(Duration::from_secs(2));
    assert_undisturbed(&world);
    assert_eq!(world.epochs_given(), given, "nothing has moved");
    world.check_offsets();
    world
}
