//! A grant: the right to one partition under one epoch.

use std::fmt;
use std::sync::Arc;

use tenure_model::{
    Epoch, GroupId, Index, MemberId, Partition, PartitionIndex, TopicId, TopicName,
};

use crate::lease::Lease;

/// Longest name of a [`Resource`], in bytes.
pub const RESOURCE_BYTES_MAX: usize = 512;

/// Group and topic of a grant that no coordinator gave.
const EXTERNAL: &str = "external";

/// Name under which a sink keeps the fence of one partition: `group/topic id/index`, or a name of one's own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Resource(Arc<str>);

impl Resource {
    /// Resource of a group's partition.
    #[must_use]
    pub fn of_partition(group: &GroupId, partition: Partition) -> Self {
        Self(format!("{group}/{}/{}", partition.topic_id, partition.index).into())
    }

    /// Resource with a name of one's own, such as `orders/7`.
    ///
    /// Words of letters, digits, `.`, `_`, `-` and `:`, with `/` between them, up to [`RESOURCE_BYTES_MAX`] bytes: a form
    /// that every sink can keep, also in a header or in the path of an object.
    ///
    /// # Errors
    ///
    /// [`ResourceError`] for any other text.
    pub fn named(text: &str) -> Result<Self, ResourceError> {
        if text.len() > RESOURCE_BYTES_MAX {
            return Err(ResourceError::TooLong { size_bytes: text.len() });
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
        for word in text.split('/') {
            // A path would take these for something else than a name.
            if matches!(word, "" | "." | "..") {
                return Err(ResourceError::Word { text: text.to_owned() });
            }
            if let Some(found) = word.chars().find(|c| !is_plain(*c)) {
                return Err(ResourceError::Character { found });
            }
        }
        Ok(Self(text.into()))
    }

    /// The resource as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The text is no name of a resource.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourceError {
    /// Longer than [`RESOURCE_BYTES_MAX`].
    #[error("resource has {size_bytes} bytes, at most {RESOURCE_BYTES_MAX} are allowed")]
    TooLong {
        /// Length found, in bytes.
        size_bytes: usize,
    },
    /// Empty, or an empty word, `.` or `..` between two `/`.
    #[error("resource {text:?} has an empty word, '.' or '..': write it as in orders/7")]
    Word {
        /// What was given.
        text: String,
    },
    /// A character outside `A-Z a-z 0-9 . _ - : /`.
    #[error(
        "resource has the character {found:?}: use letters, digits, '.', '_', '-', ':' and '/'"
    )]
    Character {
        /// The offending character.
        found: char,
    },
}

/// The right to one partition under one epoch. Cheap to clone; all clones end together.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Group that the member consumes in.
    pub group: GroupId,
    /// Holder.
    pub member: MemberId,
    /// Name of the topic.
    pub topic: TopicName,
    /// The partition.
    pub partition: Partition,
    /// Fencing token.
    pub epoch: Epoch,
    /// Names the handoff in the logs of both sides.
    pub handoff: Index,
    /// Whether the home of the offset certainly has one; if so, an absent offset is a fault, never a fresh start.
    pub home_initialised: bool,
    /// Name of the fence at every sink.
    pub resource: Resource,
    /// The grant, signed by the coordinator, for receivers that believe only what is signed. Nothing when it has no key.
    pub token: Option<Arc<str>>,
    /// Live lease.
    pub lease: Lease,
}

impl Grant {
    /// Grant that no coordinator gave: `token` comes from elsewhere and rises with every owner of `resource` (an etcd
    /// revision, a `ZooKeeper` zxid). Drives any sink; a consumer and the coordinator know nothing of it.
    ///
    /// - The holder is a made-up name, so that the same token in the hands of two is refused instead of shared. Keep
    ///   the grant for retries, or name the holder by [`Grant::held_by`].
    /// - The lease is endless: end it with `grant.lease.stop()` when the token is lost, or put in a lease of one's own.
    ///   As everywhere, safety does not rest on it.
    /// - Group and topic are `external`; the partition's topic id is made from the resource, for idempotency keys.
    ///
    /// ```
    /// use tenure_sdk::grant::{Grant, Resource};
    /// use tenure_sdk::model::Epoch;
    ///
    /// let revision = 4711; // of the key that the lock was taken with
    /// let token = Epoch::new(revision).expect("below 2^53");
    /// let resource = Resource::named("orders/7").expect("a name");
    /// let grant = Grant::external(resource, token);
    /// assert_eq!(grant.epoch.get(), 4711);
    /// ```
    #[must_use]
    pub fn external(resource: Resource, token: Epoch) -> Self {
        let holder = format!("{EXTERNAL}-{:016x}", rand::random::<u64>());
        Self {
            group: GroupId::new(EXTERNAL).expect("the constant is a name"),
            member: MemberId::new(&holder).expect("letters, a dash and digits are a name"),
            topic: TopicName::new(EXTERNAL).expect("the constant is a name"),
            partition: Partition {
                topic_id: TopicId::of_text(resource.as_str()),
                index: PartitionIndex::new(0).expect("0 is below the maximum"),
            },
            epoch: token,
            handoff: Index(token.get()),
            home_initialised: false,
            resource,
            token: None,
            lease: Lease::endless(),
        }
    }

    /// The grant in the name of `holder`, who is the same after a restart: with the same token it registers again.
    #[must_use]
    pub fn held_by(self, holder: MemberId) -> Self {
        Self { member: holder, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_takes_words_between_slashes_and_nothing_else() {
        for text in ["orders", "orders/7", "a.b_c-d:e/f/0", &"x".repeat(RESOURCE_BYTES_MAX)] {
            assert_eq!(Resource::named(text).unwrap().as_str(), text);
        }
        for text in ["", "/orders", "orders/", "a//b", "a/../b", "."] {
            let refused = Resource::named(text).unwrap_err();
            assert!(matches!(refused, ResourceError::Word { .. }), "{text}: {refused}");
        }
        for text in ["a b", "{a}", "ä", "a\0", "a\r\nb"] {
            let refused = Resource::named(text).unwrap_err();
            assert!(matches!(refused, ResourceError::Character { .. }), "{text:?}: {refused}");
        }
        let long = Resource::named(&"x".repeat(RESOURCE_BYTES_MAX + 1)).unwrap_err();
        assert_eq!(long, ResourceError::TooLong { size_bytes: RESOURCE_BYTES_MAX + 1 });
    }

    #[test]
    fn external_grants_differ_in_holder_and_in_the_key_of_their_records() {
        let grant = |name: &str| Grant::external(Resource::named(name).unwrap(), Epoch::FIRST);
        let (one, other) = (grant("orders/7"), grant("orders/8"));
        assert_ne!(one.member, grant("orders/7").member);
        assert_eq!(one.partition, grant("orders/7").partition);
        assert_ne!(one.partition, other.partition);
        let holder = MemberId::new("ann").unwrap();
        assert_eq!(one.held_by(holder.clone()).member, holder);
    }
}
