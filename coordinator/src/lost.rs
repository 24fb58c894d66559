//! Epochs that sinks have seen, above any that this cluster has given: it has lost history.
//!
//! Members tell of them in the error of an acquire that a sink's fence refused. Such a partition is held back, ever
//! longer, until the floor is raised.

use tenure_core::State;
use tenure_core::state::PartitionState;
use tenure_model::{Epoch, GroupId, Partition, seen_epoch};

/// The epoch that a sink of this partition has seen, if the cluster has not given it yet.
pub(crate) fn seen_above(state: &State, found: &PartitionState) -> Option<Epoch> {
    let trouble = found.trouble.as_ref()?;
    seen_epoch(&trouble.error).filter(|epoch| epoch.get() > state.epoch_counter)
}

/// The highest such epoch of all groups, and where it was seen.
pub(crate) fn highest(state: &State) -> Option<(&GroupId, Partition, Epoch)> {
    let troubled = state.groups.iter().flat_map(|(id, group)| {
        let named = group.derived.held_back.iter().chain(&group.derived.acquiring);
        named.filter_map(move |partition| Some((id, *partition, group.partitions.get(partition)?)))
    });
    troubled
        .filter_map(|(id, partition, found)| Some((id, partition, seen_above(state, found)?)))
        .max_by_key(|(_, _, epoch)| *epoch)
}

/// What to do about it, for people.
pub(crate) fn advice(state: &State, seen: Epoch) -> String {
    format!(
        "epoch above the counter: a sink has seen {seen}, this cluster has given none above e{}: `tenure \
         raise-epoch-floor {}`",
        state.epoch_counter,
        seen.get()
    )
}

#[cfg(test)]
mod tests;
