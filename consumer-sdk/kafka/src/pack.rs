//! Records on their way from the thread that fetches to those that read.
//!
//! Whoever reads a stream makes the records, which refer to librdkafka's messages as long as [`Loans`] allows, else are
//! copies. Messages have two duties: none may outlive its client's handle, which [`Fetch`] sees to, and each keeps the
//! whole answer alive in which it came, however many other records that brought. [`Unread`] bounds the latter for what
//! nobody has read yet, [`Loans`] for what readers have.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenure_model::{Partition, TopicName};
use tenure_sdk::source::{Packed, Record};

use crate::client::Fetch;
use crate::convert::{copy, lend};
use crate::outlet::Load;

/// How much may have been fetched since a message that nobody has read; then a copy takes its place.
///
/// Bounds what slow readers keep alive of answers whose other records are long gone.
const UNREAD_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// How much may lie, in what was fetched, between the oldest message that a reader has and the newest one; beyond that
/// readers get copies, until the oldest is gone.
///
/// Bounds what is kept alive by records that are kept, or worked on for long.
const LENT_BYTES_MAX: u64 = 64 * 1024 * 1024;

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
    /// How much was fetched up to here.
    at: u64,
    loans: Arc<Loans>,
    contents: Mutex<Contents>,
}

enum Contents {
    /// Still librdkafka's.
    Fetched(Fetch),
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
            Contents::Fetched(fetch) => match Loans::take_out(&self.loans, self.at) {
                Some(loan) => lend(&self.origin, fetch, loan),
                None => copy(&self.origin, self.load, fetch.messages),
            },
            Contents::Made(records) => records,
            Contents::Gone => Vec::new(),
        }
    }

    /// Copies the records here if nobody has read them yet.
    fn settle(&self) {
        let mut contents = self.contents();
        if let Contents::Fetched(fetch) = &mut *contents {
            let messages = mem::take(&mut fetch.messages);
            *contents = Contents::Made(copy(&self.origin, self.load, messages));
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

/// Where in all that was fetched the messages lie that readers have.
#[derive(Default)]
pub(crate) struct Loans(Mutex<BTreeSet<u64>>);

/// Messages of one pack, in a reader's hands.
pub(crate) struct Loan {
    at: u64,
    loans: Arc<Loans>,
}

impl Loans {
    fn places(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing while something is out that is too far away.
    fn take_out(this: &Arc<Self>, at: u64) -> Option<Loan> {
        let mut places = this.places();
        let is_far =
            |other: Option<&u64>| other.is_some_and(|other| at.abs_diff(*other) > LENT_BYTES_MAX);
        if is_far(places.first()) || is_far(places.last()) {
            return None;
        }
        places.insert(at);
        drop(places);
        Some(Loan { at, loans: Arc::clone(this) })
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.loans.places().remove(&self.at);
    }
}

/// Packs that may hold messages, oldest first. Dropped, it leaves none.
#[derive(Default)]
pub(crate) struct Unread {
    packs: VecDeque<Arc<Shared>>,
    fetched_bytes: u64,
    loans: Arc<Loans>,
}

impl Unread {
    /// Packs messages that are not empty, with rising offsets; `load` is what they amount to.
    pub(crate) fn pack(&mut self, origin: Origin, load: Load, fetch: Fetch) -> Pack {
        let size_bytes = load.bytes + load.records * MESSAGE_BYTES;
        self.fetched_bytes += u64::try_from(size_bytes).unwrap_or(u64::MAX);
        let contents = Mutex::new(Contents::Fetched(fetch));
        let (at, loans) = (self.fetched_bytes, Arc::clone(&self.loans));
        let shared = Arc::new(Shared { origin, load, at, loans, contents });
        self.packs.push_back(Arc::clone(&shared));
        Pack(shared)
    }

    /// Forgets what was read, and copies what has waited for too long.
    pub(crate) fn prune(&mut self) {
        while let Some(pack) = self.packs.front() {
            if self.fetched_bytes - pack.at > UNREAD_BYTES_MAX {
                pack.settle();
            } else if !pack.is_gone() {
                return;
            }
            self.packs.pop_front();
        }
    }

    /// Leaves no message, so that none keeps a client from its end.
    pub(crate) fn settle_all(&mut self) {
        for pack in self.packs.drain(..) {
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
        let contents = Mutex::new(Contents::Made(records));
        Self(Arc::new(Shared { origin, load, at: 0, loans: Arc::default(), contents }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tenure_model::{NextOffset, PartitionIndex, TopicId};
    use tenure_sdk::source::{Payload, ReadAhead};

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
        packs_apart(count, each, 0)
    }

    /// The same, as if `apart` bytes had been fetched before each pack.
    fn packs_apart(
        count: usize,
        each: usize,
        apart: u64,
    ) -> (Vec<Pack>, Unread, Client, MockKafka) {
        let kafka = MockKafka::start(1).unwrap();
        let topic = TopicName::new("packed").unwrap();
        kafka.create_topic(topic.as_str(), 1).unwrap();
        let index = PartitionIndex::new(0).unwrap();
        let record = |number| {
            let value = format!("{number:0SIZE_BYTES$}");
            NewRecord::new(index, &value[..3], &value)
        };
        let mut producer = Producer::new(&kafka.bootstrap()).unwrap();
        producer.produce(&topic, (0..count).map(record)).unwrap();
        let settings = KafkaSettings::new(kafka.bootstrap());
        let mut client = Client::new(&settings, &Arc::new(Waker::default())).unwrap();
        let partition = Partition { topic_id: TopicId::of_name(&topic), index };
        let (ahead, now) = (ReadAhead::default(), Instant::now());
        let (part, _stream) = Part::new(topic.clone(), partition, NextOffset::ZERO, ahead, now);
        assert!(client.assign(&[&part]).is_empty());
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
            unread.fetched_bytes += apart;
            let messages = mem::replace(&mut fetched, rest);
            packs.push(unread.pack(origin, load, Fetch::new(messages, client.hold())));
        }
        (packs, unread, client, kafka)
    }

    fn is_fetched(pack: &Pack) -> bool {
        matches!(*pack.0.contents(), Contents::Fetched(_))
    }

    fn read(pack: Pack, first: usize, count: usize) -> Vec<Record> {
        let records = Box::new(pack).unpack();
        assert_eq!(records.len(), count);
        check(&records, first);
        records
    }

    fn check(records: &[Record], first: usize) {
        for (number, record) in (first..).zip(records) {
            let want = format!("{number:0SIZE_BYTES$}");
            assert_eq!(record.value.as_deref(), Some(want.as_bytes()));
            assert_eq!(record.key.as_deref(), Some(&want.as_bytes()[..3]));
        }
    }

    fn is_lent(record: &Record) -> bool {
        let payloads = [&record.key, &record.value];
        let lent = payloads.map(|payload| payload.as_ref().is_some_and(Payload::is_lent));
        assert_eq!(lent[0], lent[1]);
        lent[0]
    }

    #[test]
    fn pack_that_nobody_reads_is_copied_once_much_more_was_fetched() {
        let (mut packs, mut unread, _client, _kafka) = packs(20, 10);
        unread.prune();
        assert!(packs.iter().all(is_fetched), "nothing was fetched since");
        unread.fetched_bytes = unread.packs[0].at + UNREAD_BYTES_MAX + 1;
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
        drop(read(packs.remove(0), 0, 10));
        drop(unread);
        assert!(!packs.iter().any(is_fetched));
        let consumer = client.consumer_weak();
        drop(client);
        assert_eq!(consumer.strong_count(), 0, "nothing was left to wait for");
        read(packs.remove(0), 10, 10);
        read(packs.remove(0), 20, 10);
    }

    #[test]
    fn client_ends_only_once_the_last_record_that_was_read_is_gone() {
        let (mut packs, unread, client, _kafka) = packs(30, 10);
        let consumer = client.consumer_weak();
        let kept: Vec<Vec<Record>> = [0, 10, 20].map(|at| read(packs.remove(0), at, 10)).into();
        assert!(kept.iter().flatten().all(is_lent));
        let (tell, told) = std::sync::mpsc::channel();
        let ended = std::thread::spawn(move || {
            drop((unread, client));
            tell.send(()).expect("the test waits");
        });
        told.recv_timeout(Duration::from_secs(5)).expect("it waits for nobody");
        ended.join().expect("it ends");
        let mut kept = kept.into_iter();
        let last = kept.next_back().expect("three packs");
        drop(kept);
        // Much longer than the look at a client that readers keep alive takes.
        std::thread::sleep(Duration::from_millis(500));
        assert!(consumer.strong_count() > 0, "it ended while a message is left");
        check(&last, 20);
        drop(last);
        let limit = Instant::now() + Duration::from_secs(20);
        while consumer.strong_count() > 0 {
            assert!(Instant::now() < limit, "the client does not end");
            std::thread::yield_now();
        }
    }

    #[test]
    fn kept_record_makes_later_ones_copies_until_it_is_gone_and_its_clone_holds_nothing() {
        let (mut packs, unread, client, _kafka) = packs_apart(50, 10, LENT_BYTES_MAX / 2 + 1);
        let mut kept = read(packs.remove(0), 0, 10);
        kept.truncate(1);
        assert!(read(packs.remove(0), 10, 10).iter().all(is_lent), "not far away yet");
        assert!(!read(packs.remove(0), 20, 10).iter().any(is_lent));
        let clone = kept.clone();
        assert!(is_lent(&kept[0]) && !is_lent(&clone[0]));
        drop(kept);
        let newest = read(packs.remove(1), 40, 10);
        assert!(newest.iter().all(is_lent), "nothing else is out");
        assert!(!read(packs.remove(0), 30, 10).is_empty());
        drop((newest, packs));
        assert!(unread.loans.places().is_empty());
        drop((unread, client));
        check(&clone, 0);
    }
}
