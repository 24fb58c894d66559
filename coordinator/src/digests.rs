//! The digests that this replica took of its state, and what the majority's were.
//!
//! The raft leader logs a mark; every replica takes the digest of its state as of that entry. The raft leader asks
//! all of them, and logs what a majority of the voters found; a replica that found something else stops, be it the
//! raft leader itself. Nothing here is replicated or stored: a replica that was away, or too busy, took no digest and
//! is compared the next time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use tenure_core::State;
use tenure_model::{Index, StateDigest};

use crate::raft::Fatal;
use crate::stored::digest_of;

/// Digests that are kept, and outcomes that wait for a digest.
const DIGESTS_KEPT: usize = 16;

/// Records up to which a digest is taken at once, in about a millisecond; larger states are left to a thread.
const RECORDS_AT_ONCE_MAX: usize = 2_000;

/// Digests of one replica. A clone shares them.
#[derive(Clone, Default)]
pub struct Digests(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    taken: BTreeMap<Index, StateDigest>,
    majority: BTreeMap<Index, StateDigest>,
    /// A thread takes one.
    is_taking: bool,
    /// Raised when the state is replaced: what a thread still takes is of the one before.
    life: u64,
    agreed: Index,
}

impl Digests {
    /// Takes the digest of `state` as of `index`, unless the last one is still being taken.
    pub(crate) fn mark(&self, index: Index, state: &Arc<State>) {
        if records_of(state) <= RECORDS_AT_ONCE_MAX {
            let digest = digest_of(state);
            self.lock().take(index, digest);
            return;
        }
        let life = {
            let mut known = self.lock();
            if known.is_taking {
                tracing::warn!(%index, "the digest before is still being taken, this one is left out");
                return;
            }
            known.is_taking = true;
            known.life
        };
        let (shared, state) = (self.clone(), Arc::clone(state));
        let spawned = thread::Builder::new().name("digest".to_owned()).spawn(move || {
            let digest = digest_of(&state);
            drop(state);
            let mut known = shared.lock();
            known.is_taking = false;
            if known.life == life {
                known.take(index, digest);
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%index, %error, "no thread to take a digest, it is left out");
            self.lock().is_taking = false;
        }
    }

    /// Takes note of what a majority found as of `index`.
    pub(crate) fn expect(&self, index: Index, digest: StateDigest) {
        keep(&mut self.lock().majority, index, digest);
    }

    /// Compares what can be compared by now.
    ///
    /// # Errors
    ///
    /// [`Fatal`] when this replica's state was another one than the majority's.
    pub(crate) fn check(&self) -> Result<(), Fatal> {
        let mut known = self.lock();
        let both = |(index, wanted): (&Index, &StateDigest)| {
            Some((*index, *wanted, *known.taken.get(index)?))
        };
        let compared: Vec<_> = known.majority.iter().filter_map(both).collect();
        for (index, wanted, taken) in compared {
            if wanted != taken {
                return Err(Fatal(format!(
                    "the state of this node as of entry {index} is not that of the majority: digest {taken} here, \
                     {wanted} there"
                )));
            }
            known.majority.remove(&index);
            known.agreed = known.agreed.max(index);
        }
        Ok(())
    }

    /// What this replica found as of `index`.
    #[must_use]
    pub fn at(&self, index: Index) -> Option<StateDigest> {
        self.lock().taken.get(&index).copied()
    }

    /// Last entry as of which this replica was found to be like the majority; 0: none yet.
    #[must_use]
    pub fn agreed(&self) -> Index {
        self.lock().agreed
    }

    /// Forgets everything: the state was replaced.
    pub(crate) fn clear(&self) {
        let mut known = self.lock();
        known.taken.clear();
        known.majority.clear();
        known.life += 1;
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn take(&mut self, index: Index, digest: StateDigest) {
        keep(&mut self.taken, index, digest);
    }
}

fn keep(digests: &mut BTreeMap<Index, StateDigest>, index: Index, digest: StateDigest) {
    digests.insert(index, digest);
    while digests.len() > DIGESTS_KEPT {
        digests.pop_first();
    }
}

/// Records in the stored form, without the past grants.
fn records_of(state: &State) -> usize {
    let groups = state.groups.values().map(|group| group.partitions.len() + group.members.len());
    groups.sum::<usize>() + state.operations.len() + state.changes.newest.len()
}
