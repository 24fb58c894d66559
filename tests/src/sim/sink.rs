//! The model sink: one resource per partition that registers, compares and writes as DESIGN.md, sections 8 and 9.

use tenure_model::Epoch;

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
