//! The conformance kit.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::producer::BaseRecord;
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_kafka::{KafkaSink, KafkaSinkSettings, KafkaWriter};
use tenure_tests::figures::tell;
use tenure_tests::tier;

use crate::scene::Scene;

/// Rows are `PARTITION OFFSET EPOCH` in one topic.
struct Topic {
    scene: Scene,
    settings: KafkaSinkSettings,
}

impl Subject for Topic {
    type Sink = KafkaSink;

    async fn connect(&self) -> Result<KafkaSink, SinkError> {
        KafkaSink::new(self.settings.clone())
    }

    async fn write(
        &self,
        writer: &mut KafkaWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        for offset in rows.offsets() {
            let payload = format!("{} {offset} {}", rows.partition, rows.epoch.get());
            let record = BaseRecord::to(&self.scene.topic).key("").payload(&payload).partition(0);
            tx.send(record).await?;
            pauses.here().await;
        }
        tx.commit(rows.next).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        let mut rows = Vec::new();
        for text in self.scene.read().await {
            let fields: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            let [at, offset, epoch] = fields[..] else {
                return Err("a row has three fields".into());
            };
            if at == u64::from(partition) {
                rows.push(Row { offset: NextOffset::new(offset)?, epoch: Epoch::new(epoch)? });
            }
        }
        rows.sort_by_key(|row| row.offset);
        Ok(rows)
    }

    fn beside(&self, _sink: &KafkaSink, _grant: &Grant) -> Option<KafkaWriter> {
        None
    }
}

fn options() -> Options {
    // Each hand-over makes a producer: fewer than a tenth of them where not all are asked for.
    let handovers = match tier::Tier::current() {
        tier::Tier::Fast | tier::Tier::Ci => 30,
        tier::Tier::Full => 1_000,
    };
    Options {
        handovers,
        handover_interval_max: Duration::from_millis(1_200),
        // Each owner that initialises late shuts the true one out for one write: 15 % in a usual run.
        transient_percent_max: 35,
        ..Options::with_seed(tier::seed())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_conforms() {
    let Some(scene) = Scene::new("conforms") else { return };
    let settings = scene.settings();
    let report = conformance::run(&Arc::new(Topic { scene, settings }), options()).await;
    tell(&report);
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_kafka_without_a_look_after_the_initialisation() {
    for check in [Check::StaleWrite, Check::LateRegistration, Check::Retire, Check::Restart] {
        let Some(scene) = Scene::new("unfenced") else { return };
        let settings = KafkaSinkSettings { dangerously_without_fencing: true, ..scene.settings() };
        let subject = Arc::new(Topic { scene, settings });
        let outcome = conformance::run_one(&subject, options(), check).await;
        tell(&outcome);
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}
