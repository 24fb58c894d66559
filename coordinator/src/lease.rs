//! Lease table of the raft leader: a synchronous machine with time as an argument and no IO.
//!
//! The deadline of a member lives here and nowhere else; renewals are not logged. A table belongs to one raft term:
//! it is built from the state once that term's first entry is applied, and dropped with the leadership.
//!
//! | state    | what                               | to       | answered                |
//! |----------|------------------------------------|----------|-------------------------|
//! | Live     | heartbeat received                 | Live     | at once                 |
//! | Live     | unheard for an interval plus slack | Silent   | once `heard` is applied |
//! | Live     | deadline passed                    | Expiring | never renewed again     |
//! | Live, Silent | cut short                      | same, with a nearer deadline | as before |
//! | Silent   | heartbeat received                 | Silent, heard again | once `heard` is applied |
//! | Silent   | `heard` applied                    | Live     | at once                 |
//! | Silent   | deadline passed                    | Expiring | never renewed again     |
//! | Expiring | expiry or leave applied            | gone     | with the end            |

mod leases;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use tenure_core::command::{MemberRef, SilentMember};
use tenure_model::{GroupId, MemberId, Tick};

pub use self::leases::LeaseId;
use self::leases::Leases;
use crate::settings::Deadlines;

/// Lengths of one member's lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// From the receipt of a heartbeat to expiry.
    pub ttl: Duration,
    /// How often the member heartbeats.
    pub interval: Duration,
}

/// What the table does beyond the members' own lengths.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// How long after a missed heartbeat interval a member is logged as silent.
    pub silence_slack: Duration,
    /// Share of all members, in percent, that may vanish within one window.
    pub vanished_share_percent: u64,
    /// How many must vanish before the share counts.
    pub vanished_least: u64,
    /// Length of that window.
    pub vanished_window: Duration,
    /// How long expiry pauses after too many vanished.
    pub vanished_pause: Duration,
}

impl From<&Deadlines> for Rules {
    fn from(deadlines: &Deadlines) -> Self {
        Self {
            silence_slack: Duration::from_millis(deadlines.silence_slack_ms),
            vanished_share_percent: deadlines.vanished_share_percent,
            vanished_least: deadlines.vanished_least,
            vanished_window: Duration::from_millis(deadlines.vanished_window_ms),
            vanished_pause: Duration::from_millis(deadlines.vanished_pause_ms),
        }
    }
}

/// Whether a heartbeat may be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The lease was renewed at receipt and still holds.
    Now,
    /// The outcome of an entry decides: the member is expiring, or the log calls it silent.
    Later,
    /// The membership has ended.
    Gone,
}

/// What [`LeaseTable::check`] found to say in the log of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Too many members vanished at once.
    ExpiryPaused {
        /// How many are due.
        vanished_count: usize,
        /// Out of how many.
        member_count: usize,
    },
    /// The pause is over.
    ExpiryResumed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Live,
    /// From the moment it is marked, before any entry says so.
    Silent {
        /// The log says so.
        is_logged: bool,
        /// A heartbeat came since; an entry has to take the silence back.
        is_heard: bool,
    },
    Expiring,
}

impl Phase {
    const fn answer(self) -> Answer {
        match self {
            Self::Live => Answer::Now,
            Self::Silent { .. } | Self::Expiring => Answer::Later,
        }
    }
}

#[derive(Clone, Debug)]
struct Lease {
    lengths: Lengths,
    heard_at: Tick,
    deadline: Tick,
    phase: Phase,
    /// Key of its line in `LeaseTable::checks`.
    check_at: Tick,
}

impl Lease {
    const fn renewed(&self) -> Renewed {
        Renewed { answer: self.phase.answer(), heard_at: self.heard_at, deadline: self.deadline }
    }
}

/// A lease after a heartbeat.
#[derive(Clone, Copy, Debug)]
pub struct Renewed {
    /// Whether the heartbeat may be answered.
    pub answer: Answer,
    /// When its member was last heard.
    pub heard_at: Tick,
    /// When it runs out.
    pub deadline: Tick,
}

/// See the module.
#[derive(Debug)]
pub struct LeaseTable {
    rules: Rules,
    leases: Leases,
    /// One line per lease that is not expiring: when to look at it again, never late.
    checks: BTreeSet<(Tick, MemberRef)>,
    expiring: BTreeSet<MemberRef>,
    silent: BTreeSet<MemberRef>,
    /// When members were found to have vanished, within the last window.
    vanished: VecDeque<Tick>,
    paused_until: Option<Tick>,
    /// The pause is over, and its cause lies less than a window back: no second one follows at once.
    is_resumed: bool,
}

impl LeaseTable {
    pub const fn new(rules: Rules) -> Self {
        Self {
            rules,
            leases: Leases::new(),
            checks: BTreeSet::new(),
            expiring: BTreeSet::new(),
            silent: BTreeSet::new(),
            vanished: VecDeque::new(),
            paused_until: None,
            is_resumed: false,
        }
    }

    /// Takes a member in with its full ttl from `now`; changes the lengths of one that is in already.
    pub fn admit(&mut self, member: &MemberRef, lengths: Lengths, now: Tick) {
        if let Some(lease) = self.leases.get_mut(member) {
            let grown = lengths.ttl.saturating_sub(lease.lengths.ttl);
            lease.deadline = lease.deadline.after(grown);
            lease.lengths = lengths;
            return;
        }
        self.insert(member, lengths, now, now.after(lengths.ttl), Phase::Live);
    }

    /// Takes in a member that the log calls silent, at the start of a term.
    ///
    /// `known_at` is when this replica first applied, installed or replayed the silence entry.
    pub fn admit_silent(
        &mut self,
        member: &MemberRef,
        lengths: Lengths,
        known_at: Tick,
        silent_for: Duration,
    ) {
        let deadline = known_at.after(lengths.ttl.saturating_sub(silent_for));
        let phase = Phase::Silent { is_logged: true, is_heard: false };
        self.insert(member, lengths, known_at, deadline, phase);
    }

    fn insert(
        &mut self,
        member: &MemberRef,
        lengths: Lengths,
        heard_at: Tick,
        deadline: Tick,
        phase: Phase,
    ) {
        self.remove(member);
        let mut lease = Lease { lengths, heard_at, deadline, phase, check_at: deadline };
        lease.check_at = self.next_check(&lease);
        if matches!(phase, Phase::Silent { .. }) {
            self.silent.insert(member.clone());
        }
        self.checks.insert((lease.check_at, member.clone()));
        self.leases.insert(member.clone(), lease);
    }

    fn next_check(&self, lease: &Lease) -> Tick {
        match lease.phase {
            Phase::Live => lease.deadline.min(self.silent_at(lease)),
            Phase::Silent { .. } | Phase::Expiring => lease.deadline,
        }
    }

    fn silent_at(&self, lease: &Lease) -> Tick {
        lease.heard_at.after(lease.lengths.interval).after(self.rules.silence_slack)
    }

    /// Renews the lease of a member whose heartbeat was received at `receipt`. An expiring one is not renewed.
    pub fn renew(&mut self, member: &MemberRef, receipt: Tick) -> Answer {
        match self.leases.id(member).and_then(|id| self.renew_by_id(id, receipt)) {
            Some(renewed) => renewed.answer,
            None => Answer::Gone,
        }
    }

    /// As [`LeaseTable::renew`]; nothing when the membership has ended.
    pub fn renew_by_id(&mut self, id: LeaseId, receipt: Tick) -> Option<Renewed> {
        let lease = self.leases.by_id_mut(id)?;
        if lease.phase == Phase::Expiring {
            return Some(lease.renewed());
        }
        lease.heard_at = lease.heard_at.max(receipt);
        lease.deadline = lease.deadline.max(receipt.after(lease.lengths.ttl));
        if let Phase::Silent { is_heard, .. } = &mut lease.phase {
            *is_heard = true;
        }
        Some(lease.renewed())
    }

    /// Id of the lease of `member`, for as long as it is in the table.
    pub fn id(&self, member: &MemberRef) -> Option<LeaseId> {
        self.leases.id(member)
    }

    /// Whether a heartbeat of `member` may be answered now. Asked again when the answer leaves.
    pub fn answer(&self, member: &MemberRef) -> Answer {
        self.leases.get(member).map_or(Answer::Gone, |lease| lease.phase.answer())
    }

    /// As [`LeaseTable::answer`].
    pub fn answer_by_id(&self, id: LeaseId) -> Answer {
        self.leases.by_id(id).map_or(Answer::Gone, |lease| lease.phase.answer())
    }

    /// The log says that `member` is silent.
    pub fn silence_applied(&mut self, member: &MemberRef) {
        if let Some(lease) = self.leases.get_mut(member) {
            match &mut lease.phase {
                Phase::Silent { is_logged, .. } => *is_logged = true,
                Phase::Live => {
                    lease.phase = Phase::Silent { is_logged: true, is_heard: false };
                    self.silent.insert(member.clone());
                }
                Phase::Expiring => {}
            }
        }
    }

    /// The log says that `member` was heard again, or never said that it was silent.
    pub fn heard_applied(&mut self, member: &MemberRef) {
        if let Some(lease) = self.leases.get_mut(member)
            && matches!(lease.phase, Phase::Silent { .. })
        {
            lease.phase = Phase::Live;
            self.silent.remove(member);
            let (old, new) = (lease.check_at, lease.deadline.min(lease.heard_at));
            lease.check_at = new;
            self.checks.remove(&(old, member.clone()));
            self.checks.insert((new, member.clone()));
        }
    }

    /// The membership has ended.
    pub fn remove(&mut self, member: &MemberRef) {
        if let Some(lease) = self.leases.remove(member) {
            self.checks.remove(&(lease.check_at, member.clone()));
            self.expiring.remove(member);
            self.silent.remove(member);
        }
    }

    /// Ends the lease of `member` at `until` if that is sooner. The next renewal takes it back.
    pub fn cut_short(&mut self, member: &MemberRef, until: Tick) {
        let Some(lease) = self.leases.get_mut(member) else { return };
        if lease.phase == Phase::Expiring || lease.deadline <= until {
            return;
        }
        lease.deadline = until;
        let (old, new) = (lease.check_at, lease.check_at.min(until));
        lease.check_at = new;
        self.checks.remove(&(old, member.clone()));
        self.checks.insert((new, member.clone()));
    }

    /// When `member` was last heard.
    pub fn heard_at(&self, member: &MemberRef) -> Option<Tick> {
        self.leases.get(member).map(|lease| lease.heard_at)
    }

    /// Drops every membership that `keep` refuses.
    pub fn retain(&mut self, keep: impl Fn(&MemberRef) -> bool) {
        let gone: Vec<MemberRef> =
            self.leases.members().filter(|member| !keep(member)).cloned().collect();
        for member in gone {
            self.remove(&member);
        }
    }

    /// The loop that feeds this table stood still for `gap` until a moment ago: all deadlines move by it, and none
    /// further than if its member were heard `now`. Who was heard after the gap has had its full length already.
    pub fn add_gap(&mut self, gap: Duration, now: Tick) {
        self.checks.clear();
        for (member, lease) in self.leases.iter_mut() {
            let latest = now.after(lease.lengths.ttl);
            lease.heard_at = lease.heard_at.after(gap).min(now).max(lease.heard_at);
            lease.deadline = lease.deadline.after(gap).min(latest).max(lease.deadline);
            lease.check_at = lease.check_at.after(gap).min(now);
            if lease.phase != Phase::Expiring {
                self.checks.insert((lease.check_at, member.clone()));
            }
        }
        self.paused_until = self.paused_until.map(|until| until.after(gap));
    }

    /// Marks what is due: silent members and expiring ones. Call it after all input was taken in.
    pub fn check(&mut self, now: Tick) -> Option<Notice> {
        let mut due = Vec::new();
        while let Some((at, _)) = self.checks.first()
            && *at <= now
            && let Some((_, member)) = self.checks.pop_first()
        {
            let silence_slack = self.rules.silence_slack;
            let Some(lease) = self.leases.get_mut(&member) else { continue };
            if lease.deadline <= now {
                due.push(member);
                continue;
            }
            let silent_at = lease.heard_at.after(lease.lengths.interval).after(silence_slack);
            if lease.phase == Phase::Live && silent_at <= now {
                lease.phase = Phase::Silent { is_logged: false, is_heard: false };
                self.silent.insert(member.clone());
            }
            lease.check_at = match lease.phase {
                Phase::Live => lease.deadline.min(silent_at),
                Phase::Silent { .. } | Phase::Expiring => lease.deadline,
            };
            self.checks.insert((lease.check_at, member));
        }
        let notice = self.weigh(due.len(), now);
        if self.paused_until.is_some() {
            // Kept due: they are looked at again in every check, and renewed if they are heard. The log hears of
            // them, or the next raft leader would give them a full ttl.
            for member in due {
                let Some(lease) = self.leases.get_mut(&member) else { continue };
                if lease.phase == Phase::Live {
                    lease.phase = Phase::Silent { is_logged: false, is_heard: false };
                    self.silent.insert(member.clone());
                }
                self.checks.insert((lease.check_at, member));
            }
        } else {
            for member in due {
                self.silent.remove(&member);
                if let Some(lease) = self.leases.get_mut(&member) {
                    lease.phase = Phase::Expiring;
                }
                self.expiring.insert(member);
            }
        }
        notice
    }

    /// Decides whether expiry pauses, with `due_count` members due now.
    fn weigh(&mut self, due_count: usize, now: Tick) -> Option<Notice> {
        if let Some(until) = self.paused_until {
            if now < until {
                return None;
            }
            self.paused_until = None;
            self.is_resumed = true;
            self.vanished.clear();
            self.vanished.push_back(now);
            return Some(Notice::ExpiryResumed);
        }
        let window = self.rules.vanished_window;
        while self.vanished.front().is_some_and(|at| at.after(window) <= now) {
            self.vanished.pop_front();
        }
        if self.vanished.is_empty() {
            self.is_resumed = false;
        }
        self.vanished.extend(std::iter::repeat_n(now, due_count));
        let (vanished_count, member_count) = (self.vanished.len(), self.leases.len());
        let share = (vanished_count as u64).saturating_mul(100)
            > (member_count as u64).saturating_mul(self.rules.vanished_share_percent);
        let is_mass = due_count > 0
            && vanished_count as u64 >= self.rules.vanished_least.max(1)
            && share
            && self.rules.vanished_share_percent < 100;
        if !is_mass || self.is_resumed {
            return None;
        }
        self.paused_until = Some(now.after(self.rules.vanished_pause));
        Some(Notice::ExpiryPaused { vanished_count, member_count })
    }

    /// Members to expire. Proposed again until the outcome is applied or the term ends.
    pub fn expiring(&self) -> impl Iterator<Item = &MemberRef> {
        self.expiring.iter()
    }

    /// Whether `member` is one of them.
    pub fn is_expiring(&self, member: &MemberRef) -> bool {
        self.expiring.contains(member)
    }

    /// Members to log as silent, with how long they have been.
    pub fn silence_to_log(&self, now: Tick) -> Vec<SilentMember> {
        let unlogged = |member: &&MemberRef| {
            let phase = self.leases.get(member).map(|lease| lease.phase);
            phase == Some(Phase::Silent { is_logged: false, is_heard: false })
        };
        let silent = |member: &MemberRef| {
            let silent_for = now.since(self.leases.get(member)?.heard_at);
            let silent_for_ms = u64::try_from(silent_for.as_millis()).unwrap_or(u64::MAX);
            Some(SilentMember { member: member.clone(), silent_for_ms })
        };
        self.silent.iter().filter(unlogged).filter_map(silent).collect()
    }

    /// Members whose silence is to be taken back.
    pub fn heard_to_log(&self) -> Vec<MemberRef> {
        let heard = |member: &&MemberRef| {
            let phase = self.leases.get(member).map(|lease| lease.phase);
            matches!(phase, Some(Phase::Silent { is_heard: true, .. }))
        };
        self.silent.iter().filter(heard).cloned().collect()
    }

    /// The membership of `member` in `group`, if it is in the table.
    pub fn find(&self, group: &GroupId, member: &MemberId) -> Option<MemberRef> {
        self.leases.find(group, member).cloned()
    }

    /// When the lease of `member` runs out.
    pub fn deadline(&self, member: &MemberRef) -> Option<Tick> {
        self.leases.get(member).map(|lease| lease.deadline)
    }
}

#[cfg(test)]
mod tests;
