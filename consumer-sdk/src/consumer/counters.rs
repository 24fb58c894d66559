//! What a consumer did so far.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($( $(#[$doc:meta])* $name:ident, $add:ident; )*) => {
        /// Counts since the consumer was built. All only rise.
        #[derive(Debug, Default)]
        pub struct Counters {
            $( $name: AtomicU64, )*
        }

        impl Counters {
            /// Names of the counts as metrics, in the order of `values`.
            pub(crate) const METRICS: &[&str] =
                &[$( concat!("tenure_consumer_", stringify!($name), "_total"), )*];

            pub(crate) fn values(&self) -> Vec<u64> {
                vec![$( self.$name(), )*]
            }

            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(&self) -> u64 {
                    self.$name.load(Ordering::Relaxed)
                }

                pub(crate) fn $add(&self, count: usize) {
                    self.$name.fetch_add(count as u64, Ordering::Relaxed);
                }
            )*
        }
    };
}

counters! {
    /// Records handed to handlers.
    records_delivered, add_records_delivered;
    /// Records handed to a handler although this process had done them before: the offset of an earlier grant was not in,
    /// or was moved back by an operator. Known with the offsets at the coordinator only; a rewind by the handler itself
    /// does not count.
    handled_twice, add_handled_twice;
    /// Offsets committed at the coordinator.
    commits, add_commits;
    /// Offset commits that this process refused itself, because its lease had ended: nothing was sent.
    refused_locally, add_refused_locally;
    /// Offset commits that the coordinator refused as fenced.
    refused_by_coordinator, add_refused_by_coordinator;
    /// Registrations and handlers that ended because a sink refused an older epoch.
    refused_by_sink, add_refused_by_sink;
    /// Partitions released because the coordinator asked for them.
    handoffs, add_handoffs;
    /// Partitions acquired.
    acquired, add_acquired;
    /// Partitions whose reading went on from records that were read before they were owned.
    continued_early, add_continued_early;
    /// Handlers that failed, panicked or returned without being asked to.
    handler_failures, add_handler_failures;
    /// Handlers that were run again after a failure.
    handler_retries, add_handler_retries;
    /// Records that became dead letters.
    dead_letters, add_dead_letters;
    /// Partitions that were parked.
    parked, add_parked;
    /// Partitions that stood still because no owner could read them: out of range, no offset, another topic.
    frozen, add_frozen;
    /// Handlers aborted because they did not return by their deadline.
    handlers_aborted, add_handlers_aborted;
}
