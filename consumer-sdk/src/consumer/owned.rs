//! An owned partition as a handler gets it.

use tenure_model::NextOffset;

use super::input::Input;
use super::warm::Loaded;
use crate::grant::Grant;
use crate::sink::FencedSink;

/// One owned partition: registered at every sink, verified, and at its resume point.
pub struct Owned<S: FencedSink> {
    pub(super) grant: Grant,
    pub(super) resume: NextOffset,
    pub(super) input: Input,
    pub(super) writer: S::Writer,
    /// What was prepared for it.
    pub(super) loaded: Option<Loaded>,
}

impl<S: FencedSink> std::fmt::Debug for Owned<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owned")
            .field("grant", &self.grant)
            .field("resume", &self.resume)
            .finish_non_exhaustive()
    }
}

impl<S: FencedSink> Owned<S> {
    /// The grant: partition, epoch and live lease.
    #[must_use]
    pub const fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Where reading starts.
    #[must_use]
    pub const fn resume(&self) -> NextOffset {
        self.resume
    }

    /// The records, and the writer of the home.
    #[must_use]
    pub fn split(self) -> (Input, S::Writer) {
        (self.input, self.writer)
    }
}
