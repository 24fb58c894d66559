//! The checks, one function each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure_model::{Epoch, NextOffset};

use super::pauses::Pauses;
use super::report::{Check, Verdict};
use super::tally::Tally;
use super::{Options, Row, Rows, Subject, Writer, contention, cut_off, grant, hammer};
use crate::sink::{BoxError, FencedSink, FencedWriter, SinkError, Verified};

/// Why a check does not hold.
#[derive(Debug)]
pub(super) struct Fault(pub(super) String);

impl From<SinkError> for Fault {
    fn from(error: SinkError) -> Self {
        Self(format!("unexpected: {error}"))
    }
}

impl From<BoxError> for Fault {
    fn from(error: BoxError) -> Self {
        Self(format!("the subject failed: {error}"))
    }
}

pub(super) type Held = Result<Verdict, Fault>;

macro_rules! ensure {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err($crate::sink::conformance::checks::Fault(format!($($why)+)));
        }
    };
}
pub(super) use ensure;

/// Time for what the check itself starts, on a machine that does much else.
pub(super) const SLACK: Duration = Duration::from_secs(1);

/// One check on its way.
pub(super) struct Run<S> {
    pub(super) subject: Arc<S>,
    pub(super) options: Options,
    pub(super) tally: Arc<Tally>,
}

pub(super) async fn perform<S: Subject>(run: Run<S>, check: Check) -> Held {
    let partition = check.partition();
    match check {
        Check::StaleWrite => stale_write(&run, partition).await,
        Check::LateRegistration => late_registration(&run, partition).await,
        Check::ReRegistration => re_registration(&run, partition).await,
        Check::ReadOrder => contention::read_order(&run, partition).await,
        Check::InitialiseOnce => initialise_once(&run, partition).await,
        Check::AbsentOffset => absent_offset(&run, partition).await,
        Check::Unregistered => unregistered(&run, partition).await,
        Check::Retire => retire(&run, partition).await,
        Check::Restart => restart(&run, partition).await,
        Check::PausedHolder => contention::paused_holder(&run, partition).await,
        Check::Starvation => contention::starvation(&run, partition).await,
        Check::CutOff => cut_off::perform(&run, partition).await,
        Check::Hammer => hammer::perform(&run, partition).await,
    }
}

pub(super) fn epoch(value: u64) -> Epoch {
    Epoch::new(value).expect("the kit counts from 1")
}

/// Repetitions of one write that is answered `Transient`.
const REPEATS_MAX: u32 = 10;
/// Pause before each of them.
const REPEAT_PAUSE: Duration = Duration::from_millis(10);

fn passed() -> Held {
    Ok(Verdict::Passed(String::new()))
}

/// Registers and reads the resume point, as an acquire does.
pub(super) async fn acquire<S: Subject>(
    sink: &S::Sink,
    partition: u32,
    value: u64,
) -> Result<(Writer<S>, NextOffset), SinkError> {
    let grant = grant(&format!("owner-{value}"), partition, epoch(value));
    let mut writer = sink.register(&grant).await?.writer;
    let verified = Verified::without_coordinator(false);
    let next = match writer.resume(&verified).await? {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await?,
    };
    Ok((writer, next))
}

/// The `count` rows after `first`.
pub(super) fn rows(partition: u32, value: u64, first: NextOffset, count: u64) -> Rows {
    let next = NextOffset::new(first.get() + count).expect("the kit stays far below the end");
    Rows { partition, epoch: epoch(value), first, next }
}

/// Writes where nobody else holds the resource; repeats what certainly did not happen, a few times, and counts it.
pub(super) async fn write<S: Subject>(
    run: &Run<S>,
    writer: &mut Writer<S>,
    rows: Rows,
) -> Result<(), SinkError> {
    let mut left = REPEATS_MAX;
    loop {
        let answer = run.subject.write(writer, rows, &Pauses::none()).await;
        let is_transient = matches!(answer, Err(SinkError::Transient { .. }));
        run.tally.note(is_transient);
        if !is_transient || left == 0 {
            return answer;
        }
        left -= 1;
        tokio::time::sleep(REPEAT_PAUSE).await;
    }
}

/// As [`retrying`], and counts it.
pub(super) async fn retrying_counted<T, F: Future<Output = Result<T, SinkError>>>(
    tally: &Tally,
    mut attempt: impl FnMut() -> F,
) -> Result<T, SinkError> {
    retrying(|| {
        let attempt = attempt();
        async move {
            let answer = attempt.await;
            tally.note(matches!(answer, Err(SinkError::Transient { .. })));
            answer
        }
    })
    .await
}

/// Repeats what is `Transient` while another holds the resource, for up to 10 s.
pub(super) async fn retrying<T, F: Future<Output = Result<T, SinkError>>>(
    mut attempt: impl FnMut() -> F,
) -> Result<T, SinkError> {
    const PAUSE: Duration = Duration::from_millis(5);
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match attempt().await {
            Err(SinkError::Transient { .. }) if Instant::now() < deadline => {
                tokio::time::sleep(PAUSE).await;
            }
            result => return result,
        }
    }
}

fn is_fenced<T>(result: &Result<T, SinkError>) -> bool {
    matches!(result, Err(SinkError::Fenced { .. }))
}

fn text<T>(result: &Result<T, SinkError>) -> String {
    match result {
        Ok(_) => "it went through".to_owned(),
        Err(error) => error.to_string(),
    }
}

async fn expect_rows<S: Subject>(
    subject: &S,
    partition: u32,
    expected: &[(u64, u64)],
) -> Result<(), Fault> {
    let found: Vec<(u64, u64)> = subject
        .read_back(partition)
        .await?
        .into_iter()
        .map(|Row { offset, epoch }| (offset.get(), epoch.get()))
        .collect();
    ensure!(found == expected, "(offset, epoch) of the rows is {found:?}, not {expected:?}");
    Ok(())
}

async fn stale_write<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let (old_process, new_process) = (subject.connect().await?, subject.connect().await?);
    let (mut old, start) = acquire::<S>(&old_process, partition, 1).await?;
    write(run, &mut old, rows(partition, 1, start, 1)).await?;
    let (mut new, resumed) = acquire::<S>(&new_process, partition, 2).await?;
    ensure!(resumed.get() == 1, "the new owner resumes at {resumed}, not 1");
    for _ in 0..2 {
        let stale = write(run, &mut old, rows(partition, 1, resumed, 1)).await;
        ensure!(is_fenced(&stale), "a stale write was not refused as fenced: {}", text(&stale));
    }
    write(run, &mut new, rows(partition, 2, resumed, 1)).await?;
    expect_rows(subject, partition, &[(0, 1), (1, 2)]).await?;

    // Caught between its first row and its commit, where a check before the write has long said yes.
    let partition = partition + 1;
    let (mut old, start) = acquire::<S>(&old_process, partition, 1).await?;
    let (pauses, mut gate) = Pauses::gate();
    let stopped = subject.write(&mut old, rows(partition, 1, start, 1), &pauses);
    let overtake = async {
        ensure!(gate.reached().await, "the write never reached a pause");
        let registered = tokio::time::timeout(SLACK, acquire::<S>(&new_process, partition, 2));
        let overtaken = registered.await;
        gate.open();
        Ok(matches!(overtaken, Ok(Ok(_))))
    };
    let (stopped, overtaken) = tokio::join!(stopped, overtake);
    if overtaken? {
        ensure!(
            stopped.is_err() && subject.read_back(partition).await?.is_empty(),
            "a write that was overtaken between its row and its commit went through"
        );
    }
    passed()
}

async fn late_registration<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let sink = subject.connect().await?;
    let (mut new, start) = acquire::<S>(&sink, partition, 2).await?;
    let late = acquire::<S>(&sink, partition, 1).await;
    ensure!(is_fenced(&late), "a late registration was not refused: {}", text(&late));
    write(run, &mut new, rows(partition, 2, start, 1)).await?;
    expect_rows(subject, partition, &[(0, 2)]).await?;
    passed()
}

async fn re_registration<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let sink = subject.connect().await?;
    let (mut first, start) = acquire::<S>(&sink, partition, 1).await?;
    write(run, &mut first, rows(partition, 1, start, 1)).await?;
    let next_grant = grant("owner-2", partition, epoch(2));
    let displaced = sink.register(&next_grant).await?.displaced;
    ensure!(displaced == Some(epoch(1)), "the registration displaced {displaced:?}, not e1");
    let again = sink.register(&next_grant).await;
    ensure!(again.is_ok(), "a repeated registration was refused: {}", text(&again));
    let (mut writer, resumed) = acquire::<S>(&sink, partition, 2).await?;
    write(run, &mut writer, rows(partition, 2, resumed, 1)).await?;
    expect_rows(subject, partition, &[(0, 1), (1, 2)]).await?;
    passed()
}

async fn initialise_once<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let sink = subject.connect().await?;
    let start = NextOffset::new(5).expect("a small offset");
    let mut first = sink.register(&grant("owner-1", partition, epoch(1))).await?.writer;
    let absent = first.resume(&Verified::without_coordinator(false)).await?;
    ensure!(absent.is_none(), "a fresh home resumes at {absent:?}");
    let set = first.initialise(start).await?;
    ensure!(set == start, "the start was set to 5 and is {set}");
    let mut second = sink.register(&grant("owner-2", partition, epoch(2))).await?.writer;
    let kept = second.initialise(NextOffset::ZERO).await?;
    ensure!(kept == start, "a second start replaced 5 by {kept}");
    let stale = first.initialise(NextOffset::ZERO).await;
    ensure!(is_fenced(&stale), "an old owner may set a start: {}", text(&stale));
    passed()
}

async fn absent_offset<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let sink = subject.connect().await?;
    let mut writer = sink.register(&grant("owner-1", partition, epoch(1))).await?.writer;
    let resumed = writer.resume(&Verified::without_coordinator(true)).await;
    ensure!(
        matches!(resumed, Err(SinkError::Misconfigured(_))),
        "an initialised home without an offset is taken for a fresh one: {resumed:?}"
    );
    passed()
}

async fn unregistered<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let sink = subject.connect().await?;
    for (partition, known) in [(partition, false), (partition + 1, true)] {
        if known {
            acquire::<S>(&sink, partition, 1).await?;
        }
        let forged = grant("owner-9", partition, epoch(9));
        let Some(mut writer) = subject.beside(&sink, &forged) else {
            return Ok(Verdict::Skipped("a writer comes from a registration only"));
        };
        let written = write(run, &mut writer, rows(partition, 9, NextOffset::ZERO, 1)).await;
        ensure!(written.is_err(), "a grant that was never registered wrote");
        expect_rows(subject, partition, &[]).await?;
    }
    passed()
}

async fn retire<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    let sink = subject.connect().await?;
    let (mut old, start) = acquire::<S>(&sink, partition, 1).await?;
    let (mut new, _) = acquire::<S>(&sink, partition, 2).await?;
    write(run, &mut new, rows(partition, 2, start, 1)).await?;
    new.retire().await?;
    let resumed = NextOffset::new(1).expect("a small offset");
    let stale = write(run, &mut old, rows(partition, 1, resumed, 1)).await;
    ensure!(is_fenced(&stale), "retiring let the old owner in: {}", text(&stale));
    let late = acquire::<S>(&sink, partition, 1).await;
    ensure!(is_fenced(&late), "retiring let an old registration in: {}", text(&late));
    let (_, found) = acquire::<S>(&sink, partition, 3).await?;
    ensure!(found == resumed, "the owner after a retired one resumes at {found}, not {resumed}");
    expect_rows(subject, partition, &[(0, 2)]).await?;
    passed()
}

async fn restart<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let subject = &*run.subject;
    {
        let sink = subject.connect().await?;
        let (mut writer, start) = acquire::<S>(&sink, partition, 2).await?;
        write(run, &mut writer, rows(partition, 2, start, 1)).await?;
    }
    let sink = subject.connect().await?;
    let late = acquire::<S>(&sink, partition, 1).await;
    ensure!(is_fenced(&late), "the fence is gone after a restart: {}", text(&late));
    let (_, resumed) = acquire::<S>(&sink, partition, 3).await?;
    ensure!(resumed.get() == 1, "the offset after a restart is {resumed}, not 1");
    passed()
}
