//! Opening a node.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Mutex as AsyncMutex, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::transport::Server;
use tonic::transport::server::{Connected, TcpIncoming};

use super::background::{Background, establish, observe, snapshot_by_size, step_down};
use super::failure::Failure;
use super::founding::{self, StartRefused};
use super::identity::{Identity, IdentityError, IdentityFile, Stage};
use super::log::Wal;
use super::machine::{Machine, Replica};
use super::membership::finish;
use super::network::{Dial, Network, WINDOW_BYTES};
use super::service::{Library, Part, Service};
use super::settings::{RaftSettings, RaftSettingsError, RaftTuning, Start};
use super::snapshot::SnapshotStore;
use super::wire::{Introduction, Wire};
use super::{Inner, LOG_FOLDER, Leadership, Members, RaftNode, SNAPSHOT_FOLDER};
use crate::in_place::off_thread;

/// How long closing the listener waits for calls of other nodes to end.
const FAREWELL: Duration = Duration::from_secs(1);

/// After how many of the longest election timeouts without a majority a raft leader gives up.
const QUORUM_PATIENCE: u32 = 2;

/// Why a node cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The settings contradict each other.
    #[error(transparent)]
    Settings(#[from] RaftSettingsError),
    /// The folder belongs to another node, or cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The folder is empty, and the node must not start with it.
    #[error(transparent)]
    Refused(#[from] StartRefused),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address in the settings.
        address: SocketAddr,
        /// What failed.
        source: io::Error,
    },
    /// The log or the snapshot is damaged or cannot be read; the message names the file.
    #[error("{} cannot be opened: {source}", folder.display())]
    Storage {
        /// The node's folder.
        folder: PathBuf,
        /// What failed.
        source: io::Error,
    },
    /// The raft library did not start.
    #[error("raft does not start: {reason}")]
    Raft {
        /// In its words.
        reason: String,
    },
}

impl<M: Machine> RaftNode<M> {
    /// Opens the folder, listens for the other nodes and takes part in the cluster.
    ///
    /// Waits as long as it takes for the other founders when a cluster is bootstrapped, and for any node of the
    /// cluster when this one joins.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; the node must not take part then.
    pub async fn open(settings: RaftSettings, machine: M) -> Result<Self, OpenError> {
        let bound = TcpListener::bind(settings.listen).await;
        let listener =
            bound.map_err(|source| OpenError::Listen { address: settings.listen, source })?;
        Self::open_on(listener, settings, machine).await
    }

    /// As [`RaftNode::open`], with a listener that is bound already.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub async fn open_on(
        listener: TcpListener,
        settings: RaftSettings,
        machine: M,
    ) -> Result<Self, OpenError> {
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Self::open_through(incoming, None, settings, machine).await
    }

    /// As [`RaftNode::open_on`]: the other nodes come in by `incoming`, and are reached by `dial` if it is given.
    pub(crate) async fn open_through<I, S>(
        incoming: I,
        dial: Option<Dial>,
        settings: RaftSettings,
        machine: M,
    ) -> Result<Self, OpenError>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static,
    {
        let config = settings.check()?;
        let file = IdentityFile::new(&settings.folder);
        let (identity, founding) = identify(&file, &settings)?;
        let wire = Wire::new(&settings);
        let network = Network::new(wire.clone(), settings.tuning).dialling(dial);
        let service = Service::<M>::new(wire, Introduction::new(&identity, &settings.start));
        let listening = Listening::start(incoming, service.clone(), settings.tuning);

        let settled = async {
            let identity = founding.settle(identity, &file, &settings, &network).await?;
            service.introduce_as(Introduction::new(&identity, &settings.start));
            let opened = enter(&settings, config, network.clone(), machine, &identity).await?;
            Ok((identity, opened))
        };
        let (identity, Opened { library, replica, wal, failure }) = match settled.await {
            Ok(settled) => settled,
            Err(error) => {
                listening.stop().await;
                return Err(error);
            }
        };
        service.serve(Some(Part { library: library.clone(), replica: replica.clone() }));
        let (leading, leadership) = watch::channel(Leadership::default());
        let stopped = Arc::new(watch::Sender::new(None));
        let background = Background::default();
        background.spawn(observe(
            library.clone(),
            settings.node,
            leading,
            stopped.clone(),
            failure.clone(),
        ));
        let threshold_bytes = settings.tuning.snapshot_wal_bytes;
        background.spawn(snapshot_by_size(library.clone(), wal.clone(), threshold_bytes));
        let patience = settings.tuning.election_timeout_max * QUORUM_PATIENCE;
        background.spawn(step_down(library.clone(), patience));
        let node = Self(Arc::new(Inner {
            proposals: Semaphore::new(settings.tuning.proposals_max),
            changing: AsyncMutex::new(()),
            settings,
            library,
            replica,
            wal,
            network,
            failure,
            service,
            leadership,
            stopped,
            background,
            listening,
        }));
        let finishing = finish(node.0.library.clone(), Arc::downgrade(&node.0));
        node.0.background.spawn(finishing);
        if let Err(error) = node.take_part(identity, file).await {
            node.shutdown().await;
            return Err(error);
        }
        Ok(node)
    }

    /// Initialises a founder's log, and lets a lone voter lead at once.
    async fn take_part(&self, mut identity: Identity, file: IdentityFile) -> Result<(), OpenError> {
        let Inner { settings, library, .. } = &*self.0;
        let failed = |error: &dyn std::fmt::Display| OpenError::Raft { reason: error.to_string() };
        let initialized = library.is_initialized().await.map_err(|error| failed(&error))?;
        match (identity.stage, &settings.start) {
            (Stage::Founded, Start::Bootstrap { members }) if !initialized => {
                match library.initialize(members.clone()).await {
                    Ok(()) => tracing::info!(cluster = settings.cluster, "cluster initialised"),
                    // Another founder's entries were faster.
                    Err(openraft::errors::RaftError::APIError(
                        openraft::errors::InitializeError::NotAllowed(_),
                    )) => {}
                    Err(error) => return Err(failed(&error)),
                }
            }
            (Stage::Forming | Stage::Founded | Stage::Joining | Stage::Established, _) => {}
        }
        match identity.stage {
            Stage::Established => {
                let voters: Vec<_> = library.voter_ids().collect();
                if voters == [settings.node] {
                    library.trigger().elect(false).await.map_err(|error| failed(&error))?;
                }
            }
            Stage::Founded if library.is_initialized().await.map_err(|error| failed(&error))? => {
                identity.stage = Stage::Established;
                file.write(&identity)?;
            }
            Stage::Forming | Stage::Founded | Stage::Joining => {
                let task = establish(library.clone(), file, identity, self.0.failure.clone());
                self.0.background.spawn(task);
            }
        }
        Ok(())
    }
}

/// What must happen before a node may take part.
enum Founding {
    Nothing,
    Bootstrap(Members),
    Join(Members),
}

/// Reads the folder's identity, or gives an empty folder one.
fn identify(
    file: &IdentityFile,
    settings: &RaftSettings,
) -> Result<(Identity, Founding), OpenError> {
    let found = file.read(&settings.cluster, settings.node)?;
    let fresh = match &found {
        None => true,
        Some(identity) => match identity.stage {
            Stage::Forming => true,
            Stage::Joining | Stage::Founded | Stage::Established => false,
        },
    };
    if !fresh && let Some(identity) = found {
        return Ok((identity, Founding::Nothing));
    }
    let (stage, founding) = match &settings.start {
        Start::Existing => return Err(StartRefused::EmptyFolder { node: settings.node }.into()),
        Start::Bootstrap { members } => (Stage::Forming, Founding::Bootstrap(members.clone())),
        Start::Join { peers } => (Stage::Forming, Founding::Join(peers.clone())),
    };
    let identity =
        found.unwrap_or_else(|| Identity::fresh(&settings.cluster, settings.node, stage));
    file.write(&identity)?;
    Ok((identity, founding))
}

impl Founding {
    async fn settle(
        self,
        mut identity: Identity,
        file: &IdentityFile,
        settings: &RaftSettings,
        network: &Network,
    ) -> Result<Identity, OpenError> {
        match self {
            Self::Nothing => return Ok(identity),
            Self::Bootstrap(members) => {
                identity.founders = founding::found(&identity, &members, network).await?;
                identity.stage = Stage::Founded;
            }
            Self::Join(peers) => {
                founding::join(settings.node, &peers, network).await?;
                identity.stage = Stage::Joining;
            }
        }
        file.write(&identity)?;
        Ok(identity)
    }
}

/// The parts of a node that takes part.
struct Opened<M: Machine> {
    library: Library<M>,
    replica: Replica<M>,
    wal: Wal,
    failure: Failure,
}

async fn enter<M: Machine>(
    settings: &RaftSettings,
    config: Arc<openraft::Config>,
    network: Network,
    machine: M,
    identity: &Identity,
) -> Result<Opened<M>, OpenError> {
    let failure = Failure::default();
    let (wal, replica) = open_storage(settings, machine, identity, &failure).await?;
    let started =
        Library::<M>::new(settings.node, config, network, wal.clone(), replica.clone()).await;
    match started {
        Ok(library) => Ok(Opened { library, replica, wal, failure }),
        Err(fatal) => {
            let reason = failure.get().map_or_else(|| fatal.to_string(), str::to_owned);
            Err(OpenError::Raft { reason })
        }
    }
}

/// Opens log and snapshots away from the runtime's threads: a large log takes seconds.
async fn open_storage<M: Machine>(
    settings: &RaftSettings,
    machine: M,
    identity: &Identity,
    failure: &Failure,
) -> Result<(Wal, Replica<M>), OpenError> {
    let (folder, failure) = (settings.folder.clone(), failure.clone());
    let chunk_bytes = settings.tuning.wal_chunk_bytes;
    let opened = off_thread(move || {
        let snapshots = SnapshotStore::open(&folder.join(SNAPSHOT_FOLDER))?;
        let replica = Replica::open(machine, snapshots, failure.clone())?;
        let wal = Wal::open(&folder.join(LOG_FOLDER), chunk_bytes, failure)?;
        Ok((wal, replica))
    });
    let storage = |source| OpenError::Storage { folder: settings.folder.clone(), source };
    let (wal, replica) = opened.await.and_then(|done| done).map_err(storage)?;
    if identity.stage == Stage::Established && wal.is_fresh().map_err(storage)? {
        return Err(StartRefused::LogLost { node: settings.node }.into());
    }
    Ok((wal, replica))
}

/// The listener for other nodes. Ends when dropped.
pub(crate) struct Listening {
    closing: watch::Sender<bool>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Listening {
    fn start<M, I, S>(incoming: I, service: Service<M>, tuning: RaftTuning) -> Self
    where
        M: Machine,
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static,
    {
        let (closing, mut closed) = watch::channel(false);
        let server = Server::builder()
            .http2_keepalive_interval(Some(tuning.keepalive))
            .http2_keepalive_timeout(Some(tuning.keepalive))
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .add_service(service.into_server());
        let task = tokio::spawn(async move {
            // A sender that is gone means the same as its word.
            let end = async move { drop(closed.wait_for(|closing| *closing).await) };
            if let Err(error) = server.serve_with_incoming_shutdown(incoming, end).await {
                tracing::error!(%error, "the listener for other nodes ended");
            }
        });
        Self { closing, task: Mutex::new(Some(task)) }
    }

    /// Takes no more calls.
    pub(crate) fn close(&self) {
        self.closing.send_replace(true);
    }

    /// Takes no more calls, and waits a little for those under way.
    pub(crate) async fn stop(&self) {
        self.close();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut task) = task
            && timeout(FAREWELL, &mut task).await.is_err()
        {
            task.abort();
        }
    }
}
