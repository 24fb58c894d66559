//! Subscriptions by a regular expression.

use super::*;

#[tokio::test(start_paused = true)]
async fn topic_that_appears_later_is_subscribed_to_and_read_from_its_first_record() {
    let bench = Bench::new(1);
    let name = |text: &str| TopicName::new(text).unwrap();
    let eu = bench.source.create_topic(&name("orders-eu"), 1);
    bench.source.create_topic(&name("orders-eu.old"), 1);
    bench.source.append(&name("orders-eu"), 0, "x").unwrap();
    let group = GroupId::new("g").unwrap();
    let source = Arc::new(bench.source.clone());
    let consumer = Consumer::builder(group, vec![], source, vec!["nowhere:1".to_owned()])
        .topics_matching("orders-[a-z]+")
        .reset_policy(ResetPolicy::Latest)
        .topics_interval(SECOND)
        .clock(bench.clock.clone())
        .build()
        .unwrap();
    let _run = bench.run(consumer, doing_all(&bench)).await;
    let subscribed = bench.coordinator.logged("ann subscribes").await;
    assert_eq!(subscribed, "ann subscribes to orders-eu");
    bench.coordinator.grant(&name("orders-eu"), eu[0], &bench.member);
    bench.coordinator.logged("acquired 0 at e1 from 1").await;
    let us = bench.source.create_topic(&name("orders-us"), 1);
    bench.source.append(&name("orders-us"), 0, "y").unwrap();
    bench.coordinator.logged("ann subscribes to orders-eu, orders-us").await;
    bench.coordinator.grant(&name("orders-us"), us[0], &bench.member);
    bench.coordinator.logged("acquired 0 at e2 from 0").await;
    assert_eq!(bench.lines(&["ann subscribes"]).len(), 2, "nothing is said twice");
}

#[tokio::test(start_paused = true)]
async fn pattern_that_is_none_is_refused() {
    let bench = Bench::new(1);
    let refused = bench.builder().topics_matching("orders-(").build().unwrap_err().to_string();
    assert!(refused.starts_with("topics_matching is no regular expression: "), "{refused}");
}
