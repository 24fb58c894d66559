//! When a group is planned: once it was quiet for a while, and never later than a cap. Pure: time is an argument.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_model::{GroupEpoch, GroupId, Tick};

/// How many times a target may be refused as stale before its lines are taken one by one.
pub const REFUSALS_MAX: u32 = 3;

/// Groups that wait for a plan.
#[derive(Debug)]
pub struct Settling {
    quiet: Duration,
    cap: Duration,
    groups: BTreeMap<GroupId, Wait>,
}

#[derive(Debug)]
struct Wait {
    epoch: GroupEpoch,
    first_change: Tick,
    last_change: Tick,
    not_before: Tick,
    refusals: u32,
    is_planned: bool,
}

impl Settling {
    pub const fn new(quiet: Duration, cap: Duration) -> Self {
        Self { quiet, cap, groups: BTreeMap::new() }
    }

    /// Takes over which groups are due for a plan, with their group epochs.
    pub fn follow<'a>(&mut self, due: impl Iterator<Item = (&'a GroupId, GroupEpoch)>, now: Tick) {
        let mut before = std::mem::take(&mut self.groups);
        for (group, epoch) in due {
            let mut wait = before.remove(group).unwrap_or(Wait {
                epoch,
                first_change: now,
                last_change: now,
                not_before: now,
                refusals: 0,
                is_planned: false,
            });
            if wait.epoch != epoch {
                wait.epoch = epoch;
                wait.last_change = now;
            }
            self.groups.insert(group.clone(), wait);
        }
    }

    /// Groups to plan now. Each is given once, until [`Settling::refused`] or [`Settling::failed`] gives it back.
    pub fn take_due(&mut self, now: Tick) -> Vec<GroupId> {
        let mut due = Vec::new();
        for (group, wait) in &mut self.groups {
            let settled = wait.last_change.after(self.quiet).min(wait.first_change.after(self.cap));
            if !wait.is_planned && settled.max(wait.not_before) <= now {
                wait.is_planned = true;
                due.push(group.clone());
            }
        }
        due
    }

    /// Whether the next target of `group` takes what holds of it.
    pub fn is_line_by_line(&self, group: &GroupId) -> bool {
        self.groups.get(group).is_some_and(|wait| wait.refusals >= REFUSALS_MAX)
    }

    /// The group moved on while it was planned.
    pub fn refused(&mut self, group: &GroupId) {
        if let Some(wait) = self.groups.get_mut(group) {
            wait.refusals = wait.refusals.saturating_add(1);
            wait.is_planned = false;
        }
    }

    /// The target was installed. A group that moved on meanwhile is due again.
    pub fn installed(&mut self, group: &GroupId) {
        if let Some(wait) = self.groups.get_mut(group) {
            wait.refusals = 0;
            wait.is_planned = false;
        }
    }

    /// The target was lost or is wrong: again, but not before `not_before`.
    pub fn failed(&mut self, group: &GroupId, not_before: Tick) {
        if let Some(wait) = self.groups.get_mut(group) {
            wait.not_before = not_before;
            wait.is_planned = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Tick {
        Tick(ms * 1_000_000)
    }

    fn settling() -> (Settling, GroupId) {
        let settling = Settling::new(Duration::from_millis(300), Duration::from_secs(3));
        (settling, GroupId::new("g").unwrap())
    }

    #[test]
    fn group_is_planned_once_it_was_quiet() {
        let (mut settling, group) = settling();
        settling.follow([(&group, GroupEpoch(1))].into_iter(), at(0));
        settling.follow([(&group, GroupEpoch(2))].into_iter(), at(200));
        settling.follow([(&group, GroupEpoch(2))].into_iter(), at(400));
        assert!(settling.take_due(at(499)).is_empty());
        assert_eq!(settling.take_due(at(500)), [group]);
        assert!(settling.take_due(at(501)).is_empty(), "it is being planned");
    }

    #[test]
    fn group_that_never_settles_is_planned_at_the_cap_from_its_first_change() {
        let (mut settling, group) = settling();
        for step in 0..30 {
            settling.follow([(&group, GroupEpoch(step))].into_iter(), at(step * 100));
            assert!(settling.take_due(at(step * 100)).is_empty());
        }
        settling.follow([(&group, GroupEpoch(31))].into_iter(), at(3_000));
        assert_eq!(settling.take_due(at(3_000)), [group]);
    }

    #[test]
    fn after_repeated_refusals_lines_are_taken_one_by_one() {
        let (mut settling, group) = settling();
        settling.follow([(&group, GroupEpoch(1))].into_iter(), at(0));
        for _ in 0..REFUSALS_MAX {
            assert!(!settling.is_line_by_line(&group));
            assert_eq!(settling.take_due(at(5_000)).len(), 1);
            settling.refused(&group);
        }
        assert!(settling.is_line_by_line(&group));
        settling.installed(&group);
        assert!(!settling.is_line_by_line(&group));
    }

    #[test]
    fn lost_target_is_planned_again_after_a_pause() {
        let (mut settling, group) = settling();
        settling.follow([(&group, GroupEpoch(1))].into_iter(), at(0));
        assert_eq!(settling.take_due(at(300)).len(), 1);
        settling.failed(&group, at(400));
        assert!(settling.take_due(at(399)).is_empty());
        assert_eq!(settling.take_due(at(400)).len(), 1);
    }

    #[test]
    fn planned_group_is_forgotten() {
        let (mut settling, group) = settling();
        settling.follow([(&group, GroupEpoch(1))].into_iter(), at(0));
        settling.follow(std::iter::empty(), at(100));
        assert!(settling.take_due(at(10_000)).is_empty());
    }
}
