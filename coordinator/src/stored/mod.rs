//! Stored forms: the body of a raft entry and the records of a snapshot.
//!
//! The core's types are not serialisable on purpose: what is on disk changes by decisions made here, one field at a
//! time, and never because a type was tidied up. Bytes of every form are frozen by tests.

mod command;
mod digest;
mod history;
mod pieces;
mod snapshot;

use tenure_core::level::NEWEST;
use tenure_model::FeatureLevel;

pub use command::{Batch, decode_batch, encode_batch};
pub use digest::digest_of;
pub use snapshot::{decode_snapshot, encode_snapshot};

/// Version of the encodings of this build. A higher one is refused.
pub const FORMAT: u32 = 1;

/// Bytes that this build cannot read as what they claim to be. Stops the node: the entry or snapshot was written by a
/// newer version, or is damaged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoredError {
    /// Not protobuf, or cut short.
    #[error("{what} is damaged: {problem}")]
    Damaged {
        /// Which form.
        what: &'static str,
        /// What the decoder says.
        problem: String,
    },
    /// Written by a newer version.
    #[error(
        "{what} has format {found}, this version reads up to {FORMAT}: run the newer version on this node"
    )]
    Format {
        /// Which form.
        what: &'static str,
        /// The version found.
        found: u32,
    },
    /// Decided by rules of a newer version.
    #[error(
        "{what} has feature level {found}, this version knows up to {NEWEST}: \
         run the newer version on this node"
    )]
    Level {
        /// Which form.
        what: &'static str,
        /// The level found.
        found: FeatureLevel,
    },
    /// A command of a newer version.
    #[error("unknown command at position {position}: run the newer version on this node")]
    UnknownCommand {
        /// Position in the batch.
        position: usize,
    },
}

/// Refuses what was decided by rules that this build does not know.
pub(crate) fn check_level(what: &'static str, level: FeatureLevel) -> Result<(), StoredError> {
    if level <= NEWEST { Ok(()) } else { Err(StoredError::Level { what, found: level }) }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod transcripts;
