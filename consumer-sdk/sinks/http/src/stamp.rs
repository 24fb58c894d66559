//! The client's layer: stamps requests from a grant.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::{BoxFuture, FutureExt as _};
use http::Request;
use http::header::{HeaderMap, HeaderValue};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sdk::source::Record;
use tower_layer::Layer;
use tower_service::Service;

use crate::headers;

/// Idempotency key of one record: `topic id/partition/offset`, never with the epoch in it, so that the next owner's replay
/// has the same.
///
/// Put it into a request's extensions and [`StampLayer`] makes a header of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey(HeaderValue);

impl IdempotencyKey {
    /// Key of a record.
    ///
    /// # Panics
    ///
    /// Never: the parts of a record's key are letters, digits and `-_/`.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        Self::new(&record.idempotency_key()).expect("a record's key is a header's value")
    }

    /// Key of one's own; nothing when the text is empty, over 1024 bytes, or not visible ASCII.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let fits = !text.is_empty() && text.len() <= headers::VALUE_BYTES_MAX;
        let value = HeaderValue::from_str(text).ok().filter(|_| fits && text.is_ascii());
        value.map(Self)
    }

    pub(crate) const fn value(&self) -> &HeaderValue {
        &self.0
    }
}

/// Resource, epoch and token of a grant, as headers.
#[derive(Clone, Debug)]
pub(crate) struct Stamp(Arc<HeaderMap>);

impl Stamp {
    pub(crate) fn of(grant: &Grant) -> Result<Self, SinkError> {
        let mut map = HeaderMap::new();
        let value = |text: &str| {
            HeaderValue::from_str(text).map_err(|error| {
                SinkError::Misconfigured(format!("{text:?} does not fit into a header: {error}"))
            })
        };
        map.insert(headers::RESOURCE, value(grant.resource.as_str())?);
        headers::put(&mut map, &headers::EPOCH, grant.epoch.get());
        if let Some(token) = &grant.token {
            map.insert(headers::TOKEN, value(token)?);
        }
        Ok(Self(Arc::new(map)))
    }

    /// Sets the headers, in place of any that are there.
    pub(crate) fn put_on(&self, map: &mut HeaderMap) {
        for (name, value) in &*self.0 {
            map.insert(name, value.clone());
        }
    }
}

/// Layer that stamps each request with a grant, over any client of `http` requests: hyper, reqwest, a channel of tonic.
///
/// The lease is looked at before each request; after its end nothing is sent and the error is
/// [`LeaseEnded`](tenure_sdk::lease::LeaseEnded). That is an optimisation: safety rests on the receiving service's own
/// comparison. An [`IdempotencyKey`] in the request's extensions becomes a header.
#[derive(Clone, Debug)]
pub struct StampLayer {
    grant: Grant,
    stamp: Stamp,
}

impl StampLayer {
    /// Layer for one grant. Make a new one for the next grant: an epoch is never used again.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] when the resource's name does not fit into a header.
    pub fn new(grant: &Grant) -> Result<Self, SinkError> {
        Ok(Self { grant: grant.clone(), stamp: Stamp::of(grant)? })
    }
}

impl<S> Layer<S> for StampLayer {
    type Service = StampService<S>;

    fn layer(&self, inner: S) -> StampService<S> {
        StampService { layer: self.clone(), inner }
    }
}

/// See [`StampLayer`].
#[derive(Clone)]
pub struct StampService<S> {
    layer: StampLayer,
    inner: S,
}

impl<S> fmt::Debug for StampService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StampService").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl<S, B> Service<Request<B>> for StampService<S>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<S::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        if let Err(ended) = self.layer.grant.lease.check() {
            return Box::pin(async move { Err(ended.into()) });
        }
        self.layer.stamp.put_on(request.headers_mut());
        if let Some(key) = request.extensions().get::<IdempotencyKey>() {
            let value = key.0.clone();
            request.headers_mut().insert(headers::IDEMPOTENCY_KEY, value);
        }
        self.inner.call(request).map(|answer| answer.map_err(Into::into)).boxed()
    }
}
