//! gRPC over frames of HTTP/2, one stream at a time, in one task with its connection.
//!
//! Whoever makes the load shares the processors with the nodes under load, so it has to be lean: no task for the
//! connection, no queue between the two, and of HTTP/2 what one stream of short messages takes.

use bytes::{Buf as _, BufMut as _, BytesMut};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::BenchError;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What either side may send before it is told that more may come.
const FIRST_WINDOW_BYTES: u32 = 65_535;
/// What the nodes may send. The largest: no run is long enough to use it up.
const NODE_WINDOW_BYTES: u32 = 0x7fff_ffff;

/// Room for what is read at once.
const READ_BYTES: usize = 4 * 1024;

/// Largest frame that both sides take.
const FRAME_BYTES_MAX: usize = 16 * 1024;

/// Before each message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// Kinds, flags and settings of frames.
mod frame {
    pub(super) const DATA: u8 = 0;
    pub(super) const HEADERS: u8 = 1;
    pub(super) const RST_STREAM: u8 = 3;
    pub(super) const SETTINGS: u8 = 4;
    pub(super) const PING: u8 = 6;
    pub(super) const GOAWAY: u8 = 7;
    pub(super) const WINDOW_UPDATE: u8 = 8;

    pub(super) const ACK: u8 = 1;
    pub(super) const END_STREAM: u8 = 1;
    pub(super) const END_HEADERS: u8 = 4;

    pub(super) const INITIAL_WINDOW_SIZE: u16 = 4;
}

/// Before each frame.
struct Head {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Head {
    const BYTES: usize = 9;

    fn read(mut bytes: &[u8]) -> Option<Self> {
        if bytes.len() < Self::BYTES {
            return None;
        }
        let length = usize::try_from(bytes.get_uint(3)).ok()?;
        let (kind, flags, stream) = (bytes.get_u8(), bytes.get_u8(), bytes.get_u32());
        Some(Self { length, kind, flags, stream })
    }

    fn write(&self, to: &mut BytesMut) {
        to.put_uint(u64::try_from(self.length).expect("a frame is short"), 3);
        to.put_u8(self.kind);
        to.put_u8(self.flags);
        to.put_u32(self.stream);
    }
}

/// See the module.
pub(super) struct Wire {
    socket: TcpStream,
    authority: String,
    frames: BytesMut,
    outgoing: BytesMut,
    /// The newest stream, the only one that is followed; 0: none yet.
    stream: u32,
    /// What arrived on it.
    messages: BytesMut,
    /// Nothing more arrives on it.
    is_over: bool,
    windows: Windows,
}

/// What the node takes at the moment.
struct Windows {
    connection: i64,
    stream: i64,
    /// What a stream begins with, as the node's settings have it.
    stream_first: i64,
}

impl Wire {
    /// Connects to a node.
    ///
    /// # Errors
    ///
    /// When nobody answers.
    pub(super) async fn open(address: &str) -> Result<Self, BenchError> {
        let socket = TcpStream::connect(address).await?;
        socket.set_nodelay(true)?;
        let window = i64::from(FIRST_WINDOW_BYTES);
        let mut wire = Self {
            socket,
            authority: address.to_owned(),
            frames: BytesMut::new(),
            outgoing: BytesMut::from(PREFACE),
            stream: 0,
            messages: BytesMut::new(),
            is_over: false,
            windows: Windows { connection: window, stream: window, stream_first: window },
        };
        let mut settings = BytesMut::new();
        settings.put_u16(frame::INITIAL_WINDOW_SIZE);
        settings.put_u32(NODE_WINDOW_BYTES);
        wire.put(frame::SETTINGS, 0, 0, &settings);
        let increment = NODE_WINDOW_BYTES - FIRST_WINDOW_BYTES;
        wire.put(frame::WINDOW_UPDATE, 0, 0, &increment.to_be_bytes());
        Ok(wire)
    }

    /// Calls `method`, whose one answer comes back.
    ///
    /// # Errors
    ///
    /// When it is refused.
    pub(super) async fn call<M: Message + Default>(
        &mut self,
        method: &str,
        request: &impl Message,
    ) -> Result<M, BenchError> {
        self.begin(method)?;
        self.put_message(request, frame::END_STREAM)?;
        // What ends the stream is skipped with the next call.
        self.message().await
    }

    /// Begins a call of `method` on a new stream, and lets go of the one before.
    ///
    /// # Errors
    ///
    /// When the address is too long.
    pub(super) fn begin(&mut self, method: &str) -> Result<(), BenchError> {
        self.stream = if self.stream == 0 { 1 } else { self.stream + 2 };
        self.messages.clear();
        self.is_over = false;
        self.windows.stream = self.windows.stream_first;
        let headers = headers(&self.authority, method)?;
        self.put(frame::HEADERS, frame::END_HEADERS, self.stream, &headers);
        Ok(())
    }

    /// Sends one message; it leaves while the next one is waited for.
    ///
    /// # Errors
    ///
    /// When the node does not read what it was sent before.
    pub(super) fn send(&mut self, message: &impl Message) -> Result<(), BenchError> {
        self.put_message(message, 0)
    }

    fn put_message(&mut self, message: &impl Message, flags: u8) -> Result<(), BenchError> {
        let length = message.encoded_len();
        let framed = PREFIX_BYTES + length;
        if framed > FRAME_BYTES_MAX {
            return Err(format!("a message of {length} bytes does not fit into a frame").into());
        }
        let windows = &mut self.windows;
        windows.connection -= i64::try_from(framed)?;
        windows.stream -= i64::try_from(framed)?;
        if windows.connection.min(windows.stream) < 0 {
            return Err("a node does not read what it is sent".into());
        }
        let head = Head { length: framed, kind: frame::DATA, flags, stream: self.stream };
        head.write(&mut self.outgoing);
        self.outgoing.put_u8(0);
        self.outgoing.put_u32(u32::try_from(length)?);
        Ok(message.encode(&mut self.outgoing)?)
    }

    /// The next message. A wait that is given up loses nothing.
    ///
    /// # Errors
    ///
    /// When the stream has ended.
    pub(super) async fn message<M: Message + Default>(&mut self) -> Result<M, BenchError> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            if self.is_over {
                // Why is packed; the node's log says it too.
                return Err("a node refused a call, or ended it".into());
            }
            while !self.outgoing.is_empty() {
                let written = self.socket.write(&self.outgoing).await?;
                self.outgoing.advance(written);
            }
            self.frames.reserve(READ_BYTES);
            if self.socket.read_buf(&mut self.frames).await? == 0 {
                return Err("a node closed a connection".into());
            }
            self.follow_all()?;
        }
    }

    /// Follows every frame that has arrived as a whole.
    fn follow_all(&mut self) -> Result<(), BenchError> {
        let mut frames = std::mem::take(&mut self.frames);
        while let Some(head) = Head::read(&frames) {
            let end = Head::BYTES + head.length;
            let Some(payload) = frames.get(Head::BYTES..end) else { break };
            self.follow(&head, payload)?;
            frames.advance(end);
        }
        self.frames = frames;
        Ok(())
    }

    fn follow(&mut self, head: &Head, mut payload: &[u8]) -> Result<(), BenchError> {
        let is_ack = head.flags & frame::ACK != 0;
        match head.kind {
            frame::DATA | frame::HEADERS | frame::RST_STREAM if head.stream == self.stream => {
                if head.kind == frame::DATA {
                    self.messages.put_slice(payload);
                }
                self.is_over |=
                    head.kind == frame::RST_STREAM || head.flags & frame::END_STREAM != 0;
            }
            frame::SETTINGS if !is_ack => {
                while !payload.is_empty() {
                    let (setting, value) = (payload.try_get_u16()?, payload.try_get_u32()?);
                    if setting == frame::INITIAL_WINDOW_SIZE {
                        let before = self.windows.stream_first;
                        self.windows.stream_first = i64::from(value);
                        self.windows.stream += i64::from(value) - before;
                    }
                }
                self.put(frame::SETTINGS, frame::ACK, 0, &[]);
            }
            frame::PING if !is_ack => self.put(frame::PING, frame::ACK, 0, payload),
            frame::WINDOW_UPDATE => {
                let increment = i64::from(payload.try_get_u32()?);
                if head.stream == 0 {
                    self.windows.connection += increment;
                } else if head.stream == self.stream {
                    self.windows.stream += increment;
                }
            }
            frame::GOAWAY => return Err("a node ends a connection".into()),
            _ => {}
        }
        Ok(())
    }

    /// A message that has arrived as a whole.
    fn take<M: Message + Default>(&mut self) -> Result<Option<M>, BenchError> {
        let Some(prefix) = self.messages.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let [is_compressed, length @ ..] = *prefix;
        if is_compressed != 0 {
            return Err("a message came compressed, nobody asked for that".into());
        }
        let end = PREFIX_BYTES + usize::try_from(u32::from_be_bytes(length))?;
        let Some(message) = self.messages.get(PREFIX_BYTES..end) else { return Ok(None) };
        let message = M::decode(message)?;
        self.messages.advance(end);
        Ok(Some(message))
    }

    fn put(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        Head { length: payload.len(), kind, flags, stream }.write(&mut self.outgoing);
        self.outgoing.put_slice(payload);
    }
}

/// The request's headers as HPACK has them, none to be remembered.
fn headers(authority: &str, method: &str) -> Result<BytesMut, BenchError> {
    const POST_OVER_HTTP: [u8; 2] = [0x83, 0x86];
    const PATH: &[u8] = &[0x04];
    const AUTHORITY: &[u8] = &[0x01];
    const CONTENT_TYPE: &[u8] = &[0x0f, 0x10];
    const TE: &[u8] = b"\x00\x02te";
    let mut block = BytesMut::new();
    block.put_slice(&POST_OVER_HTTP);
    for (name, value) in [
        (PATH, method),
        (AUTHORITY, authority),
        (CONTENT_TYPE, "application/grpc"),
        (TE, "trailers"),
    ] {
        // A length of 127 and more takes more than one byte.
        let length = u8::try_from(value.len()).ok().filter(|length| *length < 127);
        block.put_slice(name);
        block.put_u8(length.ok_or("the address of a node is too long")?);
        block.put_slice(value.as_bytes());
    }
    Ok(block)
}
