//! The harmless part of the conformance kit: two owners of a resource that nobody else has.

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{FencedSink, FencedWriter, Registered, SinkError, Verified};

use super::report::Report;

/// First word of the resources that a check makes up, and removes again.
pub(super) const PREFIX: &str = "tenure-check";

/// Name that no group and no other check has.
pub(super) fn resource() -> Resource {
    let name = format!("{PREFIX}/{:016x}", rand::random::<u64>());
    Resource::named(&name).expect("two words of plain characters")
}

/// Lets one owner write, registers the next, and sees the first refused. `write` moves the offset and writes no data.
pub(super) async fn run<S: FencedSink>(
    report: &mut Report,
    sink: &S,
    resource: &Resource,
    write: impl AsyncFn(&mut S::Writer, NextOffset) -> Result<(), SinkError>,
) {
    let grant = |epoch: u64| {
        Grant::external(resource.clone(), Epoch::new(epoch).expect("the trial's epochs are 1 to 3"))
    };
    let (first, second) = (grant(1), grant(2));
    let Some(mut old) = step(report, "registration", own(sink, &first).await) else { return };
    report.ok("registration", "an epoch is registered, and the resume point is read");
    if step(report, "write", write(&mut old, offset(1)).await).is_none() {
        return;
    }
    report.ok("write", "the owner's write is in");
    let registered = step(report, "take-over", own(sink, &second).await);
    let Some(mut new) = registered else { return };
    report.ok("take-over", "the next epoch is registered");

    let fenced = |result: &Result<(), SinkError>| matches!(result, Err(SinkError::Fenced { .. }));
    let stale = write(&mut old, offset(2)).await;
    refused(report, "stale write", fenced(&stale), stale.err());
    let late = sink.register(&first).await.map(|Registered { .. }| ());
    refused(report, "late registration", fenced(&late), late.err());
    if step(report, "next owner", write(&mut new, offset(2)).await).is_some() {
        report.ok("next owner", "goes on from the old owner's offset");
    }
}

/// Registers, reads the resume point and sets the start, as the SDK does.
async fn own<S: FencedSink>(sink: &S, grant: &Grant) -> Result<S::Writer, SinkError> {
    let mut writer = sink.register(grant).await?.writer;
    if writer.resume(&Verified::without_coordinator(false)).await?.is_none() {
        writer.initialise(NextOffset::ZERO).await?;
    }
    Ok(writer)
}

fn step<T>(report: &mut Report, check: &'static str, result: Result<T, SinkError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            report.fail(check, error.to_string(), next_step(&error));
            None
        }
    }
}

fn refused(report: &mut Report, check: &'static str, holds: bool, error: Option<SinkError>) {
    let found = error.map_or_else(|| "it went through".to_owned(), |error| error.to_string());
    report.hold(check, holds, found, "do not use it: a stale owner is not refused here");
}

fn next_step(error: &SinkError) -> &'static str {
    match error {
        SinkError::Transient { .. } | SinkError::Unknown(_) => {
            "run the check again; if it stays, docs/sinks.md, \"Failures\""
        }
        SinkError::Rejected(_) | SinkError::Misconfigured(_) => {
            "look for a trigger, a constraint or a missing right on the fence table"
        }
        SinkError::Fenced { .. }
        | SinkError::LeaseEnded(_)
        | SinkError::OffsetConflict { .. }
        | SinkError::FenceRegressed { .. } => "something else writes to the fence table",
    }
}

fn offset(value: u64) -> NextOffset {
    NextOffset::new(value).expect("the trial's offsets are 1 and 2")
}
