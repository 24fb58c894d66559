//! One run: three nodes and some members, each on a host of the simulated network.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tenure_coordinator::parts::Ground;
use tenure_coordinator::settings::{Deadlines, Peer, RaftLengths, StartMode};
use tenure_coordinator::{Node, NodeSettings};
use tenure_core::state::{Group, PartitionState};
use tenure_model::Partition;
use tenure_sdk::session::CoordinatorClient;
use tenure_tests::sim::rng::Rng;
use turmoil::Sim;

use super::line::{Local, dial, dial_lazily, door};
use super::member::{self, Shape, group};
use super::shared::{Keepalive, LineRecord, Shared, SimClock, Told};

/// Ports of every node.
pub(super) const CLIENT_PORT: u16 = 7400;
pub(super) const RAFT_PORT: u16 = 7401;

pub(super) const NODES: [u64; 3] = [1, 2, 3];

/// Step of simulated time; what is shorter takes one.
const TICK: Duration = Duration::from_millis(5);

/// HTTP/2 keepalive of a node towards its clients, as in production.
pub(super) const NODE_KEEPALIVE: Duration = Duration::from_secs(5);

/// Longest wait for the start and for a call that nothing disturbs.
pub(super) const CALM: Duration = Duration::from_secs(20);

/// No run is longer.
const RUN_MAX: Duration = Duration::from_secs(600);

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) members: u64,
    pub(super) shape: Shape,
    pub(super) keepalive: Keepalive,
}

impl Plan {
    pub(super) fn new(seed: u64) -> Self {
        let shape = Shape { partitions: 4, ttl_ms: 6_000 };
        Self { seed, members: 2, shape, keepalive: Keepalive::default() }
    }
}

/// Nodes that run, by id.
type Nodes = Rc<RefCell<BTreeMap<u64, Arc<Node>>>>;

/// See the module.
pub(super) struct World {
    sim: Sim<'static>,
    pub(super) shared: Arc<Shared>,
    pub(super) rng: Rng,
    plan: Plan,
    nodes: Nodes,
    /// Host of each node now, or where it fell.
    hosts: BTreeMap<u64, String>,
    down: BTreeSet<u64>,
    hosts_ever: u64,
    calls: u64,
    // After what writes into it.
    folder: TempDir,
}

/// What clients are told to connect to.
pub(super) fn client_address(node: u64) -> String {
    format!("node-{node}:{CLIENT_PORT}")
}

fn raft_address(node: u64) -> String {
    format!("node-{node}:{RAFT_PORT}")
}

fn settings(node: u64, folder: &Path) -> NodeSettings {
    let peers = NODES.into_iter().map(|node| Peer {
        node,
        raft_address: raft_address(node),
        client_address: client_address(node),
    });
    NodeSettings {
        node,
        data_dir: folder.join(format!("node-{node}")),
        client_listen: ([0, 0, 0, 0], CLIENT_PORT).into(),
        client_advertised: Some(client_address(node)),
        raft_listen: ([0, 0, 0, 0], RAFT_PORT).into(),
        raft_advertised: Some(raft_address(node)),
        peers: peers.collect(),
        start: StartMode::Bootstrap,
        deadlines: Deadlines {
            vanished_share_percent: 100,
            hold_ms: 200,
            hold_max_ms: 2_000,
            ..Deadlines::default()
        },
        raft: RaftLengths {
            heartbeat_interval_ms: 200,
            election_timeout_min_ms: 600,
            election_timeout_max_ms: 1_200,
            digest_interval_ms: 2_000,
            ..RaftLengths::default()
        },
        ..NodeSettings::default()
    }
}

async fn serve(
    shared: Arc<Shared>,
    nodes: Nodes,
    node: u64,
    host: String,
    folder: PathBuf,
) -> turmoil::Result {
    let ground = Ground {
        clock: Arc::new(SimClock(Arc::clone(&shared))),
        clients: door(&shared, &host, CLIENT_PORT).await?,
        others: door(&shared, &host, RAFT_PORT).await?,
        dial: Some(dial_lazily(&shared, &host)),
        keepalive: shared.keepalive.at_server.then_some(NODE_KEEPALIVE),
    };
    let started = Arc::new(Box::pin(Node::start_on(settings(node, &folder), ground)).await?);
    shared.say(&format!("node {node} runs on {host}"));
    nodes.borrow_mut().insert(node, Arc::clone(&started));
    let reason = started.stopped().await;
    shared.fail(&format!("node {node} stopped: {reason:?}"));
    Ok(())
}

impl World {
    /// Starts everything and waits until the members share the partitions and commit.
    pub(super) fn start(plan: Plan) -> Self {
        let mut rng = Rng::new(plan.seed);
        let mut builder = turmoil::Builder::new();
        builder
            .tick_duration(TICK)
            .simulation_duration(RUN_MAX)
            .rng_seed(rng.draw())
            .min_message_latency(Duration::from_millis(1))
            .max_message_latency(Duration::from_millis(15))
            .tcp_capacity(4096)
            .enable_random_order();
        // Memory where there is some: the disk's own speed would only cost time.
        let shm = Path::new("/dev/shm");
        let parent = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let folder = tempfile::Builder::new()
            .prefix(&format!("tenure-wire-{}-", std::process::id()))
            .tempdir_in(parent)
            .expect("a folder for this run");
        let mut world = Self {
            sim: builder.build(),
            shared: Shared::new(plan.keepalive),
            rng,
            plan,
            nodes: Nodes::default(),
            hosts: BTreeMap::new(),
            down: BTreeSet::new(),
            hosts_ever: 0,
            calls: 0,
            folder,
        };
        for node in NODES {
            world.raise(node);
        }
        world.wait("a raft leader", CALM, |world| world.leader().is_some());
        for number in 1..=plan.members {
            world.add_member(number, &NODES.map(client_address));
        }
        world.wait("all to be owned", CALM, |world| world.is_settled() && world.is_even());
        world.say("it begins");
        world
    }

    pub(super) fn say(&self, what: &str) {
        self.shared.say(what);
    }

    pub(super) fn now(&self) -> Duration {
        self.sim.elapsed()
    }

    pub(super) fn told<T>(&self, look: impl FnOnce(&Told) -> T) -> T {
        look(&self.shared.told())
    }

    pub(super) fn lines(&self) -> Vec<LineRecord> {
        self.shared.lines()
    }

    /// Lets one step of time pass, and looks at what must hold at any moment.
    fn step(&mut self) {
        if let Err(error) = self.sim.step() {
            self.shared.fail(&format!("a host failed: {error}"));
        }
        self.shared.stepped(self.sim.elapsed());
        self.look_for_two_owners();
        let violation = self.told(|told| told.violation.clone());
        if let Some(violation) = violation {
            panic!("{violation}");
        }
    }

    /// At most one member believes at any moment that it holds a partition.
    fn look_for_two_owners(&self) {
        let two = self.told(|told| {
            let mut owners: BTreeMap<Partition, &str> = BTreeMap::new();
            for (name, seat) in &told.members {
                for grant in seat.held.values().filter(|grant| grant.lease.is_live()) {
                    if let Some(other) = owners.insert(grant.partition, name) {
                        return Some(format!("{other} and {name} hold {}", grant.partition.index));
                    }
                }
            }
            None
        });
        if let Some(two) = two {
            self.shared.fail(&two);
        }
    }

    pub(super) fn pass(&mut self, length: Duration) {
        let end = self.now() + length;
        while self.now() < end {
            self.step();
        }
    }

    /// Lets time pass until `is_so`; gives how long it took.
    pub(super) fn wait(
        &mut self,
        what: &str,
        limit: Duration,
        mut is_so: impl FnMut(&Self) -> bool,
    ) -> Duration {
        let start = self.now();
        while !is_so(self) {
            let waited = self.now() - start;
            assert!(waited <= limit, "{what}: not within {limit:?}");
            self.step();
        }
        let took = self.now() - start;
        self.say(&format!("{what}: after {took:?}"));
        took
    }

    // --- nodes ----------------------------------------------------------------------------------

    /// Starts a node on a host of its own, which its name stands for from now on.
    pub(super) fn raise(&mut self, node: u64) {
        self.down.remove(&node);
        self.hosts_ever += 1;
        let host = format!("host-{}-of-node-{node}", self.hosts_ever);
        self.shared.rename(&format!("node-{node}"), &host);
        self.hosts.insert(node, host.clone());
        let (shared, nodes) = (Arc::clone(&self.shared), Rc::clone(&self.nodes));
        let folder = self.folder.path().to_owned();
        self.sim.host(host.clone(), move || {
            serve(Arc::clone(&shared), Rc::clone(&nodes), node, host.clone(), folder.clone())
        });
    }

    /// The node is gone at once.
    pub(super) fn fell(&mut self, node: u64) {
        self.say(&format!("node {node} falls"));
        self.down.insert(node);
        drop(self.nodes.borrow_mut().remove(&node));
        let host = self.hosts[&node].clone();
        self.sim.crash(host);
    }

    /// The node comes back on the host where it fell.
    pub(super) fn bounce(&mut self, node: u64) {
        self.say(&format!("node {node} comes back"));
        self.down.remove(&node);
        let host = self.hosts[&node].clone();
        self.sim.bounce(host);
    }

    /// Whether it was started and has not fallen since.
    pub(super) fn is_up(&self, node: u64) -> bool {
        !self.down.contains(&node)
    }

    pub(super) fn node(&self, node: u64) -> Option<Arc<Node>> {
        self.nodes.borrow().get(&node).cloned()
    }

    /// Host of a node.
    pub(super) fn host(&self, node: u64) -> String {
        self.hosts[&node].clone()
    }

    pub(super) fn others(node: u64) -> [u64; 2] {
        let mut others = NODES.into_iter().filter(|other| *other != node);
        [others.next(), others.next()].map(|other| other.expect("three nodes"))
    }

    /// The raft leader of the newest term that any node leads, and that term.
    pub(super) fn leader(&self) -> Option<(u64, u64)> {
        let nodes = self.nodes.borrow();
        let leads = nodes.iter().filter_map(|(id, node)| {
            let leadership = node.raft().leadership().borrow().clone();
            leadership.is_me.then_some((leadership.term.0, *id))
        });
        leads.max().map(|(term, node)| (node, term))
    }

    /// The group as the raft leader has applied it.
    pub(super) fn group<T>(&self, look: impl FnOnce(&Group) -> T) -> Option<T> {
        let (leader, _) = self.leader()?;
        let node = self.node(leader)?;
        node.raft().with_machine(|machine| machine.state().groups.get(&group()).map(|g| look(g)))
    }

    /// How many epochs were ever given.
    pub(super) fn epochs_given(&self) -> u64 {
        let node = self.leader().and_then(|(leader, _)| self.node(leader)).expect("a raft leader");
        node.raft().with_machine(|machine| machine.state().epoch_counter)
    }

    // --- members --------------------------------------------------------------------------------

    pub(super) fn add_member(&mut self, number: u64, coordinators: &[String]) {
        let host = format!("member-{number}");
        self.say(&format!("{host} starts"));
        let shared = Arc::clone(&self.shared);
        let (coordinators, shape) = (coordinators.to_vec(), self.plan.shape);
        self.sim.host(host.clone(), move || {
            member::run(Arc::clone(&shared), host.clone(), coordinators.clone(), shape)
        });
    }

    /// The member is gone at once, without a word.
    pub(super) fn crash_member(&mut self, name: &str) {
        self.say(&format!("{name} falls"));
        self.sim.crash(name);
    }

    /// Whether every partition is owned, runs, and is held by the member that the raft leader takes for its owner.
    pub(super) fn is_settled(&self) -> bool {
        let wanted = self.plan.shape.partitions as usize;
        let owners = self.group(|group| {
            let runs = |(partition, state): (&Partition, &PartitionState)| {
                let owner = state.ownership.owner().filter(|_| state.runs());
                owner.map(|owner| (*partition, owner.clone()))
            };
            group.partitions.iter().filter_map(runs).collect::<Vec<_>>()
        });
        let Some(owners) = owners else { return false };
        let seats = self.told(|told| {
            let live = told.members.values().flat_map(|seat| seat.held.values());
            let live = live.filter(|grant| grant.lease.is_live());
            live.map(|grant| (grant.partition, grant.member.clone())).collect::<BTreeMap<_, _>>()
        });
        owners.len() == wanted && owners.iter().all(|(at, owner)| seats.get(at) == Some(owner))
    }

    /// Whether all members that were started have their share.
    pub(super) fn is_even(&self) -> bool {
        let counts = self.told(|told| {
            told.members.values().map(|seat| seat.held.len() as u64).collect::<Vec<_>>()
        });
        let share = u64::from(self.plan.shape.partitions) / counts.len().max(1) as u64;
        counts.len() as u64 == self.plan.members && counts.iter().all(|count| *count >= share)
    }

    /// Number of commits that were answered so far.
    pub(super) fn commits(&self) -> usize {
        self.told(|told| told.acknowledged_at.len())
    }

    /// Longest time without an answered commit since `from`.
    pub(super) fn longest_gap(&self, from: Duration) -> Duration {
        let times = self.told(|told| told.acknowledged_at.clone());
        let times: Vec<_> =
            std::iter::once(from).chain(times.into_iter().filter(|at| *at > from)).collect();
        let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
        gaps.max().unwrap_or(Duration::MAX)
    }

    /// Runs `call` on a host of its own, with a client that knows the nodes at `coordinators`.
    pub(super) fn call<T: 'static>(
        &mut self,
        coordinators: &[String],
        call: impl FnOnce(CoordinatorClient) -> Local<T>,
    ) -> (String, T) {
        self.calls += 1;
        let host = format!("caller-{}", self.calls);
        let client = CoordinatorClient::over(coordinators.to_vec(), dial(&self.shared, &host));
        let answer = Rc::new(RefCell::new(None));
        let (called, kept) = (call(client.clone()), Rc::clone(&answer));
        self.sim.client(host.clone(), async move {
            *kept.borrow_mut() = Some(called.await);
            // Its connections stay as long as the run.
            let _client = client;
            std::future::pending().await
        });
        self.wait("the answer to a call", CALM, |_world| answer.borrow().is_some());
        let answer = answer.borrow_mut().take();
        (host, answer.expect("it is there"))
    }

    // --- the network ----------------------------------------------------------------------------

    /// Nothing that `from` sends to `to` arrives any more.
    pub(super) fn cut(&mut self, from: &str, to: &str) {
        self.say(&format!("nothing from {from} reaches {to}"));
        self.sim.partition_oneway(from, to);
    }

    /// As [`World::cut`], both ways.
    pub(super) fn part(&mut self, one: &str, other: &str) {
        self.say(&format!("{one} and {other} do not reach each other"));
        self.sim.partition(one, other);
    }

    pub(super) fn heal(&mut self, one: &str, other: &str) {
        self.say(&format!("{one} and {other} reach each other"));
        self.sim.repair(one, other);
    }

    /// What is sent between the two waits until [`World::heal_all`].
    pub(super) fn hold(&mut self, one: &str, other: &str) {
        self.say(&format!("the line between {one} and {other} stands still"));
        self.sim.hold(one, other);
    }

    /// All lines between nodes, and between nodes and members, are whole; what waited goes on.
    pub(super) fn heal_all(&mut self) {
        self.say("all lines are whole");
        let hosts: Vec<String> = NODES.map(|node| self.host(node)).into();
        let members = (1..=self.members()).map(|member| format!("member-{member}"));
        let ends: Vec<String> = hosts.iter().cloned().chain(members).collect();
        for host in &hosts {
            for end in ends.iter().filter(|end| *end != host) {
                self.sim.release(&**host, &**end);
            }
        }
    }

    pub(super) fn lose(&mut self, share: f64) {
        self.say(&format!("a share of {share} is lost"));
        self.sim.set_fail_rate(share);
    }

    pub(super) fn slow(&mut self, latency_max: Duration) {
        self.say(&format!("it takes up to {latency_max:?}"));
        self.sim.set_max_message_latency(latency_max);
    }

    pub(super) fn members(&self) -> u64 {
        self.plan.members
    }

    /// Every offset that was acknowledged is there.
    pub(super) fn check_offsets(&self) {
        let acknowledged = self.told(|told| told.acknowledged.clone());
        let found = self.group(|group| {
            let committed = |state: &PartitionState| {
                state.committed.as_ref().map_or(0, |committed| committed.next_offset.get())
            };
            group.partitions.iter().map(|(at, state)| (*at, committed(state))).collect()
        });
        let found: BTreeMap<Partition, u64> = found.expect("a raft leader");
        for (partition, acknowledged) in acknowledged {
            let there = found.get(&partition).copied().unwrap_or_default();
            assert!(
                there >= acknowledged,
                "{partition}: {acknowledged} was acknowledged, {there} is there"
            );
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.shared.story(false));
        }
        // Outside of their hosts nobody needs them any more.
        self.nodes.borrow_mut().clear();
    }
}

/// Boxes a call for [`World::call`].
pub(super) fn boxed<T>(call: impl Future<Output = T> + 'static) -> Local<T> {
    Box::pin(call)
}
