//! At most one current owner per partition in any applied state, and every hand-over passes through free.

use std::collections::BTreeMap;

use tenure_core::Event;
use tenure_model::{Epoch, MemberId, Partition};

use super::{Fact, Property, View};

/// How many entries pass between two looks at the whole state.
const ENTRIES_BETWEEN_LOOKS: u64 = 64;

/// See the module.
#[derive(Debug, Default)]
pub struct OneOwner {
    owners: BTreeMap<Partition, (MemberId, Epoch)>,
}

impl OneOwner {
    fn follow(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::PartitionGranted { partition, member, epoch, .. } => {
                let before = self.owners.insert(*partition, (member.clone(), *epoch));
                match before {
                    None => Ok(()),
                    Some((owner, _)) => {
                        Err(format!("{partition} is granted to {member} while {owner} owns it"))
                    }
                }
            }
            Event::PartitionReleased { partition, member, epoch, .. } => {
                self.expect(*partition, member, *epoch)?;
                self.owners.remove(partition);
                Ok(())
            }
            Event::PartitionRevoked { partition, member, epoch, .. }
            | Event::PartitionAcquired { partition, member, epoch, .. } => {
                self.expect(*partition, member, *epoch)
            }
            _ => Ok(()),
        }
    }

    fn expect(&self, partition: Partition, member: &MemberId, epoch: Epoch) -> Result<(), String> {
        match self.owners.get(&partition) {
            Some((owner, current)) if owner == member && *current == epoch => Ok(()),
            other => Err(format!("{partition}: {member} at {epoch} acts while {other:?} owns it")),
        }
    }
}

impl Property for OneOwner {
    fn name(&self) -> &'static str {
        "one_owner"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        let Fact::Committed { index, outcomes, state, .. } = fact else { return Ok(()) };
        for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
            self.follow(event)?;
        }
        if index.is_multiple_of(ENTRIES_BETWEEN_LOOKS) { state.invariants() } else { Ok(()) }
    }
}
