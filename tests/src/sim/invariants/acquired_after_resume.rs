//! A grant counts as acquired only once its own member registered, verified and resumed under its own epoch.

use std::collections::BTreeSet;

use tenure_core::Event;
use tenure_model::{Epoch, MemberId, Partition};

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct AcquiredAfterResume {
    resumed: BTreeSet<(Partition, Epoch, MemberId)>,
}

impl Property for AcquiredAfterResume {
    fn name(&self) -> &'static str {
        "acquired_after_resume"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        match fact {
            Fact::Resumed { partition, epoch, member, .. } => {
                self.resumed.insert((*partition, *epoch, (*member).clone()));
                Ok(())
            }
            Fact::Committed { outcomes, .. } => {
                for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
                    let Event::PartitionAcquired { partition, member, epoch, .. } = event else {
                        continue;
                    };
                    if !self.resumed.contains(&(*partition, *epoch, member.clone())) {
                        return Err(format!(
                            "{partition} counts as acquired by {member} at {epoch}, which never resumed"
                        ));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
