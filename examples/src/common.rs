//! What all examples share: settings from the environment, and a clean end on Ctrl-C or SIGTERM.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{GroupId, TopicName};
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::{Consumer, ConsumerBuilder, Stopper};
use tokio::signal::unix::{SignalKind, signal};

/// How long the end may take.
const STOP_WITHIN: Duration = Duration::from_secs(20);

/// Settings of an example.
pub(crate) struct Setup {
    coordinators: Vec<String>,
    kafka: String,
    topic: TopicName,
    /// Where files and databases are kept.
    #[allow(dead_code, reason = "not every example keeps something")]
    pub(crate) data: PathBuf,
}

fn variable(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

impl Setup {
    /// Reads the environment and starts the log.
    pub(crate) fn new() -> Result<Self, Box<dyn Error>> {
        tracing_subscriber::fmt().with_writer(std::io::stderr).init();
        let data = PathBuf::from(variable("DATA", "tenure-example-data"));
        std::fs::create_dir_all(&data)?;
        Ok(Self {
            coordinators: variable("TENURE_COORDINATORS", "127.0.0.1:7400")
                .split(',')
                .map(str::to_owned)
                .collect(),
            kafka: variable("KAFKA_BOOTSTRAP", "127.0.0.1:9092"),
            topic: TopicName::new(&variable("TOPIC", "orders"))?,
            data,
        })
    }

    /// A consumer of the topic in `group`, with everything else at its default.
    pub(crate) fn consumer(
        &self,
        group: &str,
    ) -> Result<ConsumerBuilder<CoordinatorOffsets>, Box<dyn Error>> {
        let source = Arc::new(KafkaSource::new(KafkaSettings::new(&self.kafka))?);
        let topics = vec![self.topic.clone()];
        Ok(Consumer::builder(GroupId::new(group)?, topics, source, self.coordinators.clone()))
    }
}

/// Stops the consumer on Ctrl-C, and on SIGTERM, by which service managers ask for the end.
pub(crate) fn stop_when_asked(stopper: Stopper) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    drop(tokio::spawn(async move {
        tokio::select! {
            _pressed = tokio::signal::ctrl_c() => {}
            _asked = terminate.recv() => {}
        }
        stopper.stop(STOP_WITHIN);
    }));
    Ok(())
}
