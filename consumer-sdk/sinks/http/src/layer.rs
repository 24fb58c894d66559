//! The receiving service's layer: reads the headers, serves the registration calls, and notices a forgotten check.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, Response};
use tower_layer::Layer;
use tower_service::Service;

use crate::claim::{Claim, Receiver};
use crate::fence::{Change, ChangeKind, FenceStore, Found};
use crate::headers;
use crate::refusal::Refusal;

type Protects = dyn Fn(&Method, &str) -> bool + Send + Sync;

/// Layer of a receiving service, for axum, tonic and everything else made of tower and `http`.
///
/// - A protected request without a stamp is refused before the handler runs: 428.
/// - With one, the handler finds a [`Claim`] in the request's extensions and asks it within its transaction.
/// - An answer of success whose handler did not ask is turned into an error, and said out loud in the log.
/// - `/fences/RESOURCE` is answered here: `GET`, `PUT`, `POST`, `PATCH`.
///
/// Protected is what is not `GET`, `HEAD` or `OPTIONS`, or what [`FenceLayer::protecting`] says. In gRPC every call is a
/// `POST`: name the services that write.
pub struct FenceLayer<S> {
    shared: Arc<Shared<S>>,
}

struct Shared<S> {
    store: S,
    receiver: Receiver,
    protects: Box<Protects>,
}

impl<S> Clone for FenceLayer<S> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S> fmt::Debug for FenceLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceLayer").field("receiver", &self.shared.receiver).finish()
    }
}

impl<S: FenceStore> FenceLayer<S> {
    /// Layer over a store, with the rules of the service.
    pub fn new(store: S, receiver: Receiver) -> Self {
        let is_write = |method: &Method, _path: &str| {
            !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
        };
        Self::protecting(store, receiver, is_write)
    }

    /// As [`FenceLayer::new`], with the choice of what is protected, by method and path.
    pub fn protecting(
        store: S,
        receiver: Receiver,
        protects: impl Fn(&Method, &str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { shared: Arc::new(Shared { store, receiver, protects: Box::new(protects) }) }
    }
}

impl<S: FenceStore, I> Layer<I> for FenceLayer<S> {
    type Service = FenceService<S, I>;

    fn layer(&self, inner: I) -> Self::Service {
        FenceService { shared: Arc::clone(&self.shared), inner }
    }
}

/// See [`FenceLayer`].
pub struct FenceService<S, I> {
    shared: Arc<Shared<S>>,
    inner: I,
}

impl<S, I: Clone> Clone for FenceService<S, I> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), inner: self.inner.clone() }
    }
}

impl<S, I: fmt::Debug> fmt::Debug for FenceService<S, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, I, B, R> Service<Request<B>> for FenceService<S, I>
where
    S: FenceStore,
    I: Service<Request<B>, Response = Response<R>, Error = Infallible> + Clone + Send + 'static,
    I::Future: Send,
    B: Send + 'static,
    R: Default + Send + 'static,
{
    type Response = Response<R>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<R>, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let path = request.uri().path();
        let is_grpc = is_grpc(request.headers());
        if let Some(resource) = path.strip_prefix(headers::FENCES_PATH) {
            let change = self.shared.change(request.method(), resource, request.headers());
            let store = self.shared.store.clone();
            return Box::pin(async move {
                let found = match change {
                    Ok(change) => store.alone(change).await,
                    Err(refusal) => Err(refusal),
                };
                Ok(found.map_or_else(|refusal| refuse(&refusal, is_grpc), |found| tell(&found)))
            });
        }
        // The inner service that was polled ready is the one that is called.
        let spare = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, spare);
        if !(self.shared.protects)(request.method(), path) {
            return Box::pin(inner.call(request));
        }
        match Claim::read(request.headers(), &self.shared.receiver) {
            Ok(claim) => {
                request.extensions_mut().insert(claim.clone());
                Box::pin(async move { Ok(judge(&claim, inner.call(request).await?, is_grpc)) })
            }
            Err(refusal) => Box::pin(async move { Ok(refuse(&refusal, is_grpc)) }),
        }
    }
}

impl<S> Shared<S> {
    /// Reads a call about a fence.
    fn change(&self, method: &Method, path: &str, map: &HeaderMap) -> Result<Change, Refusal> {
        let resource = path.to_owned();
        if !headers::is_resource(&resource) {
            return Err(Refusal::Malformed { header: headers::RESOURCE });
        }
        if *method == Method::GET {
            return Ok(Change { resource, kind: ChangeKind::Read });
        }
        let mut named = map.clone();
        let name = HeaderValue::from_str(&resource);
        let name = name.map_err(|_odd| Refusal::Malformed { header: headers::RESOURCE })?;
        named.insert(headers::RESOURCE, name);
        for own in [headers::EXPECTED_OFFSET, headers::NEXT_OFFSET, headers::SEQUENCE] {
            named.remove(own);
        }
        let claim = Claim::read(&named, &self.receiver)?;
        let epoch = claim.epoch();
        let missing = |header| Refusal::Missing { header };
        let kind = match *method {
            Method::PUT => {
                claim.may_raise()?;
                ChangeKind::Register { epoch, holder: holder(&claim, map)? }
            }
            Method::POST => {
                let start = headers::offset(map, &headers::NEXT_OFFSET)?;
                let start = start.ok_or_else(|| missing(headers::NEXT_OFFSET))?;
                ChangeKind::Initialise { epoch, start }
            }
            Method::PATCH => {
                let sequence = headers::number(map, &headers::SEQUENCE)?;
                let sequence = sequence.ok_or_else(|| missing(headers::SEQUENCE))?;
                ChangeKind::Close { epoch, sequence }
            }
            _ => return Err(Refusal::Absent),
        };
        Ok(Change { resource, kind })
    }
}

/// The token's member, which nobody can make up; else what the header says.
fn holder(claim: &Claim, map: &HeaderMap) -> Result<String, Refusal> {
    if let Some(token) = claim.token() {
        return Ok(token.member.to_string());
    }
    let named = headers::text(map, &headers::HOLDER)?;
    named.map(str::to_owned).ok_or(Refusal::Missing { header: headers::HOLDER })
}

fn is_grpc(map: &HeaderMap) -> bool {
    let form = map.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    form.is_some_and(|form| form.starts_with("application/grpc"))
}

fn refuse<R: Default>(refusal: &Refusal, is_grpc: bool) -> Response<R> {
    match refusal {
        Refusal::InDoubt { why } | Refusal::Unavailable { why, .. } => {
            tracing::warn!(refusal = refusal.as_str(), why, "fence store");
        }
        Refusal::Missing { .. }
        | Refusal::Malformed { .. }
        | Refusal::Token { .. }
        | Refusal::Unregistered { .. }
        | Refusal::Stale { .. }
        | Refusal::OffsetConflict { .. }
        | Refusal::Absent
        | Refusal::Unchecked => tracing::debug!(%refusal, "request refused"),
    }
    refusal.to_response(is_grpc)
}

/// The handler's answer, with the epoch that was compared; an error if none was.
fn judge<R: Default>(claim: &Claim, mut response: Response<R>, is_grpc: bool) -> Response<R> {
    let status = response.headers().get("grpc-status");
    let is_success =
        response.status().is_success() && status.is_none_or(|status| status.as_bytes() == b"0");
    if claim.was_admitted() {
        if is_success {
            headers::put(response.headers_mut(), &headers::EPOCH, claim.epoch().get());
        }
        if claim.was_replayed() {
            response.headers_mut().insert(headers::REPLAYED, HeaderValue::from_static("true"));
        }
        return response;
    }
    if is_success {
        tracing::error!(
            resource = claim.resource(),
            epoch = claim.epoch().get(),
            "a handler answered success without asking the fence: its effects are not fenced"
        );
        return Refusal::Unchecked.to_response(is_grpc);
    }
    response
}

fn tell<R: Default>(found: &Found) -> Response<R> {
    let mut response = Response::new(R::default());
    let map = response.headers_mut();
    let fence = &found.fence;
    headers::put(map, &headers::CURRENT_EPOCH, fence.epoch.get());
    headers::put(map, &headers::SEQUENCE, fence.sequence);
    if let Some(next_offset) = fence.next_offset {
        headers::put(map, &headers::NEXT_OFFSET, next_offset.get());
    }
    if let Some(displaced) = fence.displaced {
        headers::put(map, &headers::DISPLACED_EPOCH, displaced.get());
    }
    response
}
