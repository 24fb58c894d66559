//! Records on their way from the thread that fetches to those that read.
//!
//! Whoever reads a stream makes the records, so that keys and values are copied where they are used next. Until then the
//! messages belong to librdkafka, with two duties: none may outlive its client, whose end waits for it, and each keeps the whole answer alive in
//! which it came, however many other records that brought. [`Unread`] sees to both.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenure_model::{Partition, TopicName};
use tenure_sdk::source::{Packed, Record};

use crate::convert::records_of;
use crate::ffi::Message;
use crate::outlet::Load;

/// How much may have been fetched since a message that is still librdkafka's; then a copy takes its place.
///
/// Bounds what slow readers keep alive of answers whose other records are long gone.
const UNREAD_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Counted for each message beside its key and value: librdkafka's own bookkeeping, about.
const MESSAGE_BYTES: usize = 256;

/// What all records of a pack have in common.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) topic: TopicName,
    pub(crate) partition: Partition,
    pub(crate) with_headers: bool,
}

/// The reader's end of some records of one partition. Never empty.
pub(crate) struct Pack(Arc<Shared>);

/// The contents are taken and let go of under their lock: who has had it knows that no message is left.
struct Shared {
    origin: Origin,
    load: Load,
    contents: Mutex<Contents>,
}

enum Contents {
    /// Still librdkafka's.
    Fetched(Vec<Message>),
    Made(Vec<Record>),
    Gone,
}

impl Shared {
    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Vec<Record> {
        let mut contents = self.contents();
        match mem::replace(&mut *contents, Contents::Gone) {
            Contents::Fetched(messages) => records_of(&self.origin, self.load, messages),
            Contents::Made(records) => records,
            Contents::Gone => Vec::new(),
        }
    }

    /// Makes the records here if nobody has yet.
    fn settle(&self) {
        let mut contents = self.contents();
        if let Contents::Fetched(messages) = &mut *contents {
            let messages = mem::take(messages);
            *contents = Contents::Made(records_of(&self.origin, self.load, messages));
        }
    }

    /// Whether the reader has taken the records, or left.
    fn is_gone(&self) -> bool {
        self.contents.try_lock().is_ok_and(|contents| matches!(*contents, Contents::Gone))
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        let mut contents = self.0.contents();
        // Under the lock: a plain drop would let go of it first.
        *contents = Contents::Gone;
    }
}

impl fmt::Debug for Pack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pack")
            .field("partition", &self.0.origin.partition)
            .field("load", &self.0.load)
            .finish_non_exhaustive()
    }
}

impl Packed for Pack {
    fn unpack(self: Box<Self>) -> Vec<Record> {
        self.0.take()
    }
}

/// Packs that may hold messages, oldest first. Dropped, it leaves none: it must not outlive their client.
#[derive(Default)]
pub(crate) struct Unread {
    packs: VecDeque<(u64, Arc<Shared>)>,
    fetched_bytes: u64,
}

impl Unread {
    /// Packs messages that are not empty, with rising offsets; `load` is what they amount to.
    pub(crate) fn pack(&mut self, origin: Origin, load: Load, messages: Vec<Message>) -> Pack {
        let size_bytes = load.bytes + load.records * MESSAGE_BYTES;
        self.fetched_bytes += u64::try_from(size_bytes).unwrap_or(u64::MAX);
        let contents = Mutex::new(Contents::Fetched(messages));
        let shared = Arc::new(Shared { origin, load, contents });
        self.packs.push_back((self.fetched_bytes, Arc::clone(&shared)));
        Pack(shared)
    }

    /// Forgets what was read, and copies what has waited for too long.
    pub(crate) fn prune(&mut self) {
        while let Some((at, pack)) = self.packs.front() {
            if self.fetched_bytes - at > UNREAD_BYTES_MAX {
                pack.settle();
            } else if !pack.is_gone() {
                return;
            }
            self.packs.pop_front();
        }
    }

    /// Leaves no message: for the end of a client.
    pub(crate) fn settle_all(&mut self) {
        for (_, pack) in self.packs.drain(..) {
            pack.settle();
        }
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        self.settle_all();
    }
}

#[cfg(test)]
impl Pack {
    pub(crate) fn of_records(records: Vec<Record>, load: Load) -> Self {
        let Record { topic, partition, .. } = records.first().expect("a pack is not empty").clone();
        let origin = Origin { topic, partition, with_headers: true };
        Self(Arc::new(Shared { origin, load, contents: Mutex::new(Contents::Made(records)) }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tenure_model::{NextOffset, PartitionIndex, TopicId};
    use tenure_sdk::source::ReadAhead;

    use super::*;
    use crate::client::Client;
    use crate::ffi::Waker;
    use crate::mock::MockKafka;
    use crate::part::Part;
    use crate::producer::{NewRecord, Producer};
    use crate::settings::KafkaSettings;

    const SIZE_BYTES: usize = 10;

    /// Fetches `count` records, packs them by `each`, and says where they are unread; with the client they came from.
    fn packs(count: usize, each: usize) -> (Vec<Pack>, Unread, Client, MockKafka) {
        let kafka = MockKafka::start(1).unwrap();
        let topic = TopicName::new("packed").unwrap();
        kafka.create_topic(topic.as_str(), 1).unwrap();
        let index = PartitionIndex::new(0).unwrap();
        let record = |number| NewRecord::new(index, "", &format!("{number:0SIZE_BYTES$}"));
        let mut producer = Producer::new(&kafka.bootstrap()).unwrap();
        producer.produce(&topic, (0..count).map(record)).unwrap();
        let settings = KafkaSettings::new(kafka.bootstrap());
        let mut client = Client::new(&settings, &Arc::new(Waker::default())).unwrap();
        let partition = Partition { topic_id: TopicId::of_name(&topic), index };
        let (ahead, now) = (ReadAhead::default(), Instant::now());
        let (part, _stream) = Part::new(topic.clone(), partition, NextOffset::ZERO, ahead, now);
        client.assign(&part).unwrap();
        let (mut fetched, mut taken) = (Vec::new(), Vec::new());
        while fetched.len() < count {
            assert!(now.elapsed() < Duration::from_secs(20), "{} of {count}", fetched.len());
            client.take(Duration::from_millis(100), &mut taken);
            fetched.append(&mut taken);
        }
        let mut unread = Unread::default();
        let mut packs = Vec::new();
        while !fetched.is_empty() {
            let rest = fetched.split_off(each.min(fetched.len()));
            let load = Load { records: fetched.len(), bytes: fetched.len() * SIZE_BYTES };
            let origin = Origin { topic: topic.clone(), partition, with_headers: false };
            packs.push(unread.pack(origin, load, std::mem::replace(&mut fetched, rest)));
        }
        (packs, unread, client, kafka)
    }

    fn is_fetched(pack: &Pack) -> bool {
        matches!(*pack.0.contents(), Contents::Fetched(_))
    }

    fn read(pack: Pack, first: usize, count: usize) {
        let records = Box::new(pack).unpack();
        assert_eq!(records.len(), count);
        for (number, record) in (first..).zip(&records) {
            let want = format!("{number:0SIZE_BYTES$}");
            assert_eq!(record.value.as_deref(), Some(want.as_bytes()));
        }
    }

    #[test]
    fn pack_that_nobody_reads_is_copied_once_much_more_was_fetched() {
        let (mut packs, mut unread, _client, _kafka) = packs(20, 10);
        unread.prune();
        assert!(packs.iter().all(is_fetched), "nothing was fetched since");
        unread.fetched_bytes = unread.packs[0].0 + UNREAD_BYTES_MAX + 1;
        unread.prune();
        assert!(!is_fetched(&packs[0]) && is_fetched(&packs[1]));
        read(packs.remove(0), 0, 10);
        read(packs.remove(0), 10, 10);
    }

    #[test]
    fn what_was_read_or_dropped_is_forgotten() {
        let (mut packs, mut unread, _client, _kafka) = packs(30, 10);
        read(packs.remove(0), 0, 10);
        drop(packs.remove(0));
        assert_eq!(unread.packs.len(), 3);
        unread.prune();
        assert_eq!(unread.packs.len(), 1);
        // librdkafka waits for ever for a message that outlives its client.
        drop(unread);
    }

    #[test]
    fn client_may_go_while_its_records_are_unread() {
        let (mut packs, unread, client, _kafka) = packs(30, 10);
        read(packs.remove(0), 0, 10);
        drop(unread);
        assert!(!packs.iter().any(is_fetched));
        drop(client);
        read(packs.remove(0), 10, 10);
        read(packs.remove(0), 20, 10);
    }
}
