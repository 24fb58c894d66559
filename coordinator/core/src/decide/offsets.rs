//! Offsets whose home is the coordinator.

use std::collections::BTreeMap;

use tenure_model::limits::{METADATA_BYTES_MAX, REQUEST_PARTITIONS_MAX};
use tenure_model::{CommitSequence, Epoch, Home, NextOffset, Partition};

use super::ownership::check_owner;
use super::{Decided, Draft, Verdict, check_limit};
use crate::command::{CommitOffsets, OffsetCommit, RewindOffset};
use crate::state::PartitionState;
use crate::{Event, Rejection, Reply, State};

/// What is committed so far, earlier lines of the same request included.
#[derive(Clone, Copy)]
struct Newest {
    epoch: Epoch,
    sequence: CommitSequence,
    next_offset: NextOffset,
}

impl State {
    pub(super) fn commit_offsets(&self, command: &CommitOffsets) -> Decided {
        let group = self.group(&command.group)?;
        if group.settings.home != Home::Coordinator {
            return Err(Rejection::WrongHome {
                group: command.group.clone(),
                home: group.settings.home,
            });
        }
        check_limit("partitions in one request", command.commits.len(), REQUEST_PARTITIONS_MAX)?;
        let mut draft = Draft::default();
        draft.events.reserve(command.commits.len());
        // Nearly always: then no line has an earlier one of its partition.
        let is_ascending = command.commits.is_sorted_by(|a, b| a.partition < b.partition);
        let mut earlier: BTreeMap<Partition, Newest> = BTreeMap::new();
        let verdicts = command
            .commits
            .iter()
            .map(|commit| {
                let OffsetCommit { partition, epoch, .. } = *commit;
                let state = check_owner(&command.group, group, &command.member, partition, epoch)?;
                check_limit("bytes in the metadata", commit.metadata.len(), METADATA_BYTES_MAX)?;
                let newest = earlier.get(&partition).copied().or_else(|| newest(state));
                if is_repeat(commit, newest) {
                    return Ok(());
                }
                check_newer(commit, newest)?;
                #[cfg(feature = "next-level")]
                let commit = &self.with_kept_metadata(state, commit);
                let OffsetCommit { sequence, next_offset, .. } = *commit;
                if !is_ascending {
                    earlier.insert(partition, Newest { epoch, sequence, next_offset });
                }
                draft.push(Event::OffsetCommitted {
                    group: command.group.clone(),
                    member: command.member.clone(),
                    commit: commit.clone(),
                    rewind: None,
                });
                Ok(())
            })
            .collect();
        Ok((Reply::Verdicts(verdicts), draft.finish(self)))
    }

    #[cfg(feature = "next-level")]
    fn with_kept_metadata(&self, state: &PartitionState, commit: &OffsetCommit) -> OffsetCommit {
        let mut commit = commit.clone();
        if self.follows(crate::level::Rule::KeptMetadata)
            && commit.metadata.is_empty()
            && let Some(committed) = &state.committed
        {
            commit.metadata.clone_from(&committed.metadata);
        }
        commit
    }
}

impl State {
    /// The one way for an offset to move back: by name, by its owner, under the current epoch.
    pub(super) fn rewind_offset(&self, command: &RewindOffset) -> Decided {
        let RewindOffset { group: id, member, commit, request } = command;
        let group = self.group(id)?;
        if group.settings.home != Home::Coordinator {
            return Err(Rejection::WrongHome { group: id.clone(), home: group.settings.home });
        }
        let state = check_owner(id, group, member, commit.partition, commit.epoch)?;
        check_limit("bytes in the metadata", commit.metadata.len(), METADATA_BYTES_MAX)?;
        let mut draft = Draft::default();
        let is_applied =
            state.committed.as_ref().is_some_and(|found| found.rewind.as_ref() == Some(request));
        if !is_applied {
            let newest = newest(state);
            if let Some(newest) = newest {
                check_sequence(commit, newest)?;
            }
            draft.push(Event::OffsetCommitted {
                group: id.clone(),
                member: member.clone(),
                commit: commit.clone(),
                rewind: Some(request.clone()),
            });
        }
        Ok((Reply::Done, draft.finish(self)))
    }
}

fn newest(state: &PartitionState) -> Option<Newest> {
    state.committed.as_ref().map(|committed| Newest {
        epoch: committed.epoch,
        sequence: committed.sequence,
        next_offset: committed.next_offset,
    })
}

/// Whether this very commit is in already: the answer to it was lost.
fn is_repeat(commit: &OffsetCommit, newest: Option<Newest>) -> bool {
    newest.is_some_and(|newest| {
        newest.epoch == commit.epoch
            && newest.sequence == commit.sequence
            && newest.next_offset == commit.next_offset
    })
}

fn check_newer(commit: &OffsetCommit, newest: Option<Newest>) -> Verdict {
    let Some(newest) = newest else { return Ok(()) };
    check_sequence(commit, newest)?;
    if commit.next_offset < newest.next_offset {
        return Err(Rejection::OffsetRegressed {
            partition: commit.partition,
            given: commit.next_offset,
            committed: newest.next_offset,
        });
    }
    Ok(())
}

fn check_sequence(commit: &OffsetCommit, newest: Newest) -> Verdict {
    if newest.epoch == commit.epoch && commit.sequence <= newest.sequence {
        return Err(Rejection::StaleCommit {
            partition: commit.partition,
            given: commit.sequence,
            newest: newest.sequence,
        });
    }
    Ok(())
}
