//! What a consumer group of Kafka costs when a member joins, with the same load and partitions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

use super::{STEADY, STEP_MAX, Work};
use crate::bench::{BenchError, Measured, median};
use crate::feed::Feed;
use crate::servers::{Kafka, unique_name, wait_until};

/// First and last record of each partition at each member.
type Seen = Arc<Mutex<HashMap<(i32, usize), (Instant, Instant)>>>;

/// Two members share the partitions, a third one joins.
pub(super) fn measure(measured: &mut Measured, kafka: &Kafka) -> Result<(), BenchError> {
    for (protocol, p50, max) in [
        ("consumer", "kafka_join_gap_p50_ms", "kafka_join_gap_max_ms"),
        ("classic", "kafka_classic_join_gap_p50_ms", "kafka_classic_join_gap_max_ms"),
    ] {
        let gaps = join(kafka, protocol)?;
        measured.metric(p50, median(&gaps));
        measured.metric(max, gaps.iter().copied().fold(0.0, f64::max));
    }
    Ok(())
}

fn join(kafka: &Kafka, protocol: &str) -> Result<Vec<f64>, BenchError> {
    let Work { partitions, rate, .. } = STEADY;
    let topic = kafka.new_topic("rebalance", partitions);
    let group = unique_name("rebalance");
    let feed = Feed::start(kafka, &topic, partitions.into(), rate);
    let seen: Seen = Arc::default();
    let ending = Arc::new(AtomicBool::new(false));
    let mut members: Vec<JoinHandle<()>> = Vec::new();
    for member in 0..2 {
        members.push(start(kafka, &topic, &group, protocol, member, &seen, &ending)?);
    }
    let count_of = |member: usize| {
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.keys().filter(|(_, of)| *of == member).count()
    };
    let half = usize::from(partitions) / 2;
    if !wait_until(STEP_MAX, || count_of(0) >= half && count_of(1) >= half) {
        return Err("the group of Kafka did not share the partitions".into());
    }
    thread::sleep(Duration::from_secs(1));
    members.push(start(kafka, &topic, &group, protocol, 2, &seen, &ending)?);
    let joined = wait_until(STEP_MAX, || count_of(2) >= usize::from(partitions) / 3);
    ending.store(true, Ordering::SeqCst);
    for member in members {
        member.join().map_err(|_panic| "a member of Kafka's group failed")?;
    }
    let _records = feed.end();
    if !joined {
        return Err("the third member of Kafka's group got no partitions".into());
    }
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let gap = |partition: i32| {
        let (first, _) = seen.get(&(partition, 2))?;
        let before = (0..2).filter_map(|member| seen.get(&(partition, member)));
        let last = before.map(|(_, last)| *last).filter(|last| last < first).max()?;
        Some(first.saturating_duration_since(last).as_secs_f64() * 1_000.0)
    };
    let gaps: Vec<f64> = (0..i32::from(partitions)).filter_map(gap).collect();
    if gaps.is_empty() { Err("no partition moved in Kafka's group".into()) } else { Ok(gaps) }
}

fn start(
    kafka: &Kafka,
    topic: &str,
    group: &str,
    protocol: &str,
    member: usize,
    seen: &Seen,
    ending: &Arc<AtomicBool>,
) -> Result<JoinHandle<()>, BenchError> {
    let mut config = kafka.client_config();
    config.set("group.id", group).set("group.protocol", protocol);
    config.set("auto.offset.reset", "latest").set("auto.commit.interval.ms", "100");
    config.set("fetch.wait.max.ms", "20").set("fetch.queue.backoff.ms", "10");
    if protocol == "classic" {
        config.set("partition.assignment.strategy", "cooperative-sticky");
    }
    let consumer: BaseConsumer = config.create()?;
    consumer.subscribe(&[topic])?;
    let (seen, ending) = (Arc::clone(seen), Arc::clone(ending));
    Ok(thread::spawn(move || {
        while !ending.load(Ordering::SeqCst) {
            let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) else { continue };
            let now = Instant::now();
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.entry((message.partition(), member)).or_insert((now, now)).1 = now;
        }
    }))
}
