//! Who is in the cluster: a node comes as a learner, becomes a voter, and leaves.
//!
//! One change at a time, and each may be repeated. Voters change through a joint membership, which takes two
//! entries; when the change is cut off between them, by the end of its caller or of the raft leader, whoever leads
//! then writes the second one (see [`finish`]). A voter that is removed becomes a learner first: so it hears, if it
//! can be reached, that it votes no more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Weak;
use std::time::Duration;

use openraft::ChangeMembers;
use openraft::Instant as _;
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use tenure_model::Index;
use tokio::sync::MutexGuard;
use tokio::time::{Instant, sleep, timeout_at};

use super::machine::Machine;
use super::service::Library;
use super::types::{Metrics, NodeAddresses, NodeId};
use super::{Forward, Inner, LinearizeError, RaftNode, TransferError};

type Changes = ChangeMembers<NodeId, NodeAddresses>;

/// Why the membership was not changed. Every change may be repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Another node leads, or leads by now; repeat it there.
    #[error("this node is not the raft leader; the leader is {leader:?}")]
    NotLeader {
        /// Where members reach the raft leader.
        leader: Option<String>,
    },
    /// Nobody leads at the moment, or the leader has no quorum. Nothing happened.
    #[error("there is no raft leader with a quorum now")]
    NoLeader,
    /// Another change was under way for too long. Nothing happened.
    #[error("another change of the cluster is under way")]
    Busy,
    /// There is no node of that id.
    #[error("node {node} is not in the cluster: add it as a learner first")]
    UnknownNode {
        /// What was given.
        node: NodeId,
    },
    /// Another node is found at that address.
    #[error("{address} is the address of node {node}")]
    AddressTaken {
        /// The other node.
        node: NodeId,
        /// What was given.
        address: String,
    },
    /// It is the only voter.
    #[error("node {node} is the only voter: promote another one first")]
    LastVoter {
        /// What was given.
        node: NodeId,
    },
    /// Too few of the voters that would remain answer: the cluster would stand still. Nothing happened.
    #[error("only {answering} of the {voters} voters after the change answer now, no majority")]
    NoQuorumAfter {
        /// How many answer.
        answering: usize,
        /// Of how many.
        voters: usize,
    },
    /// The learner has not caught up in time. Nothing happened.
    #[error("node {node} has the log up to {matched:?}, and needs it up to {wanted} first")]
    Behind {
        /// The learner.
        node: NodeId,
        /// How far it is.
        matched: Option<Index>,
        /// How far it must be.
        wanted: Index,
    },
    /// It may have happened or may still happen.
    #[error("the outcome of the change is unknown")]
    Unknown,
    /// The node has stopped.
    #[error("this node has stopped")]
    Stopped,
}

impl From<LinearizeError> for ChangeError {
    fn from(error: LinearizeError) -> Self {
        match error {
            LinearizeError::NotLeader { leader } => Self::NotLeader { leader },
            LinearizeError::NoLeader | LinearizeError::TimedOut => Self::NoLeader,
            LinearizeError::Stopped => Self::Stopped,
        }
    }
}

impl<M: Machine> RaftNode<M> {
    /// Adds a node that receives entries and does not vote; gives the index of the newest membership.
    ///
    /// Of a node that is known it takes the addresses, and leaves its vote as it is.
    ///
    /// # Errors
    ///
    /// [`ChangeError`].
    pub async fn add_learner(
        &self,
        node: NodeId,
        addresses: NodeAddresses,
        limit: Duration,
    ) -> Result<Index, ChangeError> {
        let change = self.begin_change(limit).await?;
        let now = change.members();
        let mut others = now.nodes.iter().filter(|(other, _)| **other != node);
        if let Some((other, _)) =
            others.find(|(_, known)| known.raft_address == addresses.raft_address)
        {
            let address = addresses.raft_address;
            return Err(ChangeError::AddressTaken { node: *other, address });
        }
        let entry = BTreeMap::from([(node, addresses.clone())]);
        let index = match now.nodes.get(&node) {
            Some(known) if *known == addresses => now.index,
            Some(_) => change.submit(Changes::SetNodes(entry)).await?,
            None => change.submit(Changes::AddNodes(entry)).await?,
        };
        self.0.network.found_at(node, &addresses.raft_address);
        Ok(index)
    }

    /// Makes a learner a voter, once it has every entry of this moment.
    ///
    /// # Errors
    ///
    /// [`ChangeError`].
    pub async fn promote(&self, node: NodeId, limit: Duration) -> Result<Index, ChangeError> {
        let change = self.begin_change(limit).await?;
        let mut now = change.members();
        if !now.nodes.contains_key(&node) {
            return Err(ChangeError::UnknownNode { node });
        }
        if now.voters.contains(&node) {
            return Ok(now.index);
        }
        let wanted = change.metrics().last_log_index.map_or(Index(0), Index);
        // What is left of the limit is for the two entries.
        if !change.caught_up(node, wanted, Instant::now() + limit / 2).await {
            let matched = matched(&change.metrics(), node);
            return Err(ChangeError::Behind { node, matched, wanted });
        }
        now.voters.insert(node);
        change.check_quorum(&now.voters)?;
        change.submit(Changes::AddVoterIds(BTreeSet::from([node]))).await
    }

    /// Removes a node; gives the index of the newest membership.
    ///
    /// Asked to remove itself, the raft leader hands over, and the next one has to be asked.
    ///
    /// # Errors
    ///
    /// [`ChangeError`].
    pub async fn remove(&self, node: NodeId, limit: Duration) -> Result<Index, ChangeError> {
        let change = self.begin_change(limit).await?;
        let mut now = change.members();
        if !now.nodes.contains_key(&node) {
            return Ok(now.index);
        }
        if now.voters.remove(&node) {
            if now.voters.is_empty() {
                return Err(ChangeError::LastVoter { node });
            }
            change.check_quorum(&now.voters)?;
            if node == self.0.settings.node {
                return Err(self.hand_over(limit).await);
            }
            let answers = change.answers_lately(node);
            let demoted = change.submit(Changes::RemoveVoters(BTreeSet::from([node]))).await?;
            if answers {
                let patience = self.0.settings.tuning.election_timeout_max;
                // A node that does not hear of it in time learns less, and is removed all the same.
                let _heard = change.caught_up(node, demoted, Instant::now() + patience).await;
            }
        }
        change.submit(Changes::RemoveNodes(BTreeSet::from([node]))).await
    }

    /// Hands leadership over while a change has its turn; tells where it has to be repeated.
    async fn hand_over(&self, limit: Duration) -> ChangeError {
        match self.transfer_within_change(limit).await {
            Ok(_) | Err(TransferError::NotLeader) => {
                let leader = self.leadership().borrow().leader_client_address.clone();
                ChangeError::NotLeader { leader }
            }
            Err(TransferError::NoTarget | TransferError::TimedOut) => ChangeError::NoLeader,
            Err(TransferError::Busy) => ChangeError::Busy,
            Err(TransferError::Stopped) => ChangeError::Stopped,
        }
    }

    /// Waits for this node's turn, for a quorum, and for the end of what was begun before.
    async fn begin_change(&self, limit: Duration) -> Result<Change<'_, M>, ChangeError> {
        let deadline = Instant::now() + limit;
        let turn = timeout_at(deadline, self.0.changing.lock());
        let turn = turn.await.map_err(|_elapsed| ChangeError::Busy)?;
        self.linearize(deadline.saturating_duration_since(Instant::now())).await?;
        let change = Change { node: self, deadline, _turn: turn };
        change.settle().await?;
        Ok(change)
    }
}

/// Completes what another raft leader, or a caller that went away, left half done.
pub(crate) async fn finish<M: Machine>(library: Library<M>, node: Weak<Inner<M>>) {
    let mut metrics = library.metrics();
    drop(library);
    loop {
        let is_mine = {
            let now = metrics.borrow_and_update();
            now.state.is_leader() && is_joint(&now)
        };
        if is_mine {
            let Some(inner) = node.upgrade() else { return };
            let node = RaftNode(inner);
            let tuning = node.0.settings.tuning;
            if let Err(error) = node.begin_change(tuning.propose_timeout).await {
                tracing::debug!(%error, "a change of the cluster is not completed yet");
            }
            drop(node);
            sleep(tuning.heartbeat_interval).await;
        } else if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// Whether a change of voters is half way.
pub(crate) fn is_joint(metrics: &Metrics) -> bool {
    metrics.membership_config.membership().get_joint_config().len() > 1
}

fn matched(metrics: &Metrics, node: NodeId) -> Option<Index> {
    let replication = metrics.replication.as_ref()?;
    replication.get(&node)?.as_ref().map(|id| Index(id.index))
}

/// The newest membership.
struct Members {
    index: Index,
    nodes: BTreeMap<NodeId, NodeAddresses>,
    voters: BTreeSet<NodeId>,
}

/// The turn of one change, at the raft leader.
struct Change<'a, M: Machine> {
    node: &'a RaftNode<M>,
    deadline: Instant,
    _turn: MutexGuard<'a, ()>,
}

impl<M: Machine> Change<'_, M> {
    fn metrics(&self) -> Metrics {
        self.node.0.library.metrics().borrow_watched().clone()
    }

    fn members(&self) -> Members {
        let metrics = self.metrics();
        let membership = metrics.membership_config.membership();
        Members {
            index: metrics.membership_config.log_id().map_or(Index(0), |id| Index(id.index)),
            nodes: membership.nodes().map(|(node, known)| (*node, known.clone())).collect(),
            voters: membership.voter_ids().collect(),
        }
    }

    /// Waits until the newest membership is committed and not joint.
    async fn settle(&self) -> Result<(), ChangeError> {
        let mut metrics = self.node.0.library.metrics();
        loop {
            let (is_committed, is_joint) = {
                let now = metrics.borrow_and_update();
                let newest = now.membership_config.log_id();
                (now.committed_membership_config.log_id() == newest, is_joint(&now))
            };
            if is_committed && !is_joint {
                return Ok(());
            }
            if is_committed {
                self.submit(Changes::AddVoterIds(BTreeSet::new())).await?;
                continue;
            }
            match timeout_at(self.deadline, metrics.changed()).await {
                Err(_elapsed) => return Err(ChangeError::Busy),
                Ok(Err(_closed)) => return Err(ChangeError::Stopped),
                Ok(Ok(())) => {}
            }
        }
    }

    /// Writes the entries of one change and waits until this node shows the new membership.
    async fn submit(&self, changes: Changes) -> Result<Index, ChangeError> {
        loop {
            // Nodes stay known until they are removed by name, so that a change that is completed by another raft
            // leader ends the same.
            let attempt = Box::pin(self.node.0.library.change_membership(changes.clone(), true));
            let changed = timeout_at(self.deadline, attempt).await;
            let refused = match changed.map_err(|_elapsed| ChangeError::Unknown)? {
                Ok(response) => {
                    let index = Index(response.log_id.index);
                    self.shown(index).await?;
                    return Ok(index);
                }
                Err(RaftError::Fatal(_)) => return Err(ChangeError::Stopped),
                Err(RaftError::APIError(refused)) => refused,
            };
            let lasting = match refused {
                ClientWriteError::ForwardToLeader(refused)
                    if self.node.is_transient(&refused, None) =>
                {
                    ChangeError::NoLeader
                }
                ClientWriteError::ForwardToLeader(refused) => {
                    return Err(match self.node.forward(&refused) {
                        Forward::Nobody => ChangeError::NoLeader,
                        Forward::To(leader) => ChangeError::NotLeader { leader },
                    });
                }
                ClientWriteError::ChangeMembershipError(
                    ChangeMembershipError::InProgress(_)
                    | ChangeMembershipError::UncommittedLeaderLog(_),
                ) => ChangeError::Busy,
                ClientWriteError::ChangeMembershipError(
                    ChangeMembershipError::EmptyMembership(_)
                    | ChangeMembershipError::LearnerNotFound(_)
                    | ChangeMembershipError::NodeMetadataChanged(_)
                    | ChangeMembershipError::UnsupportedMembershipTransition(_),
                )
                | ClientWriteError::LogEntryDiscarded(_)
                | ClientWriteError::PreconditionFailed(_) => return Err(ChangeError::Unknown),
            };
            let pause = self.node.0.settings.tuning.heartbeat_interval / 4;
            if Instant::now() + pause >= self.deadline {
                return Err(lasting);
            }
            sleep(pause).await;
        }
    }

    /// Waits until the numbers of this node have the membership of that index.
    async fn shown(&self, index: Index) -> Result<(), ChangeError> {
        let mut metrics = self.node.0.library.metrics();
        let seen = |now: &Metrics| {
            now.membership_config.log_id().is_some_and(|id| Index(id.index) >= index)
        };
        while !seen(&metrics.borrow_and_update()) {
            let next = timeout_at(self.deadline, metrics.changed()).await;
            next.map_err(|_elapsed| ChangeError::Unknown)?
                .map_err(|_closed| ChangeError::Unknown)?;
        }
        Ok(())
    }

    /// Waits until `node` has all entries up to `wanted`; false when it has not at `until`.
    async fn caught_up(&self, node: NodeId, wanted: Index, until: Instant) -> bool {
        let mut metrics = self.node.0.library.metrics();
        while matched(&metrics.borrow_and_update(), node) < Some(wanted) {
            match timeout_at(until.min(self.deadline), metrics.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return false,
            }
        }
        true
    }

    /// Refuses voters of which no majority answers: their first entry would never be committed, and no other.
    fn check_quorum(&self, voters: &BTreeSet<NodeId>) -> Result<(), ChangeError> {
        let answering = voters.iter().filter(|voter| self.answers_lately(**voter)).count();
        if answering * 2 > voters.len() {
            Ok(())
        } else {
            Err(ChangeError::NoQuorumAfter { answering, voters: voters.len() })
        }
    }

    fn answers_lately(&self, node: NodeId) -> bool {
        let metrics = self.metrics();
        let acked =
            metrics.heartbeat.as_ref().and_then(|acked| acked.get(&node).copied().flatten());
        let limit = self.node.0.settings.tuning.election_timeout_max;
        node == metrics.id || acked.is_some_and(|at| at.elapsed() < limit)
    }
}
