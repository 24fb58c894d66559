//! After everything is healed every partition is owned, acquired and moves on, within the bound that the run waits.

use tenure_core::state::Ownership;

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug)]
pub struct OwnedAgain;

impl Property for OwnedAgain {
    fn name(&self) -> &'static str {
        "owned_again"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        let Fact::Ended { state, healed_at, progress } = fact else { return Ok(()) };
        for (partition, found) in state.groups.values().flat_map(|group| &group.partitions) {
            if !matches!(found.ownership, Ownership::Held { acquired: true, .. }) {
                return Err(format!(
                    "{partition} is {:?} long after everything was healed: {:?}",
                    found.ownership, found.trouble
                ));
            }
        }
        match progress.iter().find(|(_, last_written)| last_written < healed_at) {
            Some((partition, _)) => {
                Err(format!("{partition} is owned and has not moved since everything was healed"))
            }
            None => Ok(()),
        }
    }
}
