//! Owners that initialise late, and owners that are shut out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rdkafka::producer::BaseRecord;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_kafka::{KafkaSink, KafkaSinkSettings, KafkaWriter, Step};
use tenure_tests::figures::tell;
use tenure_tests::tier;

use crate::scene::{PATIENCE, Scene, acquire, numbers, offset, owner, write, write_surely};

/// Registers `sleeper` with a sink that sleeps before it initialises, after it looked, until `owned` has the partition;
/// answers what the sleeper's registration came to.
async fn sleep_until_owned(
    scene: &Scene,
    settings: KafkaSinkSettings,
    sleeper: Grant,
    owned: impl Future<Output = ()>,
) -> Result<KafkaWriter, SinkError> {
    let (asleep, looked) = tokio::sync::oneshot::channel();
    let (wake, woken) = mpsc::channel::<()>();
    let once = std::sync::Mutex::new(Some((asleep, woken)));
    let sink = KafkaSink::with_hook(settings, move |step, _| {
        if step == Step::Initialise
            && let Some((asleep, woken)) = once.lock().unwrap().take()
        {
            asleep.send(()).unwrap();
            woken.recv().unwrap();
        }
    });
    let sink = sink.unwrap();
    let late = tokio::spawn(async move { Ok(sink.register(&sleeper).await?.writer) });
    looked.await.unwrap();
    owned.await;
    wake.send(()).unwrap();
    let late = late.await.unwrap();
    tell(format_args!("{}: the sleeper's registration: {late:?}", scene.topic));
    late
}

#[tokio::test(flavor = "multi_thread")]
async fn sleeper_that_initialises_after_the_new_owner_gets_no_record_in() {
    let Some(scene) = Scene::new("sleeper") else { return };
    let rounds = tier::Tier::current().repetitions(30);
    let mut written = 0;
    let mut slowest = Duration::ZERO;
    for round in 0..rounds as u64 {
        let (old, new) = (owner(2 * round + 1), owner(2 * round + 2));
        let mut kept = None;
        let owned = async {
            let (mut writer, resumed) = acquire(&scene.sink(), &new).await.unwrap();
            assert_eq!(resumed, written);
            write(&scene, &mut writer, written, written + 2).await.unwrap();
            kept = Some(writer);
        };
        let late = sleep_until_owned(&scene, scene.settings(), old, owned).await;
        assert!(matches!(late, Err(SinkError::Fenced { .. })), "{late:?}");
        written += 2;
        // The sleeper has shut the true owner out, which goes on by itself.
        let mut writer = kept.unwrap();
        let started = Instant::now();
        write_surely(&scene, &mut writer, written, written + 2).await;
        slowest = slowest.max(started.elapsed());
        written += 2;
    }
    tell(format_args!(
        "{rounds} sleepers, slowest recovery of the true owner {} ms",
        slowest.as_millis()
    ));
    assert!(slowest < Duration::from_secs(2), "the true owner took {slowest:?} to recover");
    assert_eq!(scene.read().await, numbers(0..written));
}

#[tokio::test(flavor = "multi_thread")]
async fn sleeper_does_damage_without_a_look_after_the_initialisation() {
    let Some(scene) = Scene::new("damage") else { return };
    let settings = KafkaSinkSettings { dangerously_without_fencing: true, ..scene.settings() };
    let sink = KafkaSink::new(settings.clone()).unwrap();
    let mut kept = None;
    let owned = async {
        let (mut writer, resumed) = acquire(&sink, &owner(2)).await.unwrap();
        assert_eq!(resumed, 0);
        write(&scene, &mut writer, 0, 2).await.unwrap();
        kept = Some(writer);
    };
    // It had read its resume point, 0, before it fell asleep.
    let mut sleeper = sleep_until_owned(&scene, settings, owner(1), owned).await.unwrap();
    sleeper.resume(&Verified::without_coordinator(false)).await.unwrap();
    write(&scene, &mut sleeper, 0, 2).await.unwrap();
    write_surely(&scene, kept.as_mut().unwrap(), 2, 4).await;
    let found = scene.read().await;
    assert_ne!(found, numbers(0..4), "the negative control did no damage");
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_ping_pongs_lose_nothing_and_double_nothing() {
    let Some(scene) = Scene::new("ping_pong") else { return };
    let rounds = tier::Tier::current().repetitions(500) as u64;
    let grant = owner(1);
    let (mut writer, _) = acquire(&scene.sink(), &grant).await.unwrap();
    let mut slowest = Duration::ZERO;
    for round in 0..rounds {
        let started = Instant::now();
        if round % 2 == 0 {
            // Between two writes.
            let (intruding, grant) = (scene.clone(), grant.clone());
            let intruder =
                tokio::task::spawn_blocking(move || intruding.intrude(&grant)).await.unwrap();
            write_surely(&scene, &mut writer, round, round + 1).await;
            std::thread::spawn(move || drop(intruder));
        } else {
            // While a write is open.
            let mut tx = writer.begin().await.unwrap();
            let payload = round.to_string();
            tx.send(BaseRecord::to(&scene.topic).key("").payload(&payload).partition(0))
                .await
                .unwrap();
            let (intruding, grant) = (scene.clone(), grant.clone());
            let intruder =
                tokio::task::spawn_blocking(move || intruding.intrude(&grant)).await.unwrap();
            let cut_off = tx.commit(offset(round + 1)).await;
            assert!(matches!(cut_off, Err(SinkError::Transient { .. })), "{cut_off:?}");
            write_surely(&scene, &mut writer, round, round + 1).await;
            std::thread::spawn(move || drop(intruder));
        }
        slowest = slowest.max(started.elapsed());
    }
    tell(format_args!("{rounds} ping-pongs, slowest round {} ms", slowest.as_millis()));
    assert_eq!(scene.read().await, numbers(0..rounds));
}

#[tokio::test(flavor = "multi_thread")]
async fn old_owner_that_is_shut_out_again_and_again_ends_with_the_new_registration() {
    let Some(scene) = Scene::new("bounded") else { return };
    let stop = Arc::new(AtomicBool::new(false));
    let (mut old, _) = acquire(&scene.sink(), &owner(1)).await.unwrap();
    let (busy, ended) = (scene.clone(), Arc::clone(&stop));
    let fighting = tokio::spawn(async move {
        let mut at = 0;
        while !ended.load(Ordering::SeqCst) {
            match write(&busy, &mut old, at, at + 1).await {
                Ok(()) => at += 1,
                Err(SinkError::Transient { .. } | SinkError::Unknown(_)) => {}
                Err(error) => return (at, Some(error)),
            }
        }
        (at, None)
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let started = Instant::now();
    let (mut new, resumed) = loop {
        match acquire(&scene.sink(), &owner(2)).await {
            Ok(acquired) => break acquired,
            Err(SinkError::Transient { .. }) if started.elapsed() < PATIENCE => {}
            Err(error) => panic!("{error}"),
        }
    };
    tell(format_args!(
        "registered after {} ms against a writer that goes on",
        started.elapsed().as_millis()
    ));
    write_surely(&scene, &mut new, resumed, resumed + 1).await;
    let (landed, error) = tokio::time::timeout(PATIENCE, fighting).await.unwrap().unwrap();
    stop.store(true, Ordering::SeqCst);
    assert!(matches!(error, Some(SinkError::Fenced { .. })), "{error:?}");
    assert!(landed <= resumed, "{landed} writes were answered, the new owner resumes at {resumed}");
    assert_eq!(scene.read().await, numbers(0..resumed + 1));
}
