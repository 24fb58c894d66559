//! The run loop of one grant: register, verify, resume, then read, write and commit until it is told to stop.

use tenure_model::{ErrorCode, MemberId, NextOffset};
use tenure_proto::v1;
use tenure_sdk::session::ReleaseReason;
use tenure_sdk::session::machine::Act;

use super::super::control::Protection;
use super::super::invariants::Fact;
use super::super::network::Host;
use super::super::node::calls::{Answer, Call, What};
use super::super::node::node_at;
use super::super::sink::{SinkRefusal, Writer};
use super::super::world::{Event, NODE_COUNT, SinkAnswer, World};
use super::GrantKey;

/// How long an answer is waited for before its question counts as unknown, in milliseconds.
const ANSWER_MS: u64 = 1_000;

/// A pause before something is tried again, in milliseconds.
const PAUSE_MS: (u64, u64) = (50, 250);

/// Attempts of one step of an acquire before the partition is given back.
const ATTEMPTS_MAX: u32 = 5;

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
    id: MemberId,
    home_initialised: bool,
    writer: Option<Writer>,
    /// What was read before the registration, in a control run.
    early: Option<u64>,
    is_running: bool,
    is_draining: bool,
    is_released: bool,
    /// A final commit goes ahead of the release.
    commits_last: bool,
    /// Next record to write.
    position: u64,
    committed: u64,
    sequence: u64,
    /// The question to a sink, or of an acquire, that has no answer yet.
    asked: Option<(u64, Ask)>,
    /// The commit that has no answer yet.
    commit: Option<(u64, u64)>,
    attempts: u32,
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
    fn work(&mut self, member: usize, grant: GrantKey) -> Option<&mut Work> {
        self.members[member].works.get_mut(&grant)
    }

    fn home_is_coordinator(&self) -> bool {
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
    fn ask(&mut self, member: usize, grant: GrantKey, ask: Ask) {
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
        if let Some(trap) = self.traps.iter().position(|(step, _)| *step == ask.step()) {
            let (step, length) = self.traps.swap_remove(trap);
            self.say(|| format!("member {member} sleeps before {step:?} of {grant:?}"));
            self.pause(Host::Member(member), length);
        }
        let boot = self.members[member].boot;
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

    /// A question arrives at a sink: it is answered in one atomic step.
    pub fn serve_sink(&mut self, member: usize, boot: u64, grant: GrantKey, id: u64, ask: Ask) {
        let (partition, epoch) = grant;
        let compares = self.plan.without != Some(Protection::SinkEpoch);
        let is_down = self.now < self.sinks_down_until;
        let Some(sink) = self.sinks.get_mut(&partition) else { return };
        let result = match ask {
            _ if is_down => Err(SinkRefusal::Transient),
            Ask::Register => sink.register(epoch).map(SinkAnswer::Registered),
            Ask::Resume(writer) => sink.resume(writer).map(SinkAnswer::Resumed),
            Ask::Peek => Ok(SinkAnswer::Resumed(sink.written)),
            Ask::Write { writer, from, to } => {
                sink.write(writer, from, to, compares).map(|()| SinkAnswer::Written)
            }
            Ask::Verify | Ask::Fetch | Ask::Commit { .. } => return,
        };
        match (&result, ask) {
            (Ok(SinkAnswer::Registered(_)), _) => self.fact(&Fact::Registered { partition, epoch }),
            (Ok(SinkAnswer::Written), Ask::Write { from, to, .. }) => {
                self.say(|| format!("{partition} takes {from} to {to} under {epoch}"));
                self.last_written.insert(partition, self.now);
                self.fact(&Fact::Written { partition, epoch, from, to });
            }
            (Err(refusal), _) => self.oracle.count_refusal(match refusal {
                SinkRefusal::Fenced => "sink: fenced",
                SinkRefusal::OffsetConflict => "sink: offset conflict",
                SinkRefusal::Transient => "sink: transient",
            }),
            (Ok(_), _) => {}
        }
        let answer = result.unwrap_or_else(SinkAnswer::Refused);
        let (from, to) = (Host::Sink, Host::Member(member));
        if !self.network.is_cut(from, to) && self.rng.below(200) > 0 {
            let delay = self.network.delay(from, to, &mut self.rng);
            self.after(delay, Event::SinkAnswer { member, boot, grant, id, answer });
        }
    }

    /// A sink's answer arrives.
    pub fn sink_answered(
        &mut self,
        member: usize,
        boot: u64,
        grant: GrantKey,
        id: u64,
        answer: SinkAnswer,
    ) {
        if !self.is_of_member(member, boot) {
            return;
        }
        let home_is_coordinator = self.home_is_coordinator();
        let Some(work) = self.work(member, grant) else { return };
        // An answer that comes after its question was given up says nothing.
        let Some((_, ask)) = work.asked.take_if(|(asked, _)| *asked == id) else { return };
        let (partition, epoch) = grant;
        match (ask, answer) {
            (Ask::Register, SinkAnswer::Registered(writer)) => {
                work.writer = Some(writer);
                work.attempts = 0;
                self.registered(member, grant, writer);
            }
            (Ask::Peek, SinkAnswer::Resumed(next)) => {
                work.early = Some(next);
                self.ask(member, grant, Ask::Register);
            }
            (Ask::Resume(_), SinkAnswer::Resumed(next)) if work.is_running => {
                work.position = next;
                self.go_on(member, grant);
            }
            (Ask::Resume(_), SinkAnswer::Resumed(next)) => {
                let next = work.early.unwrap_or(next);
                self.resumed(member, grant, next, true);
            }
            (Ask::Write { to, .. }, SinkAnswer::Written) => {
                work.position = work.position.max(to);
                if !home_is_coordinator {
                    self.fact(&Fact::Acknowledged { partition, epoch, next: to });
                }
                self.go_on(member, grant);
            }
            (_, SinkAnswer::Refused(SinkRefusal::Fenced)) => {
                self.close(member, grant, ReleaseReason::Fenced, None);
            }
            (_, SinkAnswer::Refused(SinkRefusal::OffsetConflict)) => self.resolve(member, grant),
            (_, SinkAnswer::Refused(SinkRefusal::Transient)) => self.again(member, grant, ask),
            (_, SinkAnswer::Registered(_) | SinkAnswer::Written | SinkAnswer::Resumed(_)) => {}
        }
    }

    fn registered(&mut self, member: usize, grant: GrantKey, writer: Writer) {
        let skips_verify = self.plan.without == Some(Protection::Verify);
        let next = match (skips_verify, self.home_is_coordinator()) {
            (false, _) => Ask::Verify,
            (true, true) => Ask::Fetch,
            (true, false) => Ask::Resume(writer),
        };
        self.ask(member, grant, next);
    }

    /// Asks the sink where it stands, after a write whose outcome is not known.
    fn resolve(&mut self, member: usize, grant: GrantKey) {
        if let Some(writer) = self.work(member, grant).and_then(|work| work.writer) {
            self.ask(member, grant, Ask::Resume(writer));
        }
    }

    /// Tries a question again after a pause, or gives the partition back.
    fn again(&mut self, member: usize, grant: GrantKey, ask: Ask) {
        let Some(work) = self.work(member, grant) else { return };
        work.attempts += 1;
        if !work.is_running && work.attempts > ATTEMPTS_MAX {
            return self.close(member, grant, ReleaseReason::AcquireFailed, None);
        }
        self.members[member].next_id += 1;
        let id = self.members[member].next_id;
        let Some(work) = self.work(member, grant) else { return };
        if let Ask::Commit { next, .. } = ask {
            work.commit = Some((id, next));
        } else {
            work.asked = Some((id, ask));
        }
        let boot = self.members[member].boot;
        let delay = self.rng.millis(PAUSE_MS.0, PAUSE_MS.1);
        self.after(delay, Event::Send { member, boot, grant, id, ask });
    }

    /// A timer of a grant: the pace, or a question without an answer.
    pub fn timer(&mut self, member: usize, boot: u64, grant: GrantKey, id: u64) {
        if !self.is_of_member(member, boot) {
            return;
        }
        if id == 0 {
            return self.write_more(member, grant);
        }
        let home_is_coordinator = self.home_is_coordinator();
        let Some(work) = self.work(member, grant) else { return };
        if let Some((_, next)) = work.commit.filter(|(asked, _)| *asked == id) {
            // Unknown: the very same commit is sent again, to whoever leads now.
            let sequence = work.sequence;
            self.members[member].leader = self.rng.position(NODE_COUNT);
            return self.again(member, grant, Ask::Commit { sequence, next });
        }
        let Some((_, ask)) = work.asked.take_if(|(asked, _)| *asked == id) else { return };
        self.oracle.count_refusal("unknown");
        match ask {
            Ask::Write { .. } if !home_is_coordinator => self.resolve(member, grant),
            Ask::Verify | Ask::Fetch => {
                self.members[member].leader = self.rng.position(NODE_COUNT);
                self.again(member, grant, ask);
            }
            Ask::Register | Ask::Resume(_) | Ask::Peek | Ask::Write { .. } | Ask::Commit { .. } => {
                self.again(member, grant, ask);
            }
        }
    }

    /// A coordinator's answer arrives.
    pub fn call_answered(&mut self, call: &Call, answer: Answer) {
        let Call { member, boot, grant, id, what, .. } = *call;
        if !self.is_of_member(member, boot) {
            return;
        }
        let Some(work) = self.work(member, grant) else { return };
        if let What::Commit { sequence, next } = what {
            if work.commit.take_if(|(asked, _)| *asked == id).is_some() {
                self.commit_answered(member, grant, (sequence, next), answer);
            }
            return;
        }
        let Some((_, ask)) = work.asked.take_if(|(asked, _)| *asked == id) else { return };
        match answer {
            Answer::Refused(error) => self.refused(member, grant, ask, &error),
            Answer::Verified { next, home_initialised } => {
                let (early, writer) = (work.early, work.writer);
                if what == What::Fetch && writer.is_none() {
                    work.early = Some(next.unwrap_or(0));
                    return self.ask(member, grant, Ask::Register);
                }
                if !self.home_is_coordinator() {
                    return self.resolve(member, grant);
                }
                let resume = early.or(next).unwrap_or(0);
                self.resumed(member, grant, resume, home_initialised);
            }
            Answer::Committed => {}
        }
    }

    fn commit_answered(
        &mut self,
        member: usize,
        grant: GrantKey,
        (sequence, next): (u64, u64),
        answer: Answer,
    ) {
        let (partition, epoch) = grant;
        match answer {
            Answer::Committed => {
                self.fact(&Fact::Acknowledged { partition, epoch, next });
                if let Some(work) = self.work(member, grant) {
                    work.committed = next;
                }
                self.go_on(member, grant);
            }
            Answer::Refused(error) => {
                self.refused(member, grant, Ask::Commit { sequence, next }, &error);
            }
            Answer::Verified { .. } => {}
        }
    }

    /// A refusal of a coordinator: ends the grant, or the question goes elsewhere.
    fn refused(&mut self, member: usize, grant: GrantKey, ask: Ask, error: &v1::Error) {
        match ErrorCode::parse(&error.code).map(ErrorCode::retry_class) {
            Some(tenure_model::RetryClass::Never) | None => {
                self.close(member, grant, ReleaseReason::Fenced, None);
            }
            Some(_) => {
                let hint = node_at(&error.leader_address);
                self.members[member].leader = hint.unwrap_or_else(|| self.rng.position(NODE_COUNT));
                self.again(member, grant, ask);
            }
        }
    }

    /// The acquire is done: reading begins.
    fn resumed(&mut self, member: usize, grant: GrantKey, next: u64, home_initialised: bool) {
        let (partition, epoch) = grant;
        let Some(work) = self.work(member, grant) else { return };
        work.is_running = true;
        work.attempts = 0;
        work.position = next;
        work.committed = next;
        let home_initialised = home_initialised || work.home_initialised;
        let id = work.id.clone();
        self.say(|| format!("{id} resumes {partition} at {next} under {epoch}"));
        self.fact(&Fact::Resumed { partition, epoch, member: &id, next });
        let resume = NextOffset::new(next).expect("a run is short");
        self.act_of(member, Act::Acquired { partition, epoch, home_initialised, resume });
        self.go_on(member, grant);
    }

    /// Decides what comes next for a grant that runs.
    fn go_on(&mut self, member: usize, grant: GrantKey) {
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
        let pace = self.rng.millis(100, 900);
        self.after(pace, Event::Timer { member, boot, grant, id: 0 });
    }

    fn write_more(&mut self, member: usize, grant: GrantKey) {
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
    fn close(&mut self, member: usize, grant: GrantKey, reason: ReleaseReason, last: Option<u64>) {
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
