//! The end of a preparation: the next owner is ready, or its deadline passed.

use std::collections::BTreeSet;

use super::{Decided, Draft, Verdict};
use crate::command::AcknowledgePrepared;
use crate::{Event, Rejection, Reply, State};

impl State {
    pub(super) fn acknowledge_prepared(&self, prepared: &AcknowledgePrepared) -> Decided {
        self.check_preparing(prepared)?;
        let mut draft = Draft::default();
        draft.push(ready(prepared));
        Ok((Reply::Done, draft.finish(self)))
    }

    pub(super) fn expire_preparations(
        &self,
        preparations: &[AcknowledgePrepared],
    ) -> (Reply, Vec<Event>) {
        let mut draft = Draft::default();
        let mut ended = BTreeSet::new();
        let verdicts = preparations
            .iter()
            .map(|preparation| {
                self.check_preparing(preparation)?;
                if !ended.insert(preparation) {
                    return Err(nothing_to_do(preparation));
                }
                draft.push(ready(preparation));
                Ok(())
            })
            .collect();
        (Reply::Verdicts(verdicts), draft.finish(self))
    }

    /// Whether somebody waits for exactly this preparation.
    fn check_preparing(&self, named: &AcknowledgePrepared) -> Verdict {
        let state = self.partition(&named.group, named.partition)?;
        match &state.preparation {
            Some(found) if found.member == named.member && !found.ready => Ok(()),
            Some(_) | None => Err(nothing_to_do(named)),
        }
    }
}

fn ready(prepared: &AcknowledgePrepared) -> Event {
    let AcknowledgePrepared { group, member, partition } = prepared.clone();
    Event::PreparationReady { group, partition, member }
}

fn nothing_to_do(named: &AcknowledgePrepared) -> Rejection {
    let AcknowledgePrepared { member, partition, .. } = named;
    Rejection::NothingToDo { what: format!("{member} does not prepare for partition {partition}") }
}
