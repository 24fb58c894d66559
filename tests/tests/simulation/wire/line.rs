//! TCP of the simulated network as tonic wants it. Each end tells when it is opened and when it is let go.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use futures::future::BoxFuture;
use http::Uri;
use hyper_util::rt::TokioIo;
use tenure_coordinator::parts;
use tenure_sdk::session;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::Endpoint;
use tonic::transport::server::Connected;
use tower_service::Service;
use turmoil::net::{TcpListener, TcpStream};

use super::shared::{End, Shared};

/// Instead of a pause before a ping: no run is that long.
const NEVER: Duration = Duration::from_secs(365 * 86_400);

/// One end of a connection.
pub(super) struct Line {
    stream: TcpStream,
    shared: Arc<Shared>,
    number: usize,
    /// Bytes that may still come down before it breaks.
    budget: Option<u64>,
    is_broken: bool,
}

impl Line {
    fn new(
        shared: &Arc<Shared>,
        end: End,
        host: &str,
        peer: &str,
        port: u16,
        stream: TcpStream,
    ) -> Self {
        let number = shared.opened(end, host, peer, port);
        let budget = match end {
            End::Client => shared.budget(host),
            End::Server => None,
        };
        Self { stream, shared: Arc::clone(shared), number, budget, is_broken: false }
    }

    fn check(&self) -> io::Result<()> {
        if self.is_broken { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(()) }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.shared.closed(self.number);
    }
}

impl Connected for Line {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check()?;
        let Some(budget) = self.budget else {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        };
        let room = buffer.remaining().min(usize::try_from(budget).unwrap_or(usize::MAX));
        let mut bytes = vec![0; room];
        let mut part = ReadBuf::new(&mut bytes);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut part))?;
        buffer.put_slice(part.filled());
        let left = budget - part.filled().len() as u64;
        self.budget = Some(left);
        if left == 0 {
            self.is_broken = true;
            self.shared.broke();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Makes connections of one host; a name is looked up for each of them.
#[derive(Clone)]
struct Connector {
    shared: Arc<Shared>,
    host: String,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Line>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<Line>>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Self { shared, host } = self.clone();
        Box::pin(async move {
            let (name, port) = (uri.host().unwrap_or_default(), uri.port_u16().unwrap_or_default());
            let peer = shared.resolve(name).ok_or(io::ErrorKind::NotFound)?;
            let stream = TcpStream::connect((&*peer, port)).await?;
            Ok(TokioIo::new(Line::new(&shared, End::Client, &host, &peer, port, stream)))
        })
    }
}

impl Connector {
    fn set_up(&self, endpoint: Endpoint) -> Endpoint {
        if self.shared.keepalive.at_client {
            endpoint
        } else {
            endpoint.http2_keep_alive_interval(NEVER).keep_alive_timeout(NEVER)
        }
    }
}

/// How a member on `host` makes connections.
pub(super) fn dial(shared: &Arc<Shared>, host: &str) -> session::Dial {
    let connector = Connector { shared: Arc::clone(shared), host: host.to_owned() };
    Arc::new(move |endpoint| {
        let connector = connector.clone();
        let endpoint = connector.set_up(endpoint);
        Box::pin(async move { endpoint.connect_with_connector(connector).await })
    })
}

/// How a node on `host` makes connections.
pub(super) fn dial_lazily(shared: &Arc<Shared>, host: &str) -> parts::Dial {
    let connector = Connector { shared: Arc::clone(shared), host: host.to_owned() };
    Arc::new(move |endpoint| {
        connector.set_up(endpoint).connect_with_connector_lazy(connector.clone())
    })
}

/// Connections that come in at a port of the host that runs.
pub(super) async fn door(
    shared: &Arc<Shared>,
    host: &str,
    port: u16,
) -> io::Result<parts::Door<impl Stream<Item = io::Result<Line>> + Send + use<>>> {
    let address = SocketAddr::from(([0, 0, 0, 0], port));
    let listener = TcpListener::bind(address).await?;
    let (shared, host) = (Arc::clone(shared), host.to_owned());
    let incoming = futures::stream::unfold(listener, move |listener| {
        let (shared, host) = (Arc::clone(&shared), host.clone());
        async move {
            let accepted = listener.accept().await.map(|(stream, origin)| {
                let peer = turmoil::reverse_lookup(origin.ip()).unwrap_or_default();
                Line::new(&shared, End::Server, &host, &peer, port, stream)
            });
            Some((accepted, listener))
        }
    });
    Ok(parts::Door { address, incoming })
}

/// Keeps a future's type out of signatures.
pub(super) type Local<T> = Pin<Box<dyn Future<Output = T>>>;
