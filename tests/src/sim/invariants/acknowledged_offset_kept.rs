//! Acknowledged offsets are never lost: the resume point of a later epoch is at or after every one of them.
//!
//! What got no answer may or may not have happened, and is not asked for.

use std::collections::BTreeMap;

use tenure_model::{Epoch, Home, Partition};

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct AcknowledgedOffsetKept {
    acknowledged: BTreeMap<Partition, u64>,
    resumed: BTreeMap<Partition, (Epoch, u64)>,
}

impl Property for AcknowledgedOffsetKept {
    fn name(&self) -> &'static str {
        "acknowledged_offset_kept"
    }

    fn look(&mut self, fact: &Fact<'_>, view: View<'_>) -> Result<(), String> {
        match fact {
            Fact::Acknowledged { partition, epoch, next } => {
                if let Some((newer, resumed)) = self.resumed.get(partition)
                    && newer > epoch
                    && resumed < next
                {
                    return Err(format!(
                        "{partition}: {next} is acknowledged under {epoch}, but {newer} resumed at {resumed}"
                    ));
                }
                let highest = self.acknowledged.entry(*partition).or_insert(*next);
                *highest = (*next).max(*highest);
                Ok(())
            }
            Fact::Resumed { partition, epoch, next, .. } => {
                let newest = self.resumed.entry(*partition).or_insert((*epoch, *next));
                *newest = (*epoch, *next).max(*newest);
                match self.acknowledged.get(partition) {
                    Some(acknowledged) if next < acknowledged && newest.0 == *epoch => {
                        Err(format!(
                            "{partition}: {epoch} resumes at {next}, although {acknowledged} is acknowledged"
                        ))
                    }
                    Some(_) | None => Ok(()),
                }
            }
            Fact::Ended { state, .. } if view.home == Home::Coordinator => {
                let partitions = state.groups.values().flat_map(|group| group.partitions.iter());
                for (partition, found) in partitions {
                    let committed =
                        found.committed.as_ref().map_or(0, |committed| committed.next_offset.get());
                    let acknowledged = self.acknowledged.get(partition).copied().unwrap_or(0);
                    if committed < acknowledged {
                        return Err(format!(
                            "{partition} ends at {committed}, although {acknowledged} is acknowledged"
                        ));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
