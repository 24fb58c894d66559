//! What the service refuses, and what becomes of writes whose answers are lost.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Request, Response};
use tenure_model::Epoch;
use tenure_sdk::sink::{FencedSink, FencedWriter, Resolved, SinkError};
use tenure_sink_http::headers::{
    CURRENT_EPOCH, EPOCH, HOLDER, IDEMPOTENCY_KEY, NEXT_OFFSET, REFUSAL, REPLAYED, RESOURCE,
    SEQUENCE,
};
use tenure_sink_http::{HttpSettings, HyperTransport, IdempotencyKey, Receiver, Transport};
use tenure_tests::proxy::{Direction, Proxy};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::service::{Mode, STOP_BEFORE, Service, at, grant, order, owner, sink_at};

/// A request as any program could send it.
pub(crate) async fn raw(
    port: u16,
    method: Method,
    path: &str,
    map: &[(HeaderName, &str)],
    body: &'static str,
) -> Response<Bytes> {
    let uri = format!("http://127.0.0.1:{port}{path}");
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in map {
        request = request.header(name, *value);
    }
    let request = request.body(Bytes::from_static(body.as_bytes())).unwrap();
    HyperTransport::new(false).send(request).await.unwrap()
}

fn word<'h>(map: &'h HeaderMap, name: &HeaderName) -> &'h str {
    map.get(name).map_or("", |value| value.to_str().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_write_is_refused_with_both_epochs_and_stays_refused() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let sink = service.sink(HttpSettings::default());
    let (mut old, start) = owner(&sink, &grant("ann", 3)).await;
    assert_eq!(start, at(0));
    old.write(order("0 3 1", None), at(1)).await.unwrap();
    let registered = sink.register(&grant("bob", 5)).await.unwrap();
    assert_eq!(registered.displaced, Epoch::new(3).ok());
    for _ in 0..2 {
        let refused = old.write(order("1 3 1", None), at(2)).await.unwrap_err();
        let SinkError::Fenced { ours, seen } = refused else { panic!("{refused}") };
        assert_eq!((ours.get(), seen.map(Epoch::get)), (3, Some(5)));
    }
    let resource = grant("ann", 3).resource.to_string();
    let stamp = [(RESOURCE, resource.as_str()), (EPOCH, "3")];
    let answer = raw(service.port(), Method::POST, "/orders", &stamp, "1 3 1").await;
    let map = answer.headers();
    assert_eq!(answer.status(), 412);
    assert_eq!((word(map, &EPOCH), word(map, &CURRENT_EPOCH)), ("3", "5"));
    assert_eq!(word(map, &REFUSAL), "stale");
    assert_eq!(service.orders(), ["0|3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn late_registration_is_refused_and_lowers_nothing() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let sink = service.sink(HttpSettings::default());
    owner(&sink, &grant("bob", 5)).await;
    let late = sink.register(&grant("ann", 3)).await.unwrap_err();
    assert!(
        matches!(late, SinkError::Fenced { seen: Some(seen), .. } if seen.get() == 5),
        "{late}"
    );
    let other_holder = sink.register(&grant("eve", 5)).await.unwrap_err();
    assert!(matches!(other_holder, SinkError::Fenced { .. }), "{other_holder}");
    sink.register(&grant("bob", 5)).await.unwrap();
    assert_eq!(service.fence_epochs(), "5");
}

#[tokio::test(flavor = "multi_thread")]
async fn write_without_a_stamp_or_a_registration_is_428() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    for (map, status, refusal) in [
        (&[][..], 428, "missing"),
        (&[(RESOURCE, "g/t/0")], 428, "missing"),
        (&[(EPOCH, "3")], 428, "missing"),
        (&[(RESOURCE, "g/t/0"), (EPOCH, "three")], 400, "malformed"),
        (&[(RESOURCE, "g/../0"), (EPOCH, "3")], 400, "malformed"),
        (&[(RESOURCE, "g/t/0"), (EPOCH, "3"), (NEXT_OFFSET, "3")], 428, "missing"),
        (&[(RESOURCE, "g/t/0"), (EPOCH, "3")], 428, "unregistered"),
    ] {
        let answer = raw(service.port(), Method::POST, "/orders", map, "0 3 1").await;
        let found = (answer.status().as_u16(), word(answer.headers(), &REFUSAL));
        assert_eq!(found, (status, refusal), "{map:?}");
    }
    assert_eq!(service.orders(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_was_under_way_during_the_take_over_is_refused_when_it_is_complete() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let sink = service.sink(HttpSettings::default());
    let held = grant("ann", 3);
    owner(&sink, &held).await;
    let head = format!(
        "POST /orders HTTP/1.1\r\nHost: orders\r\nContent-Length: 5\r\nConnection: close\r\n\
         {RESOURCE}: {}\r\n{EPOCH}: 3\r\n\r\n0 3",
        held.resource
    );
    let mut late = TcpStream::connect(("127.0.0.1", service.port())).await.unwrap();
    late.write_all(head.as_bytes()).await.unwrap();

    let (mut new, resumed) = owner(&sink, &grant("bob", 5)).await;
    assert_eq!(resumed, at(0));
    new.write(order("0 5 1", None), at(1)).await.unwrap();

    late.write_all(b" 1").await.unwrap();
    let mut answer = String::new();
    late.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 412"), "{answer}");
    assert_eq!(service.orders(), ["0|5"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answer_is_found_out_by_the_write_itself() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let proxy = Proxy::to_port(service.port());
    let settings =
        HttpSettings { request_timeout: Duration::from_millis(500), ..HttpSettings::default() };
    let sink = sink_at(proxy.port(), settings);
    let (mut writer, _) = owner(&sink, &grant("ann", 1)).await;
    proxy.hold_answers_after(b"POST /orders");
    let answer = writer.write(order("0 1 1", None), at(1)).await.unwrap();
    assert_eq!(word(answer.headers(), &REPLAYED), "true");
    assert!(proxy.answer_kept(Duration::ZERO), "the answer was held");
    writer.write(order("1 1 1", None), at(2)).await.unwrap();
    assert_eq!(service.orders(), ["0|1", "1|1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn write_that_was_closed_off_cannot_land_later() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let settings =
        HttpSettings { request_timeout: Duration::from_millis(500), ..HttpSettings::default() };
    let (mut writer, _) = owner(&service.sink(settings), &grant("ann", 1)).await;
    let (stop, mut stopped) = service.stops.open();
    let request = order(&format!("{STOP_BEFORE}\n0 1 1"), Some(stop));
    let answer = writer.write(request, at(1)).await.unwrap_err();
    assert!(matches!(answer, SinkError::Transient { .. }), "{answer}");
    // The request goes on in the service now, long after its caller has given it up.
    stopped.recv().await.unwrap().send(()).unwrap();
    drop(stopped);
    writer.write(order("0 1 1", None), at(1)).await.unwrap();
    // Its connection went back only once it was through.
    while service.server.sql(&service.database, OPEN_TRANSACTIONS) != "0" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(service.orders(), ["0|1"]);
    assert_eq!(writer.resolve().await.unwrap(), Resolved::Applied(at(1)));
}

const OPEN_TRANSACTIONS: &str = "SELECT count(*) FROM pg_stat_activity \
    WHERE datname = current_database() AND state LIKE 'idle in transaction%'";

#[tokio::test(flavor = "multi_thread")]
async fn write_that_cannot_be_looked_up_is_unknown_until_resolved() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let proxy = Proxy::to_port(service.port());
    let settings =
        HttpSettings { request_timeout: Duration::from_millis(100), ..HttpSettings::default() };
    let sink = sink_at(proxy.port(), settings.clone());
    let calm = HttpSettings { request_timeout: Duration::from_secs(5), ..settings };
    let (writer, _) = owner(&sink_at(proxy.port(), calm), &grant("ann", 1)).await;
    writer.retire().await.unwrap();
    let mut writer = sink.register(&grant("ann", 1)).await.unwrap().writer;
    let verified = tenure_sdk::sink::Verified::without_coordinator(true);
    while writer.resume(&verified).await.is_err() {}
    proxy.hold(Direction::ToServer);
    let answer = writer.write(order("0 1 1", None), at(1)).await;
    assert!(matches!(answer, Err(SinkError::Unknown(_))), "{answer:?}");
    let refused = writer.write(order("0 1 1", None), at(1)).await;
    assert!(matches!(refused, Err(SinkError::Unknown(_))), "{refused:?}");
    proxy.release();
    let resolved = loop {
        match writer.resolve().await {
            Err(SinkError::Unknown(_)) => {}
            resolved => break resolved.unwrap(),
        }
    };
    let expected: &[&str] = match resolved {
        Resolved::Applied(offset) if offset == at(1) => &["0|1"],
        Resolved::NotApplied(offset) if offset == at(0) => &[],
        Resolved::Applied(_) | Resolved::NotApplied(_) => panic!("{resolved:?}"),
    };
    assert_eq!(service.orders(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_by_the_next_owner_is_answered_and_not_repeated() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let sink = service.sink(HttpSettings::default());
    let key = IdempotencyKey::new("AAAAAAAAAAAAAAAAAAAAAA/0/17").unwrap();
    let first = grant("ann", 3);
    let unregistered = sink.writer(&first).unwrap().write_once(order("17 3 1", None), &key).await;
    assert!(matches!(unregistered, Err(SinkError::Misconfigured(_))), "{unregistered:?}");
    for (member, epoch) in [("ann", 3), ("bob", 5)] {
        let grant = grant(member, epoch);
        sink.register(&grant).await.unwrap();
        let mut writer = sink.writer(&grant).unwrap();
        for _ in 0..2 {
            let request = order(&format!("17 {epoch} 1"), None);
            let answer = writer.write_once(request, &key).await.unwrap();
            assert_eq!((answer.status().as_u16(), &answer.body()[..]), (201, &b"1 taken"[..]));
        }
    }
    let late = sink.writer(&first).unwrap().write_once(order("17 3 1", None), &key).await;
    assert!(matches!(late, Err(SinkError::Fenced { .. })), "a replay is fenced too: {late:?}");
    assert_eq!(service.orders(), ["17|3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_offset_under_the_same_epoch_is_409() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let sink = service.sink(HttpSettings::default());
    let (mut writer, _) = owner(&sink, &grant("ann", 3)).await;
    let (mut twin, _) = owner(&sink, &grant("ann", 3)).await;
    writer.write(order("0 3 1", None), at(1)).await.unwrap();
    let conflict = twin.write(order("0 3 1", None), at(1)).await.unwrap_err();
    assert!(matches!(conflict, SinkError::OffsetConflict { found, .. } if found == at(1)));
    let resource = grant("ann", 3).resource.to_string();
    let stamp = [
        (RESOURCE, resource.as_str()),
        (EPOCH, "3"),
        (tenure_sink_http::headers::EXPECTED_OFFSET, "0"),
        (NEXT_OFFSET, "1"),
        (SEQUENCE, "0"),
        (IDEMPOTENCY_KEY, "t/0/0"),
    ];
    let answer = raw(service.port(), Method::POST, "/orders", &stamp, "0 3 1").await;
    assert_eq!((answer.status().as_u16(), word(answer.headers(), &NEXT_OFFSET)), (409, "1"));
    assert_eq!(service.orders(), ["0|3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn handler_that_forgets_to_ask_cannot_answer_success() {
    let Some(service) = Service::start(Mode::Forgetful, Receiver::default()).await else { return };
    let sink = service.sink(HttpSettings::default());
    let (mut writer, _) = owner(&sink, &grant("ann", 3)).await;
    let answer = writer.write(order("0 3 1", None), at(1)).await.unwrap_err();
    assert!(matches!(answer, SinkError::Misconfigured(_)), "{answer}");
    let resource = grant("ann", 3).resource.to_string();
    let stamp = [(RESOURCE, resource.as_str()), (EPOCH, "3"), (HOLDER, "ann")];
    let answer = raw(service.port(), Method::POST, "/orders", &stamp, "0 3 1").await;
    assert_eq!((answer.status().as_u16(), word(answer.headers(), &REFUSAL)), (500, "unchecked"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_check_the_old_owner_does_the_damage_and_the_client_says_so() {
    let Some(service) = Service::start(Mode::Unfenced, Receiver::default()).await else { return };
    let resource = grant("ann", 3).resource.to_string();
    for epoch in ["5", "3"] {
        let stamp = [(RESOURCE, resource.as_str()), (EPOCH, epoch)];
        let body = if epoch == "5" { "0 5 1" } else { "0 3 1" };
        let answer = raw(service.port(), Method::POST, "/orders", &stamp, body).await;
        assert_eq!(answer.status(), 201);
    }
    assert_eq!(service.orders(), ["0|5", "0|3"], "the stale write is in");
    let sink = service.sink(HttpSettings::default());
    let key = IdempotencyKey::new("t/0/1").unwrap();
    let answer =
        sink.writer(&grant("ann", 3)).unwrap().write_once(order("1 3 1", None), &key).await;
    assert!(matches!(answer, Err(SinkError::Misconfigured(_))), "{answer:?}");
    let registered = sink.register(&grant("ann", 3)).await;
    assert!(matches!(registered, Err(SinkError::Misconfigured(_))), "{registered:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn service_that_is_not_there_is_transient() {
    let port = tenure_tests::servers::free_port();
    let absent = sink_at(port, HttpSettings::default()).register(&grant("ann", 1)).await;
    assert!(matches!(absent, Err(SinkError::Transient { .. })), "{absent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_lease_sends_nothing() {
    let Some(service) = Service::start(Mode::Right, Receiver::default()).await else { return };
    let held = grant("ann", 1);
    let (mut writer, _) = owner(&service.sink(HttpSettings::default()), &held).await;
    held.lease.stop();
    let ended = writer.write(order("0 1 1", None), at(1)).await;
    assert!(matches!(ended, Err(SinkError::LeaseEnded(_))), "{ended:?}");
    assert_eq!(service.orders(), Vec::<String>::new());
}
