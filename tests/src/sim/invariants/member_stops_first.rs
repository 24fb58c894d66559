//! The member stops before the coordinator gives its partition away, in groups that rely on the lease.

use tenure_core::Event;
use tenure_model::Takeover;

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct MemberStopsFirst;

impl Property for MemberStopsFirst {
    fn name(&self) -> &'static str {
        "member_stops_first"
    }

    fn look(&mut self, fact: &Fact<'_>, view: View<'_>) -> Result<(), String> {
        let Fact::Committed { outcomes, .. } = fact else { return Ok(()) };
        if view.takeover == Takeover::Fence {
            return Ok(());
        }
        for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
            let Event::PartitionGranted { partition, member, epoch, .. } = event else { continue };
            for holder in view.members.iter().filter(|holder| holder.is_up) {
                if let Some(held) = holder.holds(*partition, view.now)
                    && held != *epoch
                {
                    return Err(format!(
                        "{partition} is granted to {member} at {epoch} while {} holds it at {held}",
                        holder.id
                    ));
                }
            }
        }
        Ok(())
    }
}
