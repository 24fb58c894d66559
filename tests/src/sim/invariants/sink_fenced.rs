//! No sink write of an older epoch after a newer one registered.

use std::collections::BTreeMap;

use tenure_model::{Epoch, Partition};

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct SinkFenced {
    newest: BTreeMap<Partition, Epoch>,
}

impl Property for SinkFenced {
    fn name(&self) -> &'static str {
        "sink_fenced"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        match fact {
            Fact::Registered { partition, epoch } => {
                let newest = self.newest.entry(*partition).or_insert(*epoch);
                *newest = (*epoch).max(*newest);
                Ok(())
            }
            Fact::Written { partition, epoch, from, .. } => match self.newest.get(partition) {
                Some(newest) if epoch >= newest => Ok(()),
                newest => Err(format!(
                    "{partition} took record {from} under {epoch}, after {newest:?} registered"
                )),
            },
            _ => Ok(()),
        }
    }
}
