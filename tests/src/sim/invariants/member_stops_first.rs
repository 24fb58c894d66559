//! The member stops before the coordinator gives its partition away, in groups that rely on the lease.
//!
//! Not asked of an acquire that missed its deadline: such a grant is taken back although the lease of a member that
//! heard of it late may be live for up to one ttl. The epoch alone protects there.

use std::collections::BTreeSet;

use tenure_core::Event;
use tenure_core::event::FreeCause;
use tenure_model::{Epoch, Partition, Takeover};

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct MemberStopsFirst {
    /// Grants that were taken back at the acquire deadline.
    missed: BTreeSet<(Partition, Epoch)>,
}

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
            if let Event::PartitionReleased {
                partition,
                epoch,
                cause: FreeCause::AcquireDeadline,
                ..
            } = event
            {
                self.missed.insert((*partition, *epoch));
            }
            let Event::PartitionGranted { partition, member, epoch, .. } = event else { continue };
            for holder in view.members.iter().filter(|holder| holder.is_up) {
                if let Some(held) = holder.holds(*partition, view.now)
                    && held != *epoch
                    && !self.missed.contains(&(*partition, held))
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
