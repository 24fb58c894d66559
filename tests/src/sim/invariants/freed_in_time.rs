//! A dead member is freed in time, however often the raft leader changes.
//!
//! A raft leader that rules undisturbed logs a member as silent one heartbeat interval and the slack after it was last
//! heard, or after the beginning of its rule. One that is silent is expired a ttl after it was last heard, as far as
//! the log and this replica's memory of it say; one that is not, a ttl after it was last heard, or after the beginning
//! of the rule. A loop that stood still moves both by as long as it did. A silence that is forgotten gives the dead a
//! second ttl.

use std::collections::BTreeMap;

use tenure_core::Event;
use tenure_model::MemberId;

use super::{Fact, Property, View};
use crate::sim::rng::nanos;

/// What a deadline may be late by, in milliseconds: the loop's pause, drift of the clock, a proposal and its repetition.
const LATE_MS_MAX: u64 = 500;

/// See the module.
#[derive(Debug, Default)]
pub struct FreedInTime {
    members: BTreeMap<MemberId, Heard>,
    /// By node and index: when its process first had that entry.
    known: BTreeMap<(usize, u64), u64>,
}

#[derive(Debug)]
struct Heard {
    at: u64,
    silence: Option<Silence>,
}

#[derive(Debug)]
struct Silence {
    index: u64,
    silent_for_ms: u64,
}

impl FreedInTime {
    fn follow(&mut self, index: u64, event: &Event, now: u64) {
        match event {
            Event::MemberJoined(joined) | Event::MemberUpdated(joined) => {
                let member = self.members.entry(joined.member.clone());
                member.or_insert(Heard { at: now, silence: None }).at = now;
            }
            Event::MemberLeft { member, .. } | Event::MemberExpired { member, .. } => {
                self.members.remove(member);
            }
            Event::MemberSilenced { member, silent_for_ms, .. } => {
                if let Some(member) = self.members.get_mut(member) {
                    member.silence = Some(Silence { index, silent_for_ms: *silent_for_ms });
                }
            }
            Event::MemberHeard { member, .. } => {
                if let Some(member) = self.members.get_mut(member) {
                    *member = Heard { at: now, silence: None };
                }
            }
            _ => {}
        }
    }

    fn known_at(&self, node: usize, index: u64) -> Option<u64> {
        self.known.range((node, index)..=(node, u64::MAX)).next().map(|(_, at)| *at)
    }

    fn check(&self, node: usize, (since, gaps): (u64, u64), view: View<'_>) -> Result<(), String> {
        let (lease, deadlines) = (&view.settings.lease, &view.settings.deadlines);
        let pauses = deadlines.vanished_share_percent < 100;
        let pause_ms = if pauses { deadlines.vanished_pause_ms } else { 0 };
        let late = nanos(LATE_MS_MAX);
        for (member, heard) in &self.members {
            let unheard_since = since.max(heard.at);
            let silent_by =
                unheard_since + nanos(lease.heartbeat_interval_ms + deadlines.silence_slack_ms);
            let expired_by = match &heard.silence {
                None if view.now > silent_by + late => {
                    return Err(format!("{member} is not logged as silent by node {node}"));
                }
                None => unheard_since + nanos(lease.ttl_ms),
                Some(Silence { index, silent_for_ms }) => {
                    let known_at = self.known_at(node, *index).unwrap_or(since);
                    let left = nanos(lease.ttl_ms.saturating_sub(*silent_for_ms));
                    ((known_at + left).max(heard.at + nanos(lease.ttl_ms)) + gaps).max(since)
                }
            };
            if view.now > expired_by + late + nanos(pause_ms) {
                return Err(format!(
                    "{member} is not expired by node {node}, {} ms after its time: {heard:?}",
                    (view.now - expired_by) / 1_000_000
                ));
            }
        }
        Ok(())
    }
}

impl Property for FreedInTime {
    fn name(&self) -> &'static str {
        "freed_in_time"
    }

    fn look(&mut self, fact: &Fact<'_>, view: View<'_>) -> Result<(), String> {
        match fact {
            Fact::Committed { index, outcomes, .. } => {
                for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
                    self.follow(*index, event, view.now);
                }
            }
            Fact::Replicated { node, index, .. } | Fact::Replica { node, index, .. } => {
                self.known.entry((*node, *index)).or_insert(view.now);
            }
            Fact::NodeStarted { node } => self.known.retain(|(known, _), _| known != node),
            Fact::Heard { member } => {
                if let Some(heard) = self.members.get_mut(*member) {
                    heard.at = view.now;
                }
            }
            Fact::Ruled { node, since, gaps } => self.check(*node, (*since, *gaps), view)?,
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tenure_coordinator::NodeSettings;
    use tenure_core::{Applied, Reply, State};
    use tenure_model::{GroupId, Home, Takeover};

    use super::*;

    const TTL_MS: u64 = 3_000;

    struct Look {
        property: FreedInTime,
        settings: NodeSettings,
    }

    impl Look {
        fn new() -> Self {
            let mut settings = NodeSettings::default();
            settings.lease.ttl_ms = TTL_MS;
            settings.lease.heartbeat_interval_ms = 900;
            settings.deadlines.silence_slack_ms = 300;
            settings.deadlines.vanished_share_percent = 100;
            Self { property: FreedInTime::default(), settings }
        }

        fn at(&mut self, ms: u64, fact: &Fact<'_>) -> Result<(), String> {
            let view = View {
                now: nanos(ms),
                members: &[],
                home: Home::Coordinator,
                takeover: Takeover::Lease,
                settings: &self.settings,
            };
            self.property.look(fact, view)
        }

        /// Commits an entry that node 1 has at once.
        fn commit(&mut self, ms: u64, index: u64, event: Event) {
            let outcomes = [Applied { result: Ok(Reply::Done), events: vec![event] }];
            let state = State::default();
            let commands = &[];
            let committed = Fact::Committed { index, commands, outcomes: &outcomes, state: &state };
            self.at(ms, &committed).unwrap();
            let (outcomes, expected) = (&[], &[]);
            self.at(ms, &Fact::Replicated { node: 1, index, outcomes, expected }).unwrap();
        }

        /// A member joins at 0 and is logged as silent at 1,200 ms.
        fn silent() -> Self {
            let (group, member) = (GroupId::new("g").unwrap(), MemberId::new("m").unwrap());
            let mut look = Self::new();
            look.property.members.insert(member.clone(), Heard { at: 0, silence: None });
            look.commit(1_200, 2, Event::MemberSilenced { group, member, silent_for_ms: 1_200 });
            look
        }
    }

    #[test]
    fn silent_member_is_due_a_ttl_after_it_was_last_heard_whoever_leads() {
        let mut look = Look::silent();
        let ruled = Fact::Ruled { node: 1, since: nanos(2_000), gaps: 0 };
        look.at(TTL_MS + LATE_MS_MAX, &ruled).unwrap();
        let late = look.at(TTL_MS + LATE_MS_MAX + 1, &ruled).unwrap_err();
        assert!(late.contains("is not expired by node 1"), "{late}");
    }

    #[test]
    fn loop_that_stood_still_frees_as_much_later() {
        let mut look = Look::silent();
        let ruled = Fact::Ruled { node: 1, since: nanos(2_000), gaps: nanos(700) };
        look.at(TTL_MS + 700 + LATE_MS_MAX, &ruled).unwrap();
        look.at(TTL_MS + 700 + LATE_MS_MAX + 1, &ruled).unwrap_err();
    }

    #[test]
    fn node_that_started_anew_counts_from_its_replay() {
        let mut look = Look::silent();
        look.at(2_000, &Fact::NodeStarted { node: 1 }).unwrap();
        let (outcomes, expected) = (&[], &[]);
        look.at(2_000, &Fact::Replicated { node: 1, index: 2, outcomes, expected }).unwrap();
        let ruled = Fact::Ruled { node: 1, since: nanos(2_500), gaps: 0 };
        look.at(2_000 + 1_800 + LATE_MS_MAX, &ruled).unwrap();
        look.at(2_000 + 1_800 + LATE_MS_MAX + 1, &ruled).unwrap_err();
    }

    #[test]
    fn member_that_is_not_heard_must_be_logged_as_silent() {
        let mut look = Look::new();
        let member = MemberId::new("m").unwrap();
        look.property.members.insert(member, Heard { at: 0, silence: None });
        let ruled = Fact::Ruled { node: 1, since: 0, gaps: 0 };
        look.at(1_200 + LATE_MS_MAX, &ruled).unwrap();
        let late = look.at(1_200 + LATE_MS_MAX + 1, &ruled).unwrap_err();
        assert!(late.contains("is not logged as silent"), "{late}");
    }
}
