//! Topics and partitions.

use std::fmt;

use crate::id::name;
use crate::limits::TOPIC_PARTITIONS_MAX;

name!(
    /// Name of a topic. Two lives of a topic share the name and differ in [`TopicId`].
    TopicName,
    "topic"
);

/// Identity of one life of a topic.
///
/// Written as Kafka writes it: 22 characters of URL-safe base64 over 16 bytes.
/// A topic that is deleted and created again has a new id and is a new topic.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicId {
    // Halves of the 128 bits: as one number they would have to stand at a multiple of 16 bytes, and a partition, which
    // every look-up has by the thousand, would be a third larger.
    high: u64,
    low: u64,
}

/// The text is not a topic id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("topic id {text:?} is not 22 characters of URL-safe base64")]
pub struct TopicIdError {
    /// What was given (cut to 64 characters).
    pub text: String,
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Value of each byte as a digit of [`BASE64`]; [`NO_DIGIT`] for all others. Every commit and heartbeat names its
/// partitions by ids, so that a search would show.
const DIGITS: [u8; 256] = {
    let mut digits = [NO_DIGIT; 256];
    let mut value = 0;
    while value < BASE64.len() {
        digits[BASE64[value] as usize] = value as u8;
        value += 1;
    }
    digits
};

const NO_DIGIT: u8 = u8::MAX;

impl TopicId {
    /// Makes an id from its 128 bits, most significant first.
    #[must_use]
    pub const fn from_bits(bits: u128) -> Self {
        Self { high: (bits >> 64) as u64, low: bits as u64 }
    }

    /// The id as 128 bits, most significant first.
    #[must_use]
    pub const fn bits(self) -> u128 {
        (self.high as u128) << 64 | self.low as u128
    }

    /// Id for a source that has none of its own, made from the name (FNV-1a, 128 bits).
    ///
    /// Such a source cannot tell two lives of a topic apart.
    #[must_use]
    pub fn of_name(name: &TopicName) -> Self {
        Self::of_text(name.as_str())
    }

    /// Id for something that is no topic and has a name of another form, made as [`TopicId::of_name`] does.
    #[must_use]
    pub fn of_text(text: &str) -> Self {
        const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let hash =
            text.bytes().fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
        Self::from_bits(hash)
    }

    /// Reads an id in Kafka's form.
    ///
    /// # Errors
    ///
    /// [`TopicIdError`] when the text is not 22 characters of URL-safe base64 over 16 bytes.
    pub fn parse(text: &str) -> Result<Self, TopicIdError> {
        let error = || TopicIdError { text: text.chars().take(64).collect() };
        if text.len() != 22 {
            return Err(error());
        }
        let mut bits: u128 = 0;
        for (position, byte) in text.bytes().enumerate() {
            let digit = DIGITS[usize::from(byte)];
            if digit == NO_DIGIT {
                return Err(error());
            }
            let digit = u128::from(digit);
            if position < 21 {
                bits = (bits << 6) | digit;
            } else if digit & 0xf == 0 {
                bits = (bits << 2) | (digit >> 4);
            } else {
                return Err(error());
            }
        }
        Ok(Self::from_bits(bits))
    }
}

impl fmt::Display for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.bits();
        let mut text = [0_u8; 22];
        for (position, slot) in text.iter_mut().enumerate() {
            let digit = if position < 21 {
                (bits >> (128 - 6 * (position + 1))) & 63
            } else {
                (bits & 3) << 4
            };
            *slot = BASE64[digit as usize];
        }
        f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for TopicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Number of a partition within its topic, from 0; at most [`TOPIC_PARTITIONS_MAX`] − 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionIndex(u32);

impl PartitionIndex {
    /// Makes an index, or nothing when it is [`TOPIC_PARTITIONS_MAX`] or above.
    #[must_use]
    pub const fn new(index: u32) -> Option<Self> {
        if index < TOPIC_PARTITIONS_MAX { Some(Self(index)) } else { None }
    }

    /// The plain number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for PartitionIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for PartitionIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// One partition of one life of a topic. The topic's name is looked up where people read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition {
    /// Which life of which topic.
    pub topic_id: TopicId,
    /// Which partition of it.
    pub index: PartitionIndex,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic_id, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_id_reads_back_what_it_prints() {
        for bits in [0, 1, u128::MAX, 0x1234_5678_9abc_def0_1234_5678_9abc_def0] {
            let id = TopicId::from_bits(bits);
            assert_eq!(TopicId::parse(&id.to_string()), Ok(id));
        }
    }

    #[test]
    fn topic_ids_are_ordered_as_numbers() {
        let numbers = [0, 1, u128::from(u64::MAX), 1 << 64, (1 << 64) | 1, u128::MAX];
        let ids = numbers.map(TopicId::from_bits);
        assert!(ids.is_sorted_by(|former, latter| former < latter), "{ids:?}");
        assert_eq!(ids.map(TopicId::bits), numbers);
    }

    #[test]
    fn topic_id_that_kafka_could_not_have_printed_is_refused() {
        for text in
            ["", "short", "MkU3OEVBNTcwNTJENDM2Q!", "MkU3OEVBNTcwNTJENDM2Qh", &"A".repeat(23)]
        {
            assert!(TopicId::parse(text).is_err(), "{text}");
        }
        assert!(TopicId::parse("MkU3OEVBNTcwNTJENDM2Qg").is_ok());
    }

    #[test]
    fn names_made_of_odd_characters_are_refused_with_the_place() {
        assert_eq!(
            TopicName::new("a b").unwrap_err().to_string(),
            "topic has the character ' ' at byte 1: use letters, digits, '.', '_', '-' and ':'"
        );
        assert!(TopicName::new("").is_err());
        assert!(TopicName::new(&"x".repeat(250)).is_err());
        assert!(TopicName::new(&"x".repeat(249)).is_ok());
    }
}
