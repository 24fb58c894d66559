//! The checks, one function each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tenure_model::{Epoch, NextOffset};

use super::pauses::Pauses;
use super::report::{Check, Verdict};
use super::{Options, Row, Rows, Subject, Writer, grant, hammer};
use crate::sink::{BoxError, FencedSink, FencedWriter, SinkError, Takeover, Verified};

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

type Held = Result<Verdict, Fault>;

macro_rules! ensure {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err(Fault(format!($($why)+)));
        }
    };
}

/// Time for what the check itself starts, on a machine that does much else.
const SLACK: Duration = Duration::from_secs(1);

pub(super) async fn perform<S: Subject>(subject: Arc<S>, options: Options, check: Check) -> Held {
    let partition = check.partition();
    match check {
        Check::StaleWrite => stale_write(&*subject, partition).await,
        Check::LateRegistration => late_registration(&*subject, partition).await,
        Check::ReRegistration => re_registration(&*subject, partition).await,
        Check::ReadOrder => read_order(&subject, partition).await,
        Check::InitialiseOnce => initialise_once(&*subject, partition).await,
        Check::AbsentOffset => absent_offset(&*subject, partition).await,
        Check::Unregistered => unregistered(&*subject, partition).await,
        Check::Retire => retire(&*subject, partition).await,
        Check::Restart => restart(&*subject, partition).await,
        Check::PausedHolder => paused_holder(&subject, partition).await,
        Check::Starvation => starvation(&subject, partition, options.registration_max).await,
        Check::Hammer => hammer::perform(&subject, partition, options).await,
    }
}

pub(super) fn epoch(value: u64) -> Epoch {
    Epoch::new(value).expect("the kit counts from 1")
}

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

/// Writes; repeats what certainly did not happen, for up to 10 s.
async fn write<S: Subject>(
    subject: &S,
    writer: &mut Writer<S>,
    rows: Rows,
) -> Result<(), SinkError> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match subject.write(writer, rows, &Pauses::none()).await {
            Err(SinkError::Transient { .. }) if Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(5)).await;
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

async fn stale_write<S: Subject>(subject: &S, partition: u32) -> Held {
    let (old_process, new_process) = (subject.connect().await?, subject.connect().await?);
    let (mut old, start) = acquire::<S>(&old_process, partition, 1).await?;
    write(subject, &mut old, rows(partition, 1, start, 1)).await?;
    let (mut new, resumed) = acquire::<S>(&new_process, partition, 2).await?;
    ensure!(resumed.get() == 1, "the new owner resumes at {resumed}, not 1");
    for _ in 0..2 {
        let stale = write(subject, &mut old, rows(partition, 1, resumed, 1)).await;
        ensure!(is_fenced(&stale), "a stale write was not refused as fenced: {}", text(&stale));
    }
    write(subject, &mut new, rows(partition, 2, resumed, 1)).await?;
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

async fn late_registration<S: Subject>(subject: &S, partition: u32) -> Held {
    let sink = subject.connect().await?;
    let (mut new, start) = acquire::<S>(&sink, partition, 2).await?;
    let late = acquire::<S>(&sink, partition, 1).await;
    ensure!(is_fenced(&late), "a late registration was not refused: {}", text(&late));
    write(subject, &mut new, rows(partition, 2, start, 1)).await?;
    expect_rows(subject, partition, &[(0, 2)]).await?;
    passed()
}

async fn re_registration<S: Subject>(subject: &S, partition: u32) -> Held {
    let sink = subject.connect().await?;
    let (mut first, start) = acquire::<S>(&sink, partition, 1).await?;
    write(subject, &mut first, rows(partition, 1, start, 1)).await?;
    let next_grant = grant("owner-2", partition, epoch(2));
    let displaced = sink.register(&next_grant).await?.displaced;
    ensure!(displaced == Some(epoch(1)), "the registration displaced {displaced:?}, not e1");
    let again = sink.register(&next_grant).await;
    ensure!(again.is_ok(), "a repeated registration was refused: {}", text(&again));
    let (mut writer, resumed) = acquire::<S>(&sink, partition, 2).await?;
    write(subject, &mut writer, rows(partition, 2, resumed, 1)).await?;
    expect_rows(subject, partition, &[(0, 1), (1, 2)]).await?;
    passed()
}

async fn read_order<S: Subject>(subject: &Arc<S>, partition: u32) -> Held {
    /// The old owner's write goes on this long after the registration has started.
    const OVERLAP: Duration = Duration::from_millis(60);
    const ROUNDS: u32 = 10;

    let (old_process, new_process) = (subject.connect().await?, subject.connect().await?);
    let mut landed = 0;
    for partition in (partition..).take(ROUNDS as usize) {
        let (mut old, start) = acquire::<S>(&old_process, partition, 1).await?;
        let (pauses, mut gate) = Pauses::gate();
        let write_late = subject.write(&mut old, rows(partition, 1, start, 1), &pauses);
        let take_over = async {
            ensure!(gate.reached().await, "the write never reached a pause");
            let open_late = async {
                tokio::time::sleep(OVERLAP).await;
                gate.open();
            };
            let (taken, ()) =
                tokio::join!(retrying(|| acquire::<S>(&new_process, partition, 2)), open_late);
            Ok(taken?)
        };
        let (written, taken) = tokio::join!(write_late, take_over);
        let (mut new, resumed) = taken?;
        landed += u32::from(written.is_ok());
        let expected = u64::from(written.is_ok());
        ensure!(
            resumed.get() == expected,
            "the new owner resumes at {resumed}, the old owner's last write ended at {expected}"
        );
        write(&**subject, &mut new, rows(partition, 2, resumed, 1)).await?;
        let found = subject.read_back(partition).await?.len() as u64;
        ensure!(found == expected + 1, "{found} rows, not {}", expected + 1);
    }
    Ok(Verdict::Passed(format!("{landed} of {ROUNDS} late writes got in before the fence")))
}

/// Repeats what is `Transient`, for up to 10 s.
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

async fn initialise_once<S: Subject>(subject: &S, partition: u32) -> Held {
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

async fn absent_offset<S: Subject>(subject: &S, partition: u32) -> Held {
    let sink = subject.connect().await?;
    let mut writer = sink.register(&grant("owner-1", partition, epoch(1))).await?.writer;
    let resumed = writer.resume(&Verified::without_coordinator(true)).await;
    ensure!(
        matches!(resumed, Err(SinkError::Misconfigured(_))),
        "an initialised home without an offset is taken for a fresh one: {resumed:?}"
    );
    passed()
}

async fn unregistered<S: Subject>(subject: &S, partition: u32) -> Held {
    let sink = subject.connect().await?;
    for (partition, known) in [(partition, false), (partition + 1, true)] {
        if known {
            acquire::<S>(&sink, partition, 1).await?;
        }
        let forged = grant("owner-9", partition, epoch(9));
        let Some(mut writer) = subject.beside(&sink, &forged) else {
            return Ok(Verdict::Skipped("a writer comes from a registration only"));
        };
        let written = write(subject, &mut writer, rows(partition, 9, NextOffset::ZERO, 1)).await;
        ensure!(written.is_err(), "a grant that was never registered wrote");
        expect_rows(subject, partition, &[]).await?;
    }
    passed()
}

async fn retire<S: Subject>(subject: &S, partition: u32) -> Held {
    let sink = subject.connect().await?;
    let (mut old, start) = acquire::<S>(&sink, partition, 1).await?;
    let (mut new, _) = acquire::<S>(&sink, partition, 2).await?;
    write(subject, &mut new, rows(partition, 2, start, 1)).await?;
    new.retire().await?;
    let resumed = NextOffset::new(1).expect("a small offset");
    let stale = write(subject, &mut old, rows(partition, 1, resumed, 1)).await;
    ensure!(is_fenced(&stale), "retiring let the old owner in: {}", text(&stale));
    let late = acquire::<S>(&sink, partition, 1).await;
    ensure!(is_fenced(&late), "retiring let an old registration in: {}", text(&late));
    let (_, found) = acquire::<S>(&sink, partition, 3).await?;
    ensure!(found == resumed, "the owner after a retired one resumes at {found}, not {resumed}");
    expect_rows(subject, partition, &[(0, 2)]).await?;
    passed()
}

async fn restart<S: Subject>(subject: &S, partition: u32) -> Held {
    {
        let sink = subject.connect().await?;
        let (mut writer, start) = acquire::<S>(&sink, partition, 2).await?;
        write(subject, &mut writer, rows(partition, 2, start, 1)).await?;
    }
    let sink = subject.connect().await?;
    let late = acquire::<S>(&sink, partition, 1).await;
    ensure!(is_fenced(&late), "the fence is gone after a restart: {}", text(&late));
    let (_, resumed) = acquire::<S>(&sink, partition, 3).await?;
    ensure!(resumed.get() == 1, "the offset after a restart is {resumed}, not 1");
    passed()
}

async fn paused_holder<S: Subject>(subject: &Arc<S>, partition: u32) -> Held {
    let (old_process, new_process) = (subject.connect().await?, subject.connect().await?);
    let declared = new_process.capabilities().takeover;
    let (mut old, start) = acquire::<S>(&old_process, partition, 1).await?;
    let (pauses, mut gate) = Pauses::gate();
    let paused = subject.write(&mut old, rows(partition, 1, start, 1), &pauses);
    let take_over = async {
        ensure!(gate.reached().await, "the write never reached a pause");
        let started = Instant::now();
        let patience = match declared {
            Takeover::Bounded(longest) => longest + SLACK,
            Takeover::Unbounded => SLACK,
        };
        let attempt = retrying(|| acquire::<S>(&new_process, partition, 2));
        let taken = tokio::time::timeout(patience, attempt).await;
        let waited = started.elapsed();
        gate.open();
        Ok((taken, waited))
    };
    let (written, taken) = tokio::join!(paused, take_over);
    let (taken, waited) = taken?;
    let figures = format!("waited {} ms, declared {declared:?}", waited.as_millis());
    let (mut new, resumed) = match (taken, declared) {
        (Ok(taken), _) => {
            ensure!(written.is_err(), "the paused holder's write went through after it was fenced");
            taken?
        }
        (Err(_), Takeover::Bounded(longest)) => {
            return Err(Fault(format!("no registration within the declared {longest:?}")));
        }
        (Err(_), Takeover::Unbounded) => {
            retrying(|| acquire::<S>(&new_process, partition, 2)).await?
        }
    };
    let before = u64::from(written.is_ok());
    ensure!(resumed.get() == before, "the new owner resumes at {resumed}, not {before}");
    write(&**subject, &mut new, rows(partition, 2, resumed, 1)).await?;
    let found = subject.read_back(partition).await?.len() as u64;
    ensure!(found == before + 1, "{found} rows, not {}", before + 1);
    Ok(Verdict::Passed(figures))
}

async fn starvation<S: Subject>(subject: &Arc<S>, partition: u32, longest: Duration) -> Held {
    const WRITERS: usize = 8;
    const HOLD: Duration = Duration::from_millis(10);
    const ROUNDS: u64 = 5;

    let sink = subject.connect().await?;
    let mut worst = Duration::ZERO;
    for round in 1..=ROUNDS {
        let (_, _) = acquire::<S>(&sink, partition, round).await?;
        let old = grant(&format!("owner-{round}"), partition, epoch(round));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..WRITERS {
            let process = subject.connect().await?;
            let Some(mut writer) = subject.beside(&process, &old) else {
                return Ok(Verdict::Skipped("a writer comes from a registration only"));
            };
            let subject = Arc::clone(subject);
            tasks.spawn(async move {
                let _process = process;
                let pauses = Pauses::fixed(HOLD);
                let empty = rows(partition, round, NextOffset::ZERO, 1);
                loop {
                    match subject.write(&mut writer, empty, &pauses).await {
                        Ok(()) | Err(SinkError::Transient { .. }) => {}
                        Err(_) => return,
                    }
                }
            });
        }
        // All of them are at it once each has had its turn.
        tokio::time::sleep(HOLD * 2 * u32::try_from(WRITERS).unwrap_or(8)).await;
        let started = Instant::now();
        let next = grant(&format!("owner-{}", round + 1), partition, epoch(round + 1));
        let registered = tokio::time::timeout(longest, retrying(|| sink.register(&next))).await;
        let waited = started.elapsed();
        tasks.shutdown().await;
        match registered {
            Ok(registered) => drop(registered?),
            Err(_) => return Err(Fault(format!("a registration waited longer than {longest:?}"))),
        }
        worst = worst.max(waited);
    }
    Ok(Verdict::Passed(format!(
        "longest of {ROUNDS} registrations under {WRITERS} writers: {} ms",
        worst.as_millis()
    )))
}
