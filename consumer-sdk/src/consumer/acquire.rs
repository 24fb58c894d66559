//! From a grant to the first record: register everywhere, verify, read the resume point, open the source.
//!
//! | step     | does                                        | then     |
//! |----------|---------------------------------------------|----------|
//! | Register | raises the fence at each sink, the home last | Verify   |
//! | Verify   | asks the coordinator: still this epoch?     | Resume   |
//! | Resume   | reads the resume point, or sets the first   | Open     |
//! | Open     | opens the source there                      | acquired |
//!
//! What may pass is tried again, with growing pauses, until the acquire's deadline or the end of the lease; anything
//! else gives the partition back. Nothing is read from the home before the grant is verified: the writer wants the
//! proof, [`Verified`].

use std::time::Duration;

use rand::Rng;
use tenure_model::{NextOffset, SINK_ERROR_PREFIX};
use tokio::time::Instant;

use super::AcquireStep;
use super::buffer::Buffer;
use super::end::Control;
use super::fault::{Closing, Obstacle};
use super::run::Running;
use super::warm::ReadEarly;
use crate::grant::Grant;
use crate::metrics::ACQUIRE_SECONDS;
use crate::session::{Phase, ReleaseReason};
use crate::sink::{FencedSink, FencedWriter, SinkError, Verified};
use crate::source::{RecordStream, ResetPolicy, SourceError};

const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Longest single verify; a node that does not answer is left for another in time.
const VERIFY_CALL_MAX: Duration = Duration::from_secs(5);

/// A partition that is ready for its handler.
pub(super) struct Acquired<W> {
    pub(super) writer: W,
    pub(super) stream: RecordStream,
    pub(super) resume: NextOffset,
    /// Read before it was owned, and not in the stream any more.
    pub(super) read_early: Buffer,
}

/// Takes a grant through all steps.
pub(super) async fn acquire<S: FencedSink>(
    running: &Running<S>,
    grant: &Grant,
    control: &Control,
    early: Option<ReadEarly>,
) -> Result<Acquired<S::Writer>, Closing> {
    let within = running.parts.settings.acquire_deadline;
    let mut acquire = Acquire {
        running,
        grant,
        control,
        phase: Phase::Registering,
        deadline: Instant::now() + within,
        pause: PAUSE_MIN,
        early,
        at_sink: String::new(),
    };
    let begun = Instant::now();
    match tokio::time::timeout(within, acquire.all_steps()).await {
        Ok(Ok(acquired)) => {
            metrics::histogram!(ACQUIRE_SECONDS).record(begun.elapsed());
            Ok(acquired)
        }
        Ok(Err(closing)) => Err(closing),
        Err(_elapsed) => Err(Closing::new(ReleaseReason::AcquireFailed, acquire.no_end(within))),
    }
}

struct Acquire<'a, S: FencedSink> {
    running: &'a Running<S>,
    grant: &'a Grant,
    control: &'a Control,
    phase: Phase,
    deadline: Instant,
    pause: Duration,
    early: Option<ReadEarly>,
    /// The sink that is being registered at.
    at_sink: String,
}

impl<S: FencedSink> Acquire<'_, S> {
    /// What is said when a step does not come to an end.
    fn no_end(&self, within: Duration) -> String {
        match self.phase {
            Phase::Registering => {
                format!("{SINK_ERROR_PREFIX}{}: no answer within {within:?}", self.at_sink)
            }
            Phase::Verifying | Phase::Resuming | Phase::Running | Phase::Draining => {
                format!("no end of the step {:?} within {within:?}", self.phase)
            }
        }
    }

    async fn all_steps(&mut self) -> Result<Acquired<S::Writer>, Closing> {
        self.enter(AcquireStep::Register, Phase::Registering).await?;
        let mut writer = self.register().await?;
        self.enter(AcquireStep::Verify, Phase::Verifying).await?;
        let verified = self.verify().await?;
        self.enter(AcquireStep::Resume, Phase::Resuming).await?;
        let resume = self.resume(&mut writer, &verified).await?;
        self.control.set_position(resume);
        self.enter(AcquireStep::Open, Phase::Resuming).await?;
        let (read_early, stream) = self.open(resume).await?;
        self.check_lease("open")?;
        Ok(Acquired { writer, stream, resume, read_early })
    }

    async fn register(&mut self) -> Result<S::Writer, Closing> {
        let running = self.running;
        for sink in &running.parts.also {
            sink.name().clone_into(&mut self.at_sink);
            while let Err(error) = sink.register_only(self.grant).await {
                self.again(&format!("{SINK_ERROR_PREFIX}{}", sink.name()), error).await?;
            }
        }
        let home = &running.parts.home;
        FencedSink::name(home).clone_into(&mut self.at_sink);
        loop {
            match home.register(self.grant).await {
                Ok(registered) => return Ok(registered.writer),
                Err(error) => {
                    let what = format!("{SINK_ERROR_PREFIX}{}", FencedSink::name(home));
                    self.again(&what, error).await?;
                }
            }
        }
    }

    async fn verify(&mut self) -> Result<Verified, Closing> {
        let running = self.running;
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match running.link.verify(self.grant, left.min(VERIFY_CALL_MAX)).await {
                Ok(verified) => return Ok(verified),
                Err(error) => self.again("verify", error).await?,
            }
        }
    }

    async fn resume(
        &mut self,
        writer: &mut S::Writer,
        verified: &Verified,
    ) -> Result<NextOffset, Closing> {
        loop {
            match writer.resume(verified).await {
                Ok(Some(next)) => return Ok(next),
                Ok(None) => break,
                Err(error) => self.again("resume", error).await?,
            }
        }
        let is_late = self.running.topics.is_late(&self.grant.topic);
        let policy = match verified.starts_at_earliest() || is_late {
            true => ResetPolicy::Earliest,
            false => self.running.parts.settings.reset,
        };
        let start = self.first_offset(policy).await?;
        loop {
            match writer.initialise(start).await {
                Ok(next) => return Ok(next),
                Err(error) => {
                    let unknown = matches!(error, SinkError::Unknown(_));
                    self.again("initialise", error).await?;
                    while unknown && let Err(error) = writer.resolve().await {
                        self.again("resolve", error).await?;
                    }
                }
            }
        }
    }

    async fn first_offset(&mut self, policy: ResetPolicy) -> Result<NextOffset, Closing> {
        let running = self.running;
        let (topic, partition) = (&self.grant.topic, self.grant.partition);
        if policy == ResetPolicy::Fail {
            return Err(Closing::frozen(
                "the home has no offset and the reset policy is none: set one by name",
            ));
        }
        loop {
            match running.parts.source.start(topic, partition, policy).await {
                Ok(start) => return Ok(start),
                Err(error) => self.again("source", error).await?,
            }
        }
    }

    /// Goes on with what was read early, if that continues from here; else opens the source.
    async fn open(&mut self, resume: NextOffset) -> Result<(Buffer, RecordStream), Closing> {
        let running = self.running;
        let (topic, partition) = (&self.grant.topic, self.grant.partition);
        if let Some(early) = self.early.take() {
            if let Some(continued) = early.continue_from(resume).await {
                running.parts.counters.add_continued_early(1);
                return Ok(continued);
            }
            running.parts.source.close(partition).await;
        }
        let read_ahead = running.parts.settings.read_ahead;
        let (source, doubts) = (&*running.parts.source, &running.parts.doubts);
        loop {
            let opened = match doubts.check(source, topic, partition, resume).await {
                Ok(()) => source.open(topic, partition, resume, read_ahead).await,
                Err(error) => Err(error),
            };
            match opened {
                // It had an offset, so it was there once.
                Err(error @ SourceError::UnknownPartition { .. }) if resume > NextOffset::ZERO => {
                    return Err(Closing::frozen(format!("source: {error}")));
                }
                Ok(stream) => return Ok((Buffer::default(), stream)),
                Err(error) => self.again("source", error).await?,
            }
        }
    }

    async fn enter(&mut self, step: AcquireStep, phase: Phase) -> Result<(), Closing> {
        self.check_lease("acquire")?;
        self.phase = phase;
        self.pause = PAUSE_MIN;
        self.report(None);
        if let Some(hook) = &self.running.parts.hook {
            hook(step, self.grant.clone()).await;
        }
        Ok(())
    }

    /// An answer that came after the end of the lease is not gone by: the next owner may have moved on.
    fn check_lease(&self, what: &str) -> Result<(), Closing> {
        self.grant
            .lease
            .check()
            .map_err(|ended| Closing::new(ReleaseReason::LeaseLost, format!("{what}: {ended}")))
    }

    fn report(&self, error: Option<String>) {
        let Grant { partition, epoch, .. } = *self.grant;
        self.running.parts.grants.note(self.grant, self.phase, error.as_ref());
        self.running.link.phase(partition, epoch, self.phase, self.control.position(), error);
    }

    /// Pauses before the next attempt, or ends the acquire.
    async fn again(&mut self, what: &str, obstacle: impl Into<Obstacle>) -> Result<(), Closing> {
        let (error, retry_after) = match obstacle.into() {
            Obstacle::Passing { error, retry_after } => (error, retry_after),
            Obstacle::Final(closing) => {
                return Err(Closing { error: format!("{what}: {}", closing.error), ..closing });
            }
        };
        let error = format!("{what}: {error}");
        self.check_lease(&error)?;
        let pause = retry_after.unwrap_or(self.pause).mul_f64(rand::rng().random_range(0.5..1.5));
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        if Instant::now() + pause >= self.deadline {
            return Err(Closing::new(ReleaseReason::AcquireFailed, error));
        }
        tracing::debug!(
            partition = %self.grant.partition, epoch = %self.grant.epoch, error, ?pause,
            "acquire step failed for now"
        );
        self.report(Some(error));
        tokio::time::sleep(pause).await;
        Ok(())
    }
}
