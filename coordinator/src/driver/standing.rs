//! Grants that run, and stand still for longer than they should.

use std::collections::BTreeMap;

use tenure_core::command::MemberRef;
use tenure_model::{Epoch, Partition};

use crate::soft::Held;

/// What was said in the log of grants that stand still, so that each is said once.
///
/// Bounded by what members hold: a heartbeat replaces what was known of its member.
#[derive(Debug)]
pub(super) struct Standing {
    bound_ms: u64,
    known: BTreeMap<MemberRef, BTreeMap<Partition, Epoch>>,
}

/// What became of grants that stand still.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    /// Over the bound now.
    began: Vec<(Partition, Epoch)>,
    /// They go on, or are not held any more.
    ended: Vec<(Partition, Epoch)>,
}

impl Standing {
    pub(super) const fn new(bound_ms: u64) -> Self {
        Self { bound_ms, known: BTreeMap::new() }
    }

    /// Takes over what a heartbeat says, and says what is new.
    pub(super) fn follow(&mut self, member: &MemberRef, held: &[Held]) {
        let changes = self.changes(member, held);
        for (partition, epoch) in changes.began {
            let said = held.iter().find(|held| held.partition == partition);
            tracing::warn!(
                group = %member.group, member = %member.member, %partition, %epoch,
                still_ms = said.map_or(0, |held| held.still_ms),
                position = said.map_or(0, |held| held.position),
                error = said.map_or("", |held| held.error.as_str()),
                "partition does not advance: its owner lives, its handler does not go on"
            );
        }
        for (partition, epoch) in changes.ended {
            tracing::info!(
                group = %member.group, member = %member.member, %partition, %epoch,
                "partition does not stand still any more"
            );
        }
    }

    fn changes(&mut self, member: &MemberRef, held: &[Held]) -> Changes {
        // Nearly always there is nothing on either side.
        let now: BTreeMap<Partition, Epoch> = held
            .iter()
            .filter(|held| held.stands_still(self.bound_ms))
            .map(|held| (held.partition, held.epoch))
            .collect();
        let before = self.known.remove(member).unwrap_or_default();
        let mut changes = Changes::default();
        changes.began.extend(
            now.iter()
                .filter(|(partition, epoch)| before.get(partition) != Some(epoch))
                .map(|(partition, epoch)| (*partition, *epoch)),
        );
        changes.ended.extend(
            before.into_iter().filter(|(partition, epoch)| now.get(partition) != Some(epoch)),
        );
        if !now.is_empty() {
            self.known.insert(member.clone(), now);
        }
        changes
    }

    /// The membership has ended.
    pub(super) fn forget(&mut self, member: &MemberRef) {
        self.known.remove(member);
    }
}

#[cfg(test)]
mod tests {
    use tenure_model::{GroupId, MemberEpoch, MemberId, PartitionIndex, TopicId};

    use super::*;
    use crate::soft::Phase;

    fn held(index: u32, epoch: u64, phase: Phase, still_ms: u64) -> Held {
        let index = PartitionIndex::new(index).unwrap();
        Held {
            partition: Partition { topic_id: TopicId::from_bits(1), index },
            epoch: Epoch::new(epoch).unwrap(),
            phase,
            position: 7,
            phase_ms: 0,
            error: String::new(),
            still_ms,
            end_offset: None,
        }
    }

    fn ann() -> MemberRef {
        MemberRef {
            group: GroupId::new("g").unwrap(),
            member: MemberId::new("ann").unwrap(),
            member_epoch: MemberEpoch(1),
        }
    }

    fn named(grants: &[(Partition, Epoch)]) -> Vec<String> {
        grants.iter().map(|(partition, epoch)| format!("{}:{epoch}", partition.index)).collect()
    }

    #[test]
    fn grant_that_stands_still_is_said_once_and_again_when_it_goes_on() {
        let mut standing = Standing::new(1_000);
        let mut look = |held: &[Held]| {
            let changes = standing.changes(&ann(), held);
            (named(&changes.began), named(&changes.ended))
        };
        let none = Vec::<String>::new;
        let two = |still_ms| [held(0, 1, Phase::Running, still_ms), held(1, 2, Phase::Running, 5)];
        assert_eq!(look(&two(999)), (none(), none()));
        assert_eq!(look(&two(1_000)), (vec!["0:e1".to_owned()], none()));
        assert_eq!(look(&two(2_000)), (none(), none()));
        assert_eq!(look(&two(3)), (none(), vec!["0:e1".to_owned()]));
        // Under another epoch it is another grant.
        assert_eq!(look(&two(1_500)).0, ["0:e1"]);
        let next = [held(0, 9, Phase::Running, 1_500)];
        assert_eq!(look(&next), (vec!["0:e9".to_owned()], vec!["0:e1".to_owned()]));
        assert_eq!(look(&[]), (none(), vec!["0:e9".to_owned()]));
    }

    #[test]
    fn grant_that_is_not_running_does_not_count_as_standing_still() {
        let mut standing = Standing::new(1_000);
        for phase in [Phase::Registering, Phase::Verifying, Phase::Resuming, Phase::Draining] {
            let changes = standing.changes(&ann(), &[held(0, 1, phase, 90_000)]);
            assert_eq!(changes, Changes::default(), "{phase:?}");
        }
    }
}
