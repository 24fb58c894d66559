//! The stream of one session over HTTP/2 as it is, in one task with its connection.
//!
//! Whoever makes the load shares the processors with the nodes under load, so it has to be lean: no task for the
//! connection, no queue between the two.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use h2::client::{Builder, Connection};
use h2::{RecvStream, SendStream};
use http::Request;
use prost::Message as _;
use tenure_proto::v1;
use tokio::net::TcpStream;

use super::BenchError;

/// What a node may send before it is read.
const WINDOW_BYTES: u32 = 1024 * 1024;

/// Before each message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// See the module.
pub(super) struct Wire {
    connection: Connection<TcpStream, Bytes>,
    up: SendStream<Bytes>,
    down: RecvStream,
    received: BytesMut,
}

impl Wire {
    /// Opens a session with its first message.
    ///
    /// # Errors
    ///
    /// When nobody answers, or another than a gRPC server does.
    pub(super) async fn open(address: &str, first: &v1::SessionUp) -> Result<Self, BenchError> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut builder = Builder::new();
        builder.initial_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
        let (client, mut connection) = builder.handshake(stream).await?;
        let request = Request::post(format!("http://{address}/tenure.v1.Membership/Session"))
            .header(http::header::CONTENT_TYPE, "application/grpc")
            .header(http::header::TE, "trailers")
            .body(())?;
        let (mut answered, mut up) = client.clone().send_request(request, false)?;
        up.send_data(framed(first), false)?;
        let answer = poll_fn(|context| {
            let is_over = Pin::new(&mut connection).poll(context);
            let answer = Pin::new(&mut answered).poll(context).map(Some);
            unless_over(answer, is_over.is_ready(), None)
        });
        let answer = answer.await.ok_or("a node closed a connection")??;
        if let Some(status) = answer.headers().get("grpc-status") {
            return Err(format!("a session was refused: status {status:?}").into());
        }
        Ok(Self { connection, up, down: answer.into_body(), received: BytesMut::new() })
    }

    /// Sends one message; it leaves while the next one is waited for.
    ///
    /// # Errors
    ///
    /// When the stream has ended.
    pub(super) fn send(&mut self, up: &v1::SessionUp) -> Result<(), BenchError> {
        Ok(self.up.send_data(framed(up), false)?)
    }

    /// The next message. A wait that is given up loses nothing.
    ///
    /// # Errors
    ///
    /// When the stream has ended, with the status that it ended with.
    pub(super) async fn message(&mut self) -> Result<v1::SessionDown, BenchError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            match poll_fn(|context| self.poll_data(context)).await {
                Some(chunk) => {
                    let chunk = chunk?;
                    self.down.flow_control().release_capacity(chunk.len())?;
                    self.received.extend_from_slice(&chunk);
                }
                None => return Err(self.ended().await),
            }
        }
    }

    /// Lets the connection work, both ways.
    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let is_over = Pin::new(&mut self.connection).poll(context).is_ready();
        unless_over(self.down.poll_data(context), is_over, None)
    }

    async fn ended(&mut self) -> BenchError {
        let trailers = poll_fn(|context| {
            let is_over = Pin::new(&mut self.connection).poll(context).is_ready();
            unless_over(self.down.poll_trailers(context), is_over, Ok(None))
        });
        format!("the coordinator ended a session: {:?}", trailers.await).into()
    }

    /// A message that has arrived as a whole.
    fn take(&mut self) -> Result<Option<v1::SessionDown>, BenchError> {
        let Some(prefix) = self.received.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let [is_compressed, length @ ..] = *prefix;
        if is_compressed != 0 {
            return Err("a message came compressed, nobody asked for that".into());
        }
        let length = usize::try_from(u32::from_be_bytes(length))?;
        if self.received.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.received.advance(PREFIX_BYTES);
        Ok(Some(v1::SessionDown::decode(self.received.split_to(length))?))
    }
}

/// What was found; where there is nothing and the connection is over, there never will be.
fn unless_over<T>(found: Poll<T>, is_over: bool, none: T) -> Poll<T> {
    if is_over && found.is_pending() { Poll::Ready(none) } else { found }
}

fn framed(up: &v1::SessionUp) -> Bytes {
    let length = up.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).expect("a session's message is short"));
    up.encode(&mut bytes).expect("there is room for it");
    bytes.freeze()
}
