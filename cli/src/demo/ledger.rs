//! What the workers told, and what follows from it.

use std::collections::BTreeMap;

use serde_json::Value;

/// One refusal at a resource, with both epochs.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) worker: String,
    pub(crate) partition: u64,
    pub(crate) given: u64,
    pub(crate) current: Option<u64>,
}

/// Who owned what, and what was refused, by the workers' own words.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// Newest owner of each partition with the epoch.
    owners: BTreeMap<u64, (String, u64)>,
    /// When the last owner stopped; absent while somebody owns it.
    ended_us: BTreeMap<u64, u64>,
    /// One per hand-over: how long nobody was able to work on the partition.
    pub(crate) unowned_us: Vec<u64>,
    pub(crate) moves: u64,
    pub(crate) refused_sink_writes: Vec<Refusal>,
    pub(crate) refused_offset_commits: Vec<Refusal>,
    pub(crate) refused_locally: u64,
    pub(crate) accepted_late_commits: u64,
    pub(crate) holding: BTreeMap<String, u64>,
    pub(crate) stopped: BTreeMap<String, bool>,
    pub(crate) members: BTreeMap<String, String>,
}

impl Ledger {
    /// Takes in one line of a worker.
    pub(crate) fn note(&mut self, worker: &str, event: &Value) {
        let number = |field: &str| event[field].as_u64().unwrap_or_default();
        let (partition, epoch, at) = (number("partition"), number("epoch"), number("t_us"));
        let refusal = || Refusal {
            worker: worker.to_owned(),
            partition,
            given: number("given"),
            current: event["current"].as_u64(),
        };
        match event["event"].as_str().unwrap_or_default() {
            "started" => {
                let member = event["member"].as_str().unwrap_or_default().to_owned();
                self.members.insert(worker.to_owned(), member);
            }
            "owned" => self.owned(worker, partition, epoch, at),
            "ended" => self.ended(worker, partition, epoch, at),
            "holding" => {
                self.holding.insert(worker.to_owned(), number("in_hand"));
            }
            "refused_sink_write" => self.refused_sink_writes.push(refusal()),
            "refused_offset_commit" => self.refused_offset_commits.push(refusal()),
            "refused_locally" => self.refused_locally += 1,
            "accepted_late_commit" => self.accepted_late_commits += 1,
            "stopped" => {
                self.stopped.insert(worker.to_owned(), event["clean"].as_bool().unwrap_or(false));
            }
            _ => tracing::debug!(worker, %event, "told"),
        }
    }

    fn owned(&mut self, worker: &str, partition: u64, epoch: u64, at: u64) {
        if self.owners.get(&partition).is_some_and(|(_, newer)| *newer > epoch) {
            return;
        }
        let before = self.owners.insert(partition, (worker.to_owned(), epoch));
        if before.is_some() {
            self.moves += 1;
            let ended = self.ended_us.remove(&partition).unwrap_or(at);
            self.unowned_us.push(at.saturating_sub(ended));
        }
    }

    fn ended(&mut self, worker: &str, partition: u64, epoch: u64, at: u64) {
        if self.owners.get(&partition) == Some(&(worker.to_owned(), epoch)) {
            // A frozen owner's partitions ended when it was frozen.
            self.ended_us.entry(partition).or_insert(at);
        }
    }

    /// A worker was frozen or is gone: what it owned has no working owner from now on.
    pub(crate) fn gone(&mut self, worker: &str, at: u64) {
        for partition in self.owned_by(worker) {
            self.ended_us.entry(partition).or_insert(at);
        }
    }

    pub(crate) fn owned_by(&self, worker: &str) -> Vec<u64> {
        let owned = self.owners.iter().filter(|(_, (owner, _))| owner == worker);
        owned.map(|(partition, _)| *partition).collect()
    }

    pub(crate) fn owner(&self, partition: u64) -> Option<&(String, u64)> {
        self.owners.get(&partition)
    }

    /// Whether all `count` partitions have a working owner among `workers`.
    pub(crate) fn all_owned_by(&self, count: usize, workers: &[&str]) -> bool {
        let working = self.owners.iter().filter(|(partition, (owner, _))| {
            workers.contains(&owner.as_str()) && !self.ended_us.contains_key(partition)
        });
        working.count() == count
    }

    /// Quantile of the unowned times, in milliseconds.
    pub(crate) fn unowned_ms(&self, quantile: f64) -> f64 {
        let mut times = self.unowned_us.clone();
        times.sort_unstable();
        let Some(last) = times.len().checked_sub(1) else { return 0.0 };
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a rank among some dozens of times"
        )]
        let rank = (last as f64 * quantile).round() as usize;
        #[allow(
            clippy::cast_precision_loss,
            reason = "microseconds of a minute are exact in a double"
        )]
        let ms = times[rank] as f64 / 1000.0;
        ms
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(event: &str, partition: u64, epoch: u64, t_us: u64) -> Value {
        json!({ "event": event, "partition": partition, "epoch": epoch, "t_us": t_us })
    }

    #[test]
    fn time_without_an_owner_counts_from_the_freeze() {
        let mut ledger = Ledger::default();
        ledger.note("w1", &event("owned", 0, 1, 0));
        ledger.gone("w1", 1_000_000);
        assert!(!ledger.all_owned_by(1, &["w1", "w2"]));
        ledger.note("w2", &event("owned", 0, 2, 3_000_000));
        ledger.note("w1", &event("ended", 0, 1, 9_000_000));
        assert!(ledger.all_owned_by(1, &["w2"]));
        assert_eq!((ledger.moves, ledger.unowned_ms(0.5)), (1, 2_000.0));
    }

    #[test]
    fn older_owner_heard_late_changes_nothing() {
        let mut ledger = Ledger::default();
        ledger.note("w2", &event("owned", 0, 2, 10));
        ledger.note("w1", &event("owned", 0, 1, 20));
        assert_eq!(ledger.owner(0), Some(&("w2".to_owned(), 2)));
    }
}
