//! The parts of librdkafka's C interface that the safe wrapper does not reach. All unsafe code of the project.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

#[cfg(test)]
use rdkafka::TopicPartitionList;
use rdkafka::bindings as rd;
use rdkafka::client::{Client, ClientContext};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::RDKafkaErrorCode;

type Code = rd::rd_kafka_resp_err_t;

/// Ends the wait of whoever reads the current fan-in queue.
#[derive(Default)]
pub(crate) struct Waker(Mutex<Option<QueuePointer>>);

#[derive(Clone, Copy, PartialEq, Eq)]
struct QueuePointer(*mut rd::rd_kafka_queue_t);

// SAFETY: librdkafka's queues are locked inside and may be used from any thread.
unsafe impl Send for QueuePointer {}

impl Waker {
    /// Wakes the reader now, or at its next wait. Does nothing while there is no queue.
    pub(crate) fn wake(&self) {
        let slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(QueuePointer(queue)) = *slot {
            // SAFETY: the pointer is in the slot only while its FanIn lives, and the lock keeps it there.
            unsafe { rd::rd_kafka_queue_yield(queue) };
        }
    }
}

/// One queue for the records of all partitions, apart from the client's events. Must be dropped before its client.
pub(crate) struct FanIn {
    queue: QueuePointer,
    waker: Arc<Waker>,
}

impl FanIn {
    pub(crate) fn new<C: ClientContext>(client: &Client<C>, waker: &Arc<Waker>) -> Self {
        // SAFETY: the client is alive; a new queue is never null.
        let queue = QueuePointer(unsafe { rd::rd_kafka_queue_new(client.native_ptr()) });
        *waker.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(queue);
        Self { queue, waker: Arc::clone(waker) }
    }

    /// Takes up to `limit` messages into `taken`, which it clears: waits up to `wait` for the first one and not at all
    /// for the others, because the batch call alone waits until the batch is full.
    pub(crate) fn take(&self, wait: Duration, limit: usize, taken: &mut Vec<Message>) {
        let QueuePointer(queue) = self.queue;
        let wait_ms = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX);
        taken.clear();
        // SAFETY: the queue lives as long as self; a message that is not null is ours to destroy.
        let first = unsafe { rd::rd_kafka_consume_queue(queue, wait_ms) };
        if first.is_null() {
            return;
        }
        taken.push(Message(first));
        let room = limit.saturating_sub(1);
        taken.reserve(room);
        // SAFETY: a `Message` is one pointer, and there is room for as many as are named; the call fills the first
        // `count` with messages that are ours to destroy, and nothing else.
        unsafe {
            let slots = taken.as_mut_ptr().add(taken.len()).cast::<*mut rd::rd_kafka_message_t>();
            let count = rd::rd_kafka_consume_batch_queue(queue, 0, slots, room);
            taken.set_len(taken.len() + usize::try_from(count).unwrap_or(0));
        }
    }
}

impl Drop for FanIn {
    fn drop(&mut self) {
        let mut slot = self.waker.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *slot == Some(self.queue) {
            *slot = None;
        }
        drop(slot);
        // SAFETY: made by this value, destroyed once, and no longer in the waker.
        unsafe { rd::rd_kafka_queue_destroy(self.queue.0) };
    }
}

/// Queue of one partition, led into the fan-in. Kept while the partition is open: without it the partition is mute.
pub(crate) struct PartitionQueue(QueuePointer);

impl PartitionQueue {
    pub(crate) fn new<C: ClientContext>(
        client: &Client<C>,
        topic: &str,
        index: i32,
    ) -> Option<Self> {
        let topic = CString::new(topic).ok()?;
        // SAFETY: client and text are alive during the call; a queue that is not null is ours to destroy.
        let queue =
            unsafe { rd::rd_kafka_queue_get_partition(client.native_ptr(), topic.as_ptr(), index) };
        (!queue.is_null()).then_some(Self(QueuePointer(queue)))
    }

    /// Leads the partition's records into `fan_in`, those that wait in the queue as well, in order.
    pub(crate) fn lead(&self, fan_in: &FanIn) {
        // SAFETY: both queues are alive.
        unsafe { rd::rd_kafka_queue_forward(self.0.0, fan_in.queue.0) };
    }

    /// Leads the partition's records to the client's own queue.
    #[cfg(test)]
    pub(crate) fn mislead<C: ClientContext>(&self, client: &Client<C>) {
        // SAFETY: client and queue are alive; the reference to the client's queue is given back.
        unsafe {
            let events = rd::rd_kafka_queue_get_consumer(client.native_ptr());
            rd::rd_kafka_queue_forward(self.0.0, events);
            rd::rd_kafka_queue_destroy(events);
        }
    }

    /// Keeps what is fetched from now on in this queue, until it is led again.
    pub(crate) fn keep(&self) {
        // SAFETY: the queue is alive; null ends the forwarding.
        unsafe { rd::rd_kafka_queue_forward(self.0.0, ptr::null_mut()) };
    }
}

impl Drop for PartitionQueue {
    fn drop(&mut self) {
        // SAFETY: made by this value and destroyed once.
        unsafe { rd::rd_kafka_queue_destroy(self.0.0) };
    }
}

/// A topic that the client keeps up to date. Must be dropped before its client.
pub(crate) struct TopicHandle(*mut rd::rd_kafka_topic_t);

// SAFETY: librdkafka's topics are counted and locked inside and may be let go from any thread.
unsafe impl Send for TopicHandle {}

impl TopicHandle {
    /// Asks for the topic's leaders at once, without waiting for the answer.
    pub(crate) fn new<C: ClientContext>(client: &Client<C>, topic: &str) -> Option<Self> {
        let topic = CString::new(topic).ok()?;
        // SAFETY: client and text are alive during the call; without settings it takes those of the client.
        let topic =
            unsafe { rd::rd_kafka_topic_new(client.native_ptr(), topic.as_ptr(), ptr::null_mut()) };
        (!topic.is_null()).then_some(Self(topic))
    }
}

impl Drop for TopicHandle {
    fn drop(&mut self) {
        // SAFETY: made by this value and let go once.
        unsafe { rd::rd_kafka_topic_destroy(self.0) };
    }
}

/// A fetched record, or an error of one partition.
#[repr(transparent)]
pub(crate) struct Message(*mut rd::rd_kafka_message_t);

// SAFETY: a message is a piece of memory with counts that librdkafka changes atomically. Whoever has it alone may read it
// and let go of it on any thread, while its client lives; `client::Fetch` sees to the latter.
unsafe impl Send for Message {}
// SAFETY: what is read through a shared reference was written before the message was handed out and changes no more.
// Headers are taken apart at the first look, hence `&mut` there.
unsafe impl Sync for Message {}

/// Names the leader epoch of a position in `list`, so that the client asks the broker whether its log still has what
/// was read before it.
#[cfg(test)]
pub(crate) fn set_leader_epoch(list: &TopicPartitionList, topic: &str, index: i32, epoch: i32) {
    let Ok(topic) = CString::new(topic) else { return };
    // SAFETY: list and text are alive during the calls; an element that is not null is of the list.
    unsafe {
        let found = rd::rd_kafka_topic_partition_list_find(list.ptr(), topic.as_ptr(), index);
        if !found.is_null() {
            rd::rd_kafka_topic_partition_set_leader_epoch(found, epoch);
        }
    }
}

impl Message {
    fn raw(&self) -> &rd::rd_kafka_message_t {
        // SAFETY: never null (FanIn::take), and alive until drop.
        unsafe { &*self.0 }
    }

    /// The error, when this is one.
    pub(crate) fn error(&self) -> Option<RDKafkaErrorCode> {
        let code = self.raw().err;
        (code != Code::RD_KAFKA_RESP_ERR_NO_ERROR).then(|| code.into())
    }

    /// Whether this is an error.
    pub(crate) fn is_error(&self) -> bool {
        self.raw().err != Code::RD_KAFKA_RESP_ERR_NO_ERROR
    }

    /// What an error message says in words.
    pub(crate) fn reason(&self) -> String {
        // SAFETY: the text lives as long as the message; null is tested.
        unsafe { text(rd::rd_kafka_message_errstr(self.0)) }
    }

    /// Name of the topic; absent in an error of the whole client.
    pub(crate) fn topic(&self) -> Option<&str> {
        let topic = self.raw().rkt;
        if topic.is_null() {
            return None;
        }
        // SAFETY: the message keeps its topic, and the topic its name, alive.
        unsafe { CStr::from_ptr(rd::rd_kafka_topic_name(topic)) }.to_str().ok()
    }

    /// Tells topics apart without reading the name. Valid only among messages that are alive together.
    pub(crate) fn topic_mark(&self) -> usize {
        self.raw().rkt as usize
    }

    pub(crate) fn index(&self) -> i32 {
        self.raw().partition
    }

    pub(crate) fn offset(&self) -> i64 {
        self.raw().offset
    }

    pub(crate) fn key(&self) -> Option<&[u8]> {
        // SAFETY: pointer and length come from the message, which outlives the slice.
        unsafe { slice(self.raw().key, self.raw().key_len) }
    }

    pub(crate) fn value(&self) -> Option<&[u8]> {
        // SAFETY: as above.
        unsafe { slice(self.raw().payload, self.raw().len) }
    }

    /// Whether this error says that the log was cut back. The client has one code for all offsets that it would reset,
    /// and ends the reason with the text of the cause.
    pub(crate) fn is_truncation(&self) -> bool {
        // SAFETY: the client's texts live as long as the process.
        let cause = unsafe { text(rd::rd_kafka_err2str(Code::RD_KAFKA_RESP_ERR__LOG_TRUNCATION)) };
        self.reason().contains(&cause)
    }

    /// Bytes of key and value.
    pub(crate) fn size_bytes(&self) -> usize {
        let raw = self.raw();
        raw.key_len + raw.len
    }

    /// Milliseconds since 1970.
    pub(crate) fn timestamp_ms(&self) -> Option<i64> {
        let mut kind = rd::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE;
        // SAFETY: the message is alive, `kind` is written only.
        let timestamp_ms = unsafe { rd::rd_kafka_message_timestamp(self.0, &raw mut kind) };
        (kind != rd::rd_kafka_timestamp_type_t::RD_KAFKA_TIMESTAMP_NOT_AVAILABLE
            && timestamp_ms >= 0)
            .then_some(timestamp_ms)
    }

    /// Calls `each` with the name and value of every header, in order.
    pub(crate) fn headers(&mut self, mut each: impl FnMut(&str, Option<&[u8]>)) {
        let mut headers = ptr::null_mut();
        // SAFETY: the message is alive and keeps its headers.
        let code = unsafe { rd::rd_kafka_message_headers(self.0, &raw mut headers) };
        if code != Code::RD_KAFKA_RESP_ERR_NO_ERROR || headers.is_null() {
            return;
        }
        for position in 0.. {
            let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0_usize);
            // SAFETY: the headers are alive; the call writes all three on success and ends the loop otherwise.
            let code = unsafe {
                rd::rd_kafka_header_get_all(
                    headers,
                    position,
                    &raw mut name,
                    &raw mut value,
                    &raw mut size,
                )
            };
            if code != Code::RD_KAFKA_RESP_ERR_NO_ERROR {
                return;
            }
            // SAFETY: name and value live as long as the headers.
            let (name, value) = unsafe { (CStr::from_ptr(name), slice(value.cast_mut(), size)) };
            each(&name.to_string_lossy(), value);
        }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: ours (FanIn::take) and destroyed once.
        unsafe { rd::rd_kafka_message_destroy(self.0) };
    }
}

/// # Safety
///
/// `start` is null or points to `length` bytes that live for `'a`.
unsafe fn slice<'a>(start: *mut c_void, length: usize) -> Option<&'a [u8]> {
    // SAFETY: by the contract.
    (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start.cast::<u8>(), length) })
}

/// # Safety
///
/// `start` is null or points to a text that ends with a zero.
unsafe fn text(start: *const c_char) -> String {
    if start.is_null() {
        return String::new();
    }
    // SAFETY: by the contract.
    unsafe { CStr::from_ptr(start) }.to_string_lossy().into_owned()
}

/// High watermark of a partition as the last fetch answered it; nothing before the first answer. Asks no broker.
pub(crate) fn cached_high<C: ClientContext>(
    client: &Client<C>,
    topic: &str,
    index: i32,
) -> Option<i64> {
    let topic = CString::new(topic).ok()?;
    let (mut low, mut high) = (-1_i64, -1_i64);
    // SAFETY: client and text are alive, the two numbers are written only.
    let code = unsafe {
        rd::rd_kafka_get_watermark_offsets(
            client.native_ptr(),
            topic.as_ptr(),
            index,
            &raw mut low,
            &raw mut high,
        )
    };
    (code == Code::RD_KAFKA_RESP_ERR_NO_ERROR && high >= 0).then_some(high)
}

/// What the broker says of one topic.
pub(crate) struct Described {
    pub(crate) name: String,
    /// Id (0 when the broker has none) and count of partitions.
    pub(crate) outcome: Result<(u128, usize), RDKafkaErrorCode>,
}

/// Asks the cluster for ids and partition counts. Blocks up to about `timeout`. Names must differ.
pub(crate) fn describe_topics<C: ClientContext>(
    client: &Client<C>,
    names: &[&str],
    timeout: Duration,
) -> Result<Vec<Described>, (RDKafkaErrorCode, String)> {
    let timeout_ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    let texts: Vec<CString> = names.iter().filter_map(|name| CString::new(*name).ok()).collect();
    let mut pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
    let mut message: [c_char; 256] = [0; 256];
    // SAFETY: client, texts and array are alive during the calls; librdkafka copies what it keeps. Queue, collection,
    // options and event are ours, and each is destroyed once. The answer is read before its event is destroyed.
    unsafe {
        let rk = client.native_ptr();
        let queue = rd::rd_kafka_queue_new(rk);
        let topics =
            rd::rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len());
        let options = rd::rd_kafka_AdminOptions_new(
            rk,
            rd::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS,
        );
        let set = rd::rd_kafka_AdminOptions_set_request_timeout(
            options,
            timeout_ms,
            message.as_mut_ptr(),
            message.len(),
        );
        if set == Code::RD_KAFKA_RESP_ERR_NO_ERROR {
            rd::rd_kafka_DescribeTopics(rk, topics, options, queue);
        }
        rd::rd_kafka_AdminOptions_destroy(options);
        rd::rd_kafka_TopicCollection_destroy(topics);
        let event = if set == Code::RD_KAFKA_RESP_ERR_NO_ERROR {
            rd::rd_kafka_queue_poll(queue, timeout_ms.saturating_add(500))
        } else {
            ptr::null_mut()
        };
        let answer = if set != Code::RD_KAFKA_RESP_ERR_NO_ERROR {
            Err((set.into(), text(message.as_ptr())))
        } else if event.is_null() {
            Err((RDKafkaErrorCode::OperationTimedOut, "no answer in time".into()))
        } else {
            read_described(event)
        };
        if !event.is_null() {
            rd::rd_kafka_event_destroy(event);
        }
        rd::rd_kafka_queue_destroy(queue);
        answer
    }
}

/// # Safety
///
/// `event` is alive.
unsafe fn read_described(
    event: *mut rd::rd_kafka_event_t,
) -> Result<Vec<Described>, (RDKafkaErrorCode, String)> {
    // SAFETY: everything read here belongs to the event, which the caller keeps alive; nulls are tested.
    unsafe {
        let code = rd::rd_kafka_event_error(event);
        if code != Code::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Err((code.into(), text(rd::rd_kafka_event_error_string(event))));
        }
        let result = rd::rd_kafka_event_DescribeTopics_result(event);
        if result.is_null() {
            return Err((RDKafkaErrorCode::InvalidType, "the answer is of another kind".into()));
        }
        let mut count = 0;
        let topics = rd::rd_kafka_DescribeTopics_result_topics(result, &raw mut count);
        let read = |position: usize| {
            let topic = *topics.add(position);
            let error = rd::rd_kafka_TopicDescription_error(topic);
            let code = if error.is_null() {
                Code::RD_KAFKA_RESP_ERR_NO_ERROR
            } else {
                rd::rd_kafka_error_code(error)
            };
            let outcome = if code == Code::RD_KAFKA_RESP_ERR_NO_ERROR {
                let mut partition_count = 0;
                rd::rd_kafka_TopicDescription_partitions(topic, &raw mut partition_count);
                Ok((uuid_bits(rd::rd_kafka_TopicDescription_topic_id(topic)), partition_count))
            } else {
                Err(code.into())
            };
            Described { name: text(rd::rd_kafka_TopicDescription_name(topic)), outcome }
        };
        Ok((0..count).map(read).collect())
    }
}

/// # Safety
///
/// `uuid` is null or alive.
unsafe fn uuid_bits(uuid: *const rd::rd_kafka_Uuid_t) -> u128 {
    if uuid.is_null() {
        return 0;
    }
    // SAFETY: by the contract.
    let (most, least) = unsafe {
        (
            rd::rd_kafka_Uuid_most_significant_bits(uuid),
            rd::rd_kafka_Uuid_least_significant_bits(uuid),
        )
    };
    (u128::from(most.cast_unsigned()) << 64) | u128::from(least.cast_unsigned())
}

/// A mock cluster that may be used from any thread.
pub(crate) struct SharedMock(pub(crate) MockCluster<'static, DefaultProducerContext>);

// SAFETY: each call on a mock cluster is handed to the cluster's own thread or takes its lock; the list of brokers is
// fixed when it is made; it may be destroyed from any thread.
unsafe impl Send for SharedMock {}
// SAFETY: as above.
unsafe impl Sync for SharedMock {}

/// Makes the client fail for good, as a broker's fatal answer would.
#[cfg(test)]
pub(crate) fn break_client<C: ClientContext>(client: &Client<C>) {
    // SAFETY: client and text are alive during the call.
    unsafe {
        rd::rd_kafka_test_fatal_error(
            client.native_ptr(),
            Code::RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID,
            c"injected".as_ptr(),
        )
    };
}
