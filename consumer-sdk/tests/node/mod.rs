//! A coordinator node in the test's process: real gRPC on loopback, answers by a few rules.

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use futures::Stream;
use tenure_model::ErrorCode;
use tenure_proto::v1::membership_server::{Membership, MembershipServer};
use tenure_proto::v1::offsets_server::{Offsets, OffsetsServer};
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tenure_proto::{status_of_error, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// Longest wait for something that must happen.
pub(crate) const WAIT: Duration = Duration::from_secs(20);

/// What a node does.
#[derive(Default)]
pub(crate) struct State {
    /// Sends everyone there.
    pub(crate) redirect: Option<String>,
    pub(crate) version: u64,
    pub(crate) assigned: Vec<v1::Assigned>,
    /// Ends the stream instead of answering this many releases.
    pub(crate) releases_cut: u32,
    /// Loses the answers of this many commits after they happened.
    pub(crate) commits_lost: u32,
    /// Answers commits that much later.
    pub(crate) commit_delay: Duration,
    /// Everything that came, in order.
    pub(crate) seen: Vec<(Instant, Up)>,
    pub(crate) commits: Vec<v1::OffsetCommit>,
    pub(crate) calls: u32,
    cutters: Vec<mpsc::Sender<Result<v1::SessionDown, Status>>>,
}

/// A running node. It stops with the test's process.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) address: String,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl Node {
    /// Starts a node on a thread of its own.
    pub(crate) fn start() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let node = Self { address: address.to_string(), state: Arc::default() };
        let service = node.clone();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                tonic::transport::Server::builder()
                    .add_service(MembershipServer::new(service.clone()))
                    .add_service(OffsetsServer::new(service))
                    .serve_with_incoming(TcpListenerStream::new(listener))
                    .await
                    .unwrap();
            });
        });
        node
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let answer = change(&mut self.state.0.lock().unwrap());
        self.state.1.notify_all();
        answer
    }

    /// Waits until the condition holds; blocks the thread.
    pub(crate) fn wait_for(&self, what: &str, condition: impl Fn(&State) -> bool) {
        let state = self.state.0.lock().unwrap();
        let (_state, timeout) =
            self.state.1.wait_timeout_while(state, WAIT, |state| !condition(state)).unwrap();
        assert!(!timeout.timed_out(), "waited in vain for: {what}");
    }

    /// Breaks all streams.
    pub(crate) fn cut(&self) {
        for cutter in self.change(|state| std::mem::take(&mut state.cutters)) {
            // A stream that is gone is cut already.
            let _sent = cutter.try_send(Err(Status::unavailable("cut by the test")));
        }
    }

    fn check_leader(&self) -> Result<(), Status> {
        let redirect = self.change(|state| {
            state.calls += 1;
            state.redirect.clone()
        });
        match redirect {
            None => Ok(()),
            Some(leader) => Err(status_of_error(ErrorCode::NotLeader, "not the leader", &leader)),
        }
    }

    fn assignment(state: &State) -> v1::Assignment {
        v1::Assignment {
            version: state.version,
            partitions: state.assigned.clone(),
            preparing: vec![],
        }
    }

    /// Answer to one message; nothing: the stream ends.
    fn answer(&self, up: Up) -> Option<Vec<Down>> {
        self.change(|state| {
            state.seen.push((Instant::now(), up.clone()));
            let done = |request| vec![Down::ActAnswer(v1::ActAnswer { request, error: None })];
            match up {
                Up::Join(join) => Some(vec![Down::Joined(v1::Joined {
                    member_epoch: 7,
                    ttl_ms: join.ttl_ms,
                    heartbeat_interval_ms: join.heartbeat_interval_ms,
                    clock_drift_max_ms: 50,
                    assignment: Some(Self::assignment(state)),
                    node_address: self.address.clone(),
                })]),
                Up::Heartbeat(heartbeat) => {
                    Some(vec![Down::HeartbeatAnswer(v1::HeartbeatAnswer {
                        sequence: heartbeat.sequence,
                        assignment: Some(Self::assignment(state)),
                        as_held: 0,
                    })])
                }
                Up::Release(_) if state.releases_cut > 0 => {
                    state.releases_cut -= 1;
                    None
                }
                Up::Release(release) => {
                    state.version += 1;
                    state.assigned.retain(|assigned| {
                        release.partitions.iter().all(|released| released.epoch != assigned.epoch)
                    });
                    let mut down = done(release.request);
                    down.push(Down::Assignment(Self::assignment(state)));
                    Some(down)
                }
                Up::Acquired(acquired) => Some(done(acquired.request)),
                Up::Prepared(prepared) => Some(done(prepared.request)),
                Up::ReportTopics(report) => Some(done(report.request)),
                Up::Leave(leave) => Some(done(leave.request)),
            }
        })
    }
}

type Downs = std::pin::Pin<Box<dyn Stream<Item = Result<v1::SessionDown, Status>> + Send>>;

#[tonic::async_trait]
impl Membership for Node {
    type SessionStream = Downs;

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionUp>>,
    ) -> Result<Response<Downs>, Status> {
        self.check_leader()?;
        let mut ups = request.into_inner();
        let (downs, down) = mpsc::channel(16);
        self.change(|state| state.cutters.push(downs.clone()));
        let node = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(up)) = ups.message().await {
                let Some(answers) = up.up.and_then(|up| node.answer(up)) else {
                    return node.cut();
                };
                for answer in answers {
                    if downs.send(Ok(v1::SessionDown { down: Some(answer) })).await.is_err() {
                        return;
                    }
                }
            }
        });
        // A status is the last thing on a stream.
        let mut is_over = false;
        let until_status =
            tokio_stream::StreamExt::take_while(ReceiverStream::new(down), move |item| {
                let goes_on = !is_over;
                is_over = item.is_err();
                goes_on
            });
        Ok(Response::new(Box::pin(until_status)))
    }
}

#[tonic::async_trait]
impl Offsets for Node {
    async fn commit(
        &self,
        request: Request<v1::CommitRequest>,
    ) -> Result<Response<v1::CommitResponse>, Status> {
        self.check_leader()?;
        let commits = request.into_inner().commits;
        let verdicts = commits.iter().map(|commit| v1::CommitVerdict {
            error: (commit.epoch == 1).then(|| v1::Error {
                code: ErrorCode::Fenced.to_string(),
                message: "a newer epoch exists".into(),
                current_epoch: 9,
                leader_address: String::new(),
            }),
        });
        let verdicts = verdicts.collect();
        let (is_lost, delay) = self.change(|state| {
            state.commits.extend(commits);
            let is_lost = state.commits_lost > 0;
            state.commits_lost = state.commits_lost.saturating_sub(1);
            (is_lost, state.commit_delay)
        });
        tokio::time::sleep(delay).await;
        if is_lost {
            return Err(Status::unavailable("the answer is lost"));
        }
        Ok(Response::new(v1::CommitResponse { verdicts, index: 1 }))
    }

    async fn rewind(
        &self,
        _request: Request<v1::RewindRequest>,
    ) -> Result<Response<v1::RewindResponse>, Status> {
        Err(Status::unimplemented("nobody rewinds here"))
    }

    async fn fetch(
        &self,
        _request: Request<v1::FetchRequest>,
    ) -> Result<Response<v1::FetchResponse>, Status> {
        self.check_leader()?;
        Err(status_of_error(ErrorCode::UnknownGroup, "no such group", ""))
    }
}
