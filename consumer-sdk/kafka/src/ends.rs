//! Where open partitions end, for whoever asks without waiting.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use tenure_model::{NextOffset, Partition};

/// Written by the thread that owns the client, about once a second and not by each record.
#[derive(Debug, Default)]
pub(crate) struct Ends(RwLock<BTreeMap<Partition, NextOffset>>);

impl Ends {
    /// Takes over what is known of all open partitions.
    pub(crate) fn replace(&self, known: BTreeMap<Partition, NextOffset>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = known;
    }

    pub(crate) fn forget(&self, partition: Partition) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&partition);
    }

    pub(crate) fn of(&self, partition: Partition) -> Option<NextOffset> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&partition).copied()
    }
}
