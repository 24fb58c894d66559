//! The receiving service: takes orders over HTTP and keeps them in PostgreSQL.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Uri};
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance;
use tenure_sdk::sink::{FencedSink, FencedWriter, Verified};
use tenure_sink_http::{
    Admitted, Answer, Claim, FenceLayer, HttpSettings, HttpSink, HttpWriter, PostgresFences,
    Receiver, Refusal,
};
use tenure_sink_postgres::deadpool_postgres::{
    Manager, ManagerConfig, Pool, RecyclingMethod, Runtime,
};
use tenure_sink_postgres::tokio_postgres::NoTls;
use tenure_tests::servers::{Postgres, require};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// Header that names where a test stops the handler.
const STOP: &str = "x-stop";

/// First line of an order whose handler stops before it asks the fence, too.
pub(crate) const STOP_BEFORE: &str = "stop before the check";

/// How the handler treats the fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Check and effect in one transaction.
    Right,
    /// Check in a transaction of its own, before the effect's.
    CheckBeforeHandler,
    /// The layer is there; the handler does not ask.
    Forgetful,
    /// No layer: nothing is read, nothing compared.
    Unfenced,
}

/// Handlers that stand still until their test lets them go on.
#[derive(Debug, Default)]
pub(crate) struct Stops {
    next: AtomicU64,
    open: Mutex<BTreeMap<u64, mpsc::Sender<oneshot::Sender<()>>>>,
}

impl Stops {
    /// A new place to stop at, and what arrives there.
    pub(crate) fn open(&self) -> (u64, mpsc::Receiver<oneshot::Sender<()>>) {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel(1);
        self.open.lock().unwrap().insert(id, sender);
        (id, receiver)
    }

    async fn here(&self, map: &HeaderMap) {
        let Some(id) = map.get(STOP).and_then(|value| value.to_str().ok()?.parse().ok()) else {
            return;
        };
        let sender = self.open.lock().unwrap().get(&id).cloned();
        let (go_on, told) = oneshot::channel();
        if let Some(sender) = sender
            && sender.send(go_on).await.is_ok()
        {
            // A test that is gone lets go on.
            let _told = told.await;
        }
    }
}

struct App {
    pool: Pool,
    fences: PostgresFences,
    mode: Mode,
    stops: Arc<Stops>,
}

/// A running service with a database of its own.
pub(crate) struct Service {
    pub(crate) server: &'static Postgres,
    pub(crate) database: String,
    pub(crate) stops: Arc<Stops>,
    port: u16,
    task: JoinHandle<()>,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Pool and fences over a new database with a table of orders.
pub(crate) async fn fences(
    idle: Duration,
) -> Option<(&'static Postgres, String, Pool, PostgresFences)> {
    let server = require(Postgres::shared())?;
    let database = server.new_database();
    server.sql(&database, "CREATE TABLE orders (id bigint NOT NULL, epoch bigint, part int)");
    let config = server.url_of(&database, server.port()).parse().unwrap();
    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(config, NoTls, recycling);
    let pool = Pool::builder(manager).max_size(24).runtime(Runtime::Tokio1).build().unwrap();
    let fences = PostgresFences::new(pool.clone()).idle_in_transaction_timeout(idle);
    fences.migrate().await.unwrap();
    Some((server, database, pool, fences))
}

impl Service {
    pub(crate) async fn start(mode: Mode, receiver: Receiver) -> Option<Self> {
        Self::start_bounded(mode, receiver, PostgresFences::IDLE_IN_TRANSACTION_TIMEOUT).await
    }

    pub(crate) async fn start_bounded(
        mode: Mode,
        receiver: Receiver,
        idle: Duration,
    ) -> Option<Self> {
        let (server, database, pool, fences) = fences(idle).await?;
        let stops = Arc::new(Stops::default());
        let app = App { pool, fences: fences.clone(), mode, stops: Arc::clone(&stops) };
        let router = match mode {
            Mode::Right | Mode::CheckBeforeHandler | Mode::Forgetful => Router::new()
                .route("/orders", post(orders))
                .with_state(Arc::new(app))
                .layer(FenceLayer::new(fences, receiver)),
            Mode::Unfenced => {
                Router::new().route("/orders", post(unfenced)).with_state(Arc::new(app))
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Some(Self { server, database, stops, port, task })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn sink(&self, settings: HttpSettings) -> HttpSink {
        sink_at(self.port, settings)
    }

    /// `id|epoch` of each order, in the order of ids.
    pub(crate) fn orders(&self) -> Vec<String> {
        let rows = self.server.sql(&self.database, "SELECT id, epoch FROM orders ORDER BY id");
        rows.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// Epoch of every fence.
    pub(crate) fn fence_epochs(&self) -> String {
        self.server.sql(&self.database, "SELECT epoch FROM tenure_http_fence")
    }
}

pub(crate) fn sink_at(port: u16, settings: HttpSettings) -> HttpSink {
    let base: Uri = format!("http://127.0.0.1:{port}").parse().unwrap();
    HttpSink::new(&base, settings).unwrap()
}

/// An order request: one line `id epoch part` for each order.
pub(crate) fn order(lines: &str, stop: Option<u64>) -> Request<Bytes> {
    let mut request = Request::post("/orders");
    if let Some(stop) = stop {
        request = request.header(STOP, stop);
    }
    request.body(Bytes::copy_from_slice(lines.as_bytes())).unwrap()
}

pub(crate) fn grant(member: &str, epoch: u64) -> Grant {
    conformance::grant(member, 0, Epoch::new(epoch).unwrap())
}

pub(crate) fn at(offset: u64) -> NextOffset {
    NextOffset::new(offset).unwrap()
}

/// Registers and reads the resume point, as an acquire does.
pub(crate) async fn owner(sink: &HttpSink, grant: &Grant) -> (HttpWriter, NextOffset) {
    let mut writer = sink.register(grant).await.unwrap().writer;
    let verified = Verified::without_coordinator(false);
    let next = match writer.resume(&verified).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next)
}

async fn orders(
    State(app): State<Arc<App>>,
    Extension(claim): Extension<Claim>,
    map: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    // A task of its own, as services have that finish what they have begun: the caller may be gone before it is done.
    let work = tokio::spawn(async move { take(&app, &claim, &map, &body).await });
    match work.await.unwrap() {
        Ok(answer) => {
            let status = StatusCode::from_u16(answer.status).unwrap();
            let mut response = Response::new(Body::from(answer.body));
            *response.status_mut() = status;
            response
        }
        Err(refusal) => refusal.to_response(false),
    }
}

async fn take(app: &App, claim: &Claim, map: &HeaderMap, body: &Bytes) -> Result<Answer, Refusal> {
    let text = std::str::from_utf8(body).unwrap();
    if text.starts_with(STOP_BEFORE) {
        app.stops.here(map).await;
    }
    let mut client = app.pool.get().await.map_err(Refusal::unavailable)?;
    let client: &mut tokio_postgres::Client = &mut client;
    let before = |error: tokio_postgres::Error| PostgresFences::before_commit(&error);
    let mut transaction = client.transaction().await.map_err(before)?;
    if app.mode != Mode::Forgetful
        && let Admitted::Replay(answer) = claim.admit(&app.fences, &mut transaction).await?
    {
        return Ok(answer);
    }
    if app.mode == Mode::CheckBeforeHandler {
        transaction.commit().await.map_err(before)?;
        transaction = client.transaction().await.map_err(before)?;
    }
    let mut count = 0;
    for line in text.lines().filter(|line| *line != STOP_BEFORE) {
        let numbers: Vec<i64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let part = i32::try_from(numbers[2]).unwrap();
        let insert = "INSERT INTO orders VALUES ($1, $2, $3)";
        transaction.execute(insert, &[&numbers[0], &numbers[1], &part]).await.map_err(before)?;
        app.stops.here(map).await;
        count += 1;
    }
    let answer = Answer { status: 201, body: format!("{count} taken").into() };
    if app.mode == Mode::Right {
        claim.keep(&app.fences, &mut transaction, &answer).await?;
    }
    let done = transaction.commit().await;
    done.map_err(|error| PostgresFences::at_commit(&error))?;
    Ok(answer)
}

async fn unfenced(State(app): State<Arc<App>>, body: Bytes) -> StatusCode {
    let client = app.pool.get().await.unwrap();
    for line in std::str::from_utf8(&body).unwrap().lines() {
        let values = line.replace(' ', ", ");
        client.batch_execute(&format!("INSERT INTO orders VALUES ({values})")).await.unwrap();
    }
    StatusCode::CREATED
}
