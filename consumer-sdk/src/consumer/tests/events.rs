//! What frameworks and orchestrators see of a consumer.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use super::*;
use crate::session::LostCause;

/// One word for each event.
fn word(event: &Lifecycle) -> String {
    match event {
        Lifecycle::Joined { .. } => "joined".to_owned(),
        Lifecycle::Preparing { partition, .. } => format!("preparing {}", partition.index),
        Lifecycle::PreparationEnded { partition } => format!("called off {}", partition.index),
        Lifecycle::Granted { grant } => format!("granted {}", grant.epoch),
        Lifecycle::Regained { grant, lost } => format!("regained {} after {lost}", grant.epoch),
        Lifecycle::Acquired { epoch, resume, .. } => format!("acquired {epoch} from {resume}"),
        Lifecycle::Revoking { epoch, .. } => format!("revoking {epoch}"),
        Lifecycle::Lost { epoch, .. } => format!("lost {epoch}"),
        Lifecycle::Released { epoch, reason, .. } => format!("released {epoch} {reason:?}"),
        Lifecycle::LeaseAtRisk { .. } => "at risk".to_owned(),
        Lifecycle::LeaseRenewed => "renewed".to_owned(),
        Lifecycle::Ended => "ended".to_owned(),
        Lifecycle::Missed { count } => format!("missed {count}"),
    }
}

async fn next(events: &mut LifecycleEvents) -> String {
    word(&events.next().await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn events_tell_the_life_of_grants_in_order() {
    let bench = Bench::new(1);
    let consumer = bench.builder().build().unwrap();
    let (mut events, stopper) = (consumer.lifecycle(), consumer.stopper());
    let run = bench.run(consumer, doing_all(&bench)).await;
    let (ann, partition) = (bench.member.clone(), bench.partitions[0]);
    assert_eq!(next(&mut events).await, "joined");
    let (first, _) = bench.grant(0);
    assert_eq!(next(&mut events).await, "granted e1");
    assert_eq!(next(&mut events).await, "acquired e1 from 0");
    bench.coordinator.lose(&ann, partition, first, LostCause::LeaseEnded);
    assert_eq!(next(&mut events).await, "lost e1");
    assert_eq!(next(&mut events).await, "released e1 LeaseLost");
    let (second, _) = bench.grant(0);
    assert_eq!(next(&mut events).await, "regained e2 after e1");
    assert_eq!(next(&mut events).await, "acquired e2 from 0");
    bench.coordinator.revoke(&ann, partition, second, SECOND * 30);
    assert_eq!(next(&mut events).await, "revoking e2");
    assert_eq!(next(&mut events).await, "released e2 Revoked");
    bench.grant(0);
    assert_eq!(next(&mut events).await, "granted e3", "it was not lost before");
    assert_eq!(next(&mut events).await, "acquired e3 from 0");
    stopper.stop(SECOND * 10);
    assert_eq!(next(&mut events).await, "released e3 Shutdown");
    assert_eq!(next(&mut events).await, "ended");
    run.await.unwrap().unwrap();
    assert!(events.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn handler_is_told_that_the_lease_is_at_risk_while_it_is() {
    let bench = Bench::new(1);
    let notes = bench.coordinator.clone();
    let handler = move |owned: Owned<CoordinatorOffsets>| {
        let notes = notes.clone();
        async move {
            let (input, _offsets) = owned.split();
            input.lease_at_risk().await;
            notes.note("told of the risk");
            while input.is_lease_at_risk() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            notes.note("told of the renewal");
            input.ended().await;
            Ok(())
        }
    };
    let _run = bench.run(bench.builder().build().unwrap(), handler).await;
    bench.grant(0);
    bench.coordinator.logged("acquired 0 at e1").await;
    tokio::time::sleep(SECOND * 10).await;
    assert!(bench.lines(&["told"]).is_empty());
    bench.coordinator.put_lease_at_risk(&bench.member, true);
    bench.coordinator.logged("told of the risk").await;
    tokio::time::sleep(SECOND).await;
    assert_eq!(bench.lines(&["told"]).len(), 1);
    bench.coordinator.put_lease_at_risk(&bench.member, false);
    bench.coordinator.logged("told of the renewal").await;
}

#[tokio::test(start_paused = true)]
async fn framework_works_on_partitions_that_it_is_handed_and_gives_them_back() {
    let bench = Bench::new(2);
    bench.append(0, 3);
    let consumer = bench.builder().build().unwrap();
    let (coordinator, member) = (bench.coordinator.clone(), bench.member.clone());
    let mut stream = consumer.into_stream_by(move |consumer, handler| {
        tokio::spawn(async move {
            coordinator.run(&member, consumer, move |owned| handler(owned)).await
        })
    });
    bench.coordinator.logged("ann joined").await;
    let (epoch, _) = bench.grant(0);
    let mut seen = Vec::new();
    let work = loop {
        match stream.next().await.unwrap() {
            Ownership::Work(work) => break work,
            Ownership::Happened(event) => seen.push(word(&event)),
            Ownership::Ended(end) => panic!("ended: {end:?}"),
        }
    };
    assert_eq!(seen, ["joined", "granted e1", "acquired e1 from 0"]);
    assert_eq!(work.grant().epoch, epoch);
    let (mut input, mut offsets, finish) = work.split();
    let batch = input.next_batch(&Limits::DEFAULT).await.unwrap();
    batch.iter().for_each(|record| offsets.done(record));
    bench.coordinator.revoke(&bench.member, bench.partitions[0], epoch, SECOND * 30);
    assert!(input.next_batch(&Limits::DEFAULT).await.is_none());
    finish.finish(Ok(()));
    let line = bench.coordinator.logged("release 0 e1").await;
    assert!(line.starts_with("release 0 e1 Revoked at 3"), "{line}");
    // Dropped instead of finished: as an error.
    bench.grant(1);
    loop {
        if let Some(Ownership::Work(work)) = stream.next().await {
            drop(work);
            break;
        }
    }
    let line = bench.coordinator.logged("release 1 e2").await;
    assert!(line.contains("HandlerFailed") && line.contains("dropped unfinished"), "{line}");
    stream.stopper().stop(SECOND * 5);
    let end = loop {
        if let Some(Ownership::Ended(end)) = stream.next().await {
            break end;
        }
    };
    assert!(end.unwrap().clean);
    assert!(stream.next().await.is_none());
}

fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test]
async fn probe_answers_while_every_thread_of_the_runtime_is_blocked() {
    let bench = Bench::new(1);
    let consumer = bench.builder().build().unwrap();
    let (readiness, stopper) = (consumer.readiness(), consumer.stopper());
    let probe = readiness.serve((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = probe.address();
    let ready = move || ask(address, "GET /ready HTTP/1.1\r\nHost: x\r\n\r\n");
    // This test has one thread, and these calls block it.
    assert!(ready().starts_with("HTTP/1.1 503 "), "{}", ready());
    let run = bench.run(consumer, doing_all(&bench)).await;
    assert!(ready().starts_with("HTTP/1.1 200 "), "{}", ready());
    assert!(ask(address, "GET /live HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200 "));
    assert!(ask(address, "GET /other HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404 "));
    assert!(ask(address, "POST /ready HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404 "));
    stopper.stop(SECOND);
    run.await.unwrap().unwrap();
    assert!(ready().starts_with("HTTP/1.1 503 "), "{}", ready());
    drop(probe);
    assert!(TcpStream::connect(address).is_err(), "the port is free again");
}

#[tokio::test(start_paused = true)]
async fn dump_shows_each_partition_and_its_error_while_the_consumer_runs() {
    let bench = Bench::new(2);
    bench.append(0, 3);
    let consumer = bench.builder().reset_policy(ResetPolicy::Fail).build().unwrap();
    let inspector = consumer.inspector();
    assert!(inspector.dump().starts_with("consumer: not ready, 0 partitions\n"));
    let _run = bench.run(consumer, doing_all(&bench)).await;
    let bob = MemberId::new("bob").unwrap();
    let epoch = bench.coordinator.take_for(&bench.topic, bench.partitions[0], &bob);
    bench.coordinator.commit_as(&bob, bench.partitions[0], epoch, NextOffset::new(1).unwrap());
    bench.grant(0);
    bench.grant(1);
    bench.coordinator.logged("deliver 0 e2 1..3").await;
    bench.coordinator.logged("phase 1 e3 Running: frozen").await;
    let dump = inspector.dump();
    let line = |start: &str| dump.lines().find(|line| line.starts_with(start)).unwrap_or_default();
    assert!(dump.starts_with("consumer: ready, 2 partitions\n"), "{dump}");
    assert!(
        line("  t/0 e2 handoff 2: Running, position 3, lag 0, lease ").ends_with('s'),
        "{dump}"
    );
    assert!(
        line("  t/1 e3 handoff 3: Running").contains("error: frozen: the home has no"),
        "{dump}"
    );
    assert_eq!(
        line("  tenure_consumer_frozen_total"),
        "  tenure_consumer_frozen_total 1",
        "{dump}"
    );
}
