//! `tenure sink check kafka://…`.

use tenure_tests::servers::{Kafka, free_port, require};

use crate::{check, verdict};

#[test]
fn kafka_passes_with_its_single_copies_named_and_a_missing_topic_fails() {
    let Some(kafka) = require(Kafka::shared()) else { return };
    kafka.warm_up_transactions();
    let topic = kafka.new_topic("checked", 1);
    let (code, report) = check(&format!("kafka://{}/{topic}", kafka.bootstrap()));
    assert_eq!((code, report["usable"].as_bool()), (0, Some(true)), "{report:#}");
    for name in ["topic", "retention", "elections", "stale write", "late registration", "clean-up"]
    {
        assert_eq!(verdict(&report, name), Some("ok"), "{name}: {report:#}");
    }
    assert_eq!(verdict(&report, "transactions"), Some("warn"), "one broker, one copy");

    let (code, report) = check(&format!("kafka://{}/nowhere", kafka.bootstrap()));
    assert_eq!((code, verdict(&report, "topic")), (1, Some("fail")), "{report:#}");
}

#[test]
fn broker_that_is_not_there_fails_with_the_next_step() {
    let (code, report) = check(&format!("kafka://127.0.0.1:{}/orders", free_port()));
    assert_eq!((code, verdict(&report, "connection")), (1, Some("fail")));
    assert!(report["checks"][0]["next"].is_string());
}
