//! Writes that are given up between sending and the answer.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tenure_model::NextOffset;

use super::checks::{Fault, Held, Run, acquire, ensure, retrying_counted, rows, write};
use super::hammer::{Found, resolve};
use super::pauses::Pauses;
use super::report::Verdict;
use super::{Rows, Subject, Writer};
use crate::sink::SinkError;

/// Writes that are tried; a part of them gets through.
const ROUNDS: u32 = 24;
/// Whole writes, to see how often one is polled.
const WHOLE: u32 = 3;
/// Time that the resource gets for what was sent, at most.
const UNDER_WAY_MAX: Duration = Duration::from_millis(3);

/// Cuts writes off at each step, or at random ones where there are too many. In turns the same writer finds out, and the
/// next owner does, as after a death.
pub(super) async fn perform<S: Subject>(run: &Run<S>, partition: u32) -> Held {
    let processes = [run.subject.connect().await?, run.subject.connect().await?];
    let mut random = StdRng::seed_from_u64(run.options.seed);
    let mut value = 1;
    let (mut writer, mut next) = acquire::<S>(&processes[0], partition, value).await?;
    let mut steps = 0;
    for _ in 0..WHOLE {
        let one = rows(partition, value, next, 1);
        let (answer, polls) = attempt(run, &mut writer, one, usize::MAX, Duration::ZERO).await;
        answer.ok_or_else(|| Fault("a write hangs".into()))??;
        steps = steps.max(polls);
        next = one.next;
    }
    if steps == 0 {
        return Ok(Verdict::Skipped("a write never waits for an answer"));
    }
    let (mut cut, mut takeovers, mut landed) = (0, 0_usize, 0);
    for round in 0..ROUNDS {
        let one = rows(partition, value, next, 1);
        let (in_turn, is_dead) = (round as usize / 2, round % 2 == 1);
        let has_few = steps < ROUNDS as usize / 2;
        let is_in_turn = has_few && in_turn <= steps;
        let after = if is_in_turn { in_turn } else { random.random_range(0..=steps) };
        let under_way = random.random_range(Duration::ZERO..=UNDER_WAY_MAX);
        let (answer, _) = attempt(run, &mut writer, one, after, under_way).await;
        next = match answer {
            Some(answer) => known(&mut writer, one, answer).await?,
            None => {
                cut += 1;
                let found = if is_dead {
                    value += 1;
                    takeovers += 1;
                    let process = &processes[takeovers % 2];
                    let taken =
                        retrying_counted(&run.tally, || acquire::<S>(process, partition, value));
                    let resumed;
                    (writer, resumed) = taken.await?;
                    resumed
                } else {
                    let answer = write(run, &mut writer, one).await;
                    known(&mut writer, one, answer).await?
                };
                landed += u32::from(found == one.next);
                found
            }
        };
        let is_either = next == one.first || next == one.next;
        ensure!(is_either, "a write {}..{} was cut off, found {next}", one.first, one.next);
    }
    ensure!(cut > 0, "no write was cut off");
    let damage = Found::count(&run.subject.read_back(partition).await?, next);
    let figures = format!(
        "{cut} of {ROUNDS} writes cut off, {landed} of them in after all, {takeovers} take-overs: {damage}"
    );
    if damage.is_clean() { Ok(Verdict::Passed(figures)) } else { Err(Fault(figures)) }
}

/// Writes, and gives the write up after so many polls without an end, some time later. Answers how many there were.
async fn attempt<S: Subject>(
    run: &Run<S>,
    writer: &mut Writer<S>,
    rows: Rows,
    polls_max: usize,
    under_way: Duration,
) -> (Option<Result<(), SinkError>>, usize) {
    let pauses = Pauses::none();
    let mut work = pin!(run.subject.write(writer, rows, &pauses));
    let mut polls = 0;
    let answer = poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(answer) => Poll::Ready(Some(answer)),
        Poll::Pending if polls == polls_max => Poll::Ready(None),
        Poll::Pending => {
            polls += 1;
            Poll::Pending
        }
    })
    .await;
    if answer.is_none() {
        tokio::time::sleep(under_way).await;
    }
    (answer, polls)
}

/// The offset after a write that was answered; one in doubt is resolved.
async fn known<W: crate::sink::FencedWriter>(
    writer: &mut W,
    rows: Rows,
    answer: Result<(), SinkError>,
) -> Result<NextOffset, SinkError> {
    match answer {
        Ok(()) => Ok(rows.next),
        Err(SinkError::Transient { .. }) => Ok(rows.first),
        Err(SinkError::Unknown(_)) => resolve(writer).await,
        Err(error) => Err(error),
    }
}
