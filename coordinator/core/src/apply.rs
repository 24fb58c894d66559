//! From a committed entry to verdicts and events.

use std::collections::BTreeSet;

use tenure_model::GroupId;

use crate::{Applied, Command, Context, Event, State};

/// In a debug build the invariants of groups up to this size are checked after every command; a release build, and
/// larger groups, leave it to whoever calls [`State::invariants`].
const CHECKED_PARTITIONS_MAX: usize = 2_000;

impl State {
    /// Applies one command of a committed entry: the verdict, and everything that follows from it.
    ///
    /// What can be granted or must be revoked because of the command is in the same [`Applied`], so that a release
    /// by one member and the grant to the next are one entry. After a rejection nothing but `applied` and `now` has
    /// changed.
    pub fn apply(&mut self, context: Context, command: &Command) -> Applied {
        self.applied = context.index;
        self.now = self.now.max(context.proposed_at);
        match self.decide(context, command) {
            Ok((reply, mut events)) => {
                self.evolve_all(&events);
                let follow_ups = self.reconcile(&events);
                self.evolve_all(&follow_ups);
                events.extend(follow_ups);
                let opened = self.open_rings(&events);
                self.evolve_all(&opened);
                events.extend(opened);
                if cfg!(debug_assertions) {
                    self.check_touched(&events);
                }
                Applied { result: Ok(reply), events }
            }
            Err(rejection) => Applied { result: Err(rejection), events: Vec::new() },
        }
    }

    /// Applies the commands of one entry in order, each with its own verdict.
    pub fn apply_batch(&mut self, context: Context, commands: &[Command]) -> Vec<Applied> {
        self.applied = context.index;
        self.now = self.now.max(context.proposed_at);
        commands.iter().map(|command| self.apply(context, command)).collect()
    }

    fn evolve_all(&mut self, events: &[Event]) {
        for event in events {
            self.evolve(event);
        }
    }

    fn check_touched(&self, events: &[Event]) {
        let touched: BTreeSet<&GroupId> = events
            .iter()
            .filter(|event| !matches!(event, Event::OffsetCommitted { .. }))
            .filter_map(Event::group)
            .collect();
        for id in touched {
            let Some(group) = self.groups.get(id) else { continue };
            if group.partitions.len() <= CHECKED_PARTITIONS_MAX
                && let Err(broken) = self.group_invariants(id, group)
            {
                panic!("invariant broken at index {}: {broken}; events {events:?}", self.applied);
            }
        }
    }
}
