//! Readiness over HTTP, for orchestrators.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Readiness;

/// Longest that one request may take; requests are answered one after the other.
const REQUEST_MAX: Duration = Duration::from_millis(500);

/// Longest request that is read, in bytes.
const REQUEST_BYTES_MAX: usize = 4096;

/// Answers `GET /ready` (200 or 503) and `GET /live` (200) until it is dropped.
///
/// It has a thread of its own: handlers that block the runtime do not make it time out. It knows no TLS and no names:
/// listen where only the orchestrator gets.
pub struct Probe {
    address: SocketAddr,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probe").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Readiness {
    /// Serves this readiness over HTTP at `listen`; port 0 takes a free one.
    ///
    /// | request      | answer                                                           |
    /// |--------------|------------------------------------------------------------------|
    /// | `GET /ready` | 200 while the consumer is in its group with a live lease, else 503 |
    /// | `GET /live`  | 200                                                              |
    /// | another      | 404                                                              |
    ///
    /// # Errors
    ///
    /// When the address is not free, or no thread can be started.
    pub fn serve(&self, listen: SocketAddr) -> io::Result<Probe> {
        let listener = TcpListener::bind(listen)?;
        let address = listener.local_addr()?;
        let (ends, readiness) = (Arc::new(AtomicBool::new(false)), self.clone());
        let ended = Arc::clone(&ends);
        let serve = move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                if let Err(error) = stream.and_then(|stream| answer(stream, &readiness)) {
                    tracing::debug!(%error, "probe was not answered");
                }
            }
        };
        let thread = std::thread::Builder::new().name("tenure-probe".to_owned()).spawn(serve)?;
        Ok(Probe { address, ends, thread: Some(thread) })
    }
}

impl Probe {
    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        // Wakes the thread; where even that fails, it is left behind with its port.
        let mut wake = self.address;
        if wake.ip().is_unspecified() {
            wake.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
        }
        let woken = TcpStream::connect_timeout(&wake, REQUEST_MAX).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            // It has nothing to say.
            let _ended = thread.join();
        }
    }
}

fn answer(mut stream: TcpStream, readiness: &Readiness) -> io::Result<()> {
    let until = Instant::now() + REQUEST_MAX;
    stream.set_write_timeout(Some(REQUEST_MAX))?;
    let mut request = Vec::new();
    let mut part = [0; 512];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > REQUEST_BYTES_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => break,
            count => request.extend_from_slice(&part[..count]),
        }
    }
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let path = target.split('?').next().unwrap_or("");
    let (status, body) = match (method, path) {
        ("GET" | "HEAD", "/ready") if readiness.is_ready() => ("200 OK", "ready\n"),
        ("GET" | "HEAD", "/ready") => {
            ("503 Service Unavailable", "not ready: not in the group, or the lease has ended\n")
        }
        ("GET" | "HEAD", "/live") => ("200 OK", "live\n"),
        _ => ("404 Not Found", "no such page: ask for /ready or /live\n"),
    };
    let length = body.len();
    let body = if method == "HEAD" { "" } else { body };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
}
