//! The run loop of one grant: register, verify, resume, then read, write and commit until it is told to stop.

use tenure_model::{MemberId, NextOffset};
use tenure_sdk::session::ReleaseReason;
use tenure_sdk::session::machine::Act;

use super::super::control::Protection;
use super::super::faults::{Sleeper, Trap};
use super::super::network::Host;
use super::super::node::calls::{Call, What};
use super::super::sink::Writer;
use super::super::world::{Event, World};
use super::GrantKey;

/// How long an answer is waited for before its question counts as unknown, in milliseconds.
const ANSWER_MS: u64 = 1_000;

/// A pause before something is tried again, in milliseconds.
pub(super) const PAUSE_MS: (u64, u64) = (50, 250);

/// Attempts of one step of an acquire before the partition is given back.
pub(super) const ATTEMPTS_MAX: u32 = 5;

/// Steps at which a process may be made to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    Register,
    Verify,
    Resume,
    Write,
    Commit,
}

/// One question of a grant.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    Register,
    Verify,
    Fetch,
    Resume(Writer),
    /// Only where a control run reads before it registers.
    Peek,
    Write {
        writer: Writer,
        from: u64,
        to: u64,
    },
    Commit {
        sequence: u64,
        next: u64,
    },
}

impl Ask {
    const fn step(self) -> Step {
        match self {
            Self::Register | Self::Peek => Step::Register,
            Self::Verify | Self::Fetch => Step::Verify,
            Self::Resume(_) => Step::Resume,
            Self::Write { .. } => Step::Write,
            Self::Commit { .. } => Step::Commit,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Work {
    /// Member id of the grant.
    pub(super) id: MemberId,
    pub(super) home_initialised: bool,
    pub(super) writer: Option<Writer>,
    /// What was read before the registration, in a control run.
    pub(super) early: Option<u64>,
    pub(super) is_running: bool,
    is_draining: bool,
    is_released: bool,
    /// A final commit goes ahead of the release.
    commits_last: bool,
    /// Next record to write.
    pub(super) position: u64,
    pub(super) committed: u64,
    pub(super) sequence: u64,
    /// The question to a sink, or of an acquire, that has no answer yet.
    pub(super) asked: Option<(u64, Ask)>,
    /// The commit that has no answer yet.
    pub(super) commit: Option<(u64, u64)>,
    pub(super) attempts: u32,
}

impl Work {
    /// Whether it has not resumed yet.
    #[must_use]
    pub const fn is_acquiring(&self) -> bool {
        !self.is_running
    }

    /// Whether it let go by itself.
    #[must_use]
    pub const fn is_released(&self) -> bool {
        self.is_released
    }
}

impl World {
    pub(super) fn work(&mut self, member: usize, grant: GrantKey) -> Option<&mut Work> {
        self.members[member].works.get_mut(&grant)
    }

    pub(super) fn home_is_coordinator(&self) -> bool {
        self.group_settings.home == tenure_model::Home::Coordinator
    }

    /// A new grant: registers.
    pub(super) fn begin_work(
        &mut self,
        member: usize,
        grant: GrantKey,
        id: MemberId,
        home_initialised: bool,
    ) {
        let work = Work {
            id,
            home_initialised,
            writer: None,
            early: None,
            is_running: false,
            is_draining: false,
            is_released: false,
            commits_last: self.rng.chance(50),
            position: 0,
            committed: 0,
            sequence: 0,
            asked: None,
            commit: None,
            attempts: 0,
        };
        self.members[member].works.insert(grant, work);
        let first = match self.plan.without {
            Some(Protection::ResumeAfterRegister) if self.home_is_coordinator() => Ask::Fetch,
            Some(Protection::ResumeAfterRegister) => Ask::Peek,
            _ => Ask::Register,
        };
        self.ask(member, grant, first);
    }

    /// The partition is revoked: what is under way is finished, then it is released.
    pub(super) fn drain_work(&mut self, member: usize, grant: GrantKey) {
        let Some(work) = self.work(member, grant) else { return };
        work.is_draining = true;
        if !work.is_running {
            return self.close(member, grant, ReleaseReason::Revoked, None);
        }
        self.go_on(member, grant);
    }

    /// Asks something: the local lease is looked at now, the question leaves a moment later.
    pub(super) fn ask(&mut self, member: usize, grant: GrantKey, ask: Ask) {
        let is_live = self.members[member].is_live(grant, self.now);
        if self.members[member].checks_lease && !is_live {
            self.oracle.count_refusal("member: lease checked");
            return;
        }
        self.members[member].next_id += 1;
        let id = self.members[member].next_id;
        let Some(work) = self.work(member, grant) else { return };
        if let Ask::Commit { next, .. } = ask {
            work.commit = Some((id, next));
        } else {
            work.asked = Some((id, ask));
        }
        let is_acquiring = work.is_acquiring();
        let boot = self.members[member].boot;
        self.rouse(grant.0, member, is_acquiring);
        if let Some(trap) = self.traps.iter().position(|trap| trap.step == ask.step()) {
            let Trap { step, length, deaf_for } = self.traps.swap_remove(trap);
            self.say(|| format!("member {member} sleeps before {step:?} of {grant:?}"));
            self.pause(Host::Member(member), length);
            let found = &mut self.members[member];
            found.deaf_on_waking = deaf_for;
            found.checks_lease &= deaf_for == 0;
            self.sleepers.push(Sleeper { member, boot, partition: grant.0 });
        }
        self.after(0, Event::Send { member, boot, grant, id, ask });
    }

    /// The question leaves the process.
    pub fn send_ask(&mut self, member: usize, boot: u64, grant: GrantKey, id: u64, ask: Ask) {
        if !self.is_of_member(member, boot) || !self.members[member].works.contains_key(&grant) {
            return;
        }
        let wait = self.rng.millis(ANSWER_MS, ANSWER_MS + 200);
        self.after(wait, Event::Timer { member, boot, grant, id });
        let from = Host::Member(member);
        match ask {
            Ask::Register | Ask::Peek | Ask::Resume(_) | Ask::Write { .. } => {
                if !self.network.is_cut(from, Host::Sink) {
                    let delay = self.network.delay(from, Host::Sink, &mut self.rng);
                    self.after(delay, Event::Sink { member, boot, grant, id, ask });
                }
            }
            Ask::Verify => self.call(member, grant, id, What::Verify),
            Ask::Fetch => self.call(member, grant, id, What::Fetch),
            Ask::Commit { sequence, next } => {
                self.call(member, grant, id, What::Commit { sequence, next });
            }
        }
    }

    fn call(&mut self, member: usize, grant: GrantKey, id: u64, what: What) {
        let found = &self.members[member];
        let (node, boot) = (found.leader, found.boot);
        let Some(work) = found.works.get(&grant) else { return };
        let call = Call { member, boot, grant, id, caller: work.id.clone(), what };
        let (from, to) = (Host::Member(member), Host::Node(node));
        if !self.network.is_cut(from, to) {
            let delay = self.network.delay(from, to, &mut self.rng);
            self.after(delay, Event::Call { node, call });
        }
    }

    /// Decides what comes next for a grant that runs.
    pub(super) fn go_on(&mut self, member: usize, grant: GrantKey) {
        let home_is_coordinator = self.home_is_coordinator();
        let Some(work) = self.work(member, grant) else { return };
        if home_is_coordinator && work.commit.is_none() && work.position > work.committed {
            let wants = !work.is_draining || work.commits_last;
            let (sequence, next) = (work.sequence + 1, work.position);
            if wants {
                work.sequence = sequence;
                self.ask(member, grant, Ask::Commit { sequence, next });
            }
        }
        let Some(work) = self.work(member, grant) else { return };
        if work.asked.is_some() {
            return;
        }
        if work.is_draining {
            if work.commit.is_none() || !work.commits_last {
                let last = home_is_coordinator.then_some(work.position);
                self.close(member, grant, ReleaseReason::Revoked, last);
            }
            return;
        }
        let boot = self.members[member].boot;
        let pace =
            if self.rng.chance(15) { self.rng.millis(0, 20) } else { self.rng.millis(100, 900) };
        self.after(pace, Event::Timer { member, boot, grant, id: 0 });
    }

    pub(super) fn write_more(&mut self, member: usize, grant: GrantKey) {
        let record_count = self.record_count();
        let share = self.rng.within(1, 12);
        let Some(work) = self.work(member, grant) else { return };
        let (Some(writer), None, false) = (work.writer, work.asked, work.is_draining) else {
            return;
        };
        let from = work.position;
        let to = record_count.min(from + share);
        if to > from {
            self.ask(member, grant, Ask::Write { writer, from, to });
        } else {
            self.go_on(member, grant);
        }
    }

    /// Lets go of a grant.
    pub(super) fn close(
        &mut self,
        member: usize,
        grant: GrantKey,
        reason: ReleaseReason,
        last: Option<u64>,
    ) {
        let (partition, epoch) = grant;
        if let Some(work) = self.work(member, grant) {
            work.is_released = true;
        }
        let next_offset = last.map(|last| NextOffset::new(last).expect("a run is short"));
        let error = String::new();
        self.act_of(member, Act::Release { partition, epoch, next_offset, reason, error });
        self.members[member].works.remove(&grant);
    }
}
