//! Conformance kit: what every fenced sink must hold, driven against a real one.
//!
//! A [`Subject`] says how to connect, how to write a range of offsets and how to read it back; [`run`] does the rest and
//! answers a [`Report`] that prints as a table. A sink passes when [`Report::failed`] is empty. The kit's own tests hold
//! that sinks which are known to be wrong fail it, each at the check that is named after its fault.

mod checks;
mod contention;
mod cut_off;
mod grants;
mod hammer;
mod pauses;
mod report;
mod tally;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};

use super::{BoxError, FencedSink, SinkError};
use crate::grant::Grant;

pub use grants::grant;
pub use pauses::Pauses;
pub use report::{Check, Outcome, Report, Verdict};
pub use tally::Answers;

/// Writer of a subject's sink.
pub type Writer<S> = <<S as Subject>::Sink as FencedSink>::Writer;

/// A sink under test and the way to its data.
///
/// The data has a row for each offset of each partition, without a uniqueness constraint: a duplicate is to be seen, not
/// refused by luck. The resource is empty when the kit starts; each check uses partitions of its own.
pub trait Subject: Send + Sync + 'static {
    /// The sink.
    type Sink: FencedSink;

    /// Connects as a process of its own would, and creates what is missing.
    fn connect(&self) -> impl Future<Output = Result<Self::Sink, SinkError>> + Send;

    /// Writes one row for each offset of `rows` and moves the offset to `rows.next`, in one step. Skips nothing.
    /// Awaits [`Pauses::here`] at every moment at which a real process could be stopped: at least once after the first
    /// row and before the commit.
    fn write(
        &self,
        writer: &mut Writer<Self>,
        rows: Rows,
        pauses: &Pauses,
    ) -> impl Future<Output = Result<(), SinkError>> + Send;

    /// All rows of a partition, by offset.
    fn read_back(&self, partition: u32) -> impl Future<Output = Result<Vec<Row>, BoxError>> + Send;

    /// Writer for a grant that it does not register, if the sink has such a one.
    fn beside(&self, sink: &Self::Sink, grant: &Grant) -> Option<Writer<Self>>;
}

/// Rows that one write brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Partition, as in [`grant`].
    pub partition: u32,
    /// Epoch to store in each row.
    pub epoch: Epoch,
    /// First offset.
    pub first: NextOffset,
    /// Offset after the last one.
    pub next: NextOffset,
}

impl Rows {
    /// The offsets, rising.
    pub fn offsets(self) -> impl Iterator<Item = NextOffset> + Send {
        (self.first.get()..self.next.get())
            .map(|value| NextOffset::new(value).expect("below an offset"))
    }
}

/// One row as read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its offset.
    pub offset: NextOffset,
    /// Epoch that wrote it.
    pub epoch: Epoch,
}

/// How hard to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Seed of all random choices; in the report.
    pub seed: u64,
    /// Hand-overs of the hammer. Default 100; 1000 for a verdict on a new sink.
    pub handovers: u32,
    /// Longest time from one hand-over of the hammer to the next. Default 30 ms. Where two acquisitions with a write take
    /// longer, they count, up to 400 ms more; give more to a sink that is slower, or no owner gets as far as a write.
    pub handover_interval_max: Duration,
    /// Longest registration under 8 writers of the old epoch. Default 1 s. One that takes longer fails once more than 64 of
    /// their writes got in before it, which tells starving from a slow machine; or after ten times as long in any case.
    pub registration_max: Duration,
    /// Calls of a hundred that may be answered `Transient`, counted for each check; two of a check are free. Counted are
    /// writes and acquisitions that nothing keeps waiting, and those of the hammer. Default 5; more for a sink whose
    /// true owner a late one can disturb, so that it has to recover.
    pub transient_percent_max: u32,
}

impl Options {
    /// The defaults with a seed.
    #[must_use]
    pub const fn with_seed(seed: u64) -> Self {
        Self {
            seed,
            handovers: 100,
            handover_interval_max: Duration::from_millis(30),
            registration_max: Duration::from_secs(1),
            transient_percent_max: 5,
        }
    }
}

/// Runs every check. Takes a few seconds and, for the hammer, about 25 ms a hand-over. Needs a runtime of several threads
/// or a sink that never blocks one.
pub async fn run<S: Subject>(subject: &Arc<S>, options: Options) -> Report {
    let mut outcomes = Vec::new();
    for check in Check::ALL {
        outcomes.push(run_one(subject, options, check).await);
    }
    Report { seed: options.seed, outcomes }
}

/// Runs one check.
pub async fn run_one<S: Subject>(subject: &Arc<S>, options: Options, check: Check) -> Outcome {
    /// Longest check apart from its hand-overs.
    const CHECK_MAX: Duration = Duration::from_secs(60);
    /// What a hand-over takes at the very most, apart from the wait before it.
    const HANDOVER_MAX: Duration = Duration::from_millis(500);

    let handover_max = HANDOVER_MAX + options.handover_interval_max;
    let limit = CHECK_MAX + handover_max * options.handovers;
    let tally = Arc::new(tally::Tally::default());
    let run = checks::Run { subject: Arc::clone(subject), options, tally: Arc::clone(&tally) };
    let work = Box::pin(checks::perform(run, check));
    let verdict = tokio::time::timeout(limit, work).await;
    let answers = tally.answers();
    let percent_max = options.transient_percent_max;
    let verdict = match verdict {
        Ok(Ok(Verdict::Passed(figures))) if answers.exceed(percent_max) => {
            let fault = format!("more than {percent_max} % of its calls were transient");
            Verdict::Failed(format!("{fault}; {figures}").trim_end_matches("; ").to_owned())
        }
        Ok(Ok(verdict)) => verdict,
        Ok(Err(fault)) => Verdict::Failed(fault.0),
        Err(elapsed) => Verdict::Failed(format!("hangs: {elapsed}")),
    };
    Outcome { check, verdict, answers }
}
