//! What becomes of a question of a grant: answered, refused, or not known.

use tenure_model::{ErrorCode, NextOffset};
use tenure_proto::v1;
use tenure_sdk::session::ReleaseReason;
use tenure_sdk::session::machine::Act;

use super::super::control::Protection;
use super::super::invariants::Fact;
use super::super::node::calls::{Answer, Call, What};
use super::super::node::node_at;
use super::super::sink::{SinkRefusal, Writer};
use super::super::world::{Event, NODE_COUNT, SinkAnswer, World};
use super::GrantKey;
use super::work::{ATTEMPTS_MAX, Ask, PAUSE_MS};

impl World {
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
        let is_live = self.members[member].is_live(grant, self.now);
        if self.members[member].checks_lease && !is_live {
            self.oracle.count_refusal("member: lease checked");
            return;
        }
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
}
