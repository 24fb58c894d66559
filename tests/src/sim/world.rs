//! The world: virtual time, the queue of what happens next, and who is where.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use tenure_coordinator::settings::{Deadlines, LeaseLengths, NodeSettings};
use tenure_model::{
    GroupId, GroupSettings, Home, LeaseSettings, Partition, PartitionIndex, SinkSetting, Takeover,
    TopicId, TopicName,
};

use super::event::Scheduled;
pub use super::event::{Event, SinkAnswer};
use super::faults::{Fault, Sleeper, Trap};
use super::invariants::{Fact, View};
use super::log::Log;
use super::member::Member;
use super::network::{Host, Network};
use super::node::{Node, Rule};
use super::oracle::Oracle;
use super::rng::{Rng, nanos};
use super::sink::{Fence, Sink};
use super::{Plan, Report};

/// Coordinators.
pub const NODE_COUNT: usize = 3;

/// When faults begin and when everything is healed, in milliseconds.
const FAULTS_FROM_MS: u64 = 4_000;
const HEALED_AT_MS: u64 = 45_000;

/// What a run waits after everything was healed: silence and expiry, holds, plans and acquires, each at its longest.
const BOUND_MS: u64 = 20_000;

/// Records appear in every partition at this pace, in milliseconds.
const RECORD_EVERY_MS: u64 = 100;

/// Lengths of a run: short, so that much happens in a minute.
pub const LEASE: LeaseSettings =
    LeaseSettings { ttl_ms: 3_000, heartbeat_interval_ms: 900, clock_drift_max_ms: 150 };

/// How long after a missed heartbeat interval a member is logged as silent, in milliseconds.
pub const SILENCE_SLACK_MS: u64 = 300;

/// How far a clock's rate may be off, in millionths. Two clocks at the ends drift 122 ms apart in one ttl.
pub const DRIFT_PPM: i64 = 20_000;

/// See the module.
pub struct World {
    pub plan: Plan,
    pub rng: Rng,
    /// True time, in nanoseconds since the start.
    pub now: u64,
    queue: BinaryHeap<Scheduled>,
    next_number: u64,
    pub event_count: u64,
    pub log: Log,
    pub nodes: Vec<Node>,
    pub members: Vec<Member>,
    pub network: Network,
    pub partitions: Vec<Partition>,
    pub sinks: BTreeMap<Partition, Sink>,
    /// No sink can be reached until then.
    pub sinks_down_until: u64,
    /// When each partition was last written to.
    pub last_written: BTreeMap<Partition, u64>,
    pub settings: Arc<NodeSettings>,
    pub group: GroupId,
    pub group_settings: GroupSettings,
    pub topic: TopicName,
    pub topic_id: TopicId,
    pub oracle: Oracle,
    pub traps: Vec<Trap>,
    /// Members that were trapped and may still be.
    pub sleepers: Vec<Sleeper>,
    /// Members that do not hear the answer to their next act.
    pub lost_answers: BTreeSet<usize>,
    /// Since when the raft leader rules undisturbed.
    pub rule: Option<Rule>,
    pub fault_count: usize,
    pub healed_at: Option<u64>,
    is_over: bool,
}

impl World {
    /// Everything as it is before the first event.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        let mut rng = Rng::new(plan.seed);
        let fence = if rng.chance(50) { Fence::Epoch } else { Fence::LastRegistered };
        let home = if rng.chance(55) { Home::Coordinator } else { Home::Sink };
        let takeover =
            if fence == Fence::Epoch && rng.chance(25) { Takeover::Fence } else { Takeover::Lease };
        let sinks = vec![SinkSetting { name: "sink".to_owned(), enforces_epoch: true }];
        let topic_id = TopicId::from_bits(1);
        let partition_count = u32::try_from(rng.within(3, 6)).expect("a small number");
        let member_count = rng.within(3, 5);
        let settings = Arc::new(node_settings(&mut rng, plan.is_warm));
        let mut world = Self {
            plan,
            now: 0,
            queue: BinaryHeap::new(),
            next_number: 0,
            event_count: 0,
            log: Log::default(),
            nodes: (0..NODE_COUNT).map(|_| Node::new(&mut rng)).collect(),
            members: Vec::new(),
            network: Network::default(),
            partitions: Vec::new(),
            sinks: BTreeMap::new(),
            sinks_down_until: 0,
            last_written: BTreeMap::new(),
            settings,
            group: GroupId::new("g").expect("a name"),
            group_settings: GroupSettings { home, takeover, sinks },
            topic: TopicName::new("t").expect("a name"),
            topic_id,
            oracle: Oracle::new(plan.prints),
            traps: Vec::new(),
            sleepers: Vec::new(),
            lost_answers: BTreeSet::new(),
            rule: None,
            fault_count: 0,
            healed_at: None,
            is_over: false,
            rng,
        };
        for index in 0..partition_count {
            let index = PartitionIndex::new(index).expect("a small number");
            let partition = Partition { topic_id, index };
            world.partitions.push(partition);
            world.sinks.insert(partition, Sink::new(fence, home == Home::Sink));
        }
        for member in 0..member_count {
            let member = usize::try_from(member).expect("a small number");
            world.members.push(Member::absent(member));
            let delay = world.rng.millis(0, 1_500);
            world.after(delay, Event::StartMember { member });
        }
        world.start();
        world
    }

    fn start(&mut self) {
        for node in 0..NODE_COUNT {
            self.after(0, Event::Tick { node, boot: 0 });
        }
        self.after(0, Event::Beat);
        self.after(nanos(3_700), Event::Mend { fault: Fault::Insist });
        let count = self.rng.within(10, 16);
        for _ in 0..count {
            let at = self.rng.millis(FAULTS_FROM_MS, HEALED_AT_MS - 4_000);
            self.after(at, Event::Strike);
        }
        self.after(nanos(HEALED_AT_MS), Event::Heal);
        self.after(nanos(HEALED_AT_MS + BOUND_MS), Event::End);
    }

    /// Plays to the end, or to the first broken property.
    #[must_use]
    pub fn run(mut self) -> Report {
        while !self.is_over
            && self.oracle.violation.is_none()
            && let Some(next) = self.queue.pop()
        {
            self.now = self.now.max(next.at);
            self.happen(next.event);
        }
        Report {
            violation: self.oracle.violation,
            trace: self.oracle.trace,
            simulated_ms: self.now / 1_000_000,
            member_count: self.members.len(),
            fault_count: self.fault_count,
            handoff_count: self.oracle.handoff_count,
            prepared_count: self.oracle.prepared_count,
            entry_count: self.log.entries.len(),
            event_count: self.event_count,
            matrix: self.oracle.matrix,
        }
    }

    /// Lets something happen `delay` nanoseconds from now.
    pub fn after(&mut self, delay: u64, event: Event) {
        self.at(self.now + delay, event);
    }

    /// Lets something happen at a true time.
    pub fn at(&mut self, at: u64, event: Event) {
        self.next_number += 1;
        self.queue.push(Scheduled { at, number: self.next_number, event });
    }

    fn happen(&mut self, event: Event) {
        if let Some(host) = event.host(&self.network)
            && self.hold(host).is_some()
        {
            let event = Some(event);
            self.hold(host).expect("checked above").extend(event);
            return;
        }
        self.event_count += 1;
        self.oracle.note(self.now);
        match event {
            Event::Tick { node, boot } => self.tick(node, boot),
            Event::Advance { node, boot, upto, term } => self.advance(node, boot, upto, term),
            Event::Beat => self.beat(),
            Event::Propose { node, boot } => self.propose(node, boot),
            Event::Quorum { flight } => self.quorum(flight),
            Event::Outcome { node, boot, flight, index } => {
                self.outcome(node, boot, flight, index);
            }
            Event::Confirm { node, boot, read } => self.confirm(node, boot, read),
            Event::Confirmed { node, boot, read, is_confirmed } => {
                self.confirmed(node, boot, read, is_confirmed);
            }
            Event::Up { stream } => self.up(stream),
            Event::Down { stream } => self.down(stream),
            Event::Connected { member, boot, stream } => self.connected(member, boot, stream),
            Event::Wake { member, boot, wake } => self.wake(member, boot, wake),
            Event::SendLate { member, boot, stream, up } => {
                self.send_late(member, boot, stream, up);
            }
            Event::Prepared { member, boot, partition, fails } => {
                self.prepared(member, boot, partition, fails);
            }
            Event::Told { member, boot } => self.told(member, boot),
            Event::Send { member, boot, grant, id, ask } => {
                self.send_ask(member, boot, grant, id, ask);
            }
            Event::Timer { member, boot, grant, id } => self.timer(member, boot, grant, id),
            Event::Sink { member, boot, grant, id, ask } => {
                self.serve_sink(member, boot, grant, id, ask);
            }
            Event::SinkAnswer { member, boot, grant, id, answer } => {
                self.sink_answered(member, boot, grant, id, answer);
            }
            Event::Call { node, call } => self.serve_call(node, call),
            Event::CallAnswer { call, answer } => self.call_answered(&call, answer),
            Event::Strike => self.strike(),
            Event::Mend { fault } => self.mend(fault),
            Event::Resume { host } => self.resume(host),
            Event::StartMember { member } => self.start_member(member),
            Event::StartNode { node } => self.start_node(node),
            Event::Heal => self.heal(),
            Event::End => self.end(),
        }
    }

    /// What waits for a paused process; nothing while it runs.
    fn hold(&mut self, host: Host) -> Option<&mut Vec<Event>> {
        match host {
            Host::Node(node) => self.nodes[node].paused.as_mut(),
            Host::Member(member) => self.members[member].paused.as_mut(),
            Host::Sink => None,
        }
    }

    /// Stops a process for `length`, with everything that would happen in it.
    pub fn pause(&mut self, host: Host, length: u64) {
        let slot = match host {
            Host::Node(node) => &mut self.nodes[node].paused,
            Host::Member(member) => &mut self.members[member].paused,
            Host::Sink => return,
        };
        if slot.is_none() {
            *slot = Some(Vec::new());
            self.after(length, Event::Resume { host });
        }
    }

    /// A paused process goes on: what waited happens at once, and its threads race.
    pub fn resume(&mut self, host: Host) {
        let slot = match host {
            Host::Node(node) => &mut self.nodes[node].paused,
            Host::Member(member) => &mut self.members[member].paused,
            Host::Sink => return,
        };
        let Some(waiting) = slot.take() else { return };
        self.say(|| format!("{host:?} goes on"));
        if let Host::Member(member) = host {
            let found = &mut self.members[member];
            found.deaf_until = self.now + std::mem::take(&mut found.deaf_on_waking);
        }
        let (session, others) = (self.rng.millis(0, 4), self.rng.millis(0, 4));
        let (ticks, rest): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|event| matches!(event, Event::Tick { .. }));
        for event in rest.into_iter().chain(ticks) {
            let delay = if event.is_of_session() { session } else { others };
            self.after(delay, event);
        }
    }

    /// Records there are in every partition now.
    #[must_use]
    pub const fn record_count(&self) -> u64 {
        self.now / (RECORD_EVERY_MS * 1_000_000)
    }

    /// Tells the oracle a fact.
    pub fn fact(&mut self, fact: &Fact<'_>) {
        let view = View {
            now: self.now,
            members: &self.members,
            home: self.group_settings.home,
            takeover: self.group_settings.takeover,
            settings: &self.settings,
        };
        self.oracle.look(fact, view);
    }

    /// Prints a line of the trace, where that is wanted.
    pub fn say(&self, line: impl FnOnce() -> String) {
        self.oracle.say(self.now, line);
    }

    fn end(&mut self) {
        self.is_over = true;
        let progress: Vec<_> = self
            .partitions
            .iter()
            .map(|partition| (*partition, self.last_written.get(partition).copied().unwrap_or(0)))
            .collect();
        let healed_at = self.healed_at.unwrap_or(0);
        let state = Arc::clone(&self.log.state);
        self.fact(&Fact::Ended { state: &state, healed_at, progress: &progress });
    }
}

fn node_settings(rng: &mut Rng, is_warm: bool) -> NodeSettings {
    let pauses_expiry = rng.chance(20);
    NodeSettings {
        lease: LeaseLengths {
            ttl_ms: LEASE.ttl_ms,
            heartbeat_interval_ms: LEASE.heartbeat_interval_ms,
            clock_drift_max_ms: LEASE.clock_drift_max_ms,
        },
        deadlines: Deadlines {
            drain_deadline_ms: 2_000,
            acquire_deadline_ms: 4_000,
            // Short enough for a preparation that never ends to be seen.
            prepare_deadline_ms: if is_warm { 1_500 } else { 30_000 },
            settle_ms: 200,
            settle_max_ms: 1_000,
            silence_slack_ms: SILENCE_SLACK_MS,
            fence_grace_ms: 250,
            fence_grace_most: 8,
            hold_ms: 300,
            hold_max_ms: 2_000,
            vanished_share_percent: if pauses_expiry { 50 } else { 100 },
            vanished_least: 2,
            vanished_window_ms: 1_000,
            vanished_pause_ms: 2_000,
            not_advancing_ms: 30_000,
        },
        ..NodeSettings::default()
    }
}
