//! Epochs strictly rise over the whole cluster, so that (partition, epoch) names one grant to one member ever.

use tenure_core::Event;
use tenure_model::Epoch;

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct EpochsRise {
    highest: Option<Epoch>,
}

impl Property for EpochsRise {
    fn name(&self) -> &'static str {
        "epochs_rise"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        let (Fact::Committed { outcomes, .. } | Fact::Replicated { outcomes, .. }) = fact else {
            return Ok(());
        };
        let is_first = matches!(fact, Fact::Committed { .. });
        for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
            let Event::PartitionGranted { partition, member, epoch, .. } = event else { continue };
            if is_first {
                if self.highest.is_some_and(|highest| *epoch <= highest) {
                    return Err(format!(
                        "{partition} is granted to {member} at {epoch}, after {:?}",
                        self.highest
                    ));
                }
                self.highest = Some(*epoch);
            }
        }
        Ok(())
    }
}
