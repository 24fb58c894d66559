//! An acknowledged heartbeat implies that the lease was live: its membership had not ended before it was sent.

use std::collections::BTreeMap;

use tenure_core::Event;
use tenure_model::MemberId;

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct HeartbeatOfTheLiving {
    ended: BTreeMap<MemberId, u64>,
}

impl Property for HeartbeatOfTheLiving {
    fn name(&self) -> &'static str {
        "heartbeat_of_the_living"
    }

    fn look(&mut self, fact: &Fact<'_>, view: View<'_>) -> Result<(), String> {
        match fact {
            Fact::Committed { outcomes, .. } => {
                for event in outcomes.iter().flat_map(|outcome| &outcome.events) {
                    if let Event::MemberExpired { member, .. } | Event::MemberLeft { member, .. } =
                        event
                    {
                        self.ended.insert(member.clone(), view.now);
                    }
                }
                Ok(())
            }
            Fact::HeartbeatAnswered { member, sent_at } => match self.ended.get(*member) {
                Some(ended) if ended < sent_at => Err(format!(
                    "{member} was answered although its membership had ended {} ns before it asked",
                    sent_at - ended
                )),
                Some(_) | None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}
