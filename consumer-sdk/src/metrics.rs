//! What a consumer tells the `metrics` facade; docs/metrics.md has the same list.
//!
//! Nothing is measured for it on the way of a record: once a second, and at the end, the counts that are kept anyway
//! are handed over. A process without a recorder pays nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::consumer::{Counters, Grants, Link};

/// How often counts and gauges are handed over.
const INTERVAL: Duration = Duration::from_secs(1);

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution of single values.
    Histogram,
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
}

/// Partitions that this process owns, acquired or not.
pub(crate) const PARTITIONS_OWNED: &str = "tenure_consumer_partitions_owned";
/// 1 while the consumer is in its group with a live lease, else 0.
const READY: &str = "tenure_consumer_ready";
/// Longest time for which a running partition stands still: its handler holds records, or some wait for it.
const STILL_SECONDS: &str = "tenure_consumer_still_seconds";
/// Records between the position of a partition and its end, as the source last heard it: of the partition with the most.
const LAG_MAX_RECORDS: &str = "tenure_consumer_lag_max_records";
/// The same of all partitions together.
const LAG_RECORDS: &str = "tenure_consumer_lag_records";
/// From a grant to the first delivery: registering, verifying, resuming, opening.
pub(crate) const ACQUIRE_SECONDS: &str = "tenure_consumer_acquire_duration_seconds";
/// From a revoke until its handler has ended and the source is closed.
pub(crate) const DRAIN_SECONDS: &str = "tenure_consumer_drain_duration_seconds";

/// All metrics of a consumer.
#[must_use]
pub fn all() -> Vec<Metric> {
    let counters = Counters::METRICS.iter().map(|name| Metric { name, kind: Kind::Counter });
    let gauges = [PARTITIONS_OWNED, READY, STILL_SECONDS, LAG_MAX_RECORDS, LAG_RECORDS]
        .map(|name| Metric { name, kind: Kind::Gauge });
    let histograms =
        [ACQUIRE_SECONDS, DRAIN_SECONDS].map(|name| Metric { name, kind: Kind::Histogram });
    counters.chain(gauges).chain(histograms).collect()
}

/// Hands over what is known now.
fn publish(counters: &Counters, grants: &Grants, link: &Weak<dyn Link>) {
    for (name, value) in Counters::METRICS.iter().zip(counters.values()) {
        metrics::counter!(*name).absolute(value);
    }
    let is_ready = link.upgrade().is_some_and(|link| link.is_ready());
    metrics::gauge!(READY).set(f64::from(u8::from(is_ready)));
    metrics::gauge!(STILL_SECONDS).set(grants.still_max().as_secs_f64());
    // Nothing for a source that does not tell: 0 would be a claim.
    if let Some((max, sum)) = grants.lags() {
        metrics::gauge!(LAG_MAX_RECORDS).set(rounded(max));
        metrics::gauge!(LAG_RECORDS).set(rounded(sum));
    }
}

/// As the facade wants it; exact up to 2^53.
#[allow(clippy::cast_precision_loss, reason = "a lag of more than 2^53 records need not be exact")]
const fn rounded(count: u64) -> f64 {
    count as f64
}

/// Hands over every second; never ends by itself. Dropped, it hands over once more.
pub(crate) async fn publish_on(counters: Arc<Counters>, grants: Arc<Grants>, link: Weak<dyn Link>) {
    struct Last(Arc<Counters>, Arc<Grants>, Weak<dyn Link>);
    impl Last {
        fn publish(&self) {
            publish(&self.0, &self.1, &self.2);
        }
    }
    impl Drop for Last {
        fn drop(&mut self) {
            self.publish();
        }
    }
    let last = Last(counters, grants, link);
    let mut due = tokio::time::interval(INTERVAL);
    loop {
        due.tick().await;
        last.publish();
    }
}
