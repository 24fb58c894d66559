//! A member: the real session machine, and a run loop beside it, in a process that crashes, sleeps and starts anew.

mod answers;
mod streams;
pub mod work;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tenure_model::{Epoch, MemberId, Partition, Tick};
use tenure_sdk::session::LostCause;
use tenure_sdk::session::machine::{Act, Input, LeaseChange, Machine, Output, Settings};
use tenure_sdk::source::TopicInfo;

use self::work::Work;
use super::clock::DriftingClock;
use super::network::Host;
use super::node::{address, new_clock, node_at};
use super::world::{Event, LEASE, NODE_COUNT, World};

/// One grant.
pub type GrantKey = (Partition, Epoch);

/// What the session says to the run loop.
#[derive(Clone, Debug)]
pub enum Told {
    Granted { grant: GrantKey, member: MemberId, home_initialised: bool },
    Revoked { grant: GrantKey },
    Lost { grant: GrantKey },
}

/// See the module.
#[derive(Debug)]
pub struct Member {
    pub boot: u64,
    pub is_up: bool,
    /// What waits while the process is paused.
    pub paused: Option<Vec<Event>>,
    pub clock: DriftingClock,
    machine: Option<Machine>,
    stream: Option<u64>,
    wake: u64,
    /// Id of the present membership.
    pub id: MemberId,
    /// End of the member's own lease.
    lease_ends: Option<Tick>,
    /// Ends of the leases that writes consult.
    leases: BTreeMap<GrantKey, Tick>,
    told: VecDeque<Told>,
    /// The run loop hears nothing of the session until then.
    pub deaf_until: u64,
    /// How long it hears nothing once the process is awake again, in nanoseconds.
    pub deaf_on_waking: u64,
    pub works: BTreeMap<GrantKey, Work>,
    /// True times of the join (0) and the heartbeats of the present stream.
    sent_at: BTreeMap<u64, u64>,
    /// Final offsets of releases without an answer.
    finals: BTreeMap<u64, Vec<(Partition, Epoch, u64)>>,
    /// Where calls go.
    pub leader: usize,
    /// Whether writes consult the local lease.
    pub checks_lease: bool,
    pub next_id: u64,
    /// How much later leases end in a control run that counts them from the receipt of the answer.
    lease_shift: Duration,
}

impl Member {
    /// A place where no process runs yet.
    #[must_use]
    pub fn absent(place: usize) -> Self {
        Self {
            boot: 0,
            is_up: false,
            paused: None,
            clock: DriftingClock::new(0, 0, 0),
            machine: None,
            stream: None,
            wake: 0,
            id: member_id(place, 0),
            lease_ends: None,
            leases: BTreeMap::new(),
            told: VecDeque::new(),
            deaf_until: 0,
            deaf_on_waking: 0,
            works: BTreeMap::new(),
            sent_at: BTreeMap::new(),
            finals: BTreeMap::new(),
            leader: 0,
            checks_lease: true,
            next_id: 0,
            lease_shift: Duration::ZERO,
        }
    }

    /// Whether the lease of a grant is live by the member's own clock.
    #[must_use]
    pub fn is_live(&self, grant: GrantKey, now: u64) -> bool {
        self.leases.get(&grant).is_some_and(|ends_at| self.clock.show(now) < *ends_at)
    }

    /// The epoch under which it believes to hold a partition.
    #[must_use]
    pub fn holds(&self, partition: Partition, now: u64) -> Option<Epoch> {
        let now = self.clock.show(now);
        let held =
            self.leases.iter().find(|((held, _), ends_at)| *held == partition && now < **ends_at);
        held.map(|((_, epoch), _)| *epoch)
    }

    /// What is left of the member's own lease; nothing when it has none.
    #[must_use]
    pub fn lease_left(&self, now: u64) -> Option<Duration> {
        let left = self.lease_ends?.since(self.clock.show(now));
        (!left.is_zero()).then_some(left)
    }

    /// Whether it takes a grant through its first steps.
    #[must_use]
    pub fn is_acquiring(&self) -> bool {
        self.works.values().any(Work::is_acquiring)
    }
}

fn member_id(place: usize, boot: u64) -> MemberId {
    MemberId::new(&format!("m{place}-{boot}")).expect("a name")
}

impl World {
    /// Whether an event is of the process that runs now.
    pub fn is_of_member(&self, member: usize, boot: u64) -> bool {
        self.members[member].is_up && self.members[member].boot == boot
    }

    /// Starts a member's process under a new member id.
    pub fn start_member(&mut self, member: usize) {
        if self.members[member].is_up {
            return;
        }
        let boot = self.members[member].boot + 1;
        let mut fresh = Member::absent(member);
        fresh.boot = boot;
        fresh.is_up = true;
        fresh.clock = new_clock(self.now, &mut self.rng);
        fresh.id = member_id(member, boot);
        fresh.checks_lease = self.rng.chance(60);
        fresh.machine = Some(Machine::new(Settings {
            coordinators: (0..NODE_COUNT).map(address).collect(),
            group: self.group.clone(),
            member: fresh.id.clone(),
            instance: None,
            returning_within: None,
            topics: vec![self.topic.clone()],
            settings: self.group_settings.clone(),
            lease: LEASE,
            partitions_max: None,
            client: String::new(),
            rejoin: true,
            prepares: self.plan.is_warm,
            weight: 1,
            labels: std::collections::BTreeMap::new(),
            seed: self.rng.draw(),
        }));
        self.members[member] = fresh;
        let partition_count = u32::try_from(self.partitions.len()).expect("a small number");
        let topics =
            vec![TopicInfo { topic: self.topic.clone(), topic_id: self.topic_id, partition_count }];
        self.act_of(member, Act::ReportTopics { topics });
    }

    /// Ends a member's process without a word.
    pub fn crash_member(&mut self, member: usize) {
        let found = &mut self.members[member];
        found.is_up = false;
        found.paused = None;
        found.leases.clear();
        found.works.clear();
        found.lease_ends = None;
        if let Some(stream) = found.stream.take() {
            self.give_up(stream);
        }
    }

    /// The run loop, or an operator, says something to the session.
    pub fn act_of(&mut self, member: usize, act: Act) {
        self.feed(member, Input::Act(act));
    }

    /// Hands an input to the session machine and does what it wants.
    fn feed(&mut self, member: usize, input: Input) {
        let now = self.members[member].clock.show(self.now);
        let Some(machine) = &mut self.members[member].machine else { return };
        let outputs = machine.handle(input, now);
        for output in outputs {
            self.apply_output(member, output, now);
        }
        let found = &mut self.members[member];
        let Some(machine) = &found.machine else { return };
        let Some(next) = machine.next_wake() else { return };
        found.wake += 1;
        let (boot, wake) = (found.boot, found.wake);
        let at = found.clock.when(next).max(self.now);
        self.at(at, Event::Wake { member, boot, wake });
    }

    /// The machine wants the time.
    pub fn wake(&mut self, member: usize, boot: u64, wake: u64) {
        if self.is_of_member(member, boot) && self.members[member].wake == wake {
            self.feed(member, Input::Tick);
        }
    }

    fn apply_output(&mut self, member: usize, output: Output, now: Tick) {
        match output {
            Output::Connect { address } => self.connect(member, &address),
            Output::Disconnect => {
                if let Some(stream) = self.members[member].stream.take() {
                    self.give_up(stream);
                }
            }
            Output::Send(up) => self.send_of(member, up),
            Output::Joined { member: id, .. } => self.members[member].id = id,
            Output::LeaderFound { address } => {
                if let Some(node) = node_at(&address) {
                    self.members[member].leader = node;
                }
            }
            Output::LeaseEnds { at } => {
                let shift = self.members[member].lease_shift;
                self.members[member].lease_ends = at.map(|at| at.after(shift));
            }
            Output::Prepare(preparing) => self.prepare(member, preparing.partition),
            Output::PreparationEnded { .. } | Output::LeaseAtRisk { .. } | Output::LeaseRenewed => {
            }
            Output::Granted(granted) => {
                let grant = (granted.partition, granted.epoch);
                let home_initialised = granted.home_initialised;
                let ends_at = granted.ends_at.after(self.members[member].lease_shift);
                self.members[member].leases.insert(grant, ends_at);
                self.say(|| format!("{} is told of {} {}", granted.member, grant.0, grant.1));
                let told = Told::Granted { grant, member: granted.member, home_initialised };
                self.tell(member, told, 0);
            }
            Output::Lease { partition, epoch, change } => {
                self.move_lease(member, (partition, epoch), change, now);
            }
            Output::Revoked { partition, epoch, .. } => {
                self.tell(member, Told::Revoked { grant: (partition, epoch) }, 0);
            }
            Output::Lost { partition, epoch, cause } => {
                self.oracle.count_refusal(match cause {
                    LostCause::LeaseEnded => "member: lease ended",
                    LostCause::Gone => "member: not assigned",
                    LostCause::Fenced { .. } => "member: fenced",
                    LostCause::MembershipEnded(_)
                    | LostCause::Source(_)
                    | LostCause::Handler(_)
                    | LostCause::Sink(_) => "member: ended",
                });
                let shift = self.members[member].lease_shift;
                let late = if cause == LostCause::LeaseEnded { shift } else { Duration::ZERO };
                let late = u64::try_from(late.as_nanos()).unwrap_or(0);
                self.tell(member, Told::Lost { grant: (partition, epoch) }, late);
            }
            Output::Ended { .. } => {
                self.say(|| format!("member {member} has ended"));
                self.crash_member(member);
                let delay = self.rng.millis(300, 3_000);
                self.after(delay, Event::StartMember { member });
            }
        }
    }

    /// The run loop loads what it needs for a partition that is to come: quickly, slowly, in vain, or for ever.
    fn prepare(&mut self, member: usize, partition: Partition) {
        if self.rng.chance(15) {
            return;
        }
        let length =
            if self.rng.chance(70) { self.rng.millis(5, 300) } else { self.rng.millis(300, 4_000) };
        let (boot, fails) = (self.members[member].boot, self.rng.chance(20));
        self.after(length, Event::Prepared { member, boot, partition, fails });
    }

    /// A preparation has ended; what became of its partition meanwhile the session knows.
    pub fn prepared(&mut self, member: usize, boot: u64, partition: Partition, fails: bool) {
        if self.is_of_member(member, boot) {
            let error = fails.then(|| "state is not to be had".to_owned());
            self.act_of(member, Act::Prepared { partition, error });
        }
    }

    fn move_lease(&mut self, member: usize, grant: GrantKey, change: LeaseChange, now: Tick) {
        let found = &mut self.members[member];
        let shift = found.lease_shift;
        match change {
            // As the SDK's lease: one that ran out or was stopped is never extended.
            LeaseChange::Extended(at) => {
                if let Some(ends_at) = found.leases.get_mut(&grant)
                    && *ends_at > now
                {
                    *ends_at = at.after(shift).max(*ends_at);
                }
            }
            LeaseChange::Shortened(at) => {
                if let Some(ends_at) = found.leases.get_mut(&grant) {
                    *ends_at = at.after(shift).min(*ends_at);
                }
            }
            LeaseChange::Stopped => {
                let outlives = !shift.is_zero()
                    && found.works.get(&grant).is_some_and(|work| !work.is_released())
                    && found.leases.get(&grant).is_some_and(|ends_at| *ends_at > now);
                if !outlives {
                    found.leases.remove(&grant);
                }
            }
        }
    }

    fn connect(&mut self, member: usize, address: &str) {
        if let Some(stream) = self.members[member].stream.take() {
            self.give_up(stream);
        }
        let node = node_at(address).expect("an address of this cluster");
        let boot = self.members[member].boot;
        let stream = self.network.open((member, boot), (node, self.nodes[node].boot));
        self.members[member].stream = Some(stream);
        self.members[member].sent_at.clear();
        let delay = if self.reaches(member, node) {
            self.network.delay(Host::Member(member), Host::Node(node), &mut self.rng)
                + self.network.delay(Host::Node(node), Host::Member(member), &mut self.rng)
        } else if self.nodes[node].is_up {
            900_000_000
        } else {
            2_000_000
        };
        self.after(delay, Event::Connected { member, boot, stream });
    }

    /// The attempt at a connection has ended.
    pub fn connected(&mut self, member: usize, boot: u64, stream: u64) {
        if !self.is_of_member(member, boot) || self.members[member].stream != Some(stream) {
            return;
        }
        let Some(found) = self.network.streams.get(&stream) else { return };
        let (node, node_boot) = (found.node, found.node_boot);
        if self.reaches(member, node) && self.nodes[node].boot == node_boot {
            self.feed(member, Input::Connected);
        } else {
            self.members[member].stream = None;
            self.network.streams.remove(&stream);
            self.feed(member, Input::ConnectFailed { error: "no answer".to_owned() });
        }
    }

    /// The session says something to the run loop, which hears of it a little later.
    fn tell(&mut self, member: usize, told: Told, late: u64) {
        let delay = late
            + if self.rng.chance(95) {
                self.rng.within(20_000, 3_000_000)
            } else {
                self.rng.millis(3, 200)
            };
        let boot = self.members[member].boot;
        self.members[member].told.push_back(told);
        self.after(delay, Event::Told { member, boot });
    }

    /// The run loop takes the next word of the session.
    pub fn told(&mut self, member: usize, boot: u64) {
        if !self.is_of_member(member, boot) {
            return;
        }
        let deaf_until = self.members[member].deaf_until;
        if self.now < deaf_until {
            self.at(deaf_until, Event::Told { member, boot });
            return;
        }
        let Some(told) = self.members[member].told.pop_front() else { return };
        match told {
            Told::Granted { grant, member: id, home_initialised } => {
                self.begin_work(member, grant, id, home_initialised);
            }
            Told::Revoked { grant } => self.drain_work(member, grant),
            Told::Lost { grant } => {
                self.members[member].works.remove(&grant);
            }
        }
    }
}
