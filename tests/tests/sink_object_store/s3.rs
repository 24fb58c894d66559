//! An S3 API on a loopback port, in this process, over a temporary folder.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, HttpResponse};
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tenure_sink_object_store::object_store::aws::AmazonS3Builder;
use tenure_sink_object_store::object_store::{ClientOptions, ObjectStore, RetryConfig};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinHandle;

pub(crate) const BUCKET: &str = "bucket";

/// Whether the server compares and writes in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Puts {
    /// One PUT at a time.
    Atomic,
    /// As `s3s-fs` comes: it compares, then writes.
    TwoSteps,
}

/// What goes wrong with PUTs of the manifest, on demand.
#[derive(Default)]
pub(crate) struct Faults {
    /// So many are done and answered with 500.
    pub(crate) answers_lost: AtomicUsize,
    /// The next one is held back until `release`, then done.
    pub(crate) hold: AtomicBool,
    pub(crate) release: Notify,
    /// A held one is done.
    pub(crate) released: Notify,
}

pub(crate) struct S3Server {
    port: u16,
    pub(crate) faults: Arc<Faults>,
    accepting: JoinHandle<()>,
    folder: TempDir,
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl S3Server {
    pub(crate) async fn start(puts: Puts) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let files = FileSystem::new(folder.path()).unwrap();
        let service = S3ServiceBuilder::new(files).build();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let faults = Arc::new(Faults::default());
        let state = Arc::new(State { service, puts, one: Mutex::new(()), faults: faults.clone() });
        let accepting = tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let state = Arc::clone(&state);
                tokio::spawn(async move {
                    let answer = service_fn(move |request| {
                        let state = Arc::clone(&state);
                        async move { Ok::<_, Infallible>(state.answer(request).await) }
                    });
                    // A client that hangs up is none of the server's business.
                    let _ended = Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(socket), answer)
                        .await;
                });
            }
        });
        Self { port, faults, accepting, folder }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Objects in the bucket.
    pub(crate) fn object_count(&self) -> usize {
        file_count(&self.folder.path().join(BUCKET))
    }

    /// A client of its own.
    pub(crate) fn client(&self, timeout: Duration) -> Arc<dyn ObjectStore> {
        client_of(self.port, BUCKET, timeout)
    }
}

pub(crate) fn file_count(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { file_count(&path) } else { 1 }).sum()
}

/// Client of a server on this machine. `timeout` is for one request; the client repeats what was answered with 500.
pub(crate) fn client_of(port: u16, bucket: &str, timeout: Duration) -> Arc<dyn ObjectStore> {
    tenure_sink_object_store::choose_tls();
    let retry = RetryConfig { retry_timeout: timeout, ..RetryConfig::default() };
    let store = AmazonS3Builder::new()
        .with_endpoint(format!("http://127.0.0.1:{port}"))
        .with_bucket_name(bucket)
        .with_region("us-east-1")
        .with_access_key_id("tenure")
        .with_secret_access_key("tenure")
        .with_skip_signature(true)
        .with_retry(retry)
        .with_client_options(ClientOptions::new().with_allow_http(true).with_timeout(timeout))
        .build();
    Arc::new(store.unwrap())
}

/// A body of the tests is far smaller.
const BODY_MAX: usize = 1 << 20;

struct State {
    service: S3Service,
    puts: Puts,
    one: Mutex<()>,
    faults: Arc<Faults>,
}

impl State {
    /// On a task of its own, so that a client which hangs up does not undo what it asked for.
    async fn answer(self: Arc<Self>, request: hyper::Request<Incoming>) -> HttpResponse {
        let (parts, body) = request.into_parts();
        let body = Body::from(body).store_all_limited(BODY_MAX).await;
        let Ok(body) = body else { return failed() };
        let request = hyper::Request::from_parts(parts, Body::from(body));
        tokio::spawn(async move { self.perform(request).await }).await.unwrap()
    }

    async fn perform(&self, request: hyper::Request<Body>) -> HttpResponse {
        let is_put = request.method() == Method::PUT;
        let is_manifest = is_put && request.uri().path().ends_with("manifest.json");
        let held = is_manifest && self.faults.hold.swap(false, Ordering::SeqCst);
        if held {
            self.faults.release.notified().await;
        }
        let one =
            if is_put && self.puts == Puts::Atomic { Some(self.one.lock().await) } else { None };
        let answer = self.service.call(request).await;
        drop(one);
        if held {
            self.faults.released.notify_one();
        }
        let lose = |left: usize| left.checked_sub(1);
        let lost = is_manifest
            && self
                .faults
                .answers_lost
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose)
                .is_ok();
        match answer {
            Ok(answer) if !lost => answer,
            Ok(_) | Err(_) => failed(),
        }
    }
}

fn failed() -> HttpResponse {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    answer
}
