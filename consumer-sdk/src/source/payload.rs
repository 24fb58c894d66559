//! Keys and values.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;

/// Key or value of a record: bytes that do not change, used as a `[u8]`.
///
/// A source may lend its own buffers instead of copying them ([`Payload::is_lent`]); they stay in memory until the
/// payloads that refer to them are gone. So a record may be worked on for as long as that takes, and whatever is *kept*
/// (in a map, a cache, a queue) is better a clone, or `Bytes` or a `Vec<u8>` made from the payload: these hold nothing of
/// the source. A source bounds what it lends, so that keeping costs memory up to that bound, never more.
pub struct Payload(Repr);

enum Repr {
    Own(Bytes),
    Lent { lender: Arc<dyn Lender>, place: usize },
}

/// Buffers of a source that payloads refer to. Dropped with the last of these.
pub trait Lender: Send + Sync + 'static {
    /// What lies at a place that [`Payload::lent`] was given; always the same.
    fn lend(&self, place: usize) -> &[u8];
}

impl Payload {
    /// Refers to what `lender` has at `place`, a number that means something to the lender alone.
    #[must_use]
    pub fn lent(lender: Arc<dyn Lender>, place: usize) -> Self {
        Self(Repr::Lent { lender, place })
    }

    /// Whether it refers to a buffer of the source.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        matches!(self.0, Repr::Lent { .. })
    }

    /// The same bytes, without anything of the source: copied if they were lent, else shared with this payload.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match &self.0 {
            Repr::Own(bytes) => bytes.clone(),
            Repr::Lent { .. } => Bytes::copy_from_slice(self),
        }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Own(bytes) => bytes,
            Repr::Lent { lender, place } => lender.lend(*place),
        }
    }
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// As [`Payload::to_bytes`].
impl Clone for Payload {
    fn clone(&self) -> Self {
        Self(Repr::Own(self.to_bytes()))
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.escape_ascii())
    }
}

impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Payload {}

impl PartialEq<[u8]> for Payload {
    fn eq(&self, other: &[u8]) -> bool {
        **self == *other
    }
}

impl PartialEq<&[u8]> for Payload {
    fn eq(&self, other: &&[u8]) -> bool {
        **self == **other
    }
}

impl Hash for Payload {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self(Repr::Own(bytes))
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

impl From<Payload> for Bytes {
    fn from(payload: Payload) -> Self {
        match payload.0 {
            Repr::Own(bytes) => bytes,
            Repr::Lent { lender, place } => Self::copy_from_slice(lender.lend(place)),
        }
    }
}

impl From<Payload> for Vec<u8> {
    fn from(payload: Payload) -> Self {
        Bytes::from(payload).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Buffers([&'static [u8]; 2]);

    impl Lender for Buffers {
        fn lend(&self, place: usize) -> &[u8] {
            self.0[place]
        }
    }

    #[test]
    fn what_is_made_from_a_lent_payload_holds_nothing_of_the_source() {
        let lender = Arc::new(Buffers([b"one", b"two"]));
        let payloads: Vec<Payload> =
            [0, 1, 1].map(|place| Payload::lent(Arc::clone(&lender) as _, place)).into();
        assert_eq!(payloads, [b"one", b"two", b"two"].map(|text| Payload::from(text.to_vec())));
        assert!(payloads.iter().all(Payload::is_lent));
        assert_eq!(Arc::strong_count(&lender), 4);
        let clones = payloads.clone();
        let bytes: Vec<Bytes> = payloads.iter().map(Payload::to_bytes).collect();
        let vectors: Vec<Vec<u8>> = payloads.into_iter().map(Vec::from).collect();
        assert_eq!(Arc::strong_count(&lender), 1);
        assert!(!clones.iter().any(Payload::is_lent));
        assert_eq!(
            (&*clones[1], &*bytes[1], &*vectors[1]),
            (&b"two"[..], &b"two"[..], &b"two"[..])
        );
    }

    #[test]
    fn own_payload_is_shared_by_its_clones() {
        let payload = Payload::from(b"value".to_vec());
        assert_eq!(payload.clone().as_ptr(), payload.as_ptr());
        assert_eq!(Bytes::from(payload.clone()).as_ptr(), payload.as_ptr());
        assert_eq!(format!("{payload:?}"), "b\"value\"");
    }
}
