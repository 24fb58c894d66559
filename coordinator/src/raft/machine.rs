//! The replicated state machine: the seam to the caller's [`Machine`], and its adapter to the raft library.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use openraft::entry::RaftEntry as _;
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use tenure_model::{Index, Term};
use tokio::sync::watch;
use tokio::time::Instant;

use super::effects::blocking;
use super::failure::Failure;
use super::snapshot::SnapshotStore;
use super::types::{Answer, Entry, LogId, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};

/// Where an entry stands in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryContext {
    /// Term of the raft leader that proposed it.
    pub term: Term,
    /// Its index.
    pub index: Index,
}

/// Why a machine cannot go on, for example a command of a later version. The node stops.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Fatal(pub String);

/// A captured state that encodes itself when called.
pub type Capture = Box<dyn FnOnce() -> Vec<u8> + Send>;

/// A deterministic state machine whose commands are bytes.
pub trait Machine: Send + Sync + 'static {
    /// What applying one entry answers. Never stored or sent.
    type Reply: Clone + std::fmt::Debug + Send + Sync + 'static;

    /// Applies one committed entry.
    ///
    /// # Errors
    ///
    /// [`Fatal`] stops the node; a refused command is a reply.
    fn apply(&mut self, at: EntryContext, payload: &Bytes) -> Result<Self::Reply, Fatal>;

    /// Captures the state, cheaply. The returned function encodes it, away from where entries are applied.
    fn snapshot(&self) -> Capture;

    /// Replaces the state by what a snapshot holds.
    ///
    /// # Errors
    ///
    /// [`Fatal`] stops the node.
    fn restore(&mut self, bytes: &[u8]) -> Result<(), Fatal>;

    /// Answers what another node asks of this one, beside the log. Entries wait meanwhile: be short.
    fn answer(&self, question: &[u8]) -> Vec<u8> {
        let _nothing_to_say_to = question;
        Vec::new()
    }
}

/// The machine with what the raft library must know of it. Clones share it.
pub(crate) struct Replica<M> {
    state: Arc<RwLock<Applied<M>>>,
    index: Arc<watch::Sender<Index>>,
    snapshots: SnapshotStore,
    failure: Failure,
}

struct Applied<M> {
    machine: M,
    last: Option<LogId>,
    membership: StoredMembership,
}

impl<M> Clone for Replica<M> {
    fn clone(&self) -> Self {
        Self {
            state: self.state.clone(),
            index: self.index.clone(),
            snapshots: self.snapshots.clone(),
            failure: self.failure.clone(),
        }
    }
}

impl<M: Machine> Replica<M> {
    /// Starts from the newest snapshot in the folder.
    ///
    /// # Errors
    ///
    /// With the file's name when the snapshot is damaged or the machine refuses it.
    pub(crate) fn open(machine: M, snapshots: SnapshotStore, failure: Failure) -> io::Result<Self> {
        let applied = Applied { machine, last: None, membership: StoredMembership::default() };
        let state = Arc::new(RwLock::new(applied));
        let replica = Self { state, index: Arc::new(watch::Sender::default()), snapshots, failure };
        if let Some(snapshot) = replica.snapshots.newest()? {
            replica.restore(&snapshot.meta, &snapshot.snapshot)?;
        }
        Ok(replica)
    }

    /// Reads the machine as of the last applied entry. Entries wait meanwhile: be short.
    pub(crate) fn read<T>(&self, action: impl FnOnce(&M) -> T) -> T {
        action(&self.state.read().unwrap_or_else(PoisonError::into_inner).machine)
    }

    /// Index of the last applied entry.
    pub(crate) fn applied(&self) -> watch::Receiver<Index> {
        self.index.subscribe()
    }

    fn restore(&self, meta: &SnapshotMeta, body: &[u8]) -> io::Result<()> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let restored = guard(|| state.machine.restore(body));
        self.failure.check("restore snapshot", restored)?;
        state.last = meta.last_log_id;
        state.membership = meta.last_membership.clone();
        drop(state);
        self.publish(meta.last_log_id);
        Ok(())
    }

    fn apply_one(&self, entry: &Entry) -> io::Result<Answer> {
        let id = entry.log_id();
        let at = EntryContext { term: Term(id.leader_id.term), index: Index(id.index) };
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let answer = match &entry.payload {
            EntryPayload::Blank => Answer::default(),
            EntryPayload::Normal(payload) => {
                Answer::new(guard(|| state.machine.apply(at, &payload.0))?)
            }
            EntryPayload::Membership(membership) => {
                state.membership = StoredMembership::new(Some(id), membership.clone());
                Answer::default()
            }
        };
        state.last = Some(id);
        Ok(answer)
    }

    fn publish(&self, last: Option<LogId>) {
        if let Some(id) = last {
            self.index.send_replace(Index(id.index));
        }
    }
}

/// Runs a machine's code; a panic in it is a failure of this node, not a hung one.
fn guard<T>(action: impl FnOnce() -> Result<T, Fatal>) -> io::Result<T> {
    match catch_unwind(AssertUnwindSafe(action)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(fatal)) => Err(io::Error::other(fatal)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text =
                text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(io::Error::other(format!("the state machine panicked: {text}")))
        }
    }
}

impl<M: Machine> RaftStateMachine<TypeConfig> for Replica<M> {
    type SnapshotData = Bytes;
    type SnapshotBuilder = SnapshotBuilder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        Ok((state.last, state.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<TypeConfig>>> + Unpin + OptionalSend,
    {
        while let Some(next) = entries.next().await {
            let (entry, responder) = next?;
            let applied = self.apply_one(&entry);
            let answer = self.failure.check("apply entry", applied)?;
            self.publish(Some(entry.log_id()));
            if let Some(responder) = responder {
                responder.send(answer);
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let meta =
            SnapshotMeta { last_log_id: state.last, last_membership: state.membership.clone() };
        SnapshotBuilder {
            captured: Mutex::new(Some(state.machine.snapshot())),
            meta,
            snapshots: self.snapshots.clone(),
            failure: self.failure.clone(),
        }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: Bytes) -> io::Result<()> {
        let (store, description, body) = (self.snapshots.clone(), meta.clone(), snapshot.clone());
        let written = blocking(move || store.write(&description, &body)).await;
        self.failure.check("write snapshot", written)?;
        self.restore(meta, &snapshot)
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        let store = self.snapshots.clone();
        let read = blocking(move || store.newest()).await;
        self.failure.check("read snapshot", read)
    }
}

/// Writes one snapshot from a captured state.
pub(crate) struct SnapshotBuilder {
    /// A mutex only because the raft library wants builders to be `Sync`; nobody contends for it.
    captured: Mutex<Option<Capture>>,
    meta: SnapshotMeta,
    snapshots: SnapshotStore,
    failure: Failure,
}

impl RaftSnapshotBuilder<TypeConfig> for SnapshotBuilder {
    type SnapshotData = Bytes;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let captured = self
            .captured
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .ok_or_else(|| io::Error::other("a snapshot is built once"))?;
        let (store, meta) = (self.snapshots.clone(), self.meta.clone());
        let started = Instant::now();
        let built = blocking(move || {
            let body = captured();
            store.write(&meta, &body)?;
            Ok(Bytes::from(body))
        });
        let snapshot = self.failure.check("write snapshot", built.await)?;
        tracing::info!(
            index = self.meta.last_log_id.map(|id| id.index),
            size_bytes = snapshot.len(),
            took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
            "snapshot written"
        );
        Ok(Snapshot { meta: self.meta.clone(), snapshot })
    }
}
