//! A grant goes only to a live member that subscribes to the topic and is not draining.

use std::collections::{BTreeMap, BTreeSet};

use tenure_core::Event;
use tenure_model::{MemberId, TopicId, TopicName};

use super::{Fact, Property, View};

/// See the module.
#[derive(Debug, Default)]
pub struct GrantToLiveSubscriber {
    members: BTreeMap<MemberId, BTreeSet<TopicName>>,
    draining: BTreeSet<MemberId>,
    topics: BTreeMap<TopicId, TopicName>,
}

impl GrantToLiveSubscriber {
    fn follow(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::MemberJoined(joined) | Event::MemberUpdated(joined) => {
                self.members.insert(joined.member.clone(), joined.topics.iter().cloned().collect());
            }
            Event::MemberLeft { member, .. } | Event::MemberExpired { member, .. } => {
                self.members.remove(member);
            }
            Event::MemberDrained { member, draining: true, .. } => {
                self.draining.insert(member.clone());
            }
            Event::MemberDrained { member, draining: false, .. } => {
                self.draining.remove(member);
            }
            Event::TopicGrown { topic, topic_id, .. } => {
                self.topics.insert(*topic_id, topic.clone());
            }
            Event::PartitionGranted { partition, member, epoch, .. } => {
                let topic = self.topics.get(&partition.topic_id);
                let wants = self
                    .members
                    .get(member)
                    .is_some_and(|topics| topic.is_some_and(|topic| topics.contains(topic)));
                if !wants || self.draining.contains(member) {
                    return Err(format!(
                        "{partition} is granted at {epoch} to {member}, who is gone, draining or elsewhere"
                    ));
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Property for GrantToLiveSubscriber {
    fn name(&self) -> &'static str {
        "grant_to_live_subscriber"
    }

    fn look(&mut self, fact: &Fact<'_>, _view: View<'_>) -> Result<(), String> {
        let Fact::Committed { outcomes, .. } = fact else { return Ok(()) };
        outcomes.iter().flat_map(|outcome| &outcome.events).try_for_each(|event| self.follow(event))
    }
}
