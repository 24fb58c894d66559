//! The model sink: one resource per partition that registers, compares and writes as DESIGN.md, sections 8 and 9.

use tenure_model::Epoch;

use super::control::Protection;
use super::invariants::Fact;
use super::member::GrantKey;
use super::member::work::Ask;
use super::network::Host;
use super::world::{Event, SinkAnswer, World};

/// How a sink shuts out earlier owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// By the epoch: it never goes down, and a write under an older one is refused.
    Epoch,
    /// Whoever registered last writes, as with Kafka's transactional ids.
    LastRegistered,
}

/// Why a sink refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SinkRefusal {
    /// A newer owner was here.
    Fenced,
    /// The write does not start where the offset stands.
    OffsetConflict,
    /// Certainly not applied; it may work later.
    Transient,
}

/// Proof of a registration; a write names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    pub epoch: Epoch,
    /// Rises with every registration.
    registration: u64,
}

/// The resource of one partition.
#[derive(Debug)]
pub struct Sink {
    fence: Fence,
    /// The home of the offset is here too: a write moves it, atomically.
    is_home: bool,
    current: Option<Writer>,
    registrations: u64,
    /// Next offset after everything that was written.
    pub written: u64,
}

impl Sink {
    /// An empty one.
    #[must_use]
    pub const fn new(fence: Fence, is_home: bool) -> Self {
        Self { fence, is_home, current: None, registrations: 0, written: 0 }
    }

    /// Shuts out earlier owners.
    ///
    /// # Errors
    ///
    /// [`SinkRefusal::Fenced`] where the epoch fences and a newer one was here.
    pub fn register(&mut self, epoch: Epoch) -> Result<Writer, SinkRefusal> {
        if self.fence == Fence::Epoch
            && let Some(current) = self.current
        {
            if epoch < current.epoch {
                return Err(SinkRefusal::Fenced);
            }
            if epoch == current.epoch {
                return Ok(current);
            }
        }
        self.registrations += 1;
        let writer = Writer { epoch, registration: self.registrations };
        self.current = Some(writer);
        Ok(writer)
    }

    /// Writes the records `from` to below `to`; compares and writes in one step. Without `compares` it only writes.
    ///
    /// # Errors
    ///
    /// [`SinkRefusal::Fenced`], and [`SinkRefusal::OffsetConflict`] where the offset's home is here.
    pub fn write(
        &mut self,
        writer: Writer,
        from: u64,
        to: u64,
        compares: bool,
    ) -> Result<(), SinkRefusal> {
        if compares && self.current != Some(writer) {
            return Err(SinkRefusal::Fenced);
        }
        if self.is_home && from != self.written {
            return Err(SinkRefusal::OffsetConflict);
        }
        self.written = self.written.max(to);
        Ok(())
    }

    /// The offset that lives here.
    ///
    /// # Errors
    ///
    /// [`SinkRefusal::Fenced`] to whoever is not the current writer.
    pub fn resume(&self, writer: Writer) -> Result<u64, SinkRefusal> {
        if self.current == Some(writer) { Ok(self.written) } else { Err(SinkRefusal::Fenced) }
    }
}

impl World {
    /// A question arrives at a sink: it is answered in one atomic step.
    pub fn serve_sink(&mut self, member: usize, boot: u64, grant: GrantKey, id: u64, ask: Ask) {
        let (partition, epoch) = grant;
        let compares = self.plan.without != Some(Protection::SinkEpoch);
        let is_down = self.now < self.sinks_down_until;
        let Some(sink) = self.sinks.get_mut(&partition) else { return };
        let result = match ask {
            _ if is_down => Err(SinkRefusal::Transient),
            Ask::Register => sink.register(epoch).map(SinkAnswer::Registered),
            Ask::Resume(writer) => sink.resume(writer).map(SinkAnswer::Resumed),
            Ask::Peek => Ok(SinkAnswer::Resumed(sink.written)),
            Ask::Write { writer, from, to } => {
                sink.write(writer, from, to, compares).map(|()| SinkAnswer::Written)
            }
            Ask::Verify | Ask::Fetch | Ask::Commit { .. } => return,
        };
        match (&result, ask) {
            (Ok(SinkAnswer::Registered(_)), _) => self.fact(&Fact::Registered { partition, epoch }),
            (Ok(SinkAnswer::Written), Ask::Write { from, to, .. }) => {
                self.say(|| format!("{partition} takes {from} to {to} under {epoch}"));
                self.last_written.insert(partition, self.now);
                self.fact(&Fact::Written { partition, epoch, from, to });
            }
            (Err(refusal), _) => self.oracle.count_refusal(match refusal {
                SinkRefusal::Fenced => "sink: fenced",
                SinkRefusal::OffsetConflict => "sink: offset conflict",
                SinkRefusal::Transient => "sink: transient",
            }),
            (Ok(_), _) => {}
        }
        let answer = result.unwrap_or_else(SinkAnswer::Refused);
        let (from, to) = (Host::Sink, Host::Member(member));
        if !self.network.is_cut(from, to) && self.rng.below(200) > 0 {
            let delay = self.network.delay(from, to, &mut self.rng);
            self.after(delay, Event::SinkAnswer { member, boot, grant, id, answer });
        }
    }
}
