//! Settings.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use rdkafka::ClientConfig;
use tenure_sdk::sink::{Fencing, SinkError};

/// Settings of a [`KafkaSink`](crate::KafkaSink).
///
/// `Debug` leaves out the values of [`extra`](Self::extra), of which some are passwords and keys.
#[derive(Clone, PartialEq, Eq)]
pub struct KafkaSinkSettings {
    /// Brokers to start from, `host:port` separated by commas.
    pub bootstrap: String,
    /// Name of the sink in the group's settings. Default `kafka`.
    pub name: String,
    /// Start of every transactional id and of every private group id; the resource follows after a `/`. Two services
    /// that share brokers and a group name need two prefixes. Default `tenure`.
    pub prefix: String,
    /// Topic whose partition 0 the offsets are kept under, for a source on other brokers. Default: none, they are kept
    /// under the source's own topic and partition.
    pub anchor: Option<String>,
    /// Longest single call to the brokers. Default 10 s.
    pub call_timeout: Duration,
    /// The brokers abort a transaction of a dead owner after this long if no new owner comes before; until then readers
    /// of committed records wait. Also the longest transaction. Default 30 s.
    pub transaction_timeout: Duration,
    /// First pause before a writer that was shut out initialises again; doubles up to a second, so that a registration
    /// under a newer epoch gets its turn. Default 50 ms.
    pub recovery_pause: Duration,
    /// Further settings of librdkafka by its own names, for producer and reader alike (`security.protocol`, …). Those
    /// that would break the fence are refused.
    pub extra: BTreeMap<String, String>,
    /// Switches the stamp **off**: a late initialiser is not told from the owner and damages the data. Only for negative
    /// controls that show the damage. Default false.
    pub dangerously_without_fencing: bool,
}

impl fmt::Debug for KafkaSinkSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSinkSettings")
            .field("bootstrap", &self.bootstrap)
            .field("name", &self.name)
            .field("prefix", &self.prefix)
            .field("anchor", &self.anchor)
            .field("call_timeout", &self.call_timeout)
            .field("transaction_timeout", &self.transaction_timeout)
            .field("recovery_pause", &self.recovery_pause)
            .field("extra", &self.extra.keys())
            .field("dangerously_without_fencing", &self.dangerously_without_fencing)
            .finish()
    }
}

/// Keys that belong to the sink.
const REFUSED: [&str; 13] = [
    "bootstrap.servers",
    "metadata.broker.list",
    "transactional.id",
    "transaction.timeout.ms",
    "enable.idempotence",
    "acks",
    "request.required.acks",
    "isolation.level",
    "group.id",
    "group.instance.id",
    "group.protocol",
    "enable.auto.commit",
    "max.in.flight.requests.per.connection",
];

impl KafkaSinkSettings {
    /// Settings for the brokers `bootstrap`, all else at its default.
    #[must_use]
    pub fn new(bootstrap: impl Into<String>) -> Self {
        Self {
            bootstrap: bootstrap.into(),
            name: "kafka".into(),
            prefix: "tenure".into(),
            anchor: None,
            call_timeout: Duration::from_secs(10),
            transaction_timeout: Duration::from_secs(30),
            recovery_pause: Duration::from_millis(50),
            extra: BTreeMap::new(),
            dangerously_without_fencing: false,
        }
    }

    pub(crate) const fn fencing(&self) -> Fencing {
        if self.dangerously_without_fencing { Fencing::Off } else { Fencing::On }
    }

    pub(crate) fn validate(&self) -> Result<(), SinkError> {
        let refuse = |text: String| Err(SinkError::Misconfigured(text));
        if self.bootstrap.trim().is_empty() {
            return refuse("bootstrap is empty: name at least one broker as host:port".into());
        }
        if !self.prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            return refuse(format!("prefix {:?} is not of visible ASCII characters", self.prefix));
        }
        if self.call_timeout.is_zero() || self.transaction_timeout < Duration::from_secs(1) {
            return refuse("call_timeout is 0 or transaction_timeout is below 1 s".into());
        }
        match REFUSED.iter().find(|key| self.extra.contains_key(**key)) {
            Some(key) => refuse(format!("setting {key} is refused: it belongs to the fence")),
            None => Ok(()),
        }
    }

    fn base(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("reconnect.backoff.max.ms", "1000");
        for (key, value) in &self.extra {
            config.set(key, value);
        }
        config.set("bootstrap.servers", &self.bootstrap);
        config
    }

    pub(crate) fn producer(&self, id: &str) -> ClientConfig {
        let mut config = self.base();
        config.set("transactional.id", id);
        config.set("transaction.timeout.ms", self.transaction_timeout.as_millis().to_string());
        config
    }

    /// Reads the private group's offset, and only what is decided: with `read_committed` the brokers hold the answer
    /// back while a transaction that moves the offset is open.
    pub(crate) fn reader(&self, id: &str) -> ClientConfig {
        let mut config = self.base();
        config.set("group.id", id);
        config.set("isolation.level", "read_committed");
        config.set("enable.auto.commit", "false");
        // Bounds how long closing the client may take.
        config.set("session.timeout.ms", "6000");
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_would_break_the_fence_are_refused() {
        KafkaSinkSettings::new("127.0.0.1:9092").validate().unwrap();
        for key in REFUSED {
            let mut settings = KafkaSinkSettings::new("127.0.0.1:9092");
            settings.extra.insert(key.into(), "x".into());
            assert!(matches!(settings.validate(), Err(SinkError::Misconfigured(_))), "{key}");
        }
    }

    #[test]
    fn password_is_neither_in_debug_nor_in_the_error_of_a_setting_that_is_refused() {
        const SECRET: &str = "s3cret-that-nobody-sees";
        let mut settings = KafkaSinkSettings::new("127.0.0.1:9092");
        settings.extra.insert("sasl.pasword".into(), SECRET.into());
        let refused = settings.reader("id").create::<rdkafka::consumer::BaseConsumer>();
        let refused = crate::error::classify(refused.map(drop).unwrap_err());
        for text in [format!("{settings:?}"), refused.to_string(), format!("{refused:?}")] {
            assert!(text.contains("sasl.pasword") && !text.contains(SECRET), "{text}");
        }
    }
}
