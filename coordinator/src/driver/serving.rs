//! Grants that run by the state, and that their owners' heartbeats do not name.
//!
//! An owner that ended a grant says so by a release, until it is answered. One that does not name a grant for two
//! heartbeat intervals and the slack has lost it without a word: it is asked for the partition, which goes to another.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_core::State;
use tenure_core::command::{GrantRef, MemberRef};
use tenure_model::Tick;

use super::reign::Reign;

/// See the module.
#[derive(Debug, Default)]
pub struct Unserved(BTreeMap<MemberRef, BTreeMap<GrantRef, Tick>>);

impl Unserved {
    /// Takes over which grants of `member` a heartbeat received at `receipt` should have named. Each is due `length`
    /// after the first heartbeat in a row without it.
    fn note(
        &mut self,
        member: &MemberRef,
        missing: Vec<GrantRef>,
        receipt: Tick,
        length: Duration,
    ) {
        if missing.is_empty() {
            self.0.remove(member);
            return;
        }
        let known = self.0.remove(member).unwrap_or_default();
        let due = missing.into_iter().map(|grant| {
            let at = known.get(&grant).copied().unwrap_or_else(|| receipt.after(length));
            (grant, at)
        });
        self.0.insert(member.clone(), due.collect());
    }

    pub fn forget(&mut self, member: &MemberRef) {
        self.0.remove(member);
    }

    /// Grants to ask for.
    pub fn due(&self, now: Tick) -> Vec<GrantRef> {
        let all = self.0.values().flatten();
        all.filter(|(_, at)| **at <= now).map(|(grant, _)| grant.clone()).collect()
    }

    /// What is due was asked for: it counts anew from the next heartbeat on.
    pub fn settle(&mut self, now: Tick) {
        self.0.retain(|_, grants| {
            grants.retain(|_, at| *at > now);
            !grants.is_empty()
        });
    }
}

impl Reign {
    /// Compares what the last heartbeat of `member` names with what it owns.
    pub(super) fn compare_held(&mut self, member: &MemberRef, state: &State, receipt: Tick) {
        let Ok((group, record)) = state.member(&member.group, &member.member) else { return };
        let named = self.named(member);
        let missing = record.owned.iter().filter_map(|partition| {
            let found = group.partitions.get(partition)?;
            let epoch = found.epoch.filter(|_| found.runs())?;
            let grant = GrantRef { group: member.group.clone(), partition: *partition, epoch };
            (!named.contains(&(*partition, epoch))).then_some(grant)
        });
        let slack = Duration::from_millis(self.settings.deadlines.silence_slack_ms);
        let length = Duration::from_millis(record.heartbeat_interval_ms) * 2 + slack;
        self.unserved.note(member, missing.collect(), receipt, length);
    }
}
