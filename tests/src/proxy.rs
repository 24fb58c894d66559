//! A TCP proxy that can hold back, cut, and stop answers at a chosen moment.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest pattern of [`Proxy::hold_answers_after`], in bytes.
pub const PATTERN_MAX_BYTES: usize = 256;

/// Most entries of [`Proxy::uploads`].
pub const UPLOADS_MAX: usize = 100_000;

/// Bytes that are kept of what came at a time.
pub const UPLOAD_KEPT_BYTES: usize = 256;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// A proxy between clients and one server, with threads of its own. Dropping it cuts all
/// connections.
///
/// A direction is *held* when bytes wait inside the proxy: nothing is lost, and release lets them
/// go on in order.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accept: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a free loopback port and forwards to `server`.
    ///
    /// # Panics
    ///
    /// When no loopback port can be had.
    #[must_use]
    pub fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a loopback port");
        let address = listener.local_addr().expect("a listener has an address");
        let shared = Arc::new(Shared::default());
        let accept = thread::spawn({
            let shared = Arc::clone(&shared);
            move || accept_all(&listener, server, &shared)
        });
        Self { address, shared, accept: Some(accept) }
    }

    /// As [`Proxy::start`], to a port of 127.0.0.1.
    #[must_use]
    pub fn to_port(port: u16) -> Self {
        Self::start((Ipv4Addr::LOCALHOST, port).into())
    }

    /// Address for clients.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Port for clients, on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Holds one direction of all connections, later ones too.
    pub fn hold(&self, direction: Direction) {
        self.shared.change(|state| *state.held_mut(direction) = true);
    }

    /// Ends every hold and forgets a pattern that has not been seen.
    pub fn release(&self) {
        self.shared.change(|state| {
            state.to_server_held = false;
            state.to_client_held = false;
            state.pattern = None;
            state.answers = Answers::Pass;
            state.connections.values_mut().for_each(|connection| connection.answers_held = false);
        });
    }

    /// Breaks all connections in both directions. Held bytes are lost; new connections are taken.
    pub fn cut(&self) {
        self.shared.change(|state| {
            state.connections.values().for_each(Connection::shut);
            state.connections.clear();
        });
    }

    /// Ends one direction of all connections: the receiver sees the end of the stream, held bytes
    /// are lost, the other direction goes on.
    pub fn cut_direction(&self, direction: Direction) {
        self.shared.change(|state| {
            for connection in state.connections.values_mut() {
                connection.cut(direction);
            }
        });
    }

    /// Arms a trigger: the connection on which a client sends `pattern` next still delivers it to
    /// the server, but nothing that the server sends from then on reaches that client.
    ///
    /// The hold is in force before the server gets the pattern's last byte, so no answer to it can
    /// slip through. It fires once; other connections go on.
    ///
    /// # Panics
    ///
    /// When `pattern` is empty or longer than [`PATTERN_MAX_BYTES`].
    pub fn hold_answers_after(&self, pattern: &[u8]) {
        assert!((1..=PATTERN_MAX_BYTES).contains(&pattern.len()), "a pattern has 1 to 256 bytes");
        self.shared.change(|state| {
            state.pattern = Some(pattern.to_vec());
            state.answers = Answers::Pass;
        });
    }

    /// Waits until the pattern has gone to the server with answers held; `false` after `timeout`.
    #[must_use]
    pub fn held(&self, timeout: Duration) -> bool {
        self.shared.wait_for(timeout, |state| state.answers >= Answers::Held)
    }

    /// Waits until the server has sent something after the pattern, which the proxy now keeps;
    /// `false` after `timeout`.
    ///
    /// With one request in flight at a time that is the answer, so the server has acted.
    #[must_use]
    pub fn answer_kept(&self, timeout: Duration) -> bool {
        self.shared.wait_for(timeout, |state| state.answers == Answers::Kept)
    }

    /// When bytes came from clients so far, and the first [`UPLOAD_KEPT_BYTES`] of what came at a time; the first
    /// [`UPLOADS_MAX`] of them.
    #[must_use]
    pub fn uploads(&self) -> Vec<(Instant, Vec<u8>)> {
        self.shared.lock().uploads.clone()
    }

    /// Number of connections that are open now.
    #[must_use]
    pub fn connection_count(&self) -> usize {
        self.shared.lock().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.change(|state| state.stopping = true);
        self.cut();
        // Wakes the accepting thread, which then sees that it is to stop.
        let woken = TcpStream::connect(self.address).is_ok();
        if let Some(accept) = self.accept.take().filter(|_| woken) {
            accept.join().expect("the accepting thread does not panic");
        }
    }
}

/// How far the trigger of [`Proxy::hold_answers_after`] has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Answers {
    #[default]
    Pass,
    Held,
    Kept,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    to_server_held: bool,
    to_client_held: bool,
    pattern: Option<Vec<u8>>,
    answers: Answers,
    uploads: Vec<(Instant, Vec<u8>)>,
    connections: BTreeMap<u64, Connection>,
    next_id: u64,
    stopping: bool,
}

#[derive(Debug)]
struct Connection {
    client: TcpStream,
    server: TcpStream,
    answers_held: bool,
    to_server_cut: bool,
    to_client_cut: bool,
}

impl Connection {
    fn cut(&mut self, direction: Direction) {
        let (from, to) = match direction {
            Direction::ToServer => (&self.client, &self.server),
            Direction::ToClient => (&self.server, &self.client),
        };
        shut(from, Shutdown::Read);
        shut(to, Shutdown::Write);
        match direction {
            Direction::ToServer => self.to_server_cut = true,
            Direction::ToClient => self.to_client_cut = true,
        }
    }

    fn shut(&self) {
        shut(&self.client, Shutdown::Both);
        shut(&self.server, Shutdown::Both);
    }

    fn is_cut(&self, direction: Direction) -> bool {
        match direction {
            Direction::ToServer => self.to_server_cut,
            Direction::ToClient => self.to_client_cut,
        }
    }
}

/// Shuts a socket; one that its peer has closed already needs no more.
fn shut(socket: &TcpStream, how: Shutdown) {
    if let Err(error) = socket.shutdown(how) {
        tracing::trace!(%error, "a socket was closed already");
    }
}

impl State {
    fn held_mut(&mut self, direction: Direction) -> &mut bool {
        match direction {
            Direction::ToServer => &mut self.to_server_held,
            Direction::ToClient => &mut self.to_client_held,
        }
    }

    /// What a pump that carries bytes of connection `id` may do with them.
    fn verdict(&self, id: u64, direction: Direction) -> Verdict {
        let Some(connection) = self.connections.get(&id) else { return Verdict::Drop };
        let held = match direction {
            Direction::ToServer => self.to_server_held,
            Direction::ToClient => self.to_client_held || connection.answers_held,
        };
        if connection.is_cut(direction) {
            Verdict::Drop
        } else if held {
            Verdict::Wait
        } else {
            Verdict::Pass
        }
    }
}

enum Verdict {
    Pass,
    Wait,
    Drop,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread of the proxy panics with the lock held")
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn wait_for(&self, timeout: Duration, condition: impl Fn(&State) -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        while !condition(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).expect("the lock is not poisoned").0;
        }
        true
    }

    /// Waits out a hold; `false` when the bytes are to be dropped.
    fn may_pass(&self, id: u64, direction: Direction) -> bool {
        let mut state = self.lock();
        loop {
            match state.verdict(id, direction) {
                Verdict::Pass => return true,
                Verdict::Drop => return false,
                Verdict::Wait => {
                    state = self.changed.wait(state).expect("the lock is not poisoned");
                }
            }
        }
    }
}

fn accept_all(listener: &TcpListener, server: SocketAddr, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if shared.lock().stopping {
            return;
        }
        let connected = client.and_then(|client| connect(client, server, shared));
        if let Err(error) = connected {
            tracing::debug!(%error, "a connection was not forwarded");
        }
    }
}

/// Connects to the server and starts a pump for each direction. An error drops the client.
fn connect(client: TcpStream, server: SocketAddr, shared: &Arc<Shared>) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let up = (client.try_clone()?, server.try_clone()?);
    let down = (server.try_clone()?, client.try_clone()?);
    let mut state = shared.lock();
    let id = state.next_id;
    state.next_id += 1;
    let connection = Connection {
        client,
        server,
        answers_held: false,
        to_server_cut: false,
        to_client_cut: false,
    };
    state.connections.insert(id, connection);
    drop(state);
    for ((from, to), direction) in [(up, Direction::ToServer), (down, Direction::ToClient)] {
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            pump(from, to, id, direction, &shared);
        });
    }
    Ok(())
}

/// Carries bytes until the stream ends or is cut, then ends it for the receiver too.
fn pump(mut from: TcpStream, mut to: TcpStream, id: u64, direction: Direction, shared: &Shared) {
    let mut buffer = vec![0; 64 * 1024];
    let mut tail = Vec::new();
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => count,
        };
        let chunk = &buffer[..count];
        match direction {
            Direction::ToClient => note_kept_answer(id, shared),
            Direction::ToServer => note_upload(chunk, shared),
        }
        if !shared.may_pass(id, direction) {
            break;
        }
        let fired = direction == Direction::ToServer && watch(&mut tail, chunk, id, shared);
        if to.write_all(chunk).is_err() {
            break;
        }
        if fired {
            shared.change(|state| state.answers = state.answers.max(Answers::Held));
        }
    }
    // The end of a stream is held back like its bytes.
    shared.may_pass(id, direction);
    shut(&to, Shutdown::Write);
    let ended_for_both = |connection: &mut Connection| {
        connection.cut(direction);
        connection.to_server_cut && connection.to_client_cut
    };
    shared.change(|state| {
        if state.connections.get_mut(&id).is_some_and(ended_for_both) {
            state.connections.remove(&id);
        }
    });
}

fn note_upload(bytes: &[u8], shared: &Shared) {
    let now = Instant::now();
    let mut state = shared.lock();
    if state.uploads.len() < UPLOADS_MAX {
        let kept = bytes.len().min(UPLOAD_KEPT_BYTES);
        state.uploads.push((now, bytes[..kept].to_vec()));
    }
}

fn note_kept_answer(id: u64, shared: &Shared) {
    shared.change(|state| {
        if state.connections.get(&id).is_some_and(|connection| connection.answers_held) {
            state.answers = Answers::Kept;
        }
    });
}

/// Looks for the pattern in the stream so far and holds the answers of this connection once it is
/// there. `tail` keeps the end of the stream for a pattern that comes in two chunks.
fn watch(tail: &mut Vec<u8>, chunk: &[u8], id: u64, shared: &Shared) -> bool {
    let mut state = shared.lock();
    let Some(length) = state.pattern.as_ref().map(Vec::len) else {
        keep_tail(tail, chunk);
        return false;
    };
    // Fewer bytes than the pattern: what was sent before it was armed cannot fire it alone.
    let from = tail.len().saturating_sub(length - 1);
    let stream = [&tail[from..], chunk].concat();
    let seen = stream.windows(length).any(|window| Some(window) == state.pattern.as_deref());
    let mut fired = false;
    if seen && let Some(connection) = state.connections.get_mut(&id) {
        connection.answers_held = true;
        state.pattern = None;
        fired = true;
    }
    drop(state);
    keep_tail(tail, chunk);
    fired
}

fn keep_tail(tail: &mut Vec<u8>, chunk: &[u8]) {
    tail.extend_from_slice(chunk);
    tail.drain(..tail.len().saturating_sub(PATTERN_MAX_BYTES));
}
