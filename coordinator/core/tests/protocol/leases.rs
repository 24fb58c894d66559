//! The rules of leases (DESIGN.md, section 5, rules 1 to 4), for one member and two nodes, with a clock that ticks.
//!
//! A raft leader that is not stalled does what is due before the next tick. Who stops first is asked in every order of
//! messages and elections; when the dead are freed, where every reign is long enough to log a silence.

use stateright::{Model, Property};

use super::explore;

/// From the receipt of a heartbeat to expiry, in ticks.
const TTL: u8 = 5;

/// The member stops this much earlier, counted from the send.
const DRIFT: u8 = 1;

/// One heartbeat interval and the slack: unheard for that long, a member is silent.
const SILENT_AFTER: u8 = 2;

/// A reign that is long enough to log a silence with certainty.
const REIGN_LEAST: u8 = SILENT_AFTER + 1;

/// The dead are freed after this many ticks, elections taking none.
const FREED_AFTER: u8 = TTL + SILENT_AFTER;

const ELECTIONS_MAX: u8 = 3;

/// A rule that is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// A lease counts from the send of the heartbeat.
    FromSend,
    /// Silence is logged, so that the next raft leader knows of it.
    Silence,
    /// A silent member is answered only once the log says that it was heard.
    HeardFirst,
    /// An expiry counts only in the term of the lease table that wants it.
    ExpiryTerm,
    /// A snapshot keeps who is silent.
    SnapshotSilence,
}

#[derive(Clone, Copy)]
struct Leases {
    gone: Option<Gone>,
    /// Whether proposals may wait while time passes, and reigns be short. Then the dead have no bound.
    stalls: bool,
    /// Whether a raft leader that falls restarts with its machine, and counts a silence from its replay.
    restarts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Live,
    Silent { is_logged: bool, is_heard: bool },
}

/// What the raft leader knows of the member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Table {
    phase: Phase,
    /// Ticks until the deadline.
    left: u8,
    /// Ticks since it was heard, or since the reign began.
    unheard: u8,
    /// A heartbeat that waits for its answer, with the ticks since it was sent.
    waiting: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Situation {
    is_alive: bool,
    /// What is left of the lease by the member's own count.
    lease_left: u8,
    /// Messages on their way, with the ticks since the heartbeat was sent.
    question: Option<u8>,
    answer: Option<u8>,
    term: u8,
    leader: usize,
    reign: u8,
    table: Table,
    /// What the log says of the silence: how long it had lasted.
    silence: Option<u8>,
    /// Ticks until the expiry of a silent member, as each node remembers.
    memory: [Option<u8>; 2],
    /// The term of an expiry that waits to be proposed.
    queued: Option<u8>,
    has_ended: bool,
    /// Ticks since a raft leader took a heartbeat.
    unheard: u8,
    broken: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Tick,
    Die,
    Send,
    Receive,
    LoseQuestion,
    Answer,
    Deliver,
    LoseAnswer,
    LogSilence,
    LogHeard,
    Expire,
    /// The raft leader wants the expiry and cannot propose it now.
    Queue,
    ProposeQueued,
    Elect {
        node: usize,
    },
}

impl Leases {
    fn is_gone(&self, rule: Gone) -> bool {
        self.gone == Some(rule)
    }

    /// Whether the raft leader has something to do before time goes on.
    fn is_due(&self, s: &Situation) -> bool {
        let silence = s.table.unheard >= SILENT_AFTER
            && s.table.phase == Phase::Live
            && !self.is_gone(Gone::Silence);
        let heard = matches!(s.table.phase, Phase::Silent { is_heard: true, .. });
        (s.table.left == 0 && s.queued.is_none()) || (!self.stalls && (silence || heard))
    }

    fn elect(&self, s: &mut Situation, node: usize) {
        if self.restarts {
            s.memory[s.leader] = s.silence.map(|silent_for| TTL.saturating_sub(silent_for));
        }
        if self.is_gone(Gone::SnapshotSilence) {
            s.memory[node] = None;
        }
        s.term += 1;
        s.leader = node;
        s.reign = 0;
        s.table = match s.silence.and(s.memory[node]) {
            Some(left) => Table {
                phase: Phase::Silent { is_logged: true, is_heard: false },
                left,
                unheard: 0,
                waiting: None,
            },
            None => Table { phase: Phase::Live, left: TTL, unheard: 0, waiting: None },
        };
    }

    fn end(s: &mut Situation) {
        s.has_ended = true;
        if s.lease_left > 0 {
            s.broken = Some("the membership ends before the member has stopped");
        }
    }
}

impl Model for Leases {
    type State = Situation;
    type Action = Step;

    fn init_states(&self) -> Vec<Situation> {
        vec![Situation {
            is_alive: true,
            lease_left: 0,
            question: None,
            answer: None,
            term: 1,
            leader: 0,
            reign: 0,
            table: Table { phase: Phase::Live, left: TTL, unheard: 0, waiting: None },
            silence: None,
            memory: [None; 2],
            queued: None,
            has_ended: false,
            unheard: 0,
            broken: None,
        }]
    }

    fn actions(&self, s: &Situation, steps: &mut Vec<Step>) {
        if s.broken.is_some() || s.has_ended {
            return;
        }
        let due = self.is_due(s);
        if !due {
            steps.push(Step::Tick);
        }
        if s.is_alive {
            steps.push(Step::Die);
            if s.question.is_none() {
                steps.push(Step::Send);
            }
        }
        if s.question.is_some() {
            steps.extend([Step::Receive, Step::LoseQuestion]);
        }
        if s.table.waiting.is_some()
            && (s.table.phase == Phase::Live || self.is_gone(Gone::HeardFirst))
            && s.table.left > 0
            && s.answer.is_none()
        {
            steps.push(Step::Answer);
        }
        if s.answer.is_some() {
            steps.extend([Step::Deliver, Step::LoseAnswer]);
        }
        match s.table.phase {
            Phase::Live if s.table.unheard >= SILENT_AFTER && !self.is_gone(Gone::Silence) => {
                steps.push(Step::LogSilence);
            }
            Phase::Silent { is_heard: true, .. } => steps.push(Step::LogHeard),
            Phase::Live | Phase::Silent { .. } => {}
        }
        if s.table.left == 0 && s.queued.is_none() {
            steps.push(Step::Expire);
            if self.stalls {
                steps.push(Step::Queue);
            }
        }
        if s.queued.is_some() {
            steps.push(Step::ProposeQueued);
        }
        if s.term <= ELECTIONS_MAX && (self.stalls || s.reign >= REIGN_LEAST) {
            steps.extend([Step::Elect { node: 0 }, Step::Elect { node: 1 }]);
        }
    }

    fn next_state(&self, before: &Situation, step: Step) -> Option<Situation> {
        let mut after = before.clone();
        let s = &mut after;
        match step {
            Step::Tick => {
                let older = |age: &mut Option<u8>| *age = age.map(|age| (age + 1).min(TTL));
                older(&mut s.question);
                older(&mut s.answer);
                older(&mut s.table.waiting);
                s.lease_left = s.lease_left.saturating_sub(1);
                s.table.left = s.table.left.saturating_sub(1);
                s.table.unheard = (s.table.unheard + 1).min(TTL);
                s.memory = s.memory.map(|left| left.map(|left| left.saturating_sub(1)));
                s.reign = (s.reign + 1).min(REIGN_LEAST);
                s.unheard = (s.unheard + 1).min(FREED_AFTER + 1);
                if !self.stalls && s.unheard > FREED_AFTER {
                    s.broken = Some("a dead member is not freed in time");
                }
            }
            Step::Die => s.is_alive = false,
            Step::Send => s.question = Some(0),
            Step::LoseQuestion => s.question = None,
            Step::LoseAnswer => s.answer = None,
            Step::Receive => {
                let age = s.question.take()?;
                if s.table.left == 0 {
                    // It expires: no renewal any more.
                    return Some(after);
                }
                s.unheard = 0;
                s.table.left = TTL;
                s.table.unheard = 0;
                s.table.waiting = Some(age);
                if let Phase::Silent { is_heard, .. } = &mut s.table.phase {
                    *is_heard = true;
                }
            }
            Step::Answer => s.answer = s.table.waiting.take(),
            Step::Deliver => {
                let age = s.answer.take()?;
                let age = if self.is_gone(Gone::FromSend) { 0 } else { age };
                s.lease_left = s.lease_left.max((TTL - DRIFT).saturating_sub(age));
            }
            Step::LogSilence => {
                s.silence = Some(s.table.unheard);
                s.memory = [Some(TTL.saturating_sub(s.table.unheard)); 2];
                s.table.phase = Phase::Silent { is_logged: true, is_heard: false };
            }
            Step::LogHeard => {
                s.silence = None;
                s.memory = [None; 2];
                s.table.phase = Phase::Live;
            }
            Step::Expire => Self::end(s),
            Step::Queue => s.queued = Some(s.term),
            Step::ProposeQueued => {
                let term = s.queued.take()?;
                if term == s.term || self.is_gone(Gone::ExpiryTerm) {
                    Self::end(s);
                }
            }
            Step::Elect { node } => self.elect(s, node),
        }
        Some(after)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no rule is broken", |_, s: &Situation| s.broken.is_none()),
            Property::sometimes("a member is silent, heard and lives on", |_, s: &Situation| {
                s.term > 1 && s.silence.is_none() && s.lease_left > 0 && s.reign > 0
            }),
            Property::sometimes("a dead member is freed in a later term", |_, s: &Situation| {
                s.has_ended && !s.is_alive && s.term > 2
            }),
        ]
    }
}

const PROMPT: Leases = Leases { gone: None, stalls: false, restarts: false };
const STALLING: Leases = Leases { stalls: true, ..PROMPT };

fn breaks(name: &str, model: Leases) -> bool {
    let found = explore(name, model);
    let broken = found.iter().find(|(property, _)| *property == "no rule is broken");
    println!("{name}: {broken:?}");
    assert!(broken.is_some() || found.len() == 2, "{name}: too little can happen: {found:?}");
    broken.is_some()
}

#[test]
fn member_stops_first_and_the_dead_are_freed_in_time() {
    assert!(!breaks("prompt", PROMPT));
}

#[test]
fn member_stops_first_whatever_waits_and_however_short_a_reign_is() {
    assert!(!breaks("stalling", STALLING));
}

#[test]
fn each_rule_that_is_taken_away_gives_a_counter_example() {
    for (gone, model) in [
        (Gone::FromSend, STALLING),
        (Gone::Silence, PROMPT),
        (Gone::HeardFirst, STALLING),
        (Gone::ExpiryTerm, STALLING),
        (Gone::SnapshotSilence, PROMPT),
    ] {
        let name = format!("without {gone:?}");
        assert!(breaks(&name, Leases { gone: Some(gone), ..model }), "{name}");
    }
}

/// The bound is that of rule 4 only while nodes remember: one whose machine restarted counts a silence from its replay.
#[test]
fn node_that_restarts_in_every_reign_gives_the_dead_longer() {
    assert!(breaks("restarts", Leases { restarts: true, ..PROMPT }));
}
