//! No record is left out, and none is applied twice where the sink is the home of the offset.

use std::collections::BTreeMap;

use tenure_core::Event;
use tenure_model::{Epoch, Home, Partition};

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct EffectsInOrder {
    written: BTreeMap<Partition, u64>,
    registered: BTreeMap<Partition, Epoch>,
}

impl Property for EffectsInOrder {
    fn name(&self) -> &'static str {
        "effects_in_order"
    }

    fn look(&mut self, fact: &Fact<'_>, view: View<'_>) -> Result<(), String> {
        match fact {
            Fact::Registered { partition, epoch } => {
                self.registered.insert(*partition, *epoch);
                Ok(())
            }
            Fact::Written { partition, from, to, epoch } => {
                let written = self.written.entry(*partition).or_default();
                if from > written || (view.home == Home::Sink && from != written) {
                    return Err(format!(
                        "{partition} takes {from} to {to} under {epoch}, and stands at {written}"
                    ));
                }
                *written = (*to).max(*written);
                Ok(())
            }
            Fact::Resumed { partition, next, epoch, member } => {
                let newest = self.registered.get(partition);
                if newest.is_some_and(|newest| newest > epoch) && view.may_be_overtaken(member) {
                    return Ok(());
                }
                let written = self.written.get(partition).copied().unwrap_or(0);
                if *next > written || (view.home == Home::Sink && *next != written) {
                    return Err(format!(
                        "{partition} resumes at {next} under {epoch}, and stands at {written}"
                    ));
                }
                Ok(())
            }
            Fact::Committed { outcomes, .. } => {
                for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
                    let Event::OffsetCommitted { commit, .. } = event else { continue };
                    let written = self.written.get(&commit.partition).copied().unwrap_or(0);
                    if commit.next_offset.get() > written {
                        return Err(format!(
                            "{} commits {}, and stands at {written}",
                            commit.partition, commit.next_offset
                        ));
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
