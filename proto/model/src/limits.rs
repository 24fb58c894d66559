//! Limits of everything that comes from outside.
//!
//! Each limit is checked where input enters (the conversions of `tenure-proto`) and, where it bounds the
//! replicated state, once more by the group state machine.

/// How far an epoch floor may be raised above the highest epoch that was given: what is passed over is lost, and 2^53 are
/// all there are.
pub const EPOCH_FLOOR_STEP_MAX: u64 = 1 << 40;

/// Longest group, member, instance, topic or sink name, in bytes (Kafka's limit for topics).
pub const NAME_BYTES_MAX: usize = 249;

/// Longest reason or actor of an operator's request, in bytes.
pub const REASON_BYTES_MAX: usize = 1024;

/// Longest metadata of a committed offset, in bytes (Kafka's default limit).
pub const METADATA_BYTES_MAX: usize = 4096;

/// Longest error text that a member may report, in bytes; longer texts are cut by the SDK.
pub const ERROR_TEXT_BYTES_MAX: usize = 2048;

/// Largest gRPC request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Groups in one cluster.
pub const GROUPS_MAX: usize = 10_000;

/// Members in one group.
pub const MEMBERS_MAX: usize = 10_000;

/// Topics known to one group.
pub const TOPICS_MAX: usize = 10_000;

/// Partitions of one topic.
pub const TOPIC_PARTITIONS_MAX: u32 = 100_000;

/// Partitions known to one group, over all its topics.
pub const GROUP_PARTITIONS_MAX: usize = 1_000_000;

/// Topic names in one subscription.
pub const SUBSCRIPTION_TOPICS_MAX: usize = 1_000;

/// Sinks named in one group's settings.
pub const SINKS_MAX: usize = 64;

/// Largest weight of a member: its share of partitions relative to others.
pub const WEIGHT_MAX: u32 = 20;

/// Acquires in a row that fail at a sink before the partition is said to have none within reach; fewer where fewer
/// members could own it.
pub const SINK_UNREACHABLE_AFTER: u32 = 3;

/// Labels of one member.
pub const LABELS_MAX: usize = 16;

/// Partitions in one request (commit, release, verify).
pub const REQUEST_PARTITIONS_MAX: usize = 10_000;

/// Commands in one raft entry.
pub const ENTRY_COMMANDS_MAX: usize = 1_024;

/// Members that left or expired and are still remembered, in one group.
pub const TOMBSTONES_MAX: usize = 1_000;

/// Past grants remembered for each partition. Default of the history setting.
///
/// Fewer in a group of many partitions: see [`GROUP_GRANT_HISTORY_MAX`].
pub const GRANT_HISTORY_MAX: usize = 100;

/// Past grants remembered in one group, shared evenly by its partitions: 100 each up to 10,000 partitions, one each
/// at [`GROUP_PARTITIONS_MAX`]. One takes about 64 bytes.
pub const GROUP_GRANT_HISTORY_MAX: usize = 1_000_000;

/// Changes remembered in one cluster for watchers. One takes about 100 bytes.
///
/// Whole revisions are forgotten: a single entry with more changes than this leaves none.
pub const CHANGE_HISTORY_MAX: usize = 50_000;

/// Changes in one message of a watch; a revision with more is sent in parts.
pub const WATCH_MESSAGE_CHANGES_MAX: usize = 500;

/// Watches open at one node at the same time; more are refused as overloaded.
pub const WATCHES_MAX: usize = 1_000;

/// Messages that wait for one watcher to read them.
pub const WATCH_QUEUE_MAX: usize = 16;

/// Operator actions remembered in one cluster. Default of the history setting.
pub const OPERATOR_HISTORY_MAX: usize = 10_000;

/// Longest ttl a member may ask for, in milliseconds (one hour).
pub const TTL_MS_MAX: u64 = 3_600_000;

/// Longest time that a static member's place may be kept for its return, in milliseconds (one hour).
pub const RETURNING_WITHIN_MS_MAX: u64 = 3_600_000;

/// Shortest ttl a member may ask for, in milliseconds.
pub const TTL_MS_MIN: u64 = 300;
