//! Warm handoff: state is loaded and records are read ahead while the present owner still works.
//!
//! | told                  | then                                                                                  |
//! |-----------------------|---------------------------------------------------------------------------------------|
//! | `Prepare`             | the preparer loads; the source is read from the hint on; `Prepared` once both are there |
//! | `Granted`             | acquire as ever; what was read ahead is used if it continues from the resume point    |
//! | acquired              | the handler gets what was loaded; what was not is loaded now                          |
//! | the partition is off  | all of it is dropped                                                                  |
//!
//! There is no grant before the cut-over, so nothing here can register or write.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tenure_model::{NextOffset, Partition, Tick, TopicName};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::buffer::{Buffer, size_of};
use super::fault::panic_text;
use super::link::Link;
use crate::session::Preparing;
use crate::sink::BoxError;
use crate::source::{Fetched, ReadAhead, Record, RecordSource, RecordStream};

/// Longest wait for the sinks, and for the early reading to come to where the partition ended when it began. The present
/// owner works on meanwhile; what is not there by then is done once the partition is owned.
const WARM_MAX: Duration = Duration::from_millis(250);
/// How often it is looked for the end of a partition that brings no records.
const CATCH_UP_PAUSE: Duration = Duration::from_millis(10);

/// What a preparer made, whatever its type.
pub(crate) type Loaded = Box<dyn Any + Send>;

/// Loads what a handler needs.
pub(crate) type Preparer =
    Arc<dyn Fn(Preparation) -> BoxFuture<'static, Result<Loaded, BoxError>> + Send + Sync>;

/// A partition to prepare for.
#[derive(Clone, Debug)]
pub struct Preparation {
    topic: TopicName,
    partition: Partition,
    next_offset: Option<NextOffset>,
    deadline: Option<Tick>,
}

impl Preparation {
    /// For a partition that is owned already.
    pub(super) fn late(topic: TopicName, partition: Partition, resume: NextOffset) -> Self {
        Self { topic, partition, next_offset: Some(resume), deadline: None }
    }

    fn early(preparing: &Preparing) -> Self {
        Self {
            topic: preparing.topic.clone(),
            partition: preparing.partition,
            next_offset: preparing.next_offset,
            deadline: Some(preparing.deadline),
        }
    }

    /// Name of the topic.
    #[must_use]
    pub const fn topic(&self) -> &TopicName {
        &self.topic
    }

    /// The partition.
    #[must_use]
    pub const fn partition(&self) -> Partition {
        self.partition
    }

    /// Whether another still owns the partition and writes: what is loaded now is a hint, to be caught up to
    /// [`Owned::resume`](super::Owned::resume) before it is used. If not, the resume point is [`Self::next_offset`].
    #[must_use]
    pub const fn is_early(&self) -> bool {
        self.deadline.is_some()
    }

    /// Where the owner reads now, if that is known; where reading starts, if the partition is owned already.
    #[must_use]
    pub const fn next_offset(&self) -> Option<NextOffset> {
        self.next_offset
    }

    /// When the move goes on without the preparation, on the clock of leases; nothing if the partition is owned
    /// already. A preparer that takes longer is still waited for, but the partition is nobody's meanwhile.
    #[must_use]
    pub const fn deadline(&self) -> Option<Tick> {
        self.deadline
    }
}

/// Partitions that are prepared for.
#[derive(Default)]
pub(crate) struct Warm {
    preparer: Option<Preparer>,
    early: Mutex<BTreeMap<Partition, Early>>,
}

impl fmt::Debug for Warm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Warm").field("early", &self.early().len()).finish_non_exhaustive()
    }
}

/// One partition, before it is owned.
pub(super) struct Early {
    pub(super) state: Task<Result<Loaded, String>>,
    pub(super) ahead: ReadEarly,
    /// Says `Prepared`; the grant ends it.
    _announce: Task<()>,
}

/// A task that ends with its owner.
pub(super) struct Task<T>(JoinHandle<T>);

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Task<Result<Loaded, String>> {
    /// Waits for what is loaded.
    pub(super) async fn loaded(mut self) -> Result<Loaded, String> {
        (&mut self.0).await.unwrap_or_else(|_cancelled| Err("cancelled".to_owned()))
    }
}

impl Warm {
    pub(crate) fn new(preparer: Preparer) -> Self {
        Self { preparer: Some(preparer), early: Mutex::default() }
    }

    pub(super) fn preparer(&self) -> Option<&Preparer> {
        self.preparer.as_ref()
    }

    fn early(&self) -> MutexGuard<'_, BTreeMap<Partition, Early>> {
        self.early.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to prepare; `sinks` makes the sinks ready.
    pub(super) fn begin(
        &self,
        preparing: &Preparing,
        source: &Arc<dyn RecordSource>,
        read_ahead: ReadAhead,
        sinks: BoxFuture<'static, ()>,
        link: &Arc<dyn Link>,
    ) {
        let partition = preparing.partition;
        let Some(preparer) = self.preparer.clone() else {
            return link.prepared(partition, Some("the consumer prepares nothing".to_owned()));
        };
        let (preparation, link) = (Preparation::early(preparing), Arc::clone(link));
        let (ahead, caught_up) = ReadEarly::begin(preparing, Arc::clone(source), read_ahead);
        let (tell, told) = oneshot::channel();
        let state = tokio::spawn(async move {
            let loaded = load(&preparer, preparation).await;
            // Nobody listens any more once the grant has come.
            let _listens = tell.send(loaded.as_ref().err().cloned());
            loaded
        });
        let announce = tokio::spawn(async move {
            // The end of the reading, of whatever kind, ends the wait for it.
            let warm = tokio::time::timeout(WARM_MAX, futures::future::join(caught_up, sinks));
            if let (Ok(error), _warm) = tokio::join!(told, warm) {
                link.prepared(partition, error);
            }
        });
        let announce = Task(announce);
        self.early().insert(partition, Early { state: Task(state), ahead, _announce: announce });
    }

    /// The partition does not come; answers whether it was prepared for.
    pub(super) fn call_off(&self, partition: Partition) -> bool {
        self.early().remove(&partition).is_some()
    }

    /// The partition has come.
    pub(super) fn take(&self, partition: Partition) -> Option<Early> {
        self.early().remove(&partition)
    }

    pub(super) fn call_off_all(&self) {
        self.early().clear();
    }
}

/// Runs a preparer; a panic is an error like another.
pub(super) async fn load(preparer: &Preparer, preparation: Preparation) -> Result<Loaded, String> {
    // The call itself is inside, so that its panic is contained too.
    let load = AssertUnwindSafe(async { preparer(preparation).await }).catch_unwind();
    match load.await {
        Ok(Ok(loaded)) => Ok(loaded),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => Err(panic_text(&*panic)),
    }
}

/// Records of a partition that another still owns: the newest that fit the limits, in order and without a gap.
pub(super) struct ReadEarly {
    task: Task<Option<Ahead>>,
    stop: Option<oneshot::Sender<()>>,
}

/// What was read ahead.
pub(super) struct Ahead {
    /// Everything from here on up to `next` that exists was read.
    from: NextOffset,
    next: NextOffset,
    records: VecDeque<Record>,
    bytes: usize,
    /// There is no record between the last one and here.
    passed: Option<NextOffset>,
    stream: RecordStream,
}

impl ReadEarly {
    /// Begins to read; the receiver is told once it has come to where the partition ended then, and learns of the end of
    /// the reading.
    fn begin(
        preparing: &Preparing,
        source: Arc<dyn RecordSource>,
        limits: ReadAhead,
    ) -> (Self, oneshot::Receiver<()>) {
        let (stop, stopped) = oneshot::channel();
        let (tell, caught_up) = oneshot::channel();
        let (topic, partition) = (preparing.topic.clone(), preparing.partition);
        let from = preparing.next_offset;
        let read = async move {
            let from = from?;
            // What cannot be read early is read once it is owned, and fails there with a name.
            let stream = source.open(&topic, partition, from, limits).await.ok()?;
            let catching_up = CatchingUp { source, partition, until: None, tell: Some(tell) };
            let mut ahead = Ahead {
                from,
                next: from,
                records: VecDeque::new(),
                bytes: 0,
                passed: None,
                stream,
            };
            ahead.fill(limits, stopped, catching_up).await.then_some(ahead)
        };
        (Self { task: Task(tokio::spawn(read)), stop: Some(stop) }, caught_up)
    }

    /// Ends the early reading; answers what continues from `resume`, or nothing: then the partition is to be opened
    /// anew, after it was closed.
    pub(super) async fn continue_from(
        mut self,
        resume: NextOffset,
    ) -> Option<(Buffer, RecordStream)> {
        // Gone already when the reading failed.
        let _told = self.stop.take()?.send(());
        let mut ahead = (&mut self.task.0).await.ok()??;
        if ahead.from > resume {
            return None;
        }
        ahead.records.retain(|record| record.offset >= resume);
        let mut buffer = Buffer::default();
        buffer.push(ahead.records.into());
        if let Some(next) = ahead.passed {
            buffer.pass(next);
        }
        Some((buffer, ahead.stream))
    }
}

impl Ahead {
    /// Reads until it is stopped; false when the stream ended first.
    async fn fill(
        &mut self,
        limits: ReadAhead,
        mut stopped: oneshot::Receiver<()>,
        mut catching_up: CatchingUp,
    ) -> bool {
        loop {
            tokio::select! {
                biased;
                // A sender that was dropped aborts the task anyway.
                _stopped = &mut stopped => return true,
                fetched = self.stream.recv() => match fetched {
                    Some(Fetched::Passed(next)) => {
                        self.passed = Some(next);
                        self.next = next;
                        catching_up.look(next, false);
                    }
                    Some(fetched) => match fetched.into_records() {
                        Ok(records) => {
                            self.push(records, limits);
                            catching_up.look(self.next, true);
                        }
                        Err(_) => return false,
                    },
                    None => return false,
                },
                () = tokio::time::sleep(CATCH_UP_PAUSE), if catching_up.tell.is_some() => {
                    catching_up.look(self.next, false);
                }
            }
        }
    }

    fn push(&mut self, records: Vec<Record>, limits: ReadAhead) {
        self.bytes += records.iter().map(size_of).sum::<usize>();
        self.next = records.last().map_or(self.next, Record::next);
        self.records.extend(records);
        self.passed = None;
        while self.records.len() > limits.records || self.bytes > limits.bytes {
            let Some(oldest) = self.records.pop_front() else { break };
            self.bytes -= size_of(&oldest);
            self.from = oldest.next();
        }
    }
}

/// The early reading until it has come to where the partition ended when that was first known.
struct CatchingUp {
    source: Arc<dyn RecordSource>,
    partition: Partition,
    until: Option<NextOffset>,
    /// Taken once it is told.
    tell: Option<oneshot::Sender<()>>,
}

impl CatchingUp {
    /// Looks whether it has caught up; at a source that does not tell where a partition ends, once it has brought records.
    fn look(&mut self, next: NextOffset, has_records: bool) {
        self.until = self.until.or_else(|| self.source.end_offset(self.partition));
        if self.until.map_or(has_records, |until| until <= next)
            && let Some(tell) = self.tell.take()
        {
            // Whoever waited may have given up.
            let _waits = tell.send(());
        }
    }
}
