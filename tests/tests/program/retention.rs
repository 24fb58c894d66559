//! A partition whose log has lost the offset that is to be read next.

use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::{Offset, TopicPartitionList};
use tenure_model::{NextOffset, RequestId};
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::sink::BoxError;
use tenure_sdk::{Limits, Owned};
use tenure_tests::servers::{Kafka, require, unique_name};
use tokio::runtime::Runtime;

use super::compacted::{Member, take_two};
use super::{Dev, LONGEST, read_on, until};

const GROUP: &str = "late";
/// Records before it are gone.
const FIRST: u64 = 4;
const END: i64 = 6;

/// Longer than the member's lease, and than it takes to grant a partition again.
const WATCHED: Duration = Duration::from_secs(4);

fn write(kafka: &Kafka, topic: &str) {
    let producer: BaseProducer = kafka.client_config().create().unwrap();
    for number in 0..END {
        let value = number.to_string();
        let record = BaseRecord::to(topic).partition(0).key("k").payload(&value);
        producer.send(record).map_err(|(error, _)| error).unwrap();
    }
    producer.flush(LONGEST).unwrap();
}

fn delete_before(kafka: &Kafka, topic: &str, first: u64) {
    let admin: AdminClient<DefaultClientContext> = kafka.client_config().create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, 0, Offset::Offset(first.cast_signed())).unwrap();
    let deleted =
        Runtime::new().unwrap().block_on(admin.delete_records(&list, &AdminOptions::new()));
    assert_eq!(deleted.unwrap().count(), 1);
}

/// Moves the offset to the first record that is there, by a named request, and reads on.
async fn rewind_and_read(owned: Owned<CoordinatorOffsets>) -> Result<(), BoxError> {
    let is_before = owned.resume().get() < FIRST;
    let (mut input, mut offsets) = owned.split();
    if is_before {
        let (to, name) = (NextOffset::new(FIRST)?, RequestId::new("retention")?);
        return Err(offsets.rewind(to, &name).await?.into());
    }
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        offsets.commit(batch.next()).await?;
    }
    Ok(())
}

#[test]
fn offset_that_retention_took_away_freezes_its_partition_until_it_is_rewound_by_name() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    let (dev, topic) = (Dev::start(), unique_name("retention"));
    kafka.create_topic(&topic, 1);
    write(kafka, &topic);
    let runtime = Runtime::new().unwrap();
    let early = Member::start(&dev, &runtime, kafka, &topic, GROUP, take_two);
    early.wait(2, None);
    early.stop();
    delete_before(kafka, &topic, FIRST);

    let late = Member::start(&dev, &runtime, kafka, &topic, GROUP, read_on);
    let line = || dev.json(&["partitions", GROUP])["partitions"][0].clone();
    let frozen = "frozen: source: offset 2 of";
    until("the partition to stand still", || {
        line()["error"].as_str().is_some_and(|error| error.starts_with(frozen))
    });
    let (epoch, since) = (line()["epoch"].clone(), Instant::now());
    while since.elapsed() < WATCHED {
        let now = line();
        assert!(now["error"].as_str().unwrap().starts_with(frozen), "{now}");
        assert_eq!((&now["epoch"], &now["committed"]), (&epoch, &2.into()), "{now}");
    }
    assert_eq!(late.stop(), 0);

    // The next process asks its handler before it asks Kafka.
    let rewound = Member::start(&dev, &runtime, kafka, &topic, GROUP, rewind_and_read);
    rewound.wait(END, Some(0));
    assert_eq!(rewound.stop(), 2);
}
