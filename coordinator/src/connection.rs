//! Connections of clients. Each knows whether its peer closed it, which a dead process does and a cut cable does not.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::transport::server::Connected;

/// Whether the peer of a connection has closed it. Clones are about the same connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerClosed(Arc<watch::Sender<bool>>);

impl PeerClosed {
    /// Whether the peer's end of the connection, or a reset, is read within `wait`: a process that ends closes its
    /// streams first, and its connection right after them.
    pub(crate) async fn within(&self, wait: Duration) -> bool {
        let mut closed = self.0.subscribe();
        timeout(wait, closed.wait_for(|closed| *closed)).await.is_ok()
    }

    fn set(&self) {
        self.0.send_replace(true);
    }
}

/// A client's connection.
pub(crate) struct Connection<S> {
    stream: S,
    closed: PeerClosed,
}

impl<S> Connection<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, closed: PeerClosed::default() }
    }

    fn note<T>(&self, done: io::Result<T>) -> io::Result<T> {
        if done.is_err() {
            self.closed.set();
        }
        done
    }
}

impl<S> Connected for Connection<S> {
    type ConnectInfo = PeerClosed;

    fn connect_info(&self) -> PeerClosed {
        self.closed.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, room) = (buffer.filled().len(), buffer.remaining());
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        if room > 0 && buffer.filled().len() == before {
            self.closed.set();
        }
        Poll::Ready(self.note(read))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        Poll::Ready(self.note(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices));
        Poll::Ready(self.note(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    async fn pair() -> (TcpStream, Connection<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        (peer, Connection::new(accepted))
    }

    #[tokio::test]
    async fn end_of_the_peer_is_told_from_an_end_of_our_own() {
        let (mut peer, mut connection) = pair().await;
        let closed = connection.connect_info();
        peer.write_all(b"x").await.unwrap();
        let mut buffer = [0; 8];
        assert_eq!(connection.read(&mut buffer).await.unwrap(), 1);
        assert!(!closed.within(Duration::ZERO).await, "it said something");
        drop(connection);
        assert!(!closed.within(Duration::ZERO).await, "this side ended it");

        let (peer, mut connection) = pair().await;
        let closed = connection.connect_info();
        drop(peer);
        assert_eq!(connection.read(&mut buffer).await.unwrap(), 0);
        assert!(closed.within(Duration::ZERO).await);
    }

    #[tokio::test]
    async fn reset_counts_as_closed_by_the_peer() {
        let (peer, mut connection) = pair().await;
        let closed = connection.connect_info();
        rustix::net::sockopt::set_socket_linger(&peer, Some(std::time::Duration::ZERO)).unwrap();
        drop(peer);
        assert!(connection.read(&mut [0; 8]).await.is_err());
        assert!(closed.within(Duration::ZERO).await);
    }
}
