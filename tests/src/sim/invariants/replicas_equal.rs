//! Replicas are equal at equal index: the same outcomes of every entry, and the same state now and then.

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug)]
pub struct ReplicasEqual;

impl Property for ReplicasEqual {
    fn name(&self) -> &'static str {
        "replicas_equal"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        match fact {
            Fact::Replicated { node, index, outcomes, expected } if outcomes != expected => {
                Err(format!("node {node} has another outcome of entry {index}"))
            }
            Fact::Replica { node, index, state, expected } if state != expected => {
                Err(format!("node {node} has another state at entry {index}"))
            }
            _ => Ok(()),
        }
    }
}
