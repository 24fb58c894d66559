//! No offset of an older epoch after a newer one was granted: a commit or a release that is accepted names the grant
//! that is current at that moment.

use std::collections::BTreeMap;

use tenure_core::{Applied, Command, Event, Reply};
use tenure_model::{Epoch, MemberId, Partition};

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct OffsetFenced {
    owners: BTreeMap<Partition, (MemberId, Epoch)>,
}

impl OffsetFenced {
    fn check(&self, command: &Command, outcome: &Applied) -> Result<(), String> {
        let Ok(Reply::Verdicts(verdicts)) = &outcome.result else { return Ok(()) };
        let (member, lines): (_, Vec<_>) = match command {
            Command::CommitOffsets(commit) => (
                &commit.member,
                commit.commits.iter().map(|line| (line.partition, line.epoch)).collect(),
            ),
            Command::ReleasePartitions(release) => (
                &release.member,
                release.partitions.iter().map(|line| (line.partition, line.epoch)).collect(),
            ),
            _ => return Ok(()),
        };
        for ((partition, epoch), verdict) in lines.into_iter().zip(verdicts) {
            let owner = self.owners.get(&partition);
            let is_current =
                owner.is_some_and(|(owner, current)| owner == member && *current == epoch);
            if verdict.is_ok() && !is_current {
                return Err(format!("{partition}: {member} at {epoch} is accepted, not {owner:?}"));
            }
        }
        Ok(())
    }
}

impl Property for OffsetFenced {
    fn name(&self) -> &'static str {
        "offset_fenced"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        let Fact::Committed { commands, outcomes, .. } = fact else { return Ok(()) };
        for (command, outcome) in commands.iter().zip(*outcomes) {
            self.check(command, outcome)?;
            for event in &outcome.events {
                if let Event::PartitionGranted { partition, member, epoch, .. } = event {
                    self.owners.insert(*partition, (member.clone(), *epoch));
                } else if let Event::PartitionReleased { partition, .. } = event {
                    self.owners.remove(partition);
                }
            }
        }
        Ok(())
    }
}
