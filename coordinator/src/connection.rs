//! Connections of clients. Each knows whether its peer closed it, which a dead process does and a cut cable does not.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep, timeout};
use tonic::transport::server::Connected;

/// How long the peer's end is waited for before this side ends a connection: HTTP/2 ends it as soon as the peer has said
/// good-bye, and the end itself may be on its way still.
const LAST_READ: Duration = Duration::from_millis(30);

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
    ending: Ending,
}

/// How far this side is with its own end.
enum Ending {
    Open,
    /// Waits for the peer's.
    Reading(Pin<Box<Sleep>>),
    Over,
}

impl<S> Connection<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, closed: PeerClosed::default(), ending: Ending::Open }
    }

    fn note<T>(&self, done: io::Result<T>) -> io::Result<T> {
        if done.as_ref().is_err_and(|error| is_of_the_peer(error.kind())) {
            self.closed.set();
        }
        done
    }
}

impl<S: AsyncRead + Unpin> Connection<S> {
    /// Reads what is left, until the peer's end or `LAST_READ`.
    fn poll_last_read(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if matches!(self.ending, Ending::Open) {
            self.ending = Ending::Reading(Box::pin(sleep(LAST_READ)));
        }
        let mut rest = [0; 512];
        while let Ending::Reading(limit) = &mut self.ending {
            let is_late = limit.as_mut().poll(context).is_ready();
            let mut buffer = ReadBuf::new(&mut rest);
            let is_over = match Pin::new(&mut *self).poll_read(context, &mut buffer) {
                Poll::Ready(read) => read.is_err() || buffer.filled().is_empty() || is_late,
                Poll::Pending if is_late => true,
                Poll::Pending => return Poll::Pending,
            };
            if is_over {
                self.ending = Ending::Over;
            }
        }
        Poll::Ready(())
    }
}

/// Whether an error says that the peer's system closed the connection; no answer at all does not.
fn is_of_the_peer(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(kind, BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
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
        if read.is_ok() && room > 0 && buffer.filled().len() == before {
            self.closed.set();
        }
        Poll::Ready(self.note(read))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
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
        // One piece, as nearly all answers are, costs the system less by a plain write.
        let stream = Pin::new(&mut self.stream);
        let written = match slices {
            [slice] => stream.poll_write(context, slice),
            slices => stream.poll_write_vectored(context, slices),
        };
        Poll::Ready(self.note(ready!(written)))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_last_read(context));
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// A stream whose other end does not answer any more.
    struct Cut;

    impl AsyncRead for Cut {
        fn poll_read(
            self: Pin<&mut Self>,
            _context: &mut Context<'_>,
            _buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
        }
    }

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
    async fn end_of_the_peer_that_is_on_its_way_is_read_before_this_side_ends() {
        let (mut peer, mut connection) = pair().await;
        let closed = connection.connect_info();
        let peer = tokio::spawn(async move {
            peer.write_all(&[7; 2000]).await.unwrap();
            tokio::time::sleep(LAST_READ / 3).await;
            drop(peer);
        });
        connection.shutdown().await.unwrap();
        assert!(closed.within(Duration::ZERO).await, "its end came after what it had said");
        peer.await.unwrap();

        let (_peer, mut connection) = pair().await;
        let closed = connection.connect_info();
        connection.shutdown().await.unwrap();
        assert!(!closed.within(Duration::ZERO).await, "this side ended it");
    }

    #[tokio::test]
    async fn cut_cable_does_not_count_as_closed_by_the_peer() {
        let mut connection = Connection::new(Cut);
        let closed = connection.connect_info();
        assert!(connection.read(&mut [0; 8]).await.is_err());
        assert!(!closed.within(Duration::ZERO).await);
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
