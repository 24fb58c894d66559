//! What the raft leader keeps true of all nodes: that they decide by the same rules, and that they have the same state.
//!
//! The task runs on every node and does nothing while another one leads. It asks the nodes what they support and what
//! digests they took; what follows from the answers is a command in the log.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use prost::Message as _;
use tenure_core::{Command, level};
use tenure_model::{FeatureLevel, Index, StateDigest};
use tenure_proto::raft as form;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::digests::Digests;
use crate::driver::proposer::Proposer;
use crate::machine::GroupMachine;
use crate::raft::{NodeId, RaftNode};

/// How long the answers about one mark are waited for; nodes that are slower are not compared this time.
const ANSWERS_WAIT: Duration = Duration::from_secs(30);

/// Longest pause between two rounds of questions.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// What one node says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// Highest feature level that it knows.
    pub(crate) supported: FeatureLevel,
    /// Version of its program.
    pub(crate) version: String,
    digest: Option<StateDigest>,
}

/// Answers of the last round, by node; empty while another node leads.
pub(crate) type Reports = BTreeMap<NodeId, Report>;

/// Answers the raft leader's question.
pub(crate) fn answer(digests: &Digests, question: &[u8]) -> Vec<u8> {
    // A question of a later version asks for more, never for something else.
    let asked = form::NodeQuestion::decode(question).unwrap_or_default();
    let digest = digests.at(Index(asked.digest_at)).map(|digest| digest.0);
    let version = env!("CARGO_PKG_VERSION").to_owned();
    form::NodeReport { feature_level: level::NEWEST.0, digest, version }.encode_to_vec()
}

fn read(answer: Bytes) -> Option<Report> {
    let form::NodeReport { feature_level, digest, version } =
        form::NodeReport::decode(answer).ok()?;
    let digest = digest.map(StateDigest);
    // Without a level it is not an answer.
    (feature_level > 0).then_some(Report {
        supported: FeatureLevel(feature_level),
        version,
        digest,
    })
}

/// The task; see the module.
pub(crate) struct Keeper {
    raft: RaftNode<GroupMachine>,
    proposer: Proposer,
    heartbeat_interval: Duration,
    digest_interval: Duration,
    reports: watch::Sender<Reports>,
}

/// A mark whose digests are being gathered.
struct Mark {
    index: Index,
    since: Instant,
}

impl Keeper {
    /// Makes the task; the receiver has what the nodes last said.
    pub(crate) fn new(
        raft: RaftNode<GroupMachine>,
        proposer: Proposer,
        heartbeat_interval: Duration,
        digest_interval: Duration,
    ) -> (Self, watch::Receiver<Reports>) {
        let (reports, said) = watch::channel(Reports::new());
        (Self { raft, proposer, heartbeat_interval, digest_interval, reports }, said)
    }

    /// Runs until `closing` is set.
    pub(crate) async fn run(self, mut closing: watch::Receiver<bool>) {
        tokio::select! {
            _ = closing.wait_for(|closing| *closing) => {}
            () = self.keep() => {}
        }
    }

    async fn keep(&self) {
        let mut leadership = self.raft.leadership();
        while let Ok(now) = leadership.wait_for(|now| now.is_me).await.map(|now| now.clone()) {
            self.lead(&leadership, now.term).await;
            self.reports.send_replace(Reports::new());
        }
    }

    /// Keeps one term.
    async fn lead(
        &self,
        leadership: &watch::Receiver<crate::raft::Leadership>,
        term: tenure_model::Term,
    ) {
        let pace = (self.heartbeat_interval * 5).min(PAUSE_MAX);
        let mut mark: Option<Mark> = None;
        let mut next_mark = Instant::now() + self.digest_interval;
        let leads = || {
            let now = leadership.borrow();
            now.is_me && now.term == term
        };
        while leads() {
            let reports = self.ask(mark.as_ref().map_or(Index(0), |mark| mark.index)).await;
            self.raise_level(&reports).await;
            if let Some(pending) = &mark
                && self.settle(pending, &reports).await
            {
                mark = None;
            }
            self.reports.send_replace(reports);
            if mark.is_none() && Instant::now() >= next_mark {
                next_mark = Instant::now() + self.digest_interval;
                mark = self.mark().await;
                if mark.is_some() {
                    continue;
                }
            }
            let pause = if mark.is_some() { self.heartbeat_interval } else { pace };
            sleep(pause.min(self.digest_interval)).await;
        }
    }

    /// Asks all nodes at once.
    async fn ask(&self, digest_at: Index) -> Reports {
        let question: Bytes = form::NodeQuestion { digest_at: digest_at.0 }.encode_to_vec().into();
        let nodes: Vec<NodeId> =
            self.raft.status().nodes.into_iter().map(|known| known.node).collect();
        let limit = self.heartbeat_interval * 5;
        let asked = nodes.into_iter().map(|node| {
            let question = question.clone();
            async move { Some((node, read(self.raft.ask(node, question, limit).await?)?)) }
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Raises the level to the highest that every node knows, learners among them.
    async fn raise_level(&self, reports: &Reports) {
        let nodes = self.raft.status().nodes;
        let supported = nodes.iter().map(|known| reports.get(&known.node).map(|r| r.supported));
        // One that does not answer may be an old one.
        let Some(Some(level)) = supported.min() else { return };
        let current = self.raft.with_machine(|machine| machine.state().level);
        if level <= current {
            return;
        }
        match self.proposer.propose(Command::RaiseFeatureLevel { level }).await {
            Ok(verdict) => {
                tracing::info!(%level, from = %current, index = %verdict.index, "feature level raised");
            }
            Err(error) => tracing::debug!(%error, "the feature level is raised later"),
        }
    }

    async fn mark(&self) -> Option<Mark> {
        match self.proposer.propose(Command::MarkDigest).await {
            Ok(verdict) => Some(Mark { index: verdict.index, since: Instant::now() }),
            Err(error) => {
                tracing::debug!(%error, "digests are compared later");
                None
            }
        }
    }

    /// Logs what a majority found, once there is one. True when the mark is done with.
    async fn settle(&self, mark: &Mark, reports: &Reports) -> bool {
        let index = mark.index;
        let voters: Vec<NodeId> = self
            .raft
            .status()
            .nodes
            .into_iter()
            .filter(|known| known.is_voter)
            .map(|known| known.node)
            .collect();
        let digests: BTreeMap<NodeId, StateDigest> =
            reports.iter().filter_map(|(node, report)| Some((*node, report.digest?))).collect();
        let outcome = count(&voters, &digests);
        let waited = mark.since.elapsed() >= ANSWERS_WAIT;
        match outcome {
            Outcome::Majority(digest) => {
                for (node, found) in digests.iter().filter(|(_, found)| **found != digest) {
                    tracing::error!(%node, %index, %found, %digest, "the state of a node is not that of the majority, it stops");
                }
                let compared =
                    self.proposer.propose(Command::CompareDigest { index, digest }).await;
                compared.is_ok() || waited
            }
            Outcome::Open if !waited => false,
            Outcome::Open => {
                tracing::warn!(%index, ?digests, "too few nodes took a digest in time");
                true
            }
            Outcome::Split => {
                tracing::error!(
                    %index,
                    ?digests,
                    "the states of the nodes differ, and no majority says which is right: see docs/operations.md"
                );
                true
            }
        }
    }
}

/// What the voters say of one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// More than half of all voters found this.
    Majority(StateDigest),
    /// There may be a majority yet.
    Open,
    /// All have answered, and there is none.
    Split,
}

fn count(voters: &[NodeId], digests: &BTreeMap<NodeId, StateDigest>) -> Outcome {
    let mut votes: BTreeMap<StateDigest, usize> = BTreeMap::new();
    let mut answered = 0;
    for digest in voters.iter().filter_map(|voter| digests.get(voter)) {
        *votes.entry(*digest).or_default() += 1;
        answered += 1;
    }
    let majority = votes.iter().find(|(_, count)| **count * 2 > voters.len());
    match majority {
        Some((digest, _)) => Outcome::Majority(*digest),
        None if answered == voters.len() => Outcome::Split,
        None => Outcome::Open,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(voters: u64, found: &[(u64, u64)]) -> Outcome {
        let voters: Vec<NodeId> = (1..=voters).map(NodeId).collect();
        let digests = found.iter().map(|(node, digest)| (NodeId(*node), StateDigest(*digest)));
        count(&voters, &digests.collect())
    }

    #[test]
    fn more_than_half_of_all_voters_decide_whoever_leads() {
        assert_eq!(counted(3, &[(1, 7), (2, 8), (3, 8)]), Outcome::Majority(StateDigest(8)));
        assert_eq!(counted(3, &[(1, 7), (2, 7)]), Outcome::Majority(StateDigest(7)));
        assert_eq!(counted(1, &[(1, 7)]), Outcome::Majority(StateDigest(7)));
        assert_eq!(counted(4, &[(1, 7), (2, 7), (3, 8)]), Outcome::Open);
    }

    #[test]
    fn two_voters_that_differ_cannot_tell_who_is_right() {
        assert_eq!(counted(2, &[(1, 7), (2, 8)]), Outcome::Split);
        assert_eq!(counted(2, &[(1, 7)]), Outcome::Open);
        assert_eq!(counted(4, &[(1, 7), (2, 7), (3, 8), (4, 8)]), Outcome::Split);
    }

    #[test]
    fn learner_is_compared_and_has_no_voice() {
        assert_eq!(counted(3, &[(1, 7), (4, 8), (5, 8), (2, 8)]), Outcome::Open);
    }

    #[test]
    fn answer_without_a_level_is_none() {
        assert_eq!(read(Bytes::new()), None);
        let digests = Digests::default();
        let report = read(answer(&digests, &[]).into()).unwrap();
        assert_eq!((report.supported, report.digest), (level::NEWEST, None));
    }
}
