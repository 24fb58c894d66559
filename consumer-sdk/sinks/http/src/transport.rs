//! How requests get to the service.

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tenure_sdk::sink::BoxError;

/// Largest answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The request certainly was not sent: no connection came about.
    #[error("not sent: {0}")]
    NotSent(#[source] BoxError),
    /// It may have arrived.
    #[error("no answer: {0}")]
    NoAnswer(#[source] BoxError),
}

/// Sends requests. For TLS and proxies, wrap the client that the service uses anyway.
pub trait Transport: Send + Sync + 'static {
    /// Sends one request, whose address is absolute, and reads the whole answer. Never repeats one that may have arrived.
    fn send(
        &self,
        request: Request<Bytes>,
    ) -> BoxFuture<'_, Result<Response<Bytes>, TransportError>>;
}

/// Transport of hyper without TLS. Clones share its connections.
#[derive(Clone, Debug)]
pub struct HyperTransport {
    client: Client<HttpConnector, Full<Bytes>>,
}

impl HyperTransport {
    /// HTTP/1.1, or HTTP/2 with prior knowledge, as gRPC servers speak it.
    #[must_use]
    pub fn new(http2: bool) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).http2_only(http2).build(connector);
        Self { client }
    }
}

impl Transport for HyperTransport {
    fn send(
        &self,
        request: Request<Bytes>,
    ) -> BoxFuture<'_, Result<Response<Bytes>, TransportError>> {
        Box::pin(async move {
            let answer = self.client.request(request.map(Full::new)).await.map_err(|error| {
                if error.is_connect() {
                    TransportError::NotSent(Box::new(error))
                } else {
                    TransportError::NoAnswer(Box::new(error))
                }
            })?;
            let (parts, body) = answer.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(TransportError::NoAnswer)?;
            Ok(Response::from_parts(parts, body.to_bytes()))
        })
    }
}
