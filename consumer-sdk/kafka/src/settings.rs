//! Settings of the source.

use std::collections::BTreeMap;
use std::fmt;

use rdkafka::ClientConfig;
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::{KafkaError, KafkaResult};

/// Settings of a [`KafkaSource`](crate::KafkaSource).
///
/// `Debug` leaves out the values of [`extra`](Self::extra), of which some are passwords and keys.
#[derive(Clone, PartialEq, Eq)]
pub struct KafkaSettings {
    /// Brokers to start from, `host:port` separated by commas.
    pub bootstrap: String,
    /// Name of this client in the brokers' logs and quotas. Default `tenure`.
    pub client_id: String,
    /// Whether records come with their headers. Looking for them costs a tenth of a microsecond for each record, also
    /// where there are none: a reader that needs none leaves them out. Default true.
    pub headers: bool,
    /// Further settings of librdkafka by its own names (`security.protocol`, `fetch.wait.max.ms`, …). They win over
    /// the defaults of this crate; those that would break ownership are refused.
    pub extra: BTreeMap<String, String>,
}

impl fmt::Debug for KafkaSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bootstrap, client_id, headers, extra } = self;
        f.debug_struct("KafkaSettings")
            .field("bootstrap", bootstrap)
            .field("client_id", client_id)
            .field("headers", headers)
            .field("extra", &extra.keys())
            .finish()
    }
}

/// Makes a client. The error tells which setting is refused, and not its value: a password under a misspelt name would
/// be in it.
pub(crate) fn create<C: ConsumerContext, T: FromClientConfigAndContext<C>>(
    config: &ClientConfig,
    context: C,
) -> KafkaResult<T> {
    config.create_with_context(context).map_err(|error| {
        if let KafkaError::ClientConfig(result, text, key, _value) = error {
            KafkaError::ClientConfig(result, text, key, String::new())
        } else {
            error
        }
    })
}

/// A setting that contradicts what the source promises.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The key belongs to the source.
    #[error("setting {key} is refused: {reason}")]
    Refused {
        /// The key.
        key: String,
        /// Why, and what to use instead.
        reason: &'static str,
    },
    /// No broker was named.
    #[error("bootstrap is empty: name at least one broker as host:port")]
    NoBootstrap,
}

const MEMBERSHIP: &str =
    "the source joins no consumer group; ownership is granted by the coordinator";
const STORED: &str = "offsets are committed under an epoch, never by the Kafka client";

/// Keys that users may not set, with the reason.
const REFUSED: [(&str, &str); 15] = [
    ("group.id", MEMBERSHIP),
    ("group.instance.id", MEMBERSHIP),
    ("group.protocol", MEMBERSHIP),
    ("group.protocol.type", MEMBERSHIP),
    ("group.remote.assignor", MEMBERSHIP),
    ("partition.assignment.strategy", MEMBERSHIP),
    ("enable.auto.commit", STORED),
    ("auto.commit.enable", STORED),
    ("auto.commit.interval.ms", STORED),
    ("enable.auto.offset.store", STORED),
    ("auto.offset.reset", "an offset out of range is reported and reset by name only"),
    ("enable.partition.eof", "the source needs it to know the end of a partition"),
    ("bootstrap.servers", "use the field bootstrap"),
    ("metadata.broker.list", "use the field bootstrap"),
    ("client.id", "use the field client_id"),
];

/// Defaults of this crate where they differ from librdkafka's.
const DEFAULTS: [(&str, &str); 13] = [
    ("enable.auto.commit", "false"),
    ("enable.auto.offset.store", "false"),
    ("auto.offset.reset", "error"),
    // Bounds how long closing the client may take.
    ("session.timeout.ms", "6000"),
    ("queued.min.messages", "50000"),
    ("queued.max.messages.kbytes", "65536"),
    // The default of 1000 starves a fast reader.
    ("fetch.queue.backoff.ms", "10"),
    // A partition that was just opened waits for the request that is under way for the others: 64 ms in the middle at
    // 100, 6 to 20 ms at 20 (Kafka 4.3.1), for 0.6 % of a core more.
    ("fetch.wait.max.ms", "20"),
    // The default of 10000 leaves partitions unread for seconds after a broker is back.
    ("reconnect.backoff.max.ms", "1000"),
    ("fetch.message.max.bytes", "1048576"),
    // Once for each empty answer at a new end; tells how far was read where no record says so.
    ("enable.partition.eof", "true"),
    ("allow.auto.create.topics", "false"),
    ("topic.metadata.refresh.interval.ms", "30000"),
];

impl KafkaSettings {
    /// Settings for the brokers `bootstrap`, all else at its default.
    #[must_use]
    pub fn new(bootstrap: impl Into<String>) -> Self {
        Self {
            bootstrap: bootstrap.into(),
            client_id: "tenure".into(),
            headers: true,
            extra: BTreeMap::new(),
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    ///
    /// The first setting that contradicts what the source promises.
    pub fn validate(&self) -> Result<(), SettingsError> {
        if self.bootstrap.trim().is_empty() {
            return Err(SettingsError::NoBootstrap);
        }
        for (key, reason) in REFUSED {
            if self.extra.contains_key(key) {
                return Err(SettingsError::Refused { key: key.into(), reason });
            }
        }
        Ok(())
    }

    /// Configuration of the client that reads. The group id is demanded by librdkafka, and private: nothing joins it.
    pub(crate) fn reader(&self) -> ClientConfig {
        let mut config = self.lookup();
        config.set("group.id", format!("tenure-source-{}", self.client_id));
        config.set("client.id", &self.client_id);
        config
    }

    /// Configuration of the client that looks topics up.
    pub(crate) fn lookup(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        for (key, value) in DEFAULTS {
            config.set(key, value);
        }
        for (key, value) in &self.extra {
            config.set(key, value);
        }
        config.set("bootstrap.servers", &self.bootstrap);
        config.set("client.id", format!("{}-lookup", self.client_id));
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KafkaGroup, KafkaMirror, KafkaSource};

    #[test]
    fn settings_that_would_break_ownership_are_refused_by_name() {
        for (key, _) in REFUSED {
            let mut settings = KafkaSettings::new("127.0.0.1:9092");
            settings.extra.insert(key.into(), "x".into());
            let text = settings.validate().unwrap_err().to_string();
            assert!(text.contains(key), "{text}");
        }
        assert_eq!(KafkaSettings::new(" ").validate(), Err(SettingsError::NoBootstrap));
    }

    #[test]
    fn password_is_neither_in_debug_nor_in_the_error_of_a_setting_that_is_refused() {
        const SECRET: &str = "s3cret-that-nobody-sees";
        for key in ["sasl.password", "sasl.pasword", "ssl.key.pem", "sasl.jaas.config"] {
            let mut settings = KafkaSettings::new("127.0.0.1:9092");
            settings.extra.insert(key.into(), SECRET.into());
            let debug = format!("{settings:?}");
            assert!(debug.contains(key) && !debug.contains(SECRET), "{debug}");
            for made in [
                KafkaSource::new(settings.clone()).map(drop).map_err(|e| format!("{e} {e:?}")),
                KafkaGroup::new(&settings, "g").map(drop).map_err(|e| format!("{e} {e:?}")),
                KafkaMirror::new(&settings, "g").map(drop).map_err(|e| format!("{e} {e:?}")),
            ] {
                // Whether the client takes a setting depends on how it was built; the misspelt one it never takes.
                assert!(made.is_err() || key != "sasl.pasword", "{key}");
                let text = made.err().unwrap_or_default();
                assert!(!text.contains(SECRET), "{text}");
            }
        }
    }

    #[test]
    fn other_settings_win_over_the_defaults() {
        let mut settings = KafkaSettings::new("127.0.0.1:9092");
        settings.extra.insert("fetch.wait.max.ms".into(), "10".into());
        assert_eq!(settings.validate(), Ok(()));
        assert_eq!(settings.reader().get("fetch.wait.max.ms"), Some("10"));
        assert_eq!(settings.reader().get("auto.offset.reset"), Some("error"));
        assert_eq!(settings.reader().get("group.id"), Some("tenure-source-tenure"));
        assert_eq!(settings.lookup().get("group.id"), None);
    }
}
