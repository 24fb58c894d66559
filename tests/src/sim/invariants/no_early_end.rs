//! No lease ends early by its holder's own clock: a member expires only after it has stopped by itself.

use tenure_core::Event;

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug)]
pub struct NoEarlyEnd;

impl Property for NoEarlyEnd {
    fn name(&self) -> &'static str {
        "no_early_end"
    }

    fn look(&mut self, fact: &Fact<'_>, view: View<'_>) -> Result<(), String> {
        let Fact::Committed { outcomes, .. } = fact else { return Ok(()) };
        for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
            let Event::MemberExpired { member, .. } = event else { continue };
            let holder = view.members.iter().find(|holder| holder.is_up && holder.id == *member);
            if let Some(left) = holder.and_then(|holder| holder.lease_left(view.now)) {
                return Err(format!("{member} expires {left:?} before the end of its lease"));
            }
        }
        Ok(())
    }
}
