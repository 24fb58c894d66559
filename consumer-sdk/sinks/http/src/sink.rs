//! The sink: registers grants at a service.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Response, Uri};
use tenure_model::Home;
use tenure_sdk::grant::Grant;
use tenure_sdk::lease::Lease;
use tenure_sdk::sink::{
    BoxError, Capabilities, Enforcement, FencedSink, Registered, Role, Scope, SinkError, Takeover,
};

use crate::answer::{Told, refusal_to_error};
use crate::headers;
use crate::settings::HttpSettings;
use crate::stamp::Stamp;
use crate::transport::{HyperTransport, Transport, TransportError};
use crate::writer::HttpWriter;

/// What a sink and its writers share.
pub(crate) struct Shared {
    pub(crate) settings: HttpSettings,
    scheme: Scheme,
    authority: Authority,
    /// Path before every request's own, without a slash at its end.
    prefix: String,
    transport: Box<dyn Transport>,
}

/// A service behind a [`StampLayer`](crate::StampLayer)'s counterpart, or one that keeps the same convention, as a sink.
/// Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct HttpSink {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for HttpSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shared { settings, authority, prefix, .. } = &*self.shared;
        f.debug_struct("HttpSink")
            .field("settings", settings)
            .field("authority", authority)
            .field("prefix", prefix)
            .finish_non_exhaustive()
    }
}

impl HttpSink {
    /// Sink at `http://HOST:PORT/PREFIX`, without TLS. Connects with the first request.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for another kind of address.
    pub fn new(base: &Uri, settings: HttpSettings) -> Result<Self, SinkError> {
        if base.scheme() != Some(&Scheme::HTTP) {
            return Err(SinkError::Misconfigured(format!(
                "{base} is not http://HOST:PORT: give a transport of your own for anything else"
            )));
        }
        let transport = HyperTransport::new(settings.http2);
        Self::with_transport(base, settings, transport)
    }

    /// Sink over a transport of one's own, for TLS.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] when the address is not absolute or has a query.
    pub fn with_transport(
        base: &Uri,
        settings: HttpSettings,
        transport: impl Transport,
    ) -> Result<Self, SinkError> {
        let (Some(scheme), Some(authority), None) = (base.scheme(), base.authority(), base.query())
        else {
            return Err(SinkError::Misconfigured(format!(
                "{base} is not an absolute address without a query"
            )));
        };
        let shared = Shared {
            settings,
            scheme: scheme.clone(),
            authority: authority.clone(),
            prefix: base.path().trim_end_matches('/').to_owned(),
            transport: Box::new(transport),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Writer beside the home, for a grant that the SDK has registered here. Registers nothing: the service compares the
    /// epoch of each request, so that a grant that is not registered is refused.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] when the resource's name does not fit into a header.
    pub fn writer(&self, grant: &Grant) -> Result<HttpWriter, SinkError> {
        HttpWriter::new(Arc::clone(&self.shared), grant, Role::Also)
    }
}

impl Shared {
    /// Sends a request whose address is a path and reads the answer.
    pub(crate) async fn send(
        &self,
        mut request: Request<Bytes>,
        longest: Duration,
    ) -> Result<Response<Bytes>, TransportError> {
        let own = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
        let address = Uri::builder()
            .scheme(self.scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(format!("{}{own}", self.prefix))
            .build();
        *request.uri_mut() = address.map_err(|error| TransportError::NotSent(error.into()))?;
        match tokio::time::timeout(longest, self.transport.send(request)).await {
            Ok(answer) => answer,
            Err(elapsed) => Err(TransportError::NoAnswer(elapsed.into())),
        }
    }

    /// Longest wait under a lease whose check has let the request through: with nothing left, the check is off.
    pub(crate) fn patience(&self, lease: &Lease) -> Duration {
        let left = lease.remaining();
        let full = self.settings.request_timeout;
        if left.is_zero() { full } else { full.min(left) }
    }

    /// One call about the fence itself.
    pub(crate) async fn about_fence(
        &self,
        method: Method,
        grant: &Grant,
        more: HeaderMap,
        longest: Duration,
    ) -> Result<Told, SinkError> {
        let path = format!("{}{}", headers::FENCES_PATH, grant.resource);
        let uri: Uri = path.parse().map_err(|error: http::uri::InvalidUri| {
            SinkError::Misconfigured(format!("{path:?} is no path: {error}"))
        })?;
        let is_read = method == Method::GET;
        let mut request = Request::new(Bytes::new());
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.headers_mut() = more;
        Stamp::of(grant)?.put_on(request.headers_mut());
        let answer = match self.send(request, longest).await {
            Ok(answer) => answer,
            Err(TransportError::NotSent(source)) => return Err(transient(source)),
            Err(TransportError::NoAnswer(source)) if is_read => return Err(transient(source)),
            Err(TransportError::NoAnswer(source)) => return Err(SinkError::Unknown(source)),
        };
        if let Some(error) = refusal_to_error(answer.headers(), grant.epoch, None) {
            return Err(error);
        }
        let status = answer.status();
        if status.is_success() {
            Told::read(answer.headers())
        } else if status.is_server_error() {
            let said = format!("{status} from the registration call").into();
            Err(if is_read { transient(said) } else { SinkError::Unknown(said) })
        } else if status == http::StatusCode::TOO_MANY_REQUESTS {
            Err(transient(status.to_string()))
        } else {
            Err(SinkError::Misconfigured(format!("{status} from the registration call")))
        }
    }
}

pub(crate) fn transient(source: impl Into<BoxError>) -> SinkError {
    SinkError::Transient { retry_after: None, source: source.into() }
}

impl FencedSink for HttpSink {
    type Writer = HttpWriter;

    fn name(&self) -> &str {
        &self.shared.settings.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Partition,
            home: Home::Sink,
            enforcement: Enforcement::Resource,
            takeover: Takeover::Bounded(self.shared.settings.service_pause_max),
        }
    }

    /// A registration whose answer was lost is [`SinkError::Unknown`]; repeat it.
    async fn register(&self, grant: &Grant) -> Result<Registered<HttpWriter>, SinkError> {
        let writer = HttpWriter::new(Arc::clone(&self.shared), grant, Role::Home)?;
        let mut more = HeaderMap::new();
        let holder = HeaderValue::from_str(grant.member.as_str());
        more.insert(headers::HOLDER, holder.expect("a member's name is letters, digits and .-_:"));
        let longest = self.shared.settings.request_timeout;
        let told = self.shared.about_fence(Method::PUT, grant, more, longest).await?;
        if told.epoch != grant.epoch {
            return Err(SinkError::Misconfigured(format!(
                "the service says that it registered {} and keeps {}",
                grant.epoch, told.epoch
            )));
        }
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = told.displaced.map(tenure_model::Epoch::get), "epoch registered");
        Ok(Registered { writer, displaced: told.displaced })
    }
}
