//! One coordinator node: raft, driver and services, put together.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{Stream, StreamExt as _};
use tenure_model::Clock;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpIncoming};

use crate::clock::BootClock;
use crate::connection::Connection;
use crate::driver::proposer::Proposer;
use crate::driver::{Driver, Parts};
use crate::grpc::{Services, Signer};
use crate::machine::GroupMachine;
use crate::raft::{
    Dial, NodeAddresses, NodeId, OpenError, RaftNode, RaftSettings, RaftTuning, Start, StopReason,
};
use crate::settings::{NodeSettings, NodeSettingsError, StartMode};
use crate::versions::Keeper;

/// HTTP/2 keepalive towards clients: pause before a ping, and wait for its answer.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// In the data folder, beside the log: see `silences`.
const SILENCES_FILE: &str = "silences";

/// How long open calls have to end at a shutdown.
const FAREWELL: Duration = Duration::from_secs(2);

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings contradict each other.
    #[error(transparent)]
    Settings(#[from] NodeSettingsError),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address in the settings.
        address: SocketAddr,
        /// What failed.
        source: io::Error,
    },
    /// The signing key cannot be read.
    #[error("signing key {}: {why}: `tenure signing-key FILE` makes one", path.display())]
    SigningKey {
        /// The file in the settings.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Raft or its storage does not start.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The services cannot be described to clients.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// What a node stands on: a clock, who comes in, and how it reaches the other nodes. A simulation has its own.
#[doc(hidden)]
pub struct Ground<C, R> {
    /// Steady clock.
    pub clock: Arc<dyn Clock>,
    /// Connections of members and operators.
    pub clients: Door<C>,
    /// Connections of other nodes.
    pub others: Door<R>,
    /// In place of TCP towards the other nodes.
    pub dial: Option<Dial>,
    /// HTTP/2 keepalive towards clients: pause before a ping, and wait for its answer; nothing: no pings.
    pub keepalive: Option<Duration>,
}

/// Connections as they come in at one address.
#[doc(hidden)]
pub struct Door<I> {
    /// The address, with the port that was taken.
    pub address: SocketAddr,
    /// Ends or fails only with the listener.
    pub incoming: I,
}

/// A running node. Stops when dropped; [`Node::shutdown`] stops it in order.
pub struct Node {
    raft: RaftNode<GroupMachine>,
    client_address: SocketAddr,
    raft_address: SocketAddr,
    closing: watch::Sender<bool>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl Node {
    /// Opens the data folder, listens and takes part in the cluster.
    ///
    /// With `start = bootstrap` and an empty folder it waits for the other founders.
    ///
    /// # Errors
    ///
    /// [`StartError`]; nothing is running then.
    #[must_use]
    pub fn start(settings: NodeSettings) -> BoxFuture<'static, Result<Self, StartError>> {
        // A boxed future is compiled here; any other one in the crate that awaits it, with all of raft and gRPC.
        Box::pin(async move {
            settings.validate()?;
            let clients = listen(settings.client_listen).await?;
            let others = listen(settings.raft_listen).await?;
            let clock = Arc::new(BootClock);
            let ground = Ground { clock, clients, others, dial: None, keepalive: Some(KEEPALIVE) };
            Self::start_on(settings, ground).await
        })
    }

    /// As [`Node::start`], on what it is given. For simulations; not an interface.
    ///
    /// # Errors
    ///
    /// [`StartError`].
    #[doc(hidden)]
    pub async fn start_on<C, R, S, T>(
        settings: NodeSettings,
        ground: Ground<C, R>,
    ) -> Result<Self, StartError>
    where
        C: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        R: Stream<Item = io::Result<T>> + Send + 'static,
        T: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static,
    {
        settings.validate()?;
        let signer = Arc::new(signer(&settings)?);
        let Ground { clock, clients, others, dial, keepalive } = ground;
        let (client_address, raft_address) = (clients.address, others.address);
        let raft_settings = raft_settings(&settings, client_address, raft_address);
        let node_address = raft_settings.addresses.client_address.clone();
        let settings = Arc::new(settings);

        let machine = GroupMachine::new(Arc::clone(&clock))
            .keeping_silences_at(settings.data_dir.join(SILENCES_FILE));
        let raft = RaftNode::open_through(others.incoming, dial, raft_settings, machine).await?;
        let limit = Duration::from_millis(settings.raft.propose_timeout_ms.saturating_mul(2));
        let (proposer, proposing) = Proposer::start(raft.clone(), settings.queues.commands, limit);
        let (handle, driver) = Driver::new(Parts {
            raft: raft.clone(),
            proposer: proposer.clone(),
            clock: Arc::clone(&clock),
            settings: Arc::clone(&settings),
            node_address,
        });
        let (keeper, reports) = Keeper::new(
            raft.clone(),
            proposer.clone(),
            Duration::from_millis(settings.raft.heartbeat_interval_ms),
            Duration::from_millis(settings.raft.digest_interval_ms),
        );
        let (closing, closed) = watch::channel(false);
        let services = Services::new(
            raft.clone(),
            proposer,
            handle,
            clock,
            settings,
            closed.clone(),
            signer,
            reports,
        );
        let routes = services.routes().await?;

        let mut ending = closed.clone();
        let server = Server::builder()
            .http2_keepalive_interval(keepalive)
            .http2_keepalive_timeout(keepalive)
            .add_routes(routes);
        let incoming = clients.incoming.map(|accepted| accepted.map(Connection::new));
        let serving = async move {
            // A sender that is gone means the same as its word.
            let end = async move { drop(ending.wait_for(|closing| *closing).await) };
            if let Err(error) = server.serve_with_incoming_shutdown(incoming, end).await {
                tracing::error!(%error, "the listener for clients ended");
            }
        };
        let tasks = vec![
            tokio::spawn(driver.run(closed.clone())),
            tokio::spawn(keeper.run(closed)),
            tokio::spawn(serving),
            tokio::spawn(proposing),
        ];
        tracing::info!(%client_address, %raft_address, "node started");
        Ok(Self { raft, client_address, raft_address, closing, tasks: Mutex::new(tasks) })
    }

    /// Where clients are listened for; the port is the one that was taken.
    #[must_use]
    pub const fn client_address(&self) -> SocketAddr {
        self.client_address
    }

    /// Where the other nodes are listened for.
    #[must_use]
    pub const fn raft_address(&self) -> SocketAddr {
        self.raft_address
    }

    /// Consensus of this node: leadership, status, the replicated state.
    #[must_use]
    pub const fn raft(&self) -> &RaftNode<GroupMachine> {
        &self.raft
    }

    /// Waits until the node has stopped, by itself or by [`Node::shutdown`].
    #[must_use]
    pub fn stopped(&self) -> BoxFuture<'_, StopReason> {
        Box::pin(self.raft.stopped())
    }

    /// Hands leadership over if there is anyone to take it, ends all sessions and stops.
    #[must_use]
    pub fn shutdown(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let is_leader = self.raft.leadership().borrow().is_me;
            if is_leader && let Err(error) = self.raft.transfer_leadership(None, FAREWELL).await {
                tracing::debug!(%error, "leadership was not handed over");
            }
            self.stop().await;
        })
    }

    /// Stops without handing anything over, as a crash would.
    pub async fn stop(&self) {
        self.closing.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        // Raft goes first: calls under way are refused instead of waiting for a quorum.
        self.raft.shutdown().await;
        for mut task in tasks {
            if timeout(FAREWELL, &mut task).await.is_err() {
                task.abort();
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The driver ends the sessions, the listener its calls; what they held of raft goes with them.
        self.closing.send_replace(true);
    }
}

async fn listen(address: SocketAddr) -> Result<Door<TcpIncoming>, StartError> {
    let failed = |source| StartError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Door { address, incoming: TcpIncoming::from(listener).with_nodelay(Some(true)) })
}

fn signer(settings: &NodeSettings) -> Result<Signer, StartError> {
    let cluster = settings.cluster.clone();
    let Some(path) = &settings.signing_key_file else { return Ok(Signer::new(cluster, None)) };
    let failed = |why: String| StartError::SigningKey { path: path.clone(), why };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let key = tenure_token::SigningKey::parse(&text).map_err(|error| failed(error.to_string()))?;
    tracing::info!(key = %key.public(), "grants are signed");
    Ok(Signer::new(cluster, Some(key)))
}

/// What raft wants to know; ports that were taken stand where 0 was asked for.
fn raft_settings(
    settings: &NodeSettings,
    client_address: SocketAddr,
    raft_address: SocketAddr,
) -> RaftSettings {
    let own = settings.peers.iter().find(|peer| peer.node == settings.node);
    let or = |advertised: &Option<String>, listed: Option<&String>, bound: SocketAddr| {
        advertised.as_ref().or(listed).cloned().unwrap_or_else(|| bound.to_string())
    };
    let addresses = NodeAddresses {
        raft_address: or(
            &settings.raft_advertised,
            own.map(|peer| &peer.raft_address),
            raft_address,
        ),
        client_address: or(
            &settings.client_advertised,
            own.map(|peer| &peer.client_address),
            client_address,
        ),
    };
    let mut nodes: BTreeMap<NodeId, NodeAddresses> = settings
        .peers
        .iter()
        .map(|peer| {
            let addresses = NodeAddresses {
                raft_address: peer.raft_address.clone(),
                client_address: peer.client_address.clone(),
            };
            (NodeId(peer.node), addresses)
        })
        .collect();
    let start = match settings.start {
        StartMode::Existing => Start::Existing,
        StartMode::Bootstrap => {
            nodes.insert(NodeId(settings.node), addresses.clone());
            Start::Bootstrap { members: nodes }
        }
        StartMode::Join => Start::Join { peers: nodes },
    };
    let lengths = settings.raft;
    RaftSettings {
        node: NodeId(settings.node),
        cluster: settings.cluster.clone(),
        folder: settings.data_dir.clone(),
        listen: settings.raft_listen,
        addresses,
        start,
        tuning: RaftTuning {
            heartbeat_interval: Duration::from_millis(lengths.heartbeat_interval_ms),
            election_timeout_min: Duration::from_millis(lengths.election_timeout_min_ms),
            election_timeout_max: Duration::from_millis(lengths.election_timeout_max_ms),
            propose_timeout: Duration::from_millis(lengths.propose_timeout_ms),
            snapshot_wal_bytes: lengths.snapshot_log_mib * 1024 * 1024,
            ..RaftTuning::default()
        },
    }
}
