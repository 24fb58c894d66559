//! Random interleavings keep the rules of the lease.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;

use super::*;

/// One step of a random history. The coordinator in it is a bad one: versions and epochs come in any order.
#[derive(Clone, Debug)]
enum Step {
    Sleep(u64),
    Connected,
    Broken,
    Refused,
    Joined(v1::Assignment),
    Answer(u64, v1::Assignment),
    /// The list is what that heartbeat named, in this version.
    AsHeld(u64, u64),
    Assign(v1::Assignment),
    Gone,
    Release(u32),
    Acquired(u32),
    Answered(u64, bool),
}

fn assignment() -> impl Strategy<Value = v1::Assignment> {
    let drain = proptest::option::weighted(0.2, 0..4000_u64);
    // 0: the epoch that is held, or the next one.
    let epoch = prop_oneof![4 => Just(0_u64), 1 => 1..12_u64];
    let assigned = (0..2_u32, epoch, drain);
    let version = prop_oneof![30 => Just(8_u64), 4 => 1..8_u64, 1 => Just(9_u64)];
    (version, proptest::collection::vec(assigned, 1..4)).prop_map(|(version, partitions)| {
        v1::Assignment {
            preparing: vec![],
            version,
            partitions: partitions
                .into_iter()
                .map(|(index, epoch, drain)| v1::Assigned {
                    partition: Some(partition_to_wire(partition(index))),
                    topic: "t".into(),
                    epoch,
                    revoking: drain.is_some(),
                    drain_remaining_ms: drain.unwrap_or(0),
                    home_initialised: false,
                    token: String::new(),
                    handoff: 1,
                })
                .collect(),
        }
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..1500_u64).prop_map(Step::Sleep),
        4 => (0..400_u64).prop_map(Step::Sleep),
        1 => (2000..6000_u64).prop_map(Step::Sleep),
        6 => Just(Step::Connected),
        1 => Just(Step::Broken),
        1 => Just(Step::Refused),
        6 => assignment().prop_map(Step::Joined),
        12 => (prop_oneof![3 => Just(0_u64), 1 => 0..6_u64], assignment()).prop_map(|(back, assignment)| Step::Answer(back, assignment)),
        12 => (prop_oneof![3 => Just(0_u64), 1 => 0..6_u64], prop_oneof![9 => Just(8_u64), 1 => Just(9_u64)])
            .prop_map(|(back, version)| Step::AsHeld(back, version)),
        3 => assignment().prop_map(Step::Assign),
        1 => Just(Step::Gone),
        2 => (0..2_u32).prop_map(Step::Release),
        6 => (0..2_u32).prop_map(Step::Acquired),
        2 => (1..6_u64, any::<bool>()).prop_map(|(request, done)| Step::Answered(request, done)),
    ]
}

/// What the outputs so far add up to.
#[derive(Default)]
struct Seen {
    live: BTreeMap<Partition, (Epoch, Tick)>,
    ended: BTreeMap<Partition, Epoch>,
    /// When anything that an answer may name was sent last.
    last_asked: Option<Tick>,
    /// When the join (0) and the heartbeats of this stream were sent.
    asked: BTreeMap<u64, Tick>,
    /// What the present input answers.
    named: Option<Tick>,
    /// What each heartbeat of this stream without an answer named.
    held: BTreeMap<u64, Vec<(Partition, Epoch)>>,
    /// Lists of this stream as the coordinator knows them, by version.
    lists: BTreeMap<u64, Vec<(Partition, Epoch)>>,
    awaits_joined: bool,
    /// Heartbeats in the short form.
    short: u64,
    sequence: u64,
    extended: u64,
    is_closed: bool,
}

impl Seen {
    fn take(&mut self, output: Output, now: Tick) {
        let longest = |asked: Option<Tick>| {
            asked
                .expect("a lease follows a question")
                .after(std::time::Duration::from_millis(TTL_MS - DRIFT_MS))
        };
        match output {
            Output::Send(up) => match up.up.unwrap() {
                Up::Join(_) => {
                    self.sequence = 0;
                    self.held.clear();
                    self.lists.clear();
                    self.awaits_joined = true;
                    self.asked = BTreeMap::from([(0, now)]);
                    self.last_asked = Some(now);
                }
                Up::Heartbeat(heartbeat) => {
                    let live = self.live.iter();
                    let live: Vec<_> =
                        live.map(|(partition, (epoch, _))| (*partition, *epoch)).collect();
                    if let Some(v1::HeldAsListed { version, positions, .. }) = &heartbeat.as_listed
                    {
                        assert_eq!(
                            Some(&live),
                            self.lists.get(version),
                            "the list is what is held"
                        );
                        assert_eq!(positions.len(), live.len());
                        self.short += 1;
                    } else {
                        let held: Vec<_> = heartbeat.held.iter().map(|held| held.epoch).collect();
                        let live: Vec<_> = live.iter().map(|(_, epoch)| epoch.get()).collect();
                        assert_eq!(held, live, "a heartbeat carries what is held");
                    }
                    self.held.insert(heartbeat.sequence, live);
                    self.sequence = heartbeat.sequence;
                    self.asked.insert(heartbeat.sequence, now);
                    self.last_asked = Some(now);
                }
                Up::Prepared(_)
                | Up::Acquired(_)
                | Up::Release(_)
                | Up::ReportTopics(_)
                | Up::Leave(_) => {}
            },
            Output::Granted(granted) => {
                assert!(granted.ends_at > now, "granted dead");
                assert!(granted.ends_at <= longest(self.last_asked));
                let ended = self.ended.get(&granted.partition);
                assert!(ended.is_none_or(|ended| granted.epoch > *ended), "epoch resumed");
                let before = self.live.insert(granted.partition, (granted.epoch, granted.ends_at));
                assert_eq!(before, None, "two live grants of one partition");
            }
            Output::Lease { partition, epoch, change } => {
                let (live, ends_at) = self.live.get_mut(&partition).expect("moves a live lease");
                assert_eq!(*live, epoch);
                match change {
                    LeaseChange::Extended(at) => {
                        assert!(*ends_at > now, "a lease that ran out is extended");
                        assert!(at > *ends_at && at <= longest(self.named));
                        *ends_at = at;
                        self.extended += 1;
                    }
                    LeaseChange::Shortened(at) => {
                        assert!(at < *ends_at);
                        *ends_at = at;
                    }
                    LeaseChange::Stopped => {
                        self.live.remove(&partition);
                        self.ended.insert(partition, epoch);
                    }
                }
            }
            Output::Lost { partition, .. } => assert!(!self.live.contains_key(&partition)),
            Output::Revoked { partition, epoch, .. } => {
                assert_eq!(self.live.get(&partition).map(|(epoch, _)| *epoch), Some(epoch));
            }
            Output::LeaseEnds { at } => {
                assert!(at.is_none_or(|at| at <= longest(self.last_asked)));
            }
            Output::Prepare(_)
            | Output::PreparationEnded { .. }
            | Output::LeaseAtRisk { .. }
            | Output::LeaseRenewed => {}
            Output::Ended { .. } => self.is_closed = true,
            Output::Connect { .. }
            | Output::Disconnect
            | Output::Joined { .. }
            | Output::LeaderFound { .. } => {}
        }
        assert!(!self.is_closed || self.live.is_empty(), "a grant outlived the session");
    }
}

impl Seen {
    /// Notes what lists the coordinator has sent down this stream.
    fn note_list(&mut self, input: &Input) {
        let Input::Received(down) = input else { return };
        let mut confirmed = None;
        let assignment = match down.down.as_ref().unwrap() {
            Down::Joined(joined) if std::mem::take(&mut self.awaits_joined) => {
                joined.assignment.as_ref()
            }
            Down::HeartbeatAnswer(answer) => {
                let named = self.held.remove(&answer.sequence);
                if let Some(named) = named {
                    self.held = self.held.split_off(&answer.sequence);
                    confirmed = Some((answer.as_held, named));
                }
                answer.assignment.as_ref()
            }
            Down::Assignment(assignment) => Some(assignment),
            Down::Joined(_) | Down::ActAnswer(_) | Down::Ended(_) => None,
        };
        if let Some(assignment) = assignment {
            let grants = assignment.partitions.iter().map(|assigned| {
                let partition = partition(index_of(assigned.partition.as_ref()));
                (partition, Epoch::new(assigned.epoch).unwrap())
            });
            self.lists.insert(assignment.version, grants.collect());
        } else if let Some((version, named)) = confirmed {
            self.lists.insert(version, named);
        }
    }
}

fn fill_in(mut assignment: v1::Assignment, seen: &Seen) -> v1::Assignment {
    for assigned in assignment.partitions.iter_mut().filter(|assigned| assigned.epoch == 0) {
        let partition = partition(index_of(assigned.partition.as_ref()));
        let next = seen.ended.get(&partition).map_or(1, |ended| ended.get() + 1);
        assigned.epoch = seen.live.get(&partition).map_or(next, |(epoch, _)| epoch.get());
    }
    assignment
}

fn input(step: Step, machine: &Machine, seen: &Seen, joins: u64) -> Input {
    match step {
        Step::Sleep(_) => Input::Tick,
        Step::Connected => Input::Connected,
        Step::Broken => Input::Disconnected { error: None },
        Step::Refused => Input::Disconnected { error: Some(error("NO_LEADER", "")) },
        Step::Joined(assignment) => super::joined(joins, fill_in(assignment, seen)),
        Step::Answer(back, assignment) => down(Down::HeartbeatAnswer(v1::HeartbeatAnswer {
            sequence: seen.sequence.saturating_sub(back),
            assignment: Some(fill_in(assignment, seen)),
            as_held: 0,
        })),
        Step::AsHeld(back, version) => down(Down::HeartbeatAnswer(v1::HeartbeatAnswer {
            sequence: seen.sequence.saturating_sub(back),
            assignment: None,
            as_held: version,
        })),
        Step::Assign(assignment) => down(Down::Assignment(fill_in(assignment, seen))),
        Step::Gone => Input::Disconnected { error: Some(error("MEMBER_GONE", "")) },
        Step::Release(index) => {
            let partition = partition(index);
            let epoch = seen.live.get(&partition).map_or(Epoch::FIRST, |(epoch, _)| *epoch);
            Input::Act(Act::Release {
                partition,
                epoch,
                next_offset: None,
                reason: ReleaseReason::Revoked,
                error: machine.member().to_string(),
            })
        }
        Step::Acquired(index) => {
            let partition = partition(index);
            let epoch = seen.live.get(&partition).map_or(Epoch::FIRST, |(epoch, _)| *epoch);
            let resume = NextOffset::ZERO;
            Input::Act(Act::Acquired { partition, epoch, home_initialised: true, resume })
        }
        Step::Answered(request, done) => {
            let error = (!done).then(|| error("FENCED", ""));
            down(Down::ActAnswer(v1::ActAnswer { request, error }))
        }
    }
}

/// Plays a history; answers how often a lease was extended in it, and how often a heartbeat was short.
fn play(seed: u64, steps: Vec<Step>) -> (u64, u64) {
    let mut machine = Machine::new(settings(seed));
    let mut seen = Seen::default();
    let mut now = Tick(0);
    let mut joins = 1;
    for step in steps {
        match step {
            Step::Sleep(ms) => now = now.after(std::time::Duration::from_millis(ms)),
            Step::Gone => joins += 1,
            Step::Connected
            | Step::Broken
            | Step::Refused
            | Step::Joined(_)
            | Step::Answer(..)
            | Step::AsHeld(..)
            | Step::Assign(_)
            | Step::Release(_)
            | Step::Acquired(_)
            | Step::Answered(..) => {}
        }
        let answers = match &step {
            Step::Joined(_) => Some(0),
            Step::Answer(back, _) | Step::AsHeld(back, _) => {
                Some(seen.sequence.saturating_sub(*back))
            }
            Step::Sleep(_)
            | Step::Connected
            | Step::Broken
            | Step::Refused
            | Step::Assign(_)
            | Step::Gone
            | Step::Release(_)
            | Step::Acquired(_)
            | Step::Answered(..) => None,
        };
        seen.named = answers.and_then(|sequence| seen.asked.get(&sequence).copied());
        let input = input(step, &machine, &seen, joins);
        seen.note_list(&input);
        for output in machine.handle(input, now) {
            seen.take(output, now);
        }
        for (partition, (epoch, ends_at)) in &seen.live {
            assert!(*ends_at > now, "{partition} {epoch} outlived its lease");
        }
        let wake = machine.next_wake();
        assert!(wake.is_none_or(|wake| wake > now), "wakes for nothing");
    }
    (seen.extended, seen.short)
}

#[test]
fn histories_extend_leases_at_all() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let histories = proptest::collection::vec(step(), 80);
    let (mut extended, mut short) = (0, 0);
    for seed in 0..100 {
        let counts = play(seed, histories.new_tree(&mut runner).unwrap().current());
        extended += counts.0;
        short += counts.1;
    }
    assert!(extended > 10, "only {extended} extensions in 100 histories");
    assert!(short > 0, "no heartbeat is short in 100 histories");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_history_extends_a_lease_beyond_the_send_or_grants_a_partition_twice(
        seed in any::<u64>(),
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        play(seed, steps);
    }
}
