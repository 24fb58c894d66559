//! How a node with an empty folder may start.
//!
//! A voter that lost its folder would vote with an empty log and could undo what it acknowledged. So an empty
//! folder never starts by itself:
//!
//! - **Bootstrap.** Each founder draws an incarnation for its folder, writes it down and asks all other founders
//!   who they are, until each of them has answered. Only then is the cluster founded: the node writes down the
//!   incarnation of every founder and initialises its log with the list of members.
//!   A founder that finds the others founded goes on only if they wrote down *its* incarnation. A folder that was
//!   wiped has another one and is refused, also with bootstrap still in its settings.
//! - **Join.** The node asks some nodes of the cluster and is refused if one of them knows its id as a voter.
//!
//! What is left: a founder wiped in the same moment in which the cluster is founded, while one founder had asked it
//! before and another asks it after, and only the latter can be reached when it asks back. It is then taken for
//! new, with at most the first entries of the cluster lost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::identity::{Identity, Stage};
use super::network::Network;
use super::types::{NodeAddresses, NodeId};
use super::wire::Introduction;

/// Pause between two rounds of questions.
const PAUSE: Duration = Duration::from_millis(100);
/// How often the log says whom the node waits for.
const REMINDER: Duration = Duration::from_secs(5);

/// Why a node with an empty folder does not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartRefused {
    /// The settings do not say what to do with an empty folder.
    #[error(
        "node {node} has an empty folder: bootstrap a new cluster with it, or remove it as voter, rejoin under a new id"
    )]
    EmptyFolder {
        /// This node.
        node: NodeId,
    },
    /// The cluster exists already, and this folder was not there when it was founded.
    #[error(
        "node {node} has an empty folder but node {peer} is in a cluster already: remove it as voter, rejoin under a new id"
    )]
    ClusterExists {
        /// This node.
        node: NodeId,
        /// The node that knows better.
        peer: NodeId,
    },
    /// The cluster knows this id as a voter.
    #[error(
        "node {node} has an empty folder but node {peer} knows it as a voter: remove it as voter, rejoin under a new id"
    )]
    KnownVoter {
        /// This node.
        node: NodeId,
        /// The node that knows better.
        peer: NodeId,
    },
    /// Another founder was told another list of members.
    #[error("node {peer} is to be bootstrapped with other members: give all of them the same list")]
    OtherMembers {
        /// The node with the other list.
        peer: NodeId,
    },
    /// Another node refuses to talk to this one.
    #[error("node {peer} refuses this node: {reason}")]
    PeerRefuses {
        /// The node that refuses.
        peer: NodeId,
        /// In its words.
        reason: String,
    },
    /// The folder had a log, and it is gone.
    #[error(
        "node {node} had a log and has none now: restore its folder, or remove it as voter, rejoin under a new id"
    )]
    LogLost {
        /// This node.
        node: NodeId,
    },
}

type Answers = BTreeMap<NodeId, Result<Introduction, Status>>;

/// Waits for all founders; gives the incarnation of each of them.
pub(crate) async fn found(
    identity: &Identity,
    members: &BTreeMap<NodeId, NodeAddresses>,
    network: &Network,
) -> Result<BTreeMap<String, String>, StartRefused> {
    let mut reminder = Reminder::new();
    loop {
        let answers = ask(identity.node, members, network).await;
        if let Some(founders) = meet(identity, members, &answers)? {
            return Ok(founders);
        }
        reminder.waiting(&answers);
        tokio::time::sleep(PAUSE).await;
    }
}

/// Waits for one node of the cluster, and for the word of all that answer.
pub(crate) async fn join(
    node: NodeId,
    peers: &BTreeMap<NodeId, NodeAddresses>,
    network: &Network,
) -> Result<(), StartRefused> {
    let mut reminder = Reminder::new();
    loop {
        let answers = ask(node, peers, network).await;
        let mut in_cluster = false;
        for (peer, answer) in &answers {
            let Some(introduction) = heard(*peer, answer)? else { continue };
            if introduction.voters.contains(&node) {
                return Err(StartRefused::KnownVoter { node, peer: *peer });
            }
            in_cluster |= !introduction.voters.is_empty();
        }
        if in_cluster {
            return Ok(());
        }
        reminder.waiting(&answers);
        tokio::time::sleep(PAUSE).await;
    }
}

async fn ask(me: NodeId, nodes: &BTreeMap<NodeId, NodeAddresses>, network: &Network) -> Answers {
    let others = nodes.iter().filter(|(id, _)| **id != me);
    let questions =
        others.map(|(id, node)| async { (*id, network.identify(*id, &node.raft_address).await) });
    join_all(questions).await.into_iter().collect()
}

/// Decides on one round of answers: founded, refused, or not yet.
fn meet(
    identity: &Identity,
    members: &BTreeMap<NodeId, NodeAddresses>,
    answers: &Answers,
) -> Result<Option<BTreeMap<String, String>>, StartRefused> {
    let node = identity.node;
    let mut founded = None;
    let mut incarnations = BTreeMap::from([(node.to_string(), identity.incarnation.clone())]);
    for (peer, answer) in answers {
        let Some(introduction) = heard(*peer, answer)? else { continue };
        match introduction.stage {
            Stage::Forming => {
                if introduction.members != *members {
                    return Err(StartRefused::OtherMembers { peer: *peer });
                }
                incarnations.insert(peer.to_string(), introduction.incarnation.clone());
            }
            Stage::Founded | Stage::Joining | Stage::Established => {
                if introduction.founders.get(&node.to_string()) != Some(&identity.incarnation) {
                    return Err(StartRefused::ClusterExists { node, peer: *peer });
                }
                founded = Some(introduction.founders.clone());
            }
        }
    }
    Ok(founded.or_else(|| (incarnations.len() == members.len()).then_some(incarnations)))
}

/// Nothing from a node that cannot be reached; an error from one that will never answer.
fn heard(
    peer: NodeId,
    answer: &Result<Introduction, Status>,
) -> Result<Option<&Introduction>, StartRefused> {
    match answer {
        Ok(introduction) => Ok(Some(introduction)),
        Err(status) if status.code() == Code::FailedPrecondition => {
            Err(StartRefused::PeerRefuses { peer, reason: status.message().to_owned() })
        }
        Err(_unreachable) => Ok(None),
    }
}

struct Reminder {
    next: Instant,
}

impl Reminder {
    fn new() -> Self {
        Self { next: Instant::now() + REMINDER }
    }

    fn waiting(&mut self, answers: &Answers) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + REMINDER;
        let missing: BTreeSet<NodeId> =
            answers.iter().filter(|(_, answer)| answer.is_err()).map(|(id, _)| *id).collect();
        tracing::info!(?missing, "waiting for the other nodes before this one may start");
    }
}
