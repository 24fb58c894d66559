//! A Kafka cluster as a sink.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use tenure_sdk::sink::SinkError;
use tenure_sink_kafka::{KafkaSink, KafkaSinkSettings, KafkaWriter};

use super::report::Report;
use super::{trial, usage};
use crate::Failure;

/// Longest single request.
const REQUEST: Duration = Duration::from_secs(10);

/// Brokers keep offsets of a group without commits this long by default.
const OFFSETS_RETENTION_MIN_MINUTES: u64 = 7 * 24 * 60;

/// Where the brokers are, and the topic that the offsets are kept under.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    bootstrap: String,
    topic: String,
}

impl Target {
    fn parse(url: &str) -> Option<Self> {
        let (bootstrap, topic) = url.strip_prefix("kafka://")?.split_once('/')?;
        let is_good = !bootstrap.is_empty() && !topic.is_empty() && !topic.contains('/');
        is_good.then(|| Self { bootstrap: bootstrap.to_owned(), topic: topic.to_owned() })
    }
}

pub(super) async fn check(report: &mut Report, url: &str) -> Result<(), Failure> {
    let target = Target::parse(url).ok_or_else(|| {
        usage(
            "give kafka://HOST:PORT,HOST:PORT/TOPIC; the topic's offsets are kept under it".into(),
        )
    })?;
    let asked = target.clone();
    let brokers = tokio::task::spawn_blocking(move || Brokers::look(&asked)).await;
    let brokers = match brokers
        .map_err(|error| error.to_string())
        .and_then(|found| found.map_err(|error| error.to_string()))
    {
        Ok(brokers) => brokers,
        Err(error) => {
            let next = "see that they run, take connections without TLS from here, and advertise an address that works";
            report.fail("connection", error, next);
            return Ok(());
        }
    };
    brokers.add_to(report, &target.topic);
    match (admin(&target), brokers.ids.first()) {
        (Ok(admin), Some(broker)) => settings(report, &admin, *broker).await,
        (Err(error), _) => report.skip("settings", error.to_string()),
        (Ok(_), None) => report.skip("settings", "no broker to ask"),
    }
    if report.has_failed() {
        report.skip("trial", "not before the above is mended");
    } else {
        try_out(report, &target).await;
    }
    Ok(())
}

fn client(target: &Target) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", &target.bootstrap);
    config
}

fn admin(target: &Target) -> Result<AdminClient<DefaultClientContext>, KafkaError> {
    client(target).create()
}

struct Brokers {
    ids: Vec<i32>,
    /// Partitions of the topic; 0: it is not there.
    partitions: usize,
}

impl Brokers {
    fn look(target: &Target) -> Result<Self, KafkaError> {
        let mut config = client(target);
        config.set("allow.auto.create.topics", "false");
        let consumer: BaseConsumer = config.create()?;
        let metadata = consumer.fetch_metadata(Some(&target.topic), REQUEST)?;
        let topic = metadata.topics().iter().find(|topic| topic.name() == target.topic);
        let there = topic.filter(|topic| topic.error().is_none());
        Ok(Self {
            ids: metadata.brokers().iter().map(|broker| broker.id()).collect(),
            partitions: there.map_or(0, |topic| topic.partitions().len()),
        })
    }

    fn add_to(&self, report: &mut Report, topic: &str) {
        report.ok("connection", format!("{} brokers", self.ids.len()));
        report.hold(
            "topic",
            self.partitions > 0,
            format!("{topic} has {} partitions", self.partitions),
            "name a topic that is there: the offsets are kept under one",
        );
    }
}

/// What the brokers do with offsets and transactions.
async fn settings(report: &mut Report, admin: &AdminClient<DefaultClientContext>, broker: i32) {
    let options = AdminOptions::new().request_timeout(Some(REQUEST));
    let asked = [ResourceSpecifier::Broker(broker)];
    let described = admin.describe_configs(&asked, &options).await;
    let found = match described.map(|mut found| found.pop()) {
        Ok(Some(Ok(found))) => found,
        Ok(Some(Err(error))) => return report.skip("settings", format!("not told: {error}")),
        Ok(None) => return report.skip("settings", "not told"),
        Err(error) => return report.skip("settings", format!("not told: {error}")),
    };
    let values: BTreeMap<&str, &str> = found
        .entries
        .iter()
        .filter_map(|entry| Some((entry.name.as_str(), entry.value.as_deref()?)))
        .collect();
    let number =
        |name: &str| values.get(name).and_then(|value| value.parse::<u64>().ok()).unwrap_or(0);
    copies(
        report,
        "transactions",
        number("transaction.state.log.replication.factor"),
        number("transaction.state.log.min.isr"),
    );
    copies(
        report,
        "offsets",
        number("offsets.topic.replication.factor"),
        number("min.insync.replicas"),
    );
    let minutes = number("offsets.retention.minutes");
    let found = format!("offsets.retention.minutes is {minutes}");
    if minutes < OFFSETS_RETENTION_MIN_MINUTES {
        let next = "a partition without commits for that long loses its offset and stops: give it a week or more";
        report.warn("retention", found, next);
    } else {
        report.ok("retention", found);
    }
    if values.get("unclean.leader.election.enable") == Some(&"true") {
        let next = "a replica that is behind may lead and has the old epochs: switch it off";
        report.warn("elections", "unclean.leader.election.enable is true", next);
    } else {
        report.ok("elections", "only replicas in sync may lead");
    }
}

/// The brokers' own topic that holds half of the fence.
fn copies(report: &mut Report, check: &'static str, factor: u64, in_sync_min: u64) {
    let found = format!("{factor} copies, {in_sync_min} of them in sync at least");
    if factor < 2 || in_sync_min < 2 {
        let next = "one lost disk may take a registration with it: three copies, two in sync";
        report.warn(check, found, next);
    } else {
        report.ok(check, found);
    }
}

async fn try_out(report: &mut Report, target: &Target) {
    let settings = KafkaSinkSettings {
        anchor: Some(target.topic.clone()),
        prefix: trial::PREFIX.into(),
        ..KafkaSinkSettings::new(&target.bootstrap)
    };
    let sink = match KafkaSink::new(settings) {
        Ok(sink) => sink,
        Err(error) => return report.fail("trial", error.to_string(), "see the message"),
    };
    let resource = trial::resource();
    let write = async |writer: &mut KafkaWriter, next| -> Result<(), SinkError> {
        writer.begin().await?.commit(next).await
    };
    trial::run(report, &sink, &resource, write).await;
    clean_up(report, target, &format!("{}/{resource}", trial::PREFIX)).await;
}

/// Removes the private group. The transactional id is forgotten by the brokers themselves.
async fn clean_up(report: &mut Report, target: &Target, group: &str) {
    let options = AdminOptions::new().request_timeout(Some(REQUEST));
    let deleted = async {
        let deleted = admin(target)?.delete_groups(&[group], &options).await?;
        Ok::<_, KafkaError>(deleted.into_iter().find_map(Result::err))
    };
    let failure = match deleted.await {
        Ok(None) => return report.ok("clean-up", "the trial's group is gone"),
        Ok(Some((_, code))) => code.to_string(),
        Err(error) => error.to_string(),
    };
    report.warn("clean-up", failure, format!("delete the group {group}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_has_brokers_and_one_topic() {
        let target = Target::parse("kafka://a:9092,b:9092/orders").unwrap();
        assert_eq!((&*target.bootstrap, &*target.topic), ("a:9092,b:9092", "orders"));
        for url in ["kafka://a:9092", "kafka://a:9092/", "kafka:///orders", "kafka://a/b/c"] {
            assert_eq!(Target::parse(url), None, "{url}");
        }
    }
}
