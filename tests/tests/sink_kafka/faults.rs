//! Answers that are lost, owners that are killed, offsets of other programs.

use std::process::{Command, Stdio};
use std::time::Duration;

use rand::Rng;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::producer::BaseRecord;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tenure_model::Home;
use tenure_sdk::sink::{FencedSink, FencedWriter, Resolved, SinkError};
use tenure_tests::figures::tell;
use tenure_tests::tier;

use crate::scene::{Scene, acquire, numbers, offset, owner, write, write_surely};

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_commit_is_in_doubt_and_its_producer_is_never_used_again() {
    let Some(scene) = Scene::new("in_doubt") else { return };
    let (mut writer, _) = acquire(&scene.sink(), &owner(1)).await.unwrap();
    let rounds = tier::Tier::current().repetitions(60) as u64;
    let (mut at, mut landed) = (0, 0);
    for round in 0..rounds {
        let mut tx = writer.begin().await.unwrap();
        let payload = at.to_string();
        tx.send(BaseRecord::to(&scene.topic).key("").payload(&payload).partition(0)).await.unwrap();
        // At once, and at moments around the usual length of a commit.
        let patience = Duration::from_micros(round % 10 * 1_500);
        let answer = tokio::time::timeout(patience, tx.commit(offset(at + 1))).await;
        if let Ok(answer) = answer {
            answer.unwrap();
            at += 1;
            continue;
        }
        let next = writer.begin().await;
        if let Err(SinkError::Unknown(_)) = next {
            match writer.resolve().await.unwrap() {
                Resolved::Applied(next) => {
                    assert_eq!(next, offset(at + 1));
                    (at, landed) = (at + 1, landed + 1);
                }
                Resolved::NotApplied(next) => assert_eq!(next, offset(at)),
            }
        } else {
            // Cancelled before anything of the commit was sent.
            assert!(next.is_ok(), "{next:?}");
        }
    }
    tell(format_args!(
        "{rounds} commits cut off: {at} are in, {landed} of them were found by looking"
    ));
    assert_eq!(scene.read().await, numbers(0..at));
}

const CHILD_BOOTSTRAP: &str = "TENURE_TEST_SINK_KAFKA_BOOTSTRAP";

const CHILD_TOPIC: &str = "TENURE_TEST_SINK_KAFKA_TOPIC";

const CHILD_EPOCH: &str = "TENURE_TEST_SINK_KAFKA_EPOCH";

/// Not a test by itself: the owner that [`killed_owner_leaves_records_and_offset_at_one_point`] kills.
#[tokio::test(flavor = "multi_thread")]
async fn child_that_writes_until_it_is_killed() {
    let (Ok(bootstrap), Ok(topic), Ok(value)) =
        (std::env::var(CHILD_BOOTSTRAP), std::env::var(CHILD_TOPIC), std::env::var(CHILD_EPOCH))
    else {
        return;
    };
    let scene = Scene { bootstrap, topic };
    let grant = owner(value.parse().unwrap());
    let (mut writer, mut at) = loop {
        match acquire(&scene.sink(), &grant).await {
            Ok(acquired) => break acquired,
            Err(SinkError::Transient { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    loop {
        write_surely(&scene, &mut writer, at, at + 3).await;
        at += 3;
        // For the process that started this one.
        println!("wrote up to {at}");
    }
}

#[test]
fn killed_owner_leaves_records_and_offset_at_one_point() {
    let Some(scene) = Scene::new("killed") else { return };
    let kills = tier::Tier::current().repetitions(40) as u64;
    let mut random = rand::rng();
    for value in 1..=kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::child_that_writes_until_it_is_killed", "--nocapture"])
            .env(CHILD_BOOTSTRAP, &scene.bootstrap)
            .env(CHILD_TOPIC, &scene.topic)
            .env(CHILD_EPOCH, value.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = std::io::BufReader::new(child.stdout.take().unwrap());
        let writes = random.random_range(0..4);
        let written = std::io::BufRead::lines(output)
            .map_while(Result::ok)
            .filter(|line| line.contains("wrote up to"))
            .nth(writes);
        assert!(written.is_some(), "the child ended before it was killed");
        // Somewhere in the next write.
        std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
        // SIGKILL.
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let resumed = runtime.block_on(async {
        let (writer, resumed) = acquire(&scene.sink(), &owner(kills + 1)).await.unwrap();
        drop(writer);
        resumed
    });
    tell(format_args!("{kills} owners killed, {resumed} records"));
    assert!(resumed > 0, "no owner wrote anything");
    assert_eq!(scene.committed(), numbers(0..resumed));
}

#[tokio::test(flavor = "multi_thread")]
async fn offset_that_another_program_commits_freezes_the_partition() {
    let Some(scene) = Scene::new("foreign") else { return };
    let sink = scene.sink();
    assert_eq!(sink.capabilities().home, Home::KafkaTransaction);
    let (mut writer, _) = acquire(&sink, &owner(1)).await.unwrap();
    write(&scene, &mut writer, 0, 2).await.unwrap();
    drop(writer);
    let (foreign, id) = (scene.clone(), sink.transactional_id(&owner(1)));
    tokio::task::spawn_blocking(move || {
        let other: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &foreign.bootstrap)
            .set("group.id", id)
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&foreign.topic, 0, Offset::Offset(1)).unwrap();
        other.commit(&list, rdkafka::consumer::CommitMode::Sync).unwrap();
    })
    .await
    .unwrap();
    let registered = sink.register(&owner(2)).await;
    assert!(matches!(registered, Err(SinkError::Misconfigured(_))), "{registered:?}");
}
