//! Grant tokens: who may raise a fence.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request};
use tenure_coordinator::{Node, NodeSettings};
use tenure_model::{Epoch, GroupId, LeaseSettings, MemberId, TopicName};
use tenure_proto::v1;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{BoxError, FencedSink, SinkError};
use tenure_sdk::testing::MemorySource;
use tenure_sdk::{Consumer, Limits, Owned};
use tenure_sink_http::headers::{EPOCH, HOLDER, REFUSAL, TOKEN};
use tenure_sink_http::{HttpSettings, HttpSink, Receiver, Tokens};
use tenure_token::{Claims, KeyRing, PublicKey, SigningKey};

use crate::fencing::raw;
use crate::service::{Mode, Service, at, grant, order, owner};

fn key(secret: u8) -> SigningKey {
    SigningKey::from_secret(&[secret; 32])
}

fn demanding(ring: KeyRing) -> Receiver {
    Receiver { tokens: Tokens::ToRaise(ring), ..Receiver::default() }
}

/// The grant with a token of `key` for `resource` at `epoch`.
fn signed(grant: Grant, key: &SigningKey, resource: &str, epoch: u64) -> Grant {
    let token = key.sign(&Claims {
        cluster: "tenure".into(),
        resource: resource.into(),
        epoch: Epoch::new(epoch).unwrap(),
        member: grant.member.clone(),
        issued_at_unix_ms: 0,
    });
    Grant { token: Some(token.into()), ..grant }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_raises_a_fence_without_a_token_of_the_coordinator_for_it() {
    let receiver = demanding(KeyRing::new(vec![key(1).public()]));
    let Some(service) = Service::start(Mode::Right, receiver).await else { return };
    let sink = service.sink(HttpSettings::default());
    let resource = grant("ann", 3).resource.to_string();
    let ours = signed(grant("ann", 3), &key(1), &resource, 3);
    let (mut writer, _) = owner(&sink, &ours).await;

    let attack = || grant("eve", 9_007_199_254_740_991);
    let attacks = [
        ("no token", attack()),
        ("a key of one's own", signed(attack(), &key(2), &resource, attack().epoch.get())),
        ("a token for another epoch", signed(attack(), &key(1), &resource, 4)),
        (
            "a token for another resource",
            signed(attack(), &key(1), "other/AAAAAAAAAAAAAAAAAAAAAA/0", attack().epoch.get()),
        ),
        ("text", Grant { token: Some("a.b".into()), ..attack() }),
    ];
    for (what, attack) in attacks {
        let refused = sink.register(&attack).await;
        assert!(matches!(refused, Err(SinkError::Misconfigured(_))), "{what}: {refused:?}");
        let (epoch, token) = (attack.epoch.get().to_string(), attack.token.unwrap_or_default());
        let mut map = vec![(EPOCH, epoch.as_str()), (HOLDER, "eve")];
        if !token.is_empty() {
            map.push((TOKEN, &token));
        }
        let path = format!("/fences/{resource}");
        let answer = raw(service.port(), Method::PUT, &path, &map, "").await;
        let refusal = answer.headers().get(REFUSAL).unwrap();
        assert_eq!((answer.status().as_u16(), refusal.as_bytes()), (403, &b"token"[..]), "{what}");
    }
    assert_eq!(service.fence_epochs(), "3");
    writer.write(order("0 3 1", None), at(1)).await.unwrap();

    let next = signed(grant("bob", 5), &key(1), &resource, 5);
    sink.register(&next).await.unwrap();
    let stale = writer.write(order("1 3 1", None), at(2)).await;
    assert!(matches!(stale, Err(SinkError::Fenced { .. })), "{stale:?}");
    // The old token is as true as ever, and of no use.
    let late = sink.register(&ours).await;
    assert!(matches!(late, Err(SinkError::Fenced { .. })), "{late:?}");
    assert_eq!(service.orders(), ["0|3"]);
}

async fn write_all(owned: Owned<HttpSink>) -> Result<(), BoxError> {
    let epoch = owned.grant().epoch.get();
    let (mut input, mut out) = owned.split();
    while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
        let line = |record: &tenure_sdk::source::Record| {
            format!("{} {epoch} {}", record.offset.get(), record.partition.index)
        };
        let lines: Vec<String> = batch.iter().map(line).collect();
        let request = Request::post("/orders").body(Bytes::from(lines.join("\n")))?;
        out.write(request, batch.next()).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn consumer_writes_through_a_service_that_believes_the_coordinator_alone() {
    const RECORDS: u32 = 40;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("signing.key");
    std::fs::write(&file, key(7).to_file_text()).unwrap();
    let data_dir = folder.path().join("node");
    let mut settings =
        NodeSettings { data_dir, signing_key_file: Some(file), ..NodeSettings::dev() };
    settings.deadlines.settle_ms = 50;
    let node = Node::start(settings).await.unwrap();
    let address = node.client_address().to_string();
    let mut ownership =
        v1::ownership_client::OwnershipClient::connect(format!("http://{address}")).await.unwrap();
    let keys = ownership.signing_keys(v1::SigningKeysRequest {}).await.unwrap().into_inner().keys;
    let keys: Vec<PublicKey> = keys.iter().map(|key| PublicKey::parse(key).unwrap()).collect();
    assert_eq!(keys, [key(7).public()]);
    let ring = KeyRing::new(keys).of_cluster("tenure");
    let receiver = Receiver { tokens: Tokens::Always(ring), ..Receiver::default() };
    let Some(service) = Service::start(Mode::Right, receiver).await else { return };

    let topic = TopicName::new("orders").unwrap();
    let source = MemorySource::new();
    source.create_topic(&topic, 2);
    for number in 0..RECORDS {
        source.append(&topic, number % 2, number.to_string()).unwrap();
    }
    let consumer = Consumer::builder(
        GroupId::new("billing").unwrap(),
        vec![topic],
        Arc::new(source.reader()),
        vec![address],
    )
    .member(MemberId::new("ann").unwrap())
    .lease(LeaseSettings::for_ttl(3_000))
    .home(service.sink(HttpSettings::default()))
    .build()
    .unwrap();
    let stopper = consumer.stopper();
    let run = tokio::spawn(consumer.run(write_all));
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while service.orders().len() < RECORDS as usize {
        assert!(tokio::time::Instant::now() < deadline, "{:?}", service.orders());
        assert!(!run.is_finished(), "{:?}", run.await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let distinct = "SELECT count(*), count(DISTINCT (id, part)) FROM orders";
    assert_eq!(service.server.sql(&service.database, distinct), "40|40");
    stopper.stop(Duration::from_secs(10));
    run.await.unwrap().unwrap();
    node.shutdown().await;
}
