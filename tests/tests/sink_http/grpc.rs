//! A gRPC service that is fenced by the same layer, and a client of tonic that stamps.

use std::time::Duration;

use http::header::HeaderMap;
use tenure_proto::v1;
use tenure_proto::v1::offsets_client::OffsetsClient;
use tenure_proto::v1::offsets_server::{Offsets, OffsetsServer};
use tenure_sdk::grant::Grant;
use tenure_sdk::lease::LeaseEnded;
use tenure_sdk::sink::{FencedSink, SinkError};
use tenure_sink_http::headers::EPOCH;
use tenure_sink_http::{
    Admitted, Claim, FenceLayer, HttpSettings, IdempotencyKey, PostgresFences, Receiver, Refusal,
    StampLayer, StampService, refusal_to_error,
};
use tenure_sink_postgres::deadpool_postgres::Pool;
use tenure_tests::servers::Postgres;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};
use tower_layer::Layer as _;

use crate::service::{fences, grant, sink_at};

/// Keeps a row for each commit that it is told of. The service's messages are borrowed; its effect is its own.
struct Ledger {
    pool: Pool,
    fences: PostgresFences,
}

#[tonic::async_trait]
impl Offsets for Ledger {
    async fn commit(
        &self,
        request: Request<v1::CommitRequest>,
    ) -> Result<Response<v1::CommitResponse>, Status> {
        let claim = request.extensions().get::<Claim>().cloned();
        let claim = claim.ok_or_else(|| Status::internal("the layer is missing"))?;
        let mut client = self.pool.get().await.map_err(Refusal::unavailable)?;
        let client: &mut tokio_postgres::Client = &mut client;
        let before = |error: tokio_postgres::Error| PostgresFences::before_commit(&error);
        let mut transaction = client.transaction().await.map_err(before)?;
        if let Admitted::Replay(_) = claim.admit(&self.fences, &mut transaction).await? {
            return Ok(Response::new(v1::CommitResponse::default()));
        }
        let epoch = claim.epoch().get().cast_signed();
        for commit in &request.get_ref().commits {
            let insert = "INSERT INTO orders VALUES ($1, $2, 0)";
            let id = commit.next_offset.cast_signed();
            transaction.execute(insert, &[&id, &epoch]).await.map_err(before)?;
        }
        transaction.commit().await.map_err(|error| PostgresFences::at_commit(&error))?;
        Ok(Response::new(v1::CommitResponse::default()))
    }

    async fn rewind(
        &self,
        _request: Request<v1::RewindRequest>,
    ) -> Result<Response<v1::RewindResponse>, Status> {
        Err(Status::unimplemented("nobody rewinds here"))
    }

    async fn fetch(
        &self,
        _request: Request<v1::FetchRequest>,
    ) -> Result<Response<v1::FetchResponse>, Status> {
        Ok(Response::new(v1::FetchResponse::default()))
    }
}

struct Running {
    server: &'static Postgres,
    database: String,
    port: u16,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Running {
    async fn start() -> Option<Self> {
        let (server, database, pool, fences) = fences(Duration::from_secs(3)).await?;
        let writes = |_: &http::Method, path: &str| path.ends_with("/Commit");
        let layer = FenceLayer::protecting(fences.clone(), Receiver::default(), writes);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let service = OffsetsServer::new(Ledger { pool, fences });
        let served = Server::builder()
            .layer(layer)
            .add_service(service)
            .serve_with_incoming(TcpIncoming::from(listener));
        let task = tokio::spawn(async move { served.await.unwrap() });
        Some(Self { server, database, port, task })
    }

    async fn channel(&self) -> Channel {
        let address = format!("http://127.0.0.1:{}", self.port);
        Channel::from_shared(address).unwrap().connect().await.unwrap()
    }

    async fn client(&self, grant: &Grant) -> OffsetsClient<StampService<Channel>> {
        let layer = StampLayer::new(grant).unwrap();
        OffsetsClient::new(layer.layer(self.channel().await))
    }

    async fn register(&self, grant: &Grant) -> Result<(), SinkError> {
        let settings = HttpSettings { http2: true, ..HttpSettings::default() };
        sink_at(self.port, settings).register(grant).await.map(drop)
    }

    fn rows(&self) -> String {
        let rows = "SELECT string_agg(id || ' ' || epoch, ', ' ORDER BY id) FROM orders";
        self.server.sql(&self.database, rows)
    }
}

fn commit(offset: u64) -> Request<v1::CommitRequest> {
    let commits = vec![v1::OffsetCommit { next_offset: offset, ..v1::OffsetCommit::default() }];
    let mut request = Request::new(v1::CommitRequest { commits, ..v1::CommitRequest::default() });
    let key = IdempotencyKey::new(&format!("AAAAAAAAAAAAAAAAAAAAAA/0/{offset}")).unwrap();
    request.extensions_mut().insert(key);
    request
}

fn headers(status: &Status) -> HeaderMap {
    status.metadata().clone().into_headers()
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_service_refuses_the_old_owner_and_repeats_nothing() {
    let Some(service) = Running::start().await else { return };
    let (old, new) = (grant("ann", 3), grant("bob", 5));
    let mut old_client = service.client(&old).await;
    let unregistered = old_client.commit(commit(1)).await.unwrap_err();
    assert_eq!(unregistered.code(), Code::FailedPrecondition);
    service.register(&old).await.unwrap();
    let answer = old_client.commit(commit(1)).await.unwrap();
    assert_eq!(answer.metadata().get(EPOCH.as_str()).unwrap(), "3");
    service.register(&new).await.unwrap();
    let mut new_client = service.client(&new).await;
    // The replay of what the old owner has done, and the next record.
    new_client.commit(commit(1)).await.unwrap();
    new_client.commit(commit(2)).await.unwrap();
    let stale = old_client.commit(commit(3)).await.unwrap_err();
    assert_eq!(stale.code(), Code::FailedPrecondition);
    let error = refusal_to_error(&headers(&stale), old.epoch, None).unwrap();
    assert!(matches!(error, SinkError::Fenced { seen: Some(seen), .. } if seen == new.epoch));
    assert!(matches!(service.register(&old).await, Err(SinkError::Fenced { .. })));
    assert_eq!(service.rows(), "1 3, 2 5");
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_call_without_a_stamp_is_refused_and_a_read_needs_none() {
    let Some(service) = Running::start().await else { return };
    let mut client = OffsetsClient::new(service.channel().await);
    let refused = client.commit(commit(1)).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, "missing"));
    client.fetch(v1::FetchRequest::default()).await.unwrap();
    assert_eq!(service.rows(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_call_after_the_end_of_the_lease_is_not_sent() {
    let Some(service) = Running::start().await else { return };
    let held = grant("ann", 3);
    service.register(&held).await.unwrap();
    let mut client = service.client(&held).await;
    held.lease.stop();
    let status = client.commit(commit(1)).await.unwrap_err();
    let mut cause: Option<&dyn std::error::Error> = Some(&status);
    let mut ended = false;
    while let Some(found) = cause {
        ended |= found.is::<LeaseEnded>();
        cause = found.source();
    }
    assert!(ended, "{status:?}");
    assert_eq!(service.rows(), "");
}
