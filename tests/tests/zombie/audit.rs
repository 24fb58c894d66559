//! What the rounds have left behind, and what is wrong with it. The same for the suite and for its negative control.

use tenure_tests::effects::Audit;
use tenure_tests::zombie::{Answer, Judge, Line};

/// One stop: the epoch that was stopped, and what was said to its late acts.
#[derive(Clone, Debug)]
pub(crate) struct Stop {
    pub(crate) number: u32,
    pub(crate) epoch: u64,
    pub(crate) late: Vec<Line>,
}

impl Stop {
    /// Late acts that `judge` refused for a newer epoch, or because no row has this one any more.
    fn refusals(&self, judge: Judge) -> usize {
        let counts = |line: &&Line| match line.answer {
            Some(Answer::Fenced) => line.current.is_some_and(|current| current > self.epoch),
            Some(Answer::NoRow) => true,
            // The server ended the transaction for its pause: true, but no word about the epoch.
            Some(Answer::Ended | Answer::Accepted | Answer::Failed) | None => false,
        };
        self.late.iter().filter(|line| line.judge == Some(judge)).filter(counts).count()
    }

    fn said(&self, answer: Answer) -> usize {
        let judged = self.late.iter().filter(|line| line.judge.is_some());
        judged.filter(|line| line.answer == Some(answer)).count()
    }
}

/// Everything that one place has seen.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) stops: Vec<Stop>,
    pub(crate) stops_wanted: usize,
    pub(crate) audit: Audit,
}

impl Outcome {
    fn sum(&self, count: impl Fn(&Stop) -> usize) -> usize {
        self.stops.iter().map(count).sum()
    }

    /// One line for people.
    pub(crate) fn figures(&self) -> String {
        let Audit { produced, lost, duplicated, out_of_order, .. } = self.audit;
        format!(
            "{} stops; late acts refused by the database {}, by the coordinator {}, ended by the \
             database {}, accepted {}, failed {}; of {produced} records {lost} lost, {duplicated} \
             duplicated, {out_of_order} out of order; of {} offset moves {} went back",
            self.stops.len(),
            self.sum(|stop| stop.refusals(Judge::Database)),
            self.sum(|stop| stop.refusals(Judge::Coordinator)),
            self.sum(|stop| stop.said(Answer::Ended)),
            self.sum(|stop| stop.said(Answer::Accepted)),
            self.sum(|stop| stop.said(Answer::Failed)),
            self.audit.offsets_moved,
            self.audit.offsets_moved_back,
        )
    }
}

/// All that is wrong with an outcome; empty: it holds.
pub(crate) fn faults(outcome: &Outcome) -> Vec<String> {
    let mut faults = Vec::new();
    if outcome.stops.len() < outcome.stops_wanted {
        faults.push(format!("{} of {} stops", outcome.stops.len(), outcome.stops_wanted));
    }
    let judges = [(Judge::Database, "the database"), (Judge::Coordinator, "the coordinator")];
    for stop in &outcome.stops {
        for (judge, name) in judges {
            if stop.refusals(judge) == 0 {
                faults.push(format!("stop {} was not refused by {name}", stop.number));
            }
        }
        let accepted = stop.said(Answer::Accepted);
        if accepted > 0 {
            faults.push(format!("stop {}: {accepted} late acts were accepted", stop.number));
        }
    }
    faults.extend(outcome.audit.faults());
    faults
}
