//! Collects concurrent commands into one raft entry and hands each its own verdict.
//!
//! While one entry is on its way the next one fills. Commands are proposed in the order in which they were submitted.

use std::sync::Arc;
use std::time::Duration;

use tenure_core::command::Command;
use tenure_core::{Applied, Rejection, Reply};
use tenure_model::Index;
use tenure_model::limits::ENTRY_COMMANDS_MAX;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::clock::wall_clock;
use crate::machine::GroupMachine;
use crate::raft::{ProposeError, RaftNode};
use crate::stored::encode_batch;

/// Where an entry is closed although more commands wait, in bytes by estimate. One command may be larger.
const ENTRY_BYTES: usize = 2 * 1024 * 1024;

/// Handle of the task that proposes. Clones share it; it ends with the last one.
#[derive(Clone)]
pub(crate) struct Proposer {
    queue: mpsc::Sender<Waiting>,
    limit: Duration,
}

struct Waiting {
    command: Command,
    answer: oneshot::Sender<Result<Verdict, ProposeError>>,
}

/// What became of one command.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    /// Index of its entry.
    pub(crate) index: Index,
    outcomes: Arc<[Applied]>,
    position: usize,
}

impl Verdict {
    /// The state's answer.
    pub(crate) fn result(&self) -> Result<&Reply, &Rejection> {
        self.outcomes[self.position].result.as_ref()
    }
}

/// A command that was submitted.
pub(crate) struct Submitted {
    answer: oneshot::Receiver<Result<Verdict, ProposeError>>,
    limit: Duration,
}

impl Submitted {
    /// Waits for the verdict.
    ///
    /// # Errors
    ///
    /// [`ProposeError`]; after all but [`ProposeError::Unknown`] nothing happened.
    pub(crate) async fn outcome(self) -> Result<Verdict, ProposeError> {
        match timeout(self.limit, self.answer).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(ProposeError::Unknown),
            Err(_elapsed) => Err(ProposeError::Unknown),
        }
    }
}

impl Proposer {
    /// Starts the task. At most `queued_max` commands wait; one waits no longer than `limit`.
    pub(crate) fn start(
        raft: RaftNode<GroupMachine>,
        queued_max: usize,
        limit: Duration,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (queue, waiting) = mpsc::channel(queued_max);
        (Self { queue, limit }, run(raft, waiting))
    }

    /// Queues `command`, in order.
    ///
    /// # Errors
    ///
    /// [`ProposeError::Overloaded`] when the queue is full, [`ProposeError::Stopped`] when the node is.
    pub(crate) fn submit(&self, command: Command) -> Result<Submitted, ProposeError> {
        let (sender, answer) = oneshot::channel();
        match self.queue.try_send(Waiting { command, answer: sender }) {
            Ok(()) => Ok(Submitted { answer, limit: self.limit }),
            Err(mpsc::error::TrySendError::Full(_)) => Err(ProposeError::Overloaded),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(ProposeError::Stopped),
        }
    }

    /// Queues `command` and waits for its verdict.
    ///
    /// # Errors
    ///
    /// As [`Submitted::outcome`] and [`Proposer::submit`].
    pub(crate) async fn propose(&self, command: Command) -> Result<Verdict, ProposeError> {
        self.submit(command)?.outcome().await
    }
}

async fn run(raft: RaftNode<GroupMachine>, mut queue: mpsc::Receiver<Waiting>) {
    let mut waiting = Vec::new();
    while queue.recv_many(&mut waiting, ENTRY_COMMANDS_MAX).await > 0 {
        let mut drained = waiting.drain(..).filter(|one| !one.answer.is_closed()).peekable();
        while drained.peek().is_some() {
            let mut commands = Vec::new();
            let mut answers = Vec::new();
            let mut size_bytes = 0;
            while let Some(next) = drained.next_if(|next| {
                commands.is_empty() || size_bytes + weight(&next.command) <= ENTRY_BYTES
            }) {
                size_bytes += weight(&next.command);
                commands.push(next.command);
                answers.push(next.answer);
            }
            let payload = encode_batch(wall_clock(), &commands);
            let outcome = raft.propose(payload, None).await;
            for (position, answer) in answers.into_iter().enumerate() {
                let verdict =
                    outcome.clone().map(|(index, outcomes)| Verdict { index, outcomes, position });
                // A caller that gave up wants no answer.
                drop(answer.send(verdict));
            }
        }
    }
}

/// Size of a command in the log, in bytes, roughly.
fn weight(command: &Command) -> usize {
    const LINE: usize = 64;
    const MEMBER: usize = 128;
    match command {
        Command::JoinGroup(join) => 1024 + (join.topics.len() + join.report.len()) * MEMBER,
        Command::LeaveGroup(leave) => {
            leave.partitions.iter().map(|release| LINE + release.error.len()).sum()
        }
        Command::ReportTopics(report) => report.topics.len() * MEMBER,
        Command::ExpireMembers { members, .. }
        | Command::ReserveMembers { members, .. }
        | Command::MarkMembersHeard { members, .. } => members.len() * MEMBER,
        Command::MarkMembersSilent { members, .. } => members.len() * MEMBER,
        Command::InstallTarget(install) => install.target.len() * MEMBER,
        Command::ReleasePartitions(release) => {
            release.partitions.iter().map(|release| LINE + release.error.len()).sum()
        }
        Command::CommitOffsets(commit) => {
            commit.commits.iter().map(|commit| LINE + commit.metadata.len()).sum()
        }
        Command::ExpireRevocations { grants, .. }
        | Command::ExpireAcquisitions { grants, .. }
        | Command::TakeBackUnserved { grants, .. } => grants.len() * MEMBER,
        Command::ExpirePreparations { preparations, .. } => preparations.len() * MEMBER,
        Command::LiftHolds { partitions, .. } => partitions.len() * MEMBER,
        Command::RebalanceGroup(rebalance) => rebalance.target.len() * MEMBER,
        Command::RewindOffset(rewind) => LINE + rewind.commit.metadata.len(),
        Command::AcknowledgeAcquired(_)
        | Command::AcknowledgePrepared(_)
        | Command::MovePartition(_)
        | Command::DrainMember(_)
        | Command::RaiseEpochFloor { .. }
        | Command::RaiseFeatureLevel { .. }
        | Command::MarkDigest
        | Command::CompareDigest { .. } => 1024,
    }
}
