//! Members whose processes may be dead, and processes that wait for the place of a static one. Of one term.
//!
//! | takeover | member  | its connection was closed by the peer | a process with its instance id waits             |
//! |----------|---------|---------------------------------------|--------------------------------------------------|
//! | lease    | dynamic | the lease goes on                     | -                                                |
//! | lease    | static  | the lease goes on                     | until the lease ends; the place is kept for it   |
//! | fence    | dynamic | the lease ends after a short grace    | -                                                |
//! | fence    | static  | the lease goes on                     | until a short grace is over; the place is kept   |
//!
//! A reconnect takes all of it back.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tenure_core::State;
use tenure_core::command::MemberRef;
use tenure_model::{MemberId, Takeover, Tick};

use super::reign::Reign;
use super::session::SessionId;
use crate::settings::Deadlines;

/// A process that has not asked for so long does not wait any more.
const ASKED_WITHIN: Duration = Duration::from_secs(5);

/// How long a place is kept for a process that waited for it, in milliseconds.
pub const SUCCESSOR_MS: u64 = 10_000;

/// Whether a static member's place is free for a new process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The earlier process was heard since the new one asked first.
    Taken,
    /// Nothing was heard of the earlier process yet; its lease ends after `remaining`, at the latest.
    Waits { remaining: Duration },
}

/// A process that asks for the place of a static member.
#[derive(Clone, Debug)]
pub struct Asker {
    /// The member that has the instance id now.
    pub old: MemberRef,
    pub member: MemberId,
    /// Host and process, for people.
    pub client: String,
}

#[derive(Debug)]
struct Waiter {
    member: MemberId,
    client: String,
    since: Tick,
    asked_at: Tick,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Places {
    /// When the connection of a member of a `fence` group was closed by its peer.
    closed: BTreeMap<MemberRef, Tick>,
    /// When leases were cut short, within the last window.
    cut: VecDeque<Tick>,
    waiters: BTreeMap<MemberRef, Waiter>,
}

impl Places {
    /// A session of `member` is open again.
    pub fn reopened(&mut self, member: &MemberRef) {
        self.closed.remove(member);
    }

    pub fn forget(&mut self, member: &MemberRef) {
        self.closed.remove(member);
        self.waiters.remove(member);
    }

    /// Nobody waits for the place of `member` any more.
    pub fn turn_away(&mut self, member: &MemberRef) {
        self.waiters.remove(member);
    }

    /// Whether a process waits for the place of `member`.
    pub fn is_awaited(&self, member: &MemberRef, now: Tick) -> bool {
        let waiter = self.waiters.get(member);
        waiter.is_some_and(|waiter| now <= waiter.asked_at.after(ASKED_WITHIN))
    }

    /// Who waits for the place of `member`, for people; empty: nobody.
    pub fn awaited_by(&self, member: &MemberRef, now: Tick) -> String {
        let waiter = self.waiters.get(member).filter(|_| self.is_awaited(member, now));
        waiter.map_or_else(String::new, |waiter| waiter.client.clone())
    }

    /// Counts one more lease cut short, unless there were too many within the last window.
    fn may_cut(&mut self, deadlines: &Deadlines, now: Tick) -> bool {
        let window = Duration::from_millis(deadlines.vanished_window_ms);
        while self.cut.front().is_some_and(|at| at.after(window) <= now) {
            self.cut.pop_front();
        }
        let may = (self.cut.len() as u64) < deadlines.fence_grace_most;
        if may {
            self.cut.push_back(now);
        }
        may
    }

    fn ask(&mut self, asker: &Asker, now: Tick) -> &Waiter {
        let fresh = || Waiter {
            member: asker.member.clone(),
            client: asker.client.clone(),
            since: now,
            asked_at: now,
        };
        let waiter = self.waiters.entry(asker.old.clone()).or_insert_with(fresh);
        if waiter.member != asker.member {
            *waiter = fresh();
        }
        waiter.asked_at = now;
        waiter
    }
}

impl Reign {
    /// The connection of a session was closed by its peer, which may be dead. Where the resource refuses a stale owner
    /// by itself, its lease ends after a short grace.
    pub fn closed_by_peer(&mut self, member: &MemberRef, id: SessionId, state: &State, now: Tick) {
        if !self.has_session(member, Some(id)) {
            return;
        }
        self.close(member, id);
        let Ok((group, record)) = state.member(&member.group, &member.member) else { return };
        let is_fence = match group.settings.takeover {
            Takeover::Fence => true,
            Takeover::Lease => false,
        };
        if !is_fence || record.epoch != member.member_epoch {
            return;
        }
        self.places.closed.insert(member.clone(), now);
        if record.instance.is_some() {
            return;
        }
        let deadlines = self.settings.deadlines;
        if self.places.may_cut(&deadlines, now) {
            let grace = Duration::from_millis(deadlines.fence_grace_ms);
            self.table.cut_short(member, now.after(grace));
        } else {
            tracing::warn!(
                group = %member.group, member = %member.member,
                "too many connections closed at once, the lease keeps its length"
            );
        }
    }

    /// A process asks for the place of a static member. Said again and again while it waits.
    pub fn ask_for_place(&mut self, asker: &Asker, state: &State, now: Tick) -> Place {
        let old = &asker.old;
        let Some(deadline) = self.table.deadline(old) else {
            return Place::Waits { remaining: Duration::ZERO };
        };
        let since = self.places.ask(asker, now).since;
        let is_heard = self.table.heard_at(old).is_some_and(|heard_at| heard_at > since);
        if is_heard && self.has_session(old, None) {
            self.places.turn_away(old);
            return Place::Taken;
        }
        if since == now {
            tracing::info!(
                group = %old.group, member = %old.member, successor = %asker.member, client = asker.client,
                "a process waits for the place of a static member"
            );
        }
        self.show_waiter(old, now);
        let fence = state.group(&old.group).is_ok_and(|group| match group.settings.takeover {
            Takeover::Fence => true,
            Takeover::Lease => false,
        });
        let grace = Duration::from_millis(self.settings.deadlines.fence_grace_ms);
        if fence
            && let Some(closed_at) = self.places.closed.get(old)
            && !self.has_session(old, None)
        {
            self.table.cut_short(old, closed_at.after(grace));
        }
        let deadline = self.table.deadline(old).unwrap_or(deadline);
        Place::Waits { remaining: deadline.since(now) }
    }
}

#[cfg(test)]
mod tests;
