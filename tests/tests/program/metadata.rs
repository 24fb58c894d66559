//! Metadata of committed offsets, as `describe` and `partitions` show it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tenure_model::limits::METADATA_BYTES_MAX;
use tenure_model::{GroupId, LeaseSettings, TopicName};
use tenure_sdk::offsets::CoordinatorOffsets;
use tenure_sdk::testing::MemorySource;
use tenure_sdk::{Consumer, Owned};

use super::{Dev, said, until};

/// What the owner of each partition puts beside its offset, by the partition's index.
fn metadata(index: u32) -> Vec<u8> {
    match index {
        0 => Vec::new(),
        1 => "day 4, größer".into(),
        2 => "a\u{1b}[2J\u{1b}]0;title\u{7}\nb\u{9b}31m\u{202e}c".into(),
        3 => vec![0, 0xff, b'x'],
        _ => vec![b'm'; METADATA_BYTES_MAX],
    }
}

#[test]
fn metadata_is_shown_with_the_offset_and_cannot_play_tricks_on_a_terminal() {
    let (dev, count) = (Dev::start(), 5);
    let topic = TopicName::new("orders").unwrap();
    let source = MemorySource::new();
    source.create_topic(&topic, count);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let own = |owned: Owned<CoordinatorOffsets>| async move {
        let index = owned.grant().partition.index.get();
        let (mut input, mut offsets) = owned.split();
        offsets.set_metadata(metadata(index))?;
        while let Some(record) = input.next_record().await {
            offsets.done(&record);
        }
        Ok(())
    };
    let consumer = Consumer::builder(
        GroupId::new("billing").unwrap(),
        vec![topic.clone()],
        Arc::new(source.reader()),
        vec![dev.address.clone()],
    )
    .lease(LeaseSettings::for_ttl(3_000))
    .build()
    .unwrap();
    let stopper = consumer.stopper();
    let run = runtime.spawn(consumer.run(own));
    let partition =
        |index: usize| dev.json(&["partitions", "billing"])["partitions"][index].clone();
    for index in 0..count {
        source.append(&topic, index, "x").unwrap();
    }
    until("a group", || dev.run(&["partitions", "billing"]).status.success());
    until("offsets", || (0..5).all(|index| partition(index)["committed"] == 1));
    stopper.stop(Duration::from_secs(10));
    assert!(runtime.block_on(run).unwrap().unwrap().clean);

    let shown: Vec<Value> = (0..5).map(partition).collect();
    assert_eq!(shown[0]["metadata"], Value::Null);
    for index in [1, 2, 4] {
        let want = String::from_utf8(metadata(index)).unwrap();
        assert_eq!(shown[index as usize]["metadata"], want, "whole, as it was put");
    }
    assert_eq!(
        (&shown[3]["metadata"], &shown[3]["metadata_hex"]),
        (&Value::Null, &"00ff78".into())
    );
    let described = dev.json(&["describe", "billing"]);
    assert_eq!(described["partitions"].as_array().unwrap(), &shown);

    for command in ["partitions", "describe"] {
        let table = said(&dev.run(&[command, "billing"]));
        let json = said(&dev.run(&[command, "billing", "--output", "json"]));
        for text in [&table, &json] {
            let acts = |char: char| (char.is_control() && char != '\n') || char == '\u{202e}';
            assert!(!text.contains(acts), "{text:?}");
        }
        let long = format!("{}… (4096 bytes)", "m".repeat(40));
        for text in ["METADATA", "day 4, größer", "a\\u{1b}[2J", "c\n", "0x00ff78", &long] {
            assert!(table.contains(text), "{command} lacks {text:?}: {table}");
        }
        assert!(!table.contains(&"m".repeat(41)), "{table}");
    }
}
