//! What the driver has under way: confirmations, proposals, plans. Each result names the term it was begun in.

use std::pin::Pin;
use std::time::Duration;

use tenure_core::command::MemberRef;
use tenure_model::{GroupId, Index, Term, Tick};
use tokio::time::Instant;

use super::Driver;
use super::leading::{self, Lane, Outcome, Proposal};
use super::proposer::{Proposer, Verdict};
use super::reign::WaitingMembers;
use crate::in_place::off_thread;
use crate::machine::GroupMachine;
use crate::raft::{LinearizeError, ProposeError, RaftNode};

/// Something under way.
pub(crate) type Work = Pin<Box<dyn Future<Output = Done> + Send>>;

/// Its result.
pub(crate) enum Done {
    /// Leadership was confirmed, or not.
    Confirmed { term: Term, waiting: WaitingMembers, result: Result<Index, LinearizeError> },
    /// A proposal of one lane.
    Proposed {
        term: Term,
        lane: Lane,
        /// Whom or what the command named, where the verdicts matter.
        members: Vec<MemberRef>,
        outcome: Result<Verdict, ProposeError>,
    },
    /// A target was computed and proposed.
    Planned { term: Term, group: GroupId, outcome: Result<Verdict, ProposeError> },
}

impl Driver {
    /// Marks what is due and proposes it; begins plans.
    pub(super) fn work_off(&mut self, now: Tick) {
        let Some(reign) = &mut self.reign else { return };
        let term = reign.term;
        let (proposals, plans) = (reign.proposals(now), reign.plans(now));
        for proposal in proposals {
            self.propose(term, proposal);
        }
        for (group, line_by_line) in plans {
            let (raft, proposer) = (self.parts.raft.clone(), self.parts.proposer.clone());
            self.work.push(Box::pin(async move {
                let outcome = plan_group(&raft, &proposer, &group, line_by_line).await;
                Done::Planned { term, group, outcome }
            }));
        }
    }

    /// Begins the confirmation that waiting heartbeats need.
    pub(super) fn confirm_waiting(&mut self) {
        let Some(reign) = &mut self.reign else { return };
        let term = reign.term;
        if let Some(waiting) = reign.confirmation() {
            self.pause.begin(Instant::now());
            self.confirm(term, waiting);
        }
    }

    fn propose(&mut self, term: Term, proposal: Proposal) {
        let Proposal { lane, members, command } = proposal;
        // Queued here and now, so that proposals of one lane are never reordered.
        let submitted = self.parts.proposer.submit(command);
        self.work.push(Box::pin(async move {
            let outcome = match submitted {
                Ok(submitted) => submitted.outcome().await,
                Err(error) => Err(error),
            };
            Done::Proposed { term, lane, members, outcome }
        }));
    }

    /// One confirmation covers every heartbeat received before it begins.
    fn confirm(&mut self, term: Term, waiting: WaitingMembers) {
        let raft = self.parts.raft.clone();
        let limit = Duration::from_millis(self.parts.settings.raft.propose_timeout_ms);
        self.work.push(Box::pin(async move {
            let result = raft.linearize(limit).await;
            Done::Confirmed { term, waiting, result }
        }));
    }

    pub(super) fn take_done(&mut self, done: Done) {
        let now = self.parts.clock.now();
        let Some(reign) = &mut self.reign else { return };
        match done {
            Done::Confirmed { term, waiting, result } if term == reign.term => match result {
                Ok(_) => self
                    .parts
                    .raft
                    .with_machine(|machine| reign.confirmed(waiting, Some(machine.state()))),
                Err(error) => {
                    tracing::debug!(%error, "leadership was not confirmed");
                    reign.confirmed(waiting, None);
                }
            },
            Done::Proposed { term, lane, members, outcome } if term == reign.term => {
                if let Err(error) = &outcome {
                    tracing::debug!(?lane, %error, "proposal was lost, it is proposed again");
                }
                self.parts.raft.with_machine(|machine| {
                    reign.proposed(lane, &members, known(&outcome), machine.state(), now);
                });
            }
            Done::Planned { term, group, outcome } if term == reign.term => {
                if let Err(error) = &outcome {
                    tracing::debug!(%group, %error, "target was lost, the group is planned again");
                }
                reign.planned(&group, known(&outcome), now);
            }
            // Of an earlier term.
            Done::Confirmed { .. } | Done::Proposed { .. } | Done::Planned { .. } => {}
        }
    }
}

fn known(outcome: &Result<Verdict, ProposeError>) -> Outcome<'_> {
    outcome.as_ref().ok().map(Verdict::result)
}

async fn plan_group(
    raft: &RaftNode<GroupMachine>,
    proposer: &Proposer,
    group: &GroupId,
    line_by_line: bool,
) -> Result<Verdict, ProposeError> {
    // A group does not go away; if it did, there is nothing to install.
    let question = raft.with_machine(|machine| leading::question(machine.state(), group));
    let Some((group_epoch, input)) = question else { return Err(ProposeError::Unknown) };
    let named = group.clone();
    let install = move || leading::install(&named, group_epoch, &input, line_by_line);
    let command = off_thread(install).await;
    proposer.propose(command.map_err(|_panic| ProposeError::Unknown)?).await
}
