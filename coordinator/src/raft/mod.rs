//! Consensus: replicates opaque bytes for a [`Machine`], in the order of one log.
//!
//! [`RaftNode`] hides the raft library and its storage. What it adds to them: an empty folder never votes,
//! storage errors stop the node, proposals and reads say whether anything happened, and leadership is told apart
//! by term.
//!
//! ```text
//! <folder>/identity.toml       whose folder it is
//! <folder>/log/*.wal           log, vote, entry-committed index
//! <folder>/snapshots/*.snapshot
//! ```

mod background;
mod effects;
mod failure;
mod founding;
mod identity;
mod log;
mod machine;
mod membership;
mod network;
mod open;
mod service;
mod settings;
#[cfg(test)]
mod sim;
mod snapshot;
mod stored;
#[cfg(test)]
mod tests;
mod types;
mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{
    ClientWriteError, ForwardReason, ForwardToLeader, LinearizableReadError, RaftError,
};
use openraft::impls::ProgressResponder;
use openraft::raft::ClientWriteResponse;
use openraft::{Instant as _, ReadPolicy};
use tenure_model::{Index, Term};
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub use founding::StartRefused;
pub use identity::IdentityError;
pub use machine::{Capture, EntryContext, Fatal, Machine};
pub use membership::ChangeError;
#[doc(hidden)]
pub use network::Dial;
pub use open::OpenError;
pub use settings::{RaftSettings, RaftSettingsError, RaftTuning, Start};
pub use types::{NodeAddresses, NodeId};

use background::Background;
use failure::Failure;
use log::Wal;
use machine::Replica;
use network::Network;
use open::Listening;
use service::{Library, Service};
use types::{CommittedLeader, Metrics, Payload, TypeConfig};

pub(crate) const LOG_FOLDER: &str = "log";
pub(crate) const SNAPSHOT_FOLDER: &str = "snapshots";

/// Largest payload of one entry, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Who leads, as far as this node knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    /// Newest term that this node has heard of.
    pub term: Term,
    /// The raft leader of that term, once known.
    pub leader: Option<NodeId>,
    /// Where members reach that leader.
    pub leader_client_address: Option<String>,
    /// Whether this node leads `term` and has applied the first entry of that term.
    ///
    /// A raft leader that is cut off stays so until it hears of a higher term: ask [`RaftNode::linearize`] before
    /// acting on it. The term may rise while this stays true; key what a leader keeps by the term.
    pub is_me: bool,
}

/// Why the node stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// [`RaftNode::shutdown`] was called, or the node was dropped.
    Shutdown,
    /// The disk or the state machine failed. The process should exit with an error.
    Failed(String),
}

/// Why a proposal has no reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// This node does not lead, or not in the term asked for. Nothing happened; ask the raft leader.
    #[error("this node is not the raft leader of that term; the leader is {leader:?}")]
    NotLeader {
        /// Where members reach the raft leader, if known. This node's own address if only the term is another.
        leader: Option<String>,
    },
    /// Nobody leads at the moment, or the leader has no quorum. Nothing happened; retry.
    #[error("there is no raft leader with a quorum now")]
    NoLeader,
    /// Too many proposals are under way. Nothing happened; retry later.
    #[error("too many proposals are under way")]
    Overloaded,
    /// The payload is too large. Nothing happened; retrying cannot help.
    #[error("the payload has {size_bytes} bytes, at most {PAYLOAD_BYTES_MAX} are allowed")]
    TooLarge {
        /// Its size.
        size_bytes: usize,
    },
    /// It may have happened or may still happen.
    #[error("the outcome of the proposal is unknown")]
    Unknown,
    /// The node has stopped. Nothing happened.
    #[error("this node has stopped")]
    Stopped,
}

/// Why a linearizable read is not possible on this node now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinearizeError {
    /// This node does not lead.
    #[error("this node is not the raft leader; the leader is {leader:?}")]
    NotLeader {
        /// Where members reach the raft leader.
        leader: Option<String>,
    },
    /// Nobody leads at the moment.
    #[error("there is no raft leader now")]
    NoLeader,
    /// No quorum confirmed this node's leadership in time.
    #[error("no quorum confirmed the leadership in time")]
    TimedOut,
    /// The node has stopped.
    #[error("this node has stopped")]
    Stopped,
}

/// Why leadership was not handed over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// This node does not lead.
    #[error("this node is not the raft leader")]
    NotLeader,
    /// There is no other voter of that id.
    #[error("there is no other voter to take over")]
    NoTarget,
    /// A change of the cluster was under way for too long. Nobody was asked.
    #[error("a change of the cluster is under way")]
    Busy,
    /// This node still leads.
    #[error("the other node did not take over in time")]
    TimedOut,
    /// The node has stopped.
    #[error("this node has stopped")]
    Stopped,
}

/// One node of the cluster, as the newest membership has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeStatus {
    /// Its id.
    pub node: NodeId,
    /// Where it can be reached.
    pub addresses: NodeAddresses,
    /// Whether it votes; a learner only receives entries.
    pub is_voter: bool,
    /// Last entry that the raft leader knows it has; only on the leader.
    pub matched: Option<Index>,
    /// How long ago it last answered; only on the leader, and not of itself.
    pub acked_ago: Option<Duration>,
}

/// Numbers of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RaftStatus {
    /// This node.
    pub node: NodeId,
    /// Newest term heard of.
    pub term: Term,
    /// The raft leader, if known.
    pub leader: Option<NodeId>,
    /// Last entry in the log.
    pub last_log: Option<Index>,
    /// Last entry known to be committed.
    pub committed: Option<Index>,
    /// Last entry applied here.
    pub applied: Option<Index>,
    /// Last entry in the newest snapshot.
    pub snapshot: Option<Index>,
    /// Last entry removed from the log.
    pub purged: Option<Index>,
    /// Size of the log on disk, in bytes.
    pub wal_bytes: u64,
    /// How long ago a quorum last answered; only on the leader, and zero when it is the only voter.
    pub quorum_acked_ago: Option<Duration>,
    /// Whether a change of voters is half way.
    pub is_changing: bool,
    /// All nodes.
    pub nodes: Vec<NodeStatus>,
}

/// Handle of this node's part in the cluster. Clones share it; the last one that is dropped stops the node.
pub struct RaftNode<M: Machine>(Arc<Inner<M>>);

impl<M: Machine> Clone for RaftNode<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Inner<M: Machine> {
    settings: RaftSettings,
    library: Library<M>,
    replica: Replica<M>,
    wal: Wal,
    network: Network,
    failure: Failure,
    service: Service<M>,
    proposals: Semaphore,
    /// One change of the membership at a time.
    changing: Mutex<()>,
    leadership: watch::Receiver<Leadership>,
    stopped: Arc<watch::Sender<Option<StopReason>>>,
    background: Background,
    listening: Listening,
}

impl<M: Machine> RaftNode<M> {
    /// Proposes one entry and waits until it is applied here; gives its index and what the machine answered.
    ///
    /// With `only_in`, it is proposed only if this node leads in exactly that term.
    /// Dropping the future leaves the outcome unknown.
    ///
    /// # Errors
    ///
    /// [`ProposeError`]; after all but [`ProposeError::Unknown`] nothing happened.
    pub async fn propose(
        &self,
        payload: Bytes,
        only_in: Option<Term>,
    ) -> Result<(Index, M::Reply), ProposeError> {
        let inner = &*self.0;
        if payload.len() > PAYLOAD_BYTES_MAX {
            return Err(ProposeError::TooLarge { size_bytes: payload.len() });
        }
        if inner.stopped.borrow().is_some() {
            return Err(ProposeError::Stopped);
        }
        let Ok(_permit) = inner.proposals.try_acquire() else {
            return Err(ProposeError::Overloaded);
        };
        let tuning = &inner.settings.tuning;
        let deadline = Instant::now() + tuning.propose_timeout;
        let retry_until = deadline.min(Instant::now() + tuning.election_timeout_max);
        loop {
            let attempt = self.propose_once(payload.clone(), only_in);
            let written =
                timeout_at(deadline, attempt).await.map_err(|_elapsed| ProposeError::Unknown)?;
            let refused = match written {
                Ok(response) => {
                    let reply =
                        response.data.get().expect("every payload is answered by this machine");
                    return Ok((Index(response.log_id.index), reply));
                }
                Err(Some(refused)) => refused,
                Err(None) => return Err(ProposeError::Unknown),
            };
            if !self.is_transient(&refused, only_in) || Instant::now() >= retry_until {
                return Err(match self.forward(&refused) {
                    Forward::Nobody => ProposeError::NoLeader,
                    Forward::To(leader) => ProposeError::NotLeader { leader },
                });
            }
            sleep(tuning.heartbeat_interval / 4).await;
        }
    }

    /// Gives the refusal if the entry was not even appended, and nothing when the outcome is unknown.
    async fn propose_once(
        &self,
        payload: Bytes,
        only_in: Option<Term>,
    ) -> Result<ClientWriteResponse<TypeConfig>, Option<ForwardToLeader<TypeConfig>>> {
        let (responder, answer) = ProgressResponder::complete_only();
        let request = self.0.library.write(Payload(payload)).responder(responder);
        let request = match only_in {
            Some(Term(term)) => request.with_leader(CommittedLeader::new(term)),
            None => request,
        };
        request.await.map_err(|_fatal| None)?;
        match answer.await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(ClientWriteError::ForwardToLeader(refused))) => Err(Some(refused)),
            Ok(Err(
                ClientWriteError::LogEntryDiscarded(_)
                | ClientWriteError::ChangeMembershipError(_)
                | ClientWriteError::PreconditionFailed(_),
            ))
            | Err(_) => Err(None),
        }
    }

    /// Whether this node leads and merely waits for its first quorum.
    fn is_transient(&self, refused: &ForwardToLeader<TypeConfig>, only_in: Option<Term>) -> bool {
        match refused.reason {
            ForwardReason::LeaseExpired => true,
            ForwardReason::NotLeader => {
                only_in.is_none() && refused.leader_id == Some(self.0.settings.node)
            }
            ForwardReason::LeadershipTransfer => false,
        }
    }

    /// Where a refusal points to. A successor counts only if a quorum was there when it was named: a raft leader that
    /// gives up without one names somebody who may be dead as well.
    fn forward(&self, refused: &ForwardToLeader<TypeConfig>) -> Forward {
        let is_named_alone = match refused.reason {
            ForwardReason::LeadershipTransfer => {
                let acked = self.0.library.metrics().borrow_watched().last_quorum_acked;
                let patience = self.0.settings.tuning.election_timeout_max;
                acked.is_none_or(|at| at.elapsed() > patience)
            }
            ForwardReason::LeaseExpired | ForwardReason::NotLeader => false,
        };
        if refused.leader_id.is_none() || is_named_alone {
            return Forward::Nobody;
        }
        Forward::To(refused.leader_node.as_ref().map(|node| node.client_address.clone()))
    }

    /// Confirms with a quorum that this node leads, and waits until everything committed by now is applied here.
    ///
    /// # Errors
    ///
    /// [`LinearizeError`]; nothing may then be told from the state.
    pub async fn linearize(&self, limit: Duration) -> Result<Index, LinearizeError> {
        let deadline = Instant::now() + limit;
        if self.0.stopped.borrow().is_some() {
            return Err(LinearizeError::Stopped);
        }
        loop {
            let confirmed =
                timeout_at(deadline, self.0.library.ensure_linearizable(ReadPolicy::ReadIndex))
                    .await;
            let error = match confirmed {
                Err(_elapsed) => return Err(LinearizeError::TimedOut),
                Ok(Ok(read)) => return Ok(Index(read.log_id().index)),
                Ok(Err(RaftError::Fatal(_))) => return Err(LinearizeError::Stopped),
                Ok(Err(RaftError::APIError(error))) => error,
            };
            match error {
                LinearizableReadError::QuorumNotEnough(_) => {}
                LinearizableReadError::ForwardToLeader(refused)
                    if self.is_transient(&refused, None) => {}
                LinearizableReadError::ForwardToLeader(refused) => {
                    return Err(match self.forward(&refused) {
                        Forward::Nobody => LinearizeError::NoLeader,
                        Forward::To(leader) => LinearizeError::NotLeader { leader },
                    });
                }
            }
            let pause = Instant::now() + self.0.settings.tuning.heartbeat_interval / 4;
            tokio::time::sleep_until(pause.min(deadline)).await;
            if Instant::now() >= deadline {
                return Err(LinearizeError::TimedOut);
            }
        }
    }

    /// Reads the machine as of the last applied entry. Entries wait meanwhile: be short, and never block.
    pub fn with_machine<T>(&self, action: impl FnOnce(&M) -> T) -> T {
        self.0.replica.read(action)
    }

    /// Asks the machine of a node, this one or another; nothing when it does not answer in time.
    pub async fn ask(&self, node: NodeId, question: Bytes, limit: Duration) -> Option<Bytes> {
        if node == self.0.settings.node {
            return Some(self.with_machine(|machine| machine.answer(&question)).into());
        }
        let known = self.status().nodes.into_iter().find(|known| known.node == node)?;
        let asked = self.0.network.ask(node, &known.addresses.raft_address, question);
        match timeout(limit, asked).await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(status)) => {
                tracing::debug!(peer = %node, reason = status.message(), "a node does not answer");
                None
            }
            Err(_elapsed) => None,
        }
    }

    /// Index of the last applied entry.
    #[must_use]
    pub fn applied(&self) -> watch::Receiver<Index> {
        self.0.replica.applied()
    }

    /// Who leads.
    #[must_use]
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.0.leadership.clone()
    }

    /// Waits until the node has stopped.
    pub async fn stopped(&self) -> StopReason {
        let mut stopped = self.0.stopped.subscribe();
        let found = stopped.wait_for(Option::is_some).await;
        found.ok().and_then(|reason| reason.clone()).unwrap_or(StopReason::Shutdown)
    }

    /// Numbers of this node now.
    #[must_use]
    pub fn status(&self) -> RaftStatus {
        let metrics: Metrics = self.0.library.metrics().borrow_watched().clone();
        let is_changing = membership::is_joint(&metrics);
        let matched = metrics.replication.unwrap_or_default();
        let acked = metrics.heartbeat.unwrap_or_default();
        let membership = metrics.membership_config.membership();
        let voters: std::collections::BTreeSet<NodeId> = membership.voter_ids().collect();
        let is_alone = voters.iter().eq([&metrics.id]);
        let nodes = membership.nodes().map(|(node, addresses)| NodeStatus {
            node: *node,
            addresses: addresses.clone(),
            is_voter: voters.contains(node),
            matched: matched.get(node).copied().flatten().map(|id| Index(id.index)),
            acked_ago: acked
                .get(node)
                .copied()
                .flatten()
                .filter(|_| *node != metrics.id)
                .map(|at| at.elapsed()),
        });
        RaftStatus {
            node: metrics.id,
            term: Term(metrics.current_term),
            leader: metrics.current_leader,
            last_log: metrics.last_log_index.map(Index),
            committed: metrics.local_committed.map(|id| Index(id.index)),
            applied: metrics.last_applied.map(|id| Index(id.index)),
            snapshot: metrics.snapshot.map(|id| Index(id.index)),
            purged: metrics.purged.map(|id| Index(id.index)),
            wal_bytes: self.0.wal.size_bytes().unwrap_or(0),
            quorum_acked_ago: metrics
                .last_quorum_acked
                .map(|at| if is_alone { Duration::ZERO } else { at.elapsed() }),
            is_changing,
            nodes: nodes.collect(),
        }
    }

    /// Writes a snapshot in the background, and removes entries that it makes superfluous.
    ///
    /// Happens by itself when the log has grown to `snapshot_wal_bytes`.
    pub async fn write_snapshot(&self) {
        // Fails only when the node has stopped; whoever cares is told by `stopped`.
        drop(self.0.library.trigger().snapshot().await);
    }

    /// Hands leadership to another voter, to the most advanced one if none is named. Gives who leads then.
    ///
    /// Waits for a change of the cluster that is under way, and for the next raft leader: for both together up to `limit`.
    ///
    /// # Errors
    ///
    /// [`TransferError`].
    pub async fn transfer_leadership(
        &self,
        to: Option<NodeId>,
        limit: Duration,
    ) -> Result<NodeId, TransferError> {
        let deadline = Instant::now() + limit;
        // A change of the membership could take away the target's vote meanwhile. A raft leader that is left with the
        // only vote would wait for the target for ever.
        let turn = timeout_at(deadline, self.0.changing.lock()).await;
        let turn = turn.map_err(|_elapsed| TransferError::Busy)?;
        let asked = self.ask_to_lead(to).await?;
        drop(turn);
        self.led_by_another(asked, deadline).await
    }

    /// As [`RaftNode::transfer_leadership`], for the change whose turn it is.
    async fn transfer_within_change(&self, limit: Duration) -> Result<NodeId, TransferError> {
        let asked = self.ask_to_lead(None).await?;
        self.led_by_another(asked, Instant::now() + limit).await
    }

    /// Asks a voter to take over; nobody where this node is to lead.
    async fn ask_to_lead(&self, to: Option<NodeId>) -> Result<Option<NodeId>, TransferError> {
        let status = self.status();
        let me = status.node;
        if status.leader != Some(me) {
            return Err(TransferError::NotLeader);
        }
        if to == Some(me) {
            return Ok(None);
        }
        let voters = status.nodes.into_iter().filter(|other| other.is_voter && other.node != me);
        let candidates = voters.filter(|other| to.is_none_or(|to| to == other.node));
        let target =
            candidates.max_by_key(|other| other.matched).ok_or(TransferError::NoTarget)?.node;
        let asked = self.0.library.trigger().transfer_leader(target).await;
        asked.map_err(|_fatal| TransferError::Stopped)?;
        Ok(Some(target))
    }

    /// Waits until `asked` leads, or yet another node; gives this one where nobody was asked.
    async fn led_by_another(
        &self,
        asked: Option<NodeId>,
        deadline: Instant,
    ) -> Result<NodeId, TransferError> {
        let me = self.0.settings.node;
        let Some(asked) = asked else { return Ok(me) };
        let mut leadership = self.leadership();
        let moved = leadership.wait_for(|now| now.leader.is_some_and(|leader| leader != me));
        match timeout_at(deadline, moved).await {
            Err(_elapsed) => Err(TransferError::TimedOut),
            Ok(Err(_closed)) => Err(TransferError::Stopped),
            Ok(Ok(now)) => Ok(now.leader.unwrap_or(asked)),
        }
    }

    /// Stops taking part and gives the folder free.
    pub async fn shutdown(&self) {
        let inner = &*self.0;
        inner.end(StopReason::Shutdown);
        if let Err(error) = inner.library.shutdown().await {
            tracing::error!(%error, "the raft task ended badly");
        }
        inner.listening.stop().await;
        inner.background.stop();
        inner.wal.close();
    }
}

impl<M: Machine> Inner<M> {
    /// Tells everybody and lets go of the raft library.
    fn end(&self, reason: StopReason) {
        self.stopped.send_if_modified(|stopped| {
            let first = stopped.is_none();
            if first {
                *stopped = Some(reason);
            }
            first
        });
        self.listening.close();
        self.service.serve(None);
    }
}

impl<M: Machine> Drop for Inner<M> {
    fn drop(&mut self) {
        self.end(StopReason::Shutdown);
        self.background.stop();
    }
}

/// Where a refused caller should go.
enum Forward {
    Nobody,
    To(Option<String>),
}

/// The founders as the raft library wants them.
type Members = BTreeMap<NodeId, NodeAddresses>;
