//! Settings that both ends of the protocol share.

use std::time::Duration;

use crate::id::NameError;
use crate::limits::{SINKS_MAX, TTL_MS_MAX, TTL_MS_MIN};

/// Where a group's offsets live. Exactly one home per group; set when the group is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Home {
    /// In the coordinator's replicated state. At least once with a sink that only fences.
    #[default]
    Coordinator,
    /// In the sink, moved by the same transaction as the data. Exactly once.
    Sink,
    /// In Kafka, moved by the transaction that produces the records. Exactly once.
    KafkaTransaction,
}

impl Home {
    /// The setting's text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Sink => "sink",
            Self::KafkaTransaction => "kafka-transaction",
        }
    }
}

/// When a partition may be taken from a member that does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Takeover {
    /// Only once the member's own lease has certainly run out.
    #[default]
    Lease,
    /// As soon as the drain deadline passes; every sink must enforce the epoch itself.
    Fence,
}

impl Takeover {
    /// The setting's text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Fence => "fence",
        }
    }
}

/// What all members of a group must agree on. Logged with the group; a join that differs is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupSettings {
    /// Home of the offsets. Default [`Home::Coordinator`].
    pub home: Home,
    /// Default [`Takeover::Lease`].
    pub takeover: Takeover,
    /// Names of the sinks, sorted; at most [`SINKS_MAX`].
    pub sinks: Vec<SinkSetting>,
}

/// One sink as named at join.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SinkSetting {
    /// Name that the service gave it.
    pub name: String,
    /// Whether the resource itself refuses an older epoch.
    pub enforces_epoch: bool,
}

/// Two settings that contradict each other, or one out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The ttl is out of range.
    #[error("ttl_ms is {ttl_ms}: use {TTL_MS_MIN} to {TTL_MS_MAX}")]
    Ttl {
        /// What was given.
        ttl_ms: u64,
    },
    /// A length is zero.
    #[error("{name} is 0: give it a length above 0")]
    Zero {
        /// The setting's name.
        name: &'static str,
    },
    /// Heartbeats are too rare for the lease.
    #[error(
        "heartbeat_interval_ms is {interval_ms}, more than a third of ttl_ms {ttl_ms}: \
         lower it to {} or raise ttl_ms", ttl_ms / 3
    )]
    HeartbeatTooSlow {
        /// Heartbeat interval, in milliseconds.
        interval_ms: u64,
        /// Ttl, in milliseconds.
        ttl_ms: u64,
    },
    /// The drift margin eats the whole lease.
    #[error(
        "clock_drift_max_ms is {drift_ms}, not below ttl_ms {ttl_ms} less one heartbeat interval: \
         lower it or raise ttl_ms"
    )]
    DriftTooLarge {
        /// Drift, in milliseconds.
        drift_ms: u64,
        /// Ttl, in milliseconds.
        ttl_ms: u64,
    },
    /// In lease mode a drain must outlast the owner's lease.
    #[error(
        "drain_deadline_ms is {drain_ms}, below ttl_ms + clock_drift_max_ms = {least_ms}: \
         raise it, or use takeover = fence"
    )]
    DrainTooShort {
        /// Drain deadline, in milliseconds.
        drain_ms: u64,
        /// The least that is allowed, in milliseconds.
        least_ms: u64,
    },
    /// `takeover = fence` with a sink that cannot enforce the epoch.
    #[error(
        "takeover is fence, but the sink {sink:?} does not enforce the epoch itself: use takeover = lease"
    )]
    SinkNotFenced {
        /// The sink's name.
        sink: String,
    },
    /// `takeover = fence` without any sink.
    #[error("takeover is fence, but no sink is named: name the sinks or use takeover = lease")]
    NoSink,
    /// Too many sinks.
    #[error("{count} sinks are named, at most {SINKS_MAX} are allowed")]
    TooManySinks {
        /// How many were named.
        count: usize,
    },
    /// A sink's name is odd or given twice.
    #[error("sink {sink:?}: {problem}")]
    SinkName {
        /// The name.
        sink: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl GroupSettings {
    /// Checks the settings against each other and sorts the sinks.
    ///
    /// # Errors
    ///
    /// The first contradiction found.
    pub fn validate(mut self) -> Result<Self, SettingsError> {
        if self.sinks.len() > SINKS_MAX {
            return Err(SettingsError::TooManySinks { count: self.sinks.len() });
        }
        self.sinks.sort();
        for sink in &self.sinks {
            crate::id::check_name("sink", &sink.name).map_err(|error: NameError| {
                SettingsError::SinkName {
                    sink: sink.name.chars().take(64).collect(),
                    problem: error.to_string(),
                }
            })?;
        }
        if let Some(pair) = self.sinks.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(SettingsError::SinkName {
                sink: pair[0].name.clone(),
                problem: "is named twice".to_owned(),
            });
        }
        if self.takeover == Takeover::Fence {
            if let Some(sink) = self.sinks.iter().find(|sink| !sink.enforces_epoch) {
                return Err(SettingsError::SinkNotFenced { sink: sink.name.clone() });
            }
            if self.sinks.is_empty() {
                return Err(SettingsError::NoSink);
            }
        }
        Ok(self)
    }
}

/// Lengths that a lease is made of, in milliseconds.
///
/// Safety never rests on them; they bound how long a partition stays unowned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseSettings {
    /// How long a member keeps its partitions after its last heartbeat. Default 10000.
    pub ttl_ms: u64,
    /// How often a member heartbeats; at most a third of the ttl. Default 3000.
    pub heartbeat_interval_ms: u64,
    /// How far two clocks may drift apart during one ttl. Default 500.
    pub clock_drift_max_ms: u64,
}

impl Default for LeaseSettings {
    fn default() -> Self {
        Self { ttl_ms: 10_000, heartbeat_interval_ms: 3_000, clock_drift_max_ms: 500 }
    }
}

impl LeaseSettings {
    /// Lengths for a ttl of one's own: interval 3/10 of it, drift 1/20 of it.
    #[must_use]
    pub const fn for_ttl(ttl_ms: u64) -> Self {
        Self { ttl_ms, heartbeat_interval_ms: ttl_ms / 10 * 3, clock_drift_max_ms: ttl_ms / 20 }
    }

    /// Checks the lengths against each other.
    ///
    /// # Errors
    ///
    /// The first contradiction found.
    pub fn validate(self) -> Result<Self, SettingsError> {
        let Self { ttl_ms, heartbeat_interval_ms: interval_ms, clock_drift_max_ms: drift_ms } =
            self;
        if !(TTL_MS_MIN..=TTL_MS_MAX).contains(&ttl_ms) {
            return Err(SettingsError::Ttl { ttl_ms });
        }
        if interval_ms == 0 {
            return Err(SettingsError::Zero { name: "heartbeat_interval_ms" });
        }
        if interval_ms > ttl_ms / 3 {
            return Err(SettingsError::HeartbeatTooSlow { interval_ms, ttl_ms });
        }
        if drift_ms >= ttl_ms - interval_ms {
            return Err(SettingsError::DriftTooLarge { drift_ms, ttl_ms });
        }
        Ok(self)
    }

    /// The ttl as a length.
    #[must_use]
    pub const fn ttl(self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }

    /// The heartbeat interval as a length.
    #[must_use]
    pub const fn heartbeat_interval(self) -> Duration {
        Duration::from_millis(self.heartbeat_interval_ms)
    }

    /// The drift margin as a length.
    #[must_use]
    pub const fn clock_drift_max(self) -> Duration {
        Duration::from_millis(self.clock_drift_max_ms)
    }

    /// What is left of a member's lease when two heartbeats in a row were not answered: the lease is *at risk* from
    /// there on. Never less than a quarter of the lease.
    #[must_use]
    pub fn lease_at_risk(self) -> Duration {
        let lease = self.ttl().saturating_sub(self.clock_drift_max());
        lease.saturating_sub(self.heartbeat_interval() * 2).max(lease / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradicting_lengths_are_refused_by_name() {
        let check = |ttl_ms, heartbeat_interval_ms, clock_drift_max_ms, want: &str| {
            let settings = LeaseSettings { ttl_ms, heartbeat_interval_ms, clock_drift_max_ms };
            assert_eq!(settings.validate().unwrap_err().to_string(), want);
        };
        check(0, 1, 0, "ttl_ms is 0: use 300 to 3600000");
        check(u64::MAX, 1, 0, "ttl_ms is 18446744073709551615: use 300 to 3600000");
        check(900, 0, 0, "heartbeat_interval_ms is 0: give it a length above 0");
        check(
            900,
            301,
            0,
            "heartbeat_interval_ms is 301, more than a third of ttl_ms 900: lower it to 300 or raise ttl_ms",
        );
        check(
            900,
            300,
            600,
            "clock_drift_max_ms is 600, not below ttl_ms 900 less one heartbeat interval: lower it or raise ttl_ms",
        );
        assert!(LeaseSettings::default().validate().is_ok());
        assert!(LeaseSettings::for_ttl(1500).validate().is_ok());
    }

    #[test]
    fn fence_takeover_needs_sinks_that_enforce_the_epoch() {
        let sink = |enforces_epoch| SinkSetting { name: "pg".into(), enforces_epoch };
        let fence =
            |sinks| GroupSettings { takeover: Takeover::Fence, sinks, ..GroupSettings::default() };
        assert!(fence(vec![]).validate().is_err());
        assert!(fence(vec![sink(false)]).validate().is_err());
        assert!(fence(vec![sink(true)]).validate().is_ok());
        assert!(fence(vec![sink(true), sink(true)]).validate().is_err());
    }
}
