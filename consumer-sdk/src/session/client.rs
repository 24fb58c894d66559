//! Unary calls to the coordinator.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tenure_model::{
    CommitSequence, Epoch, ErrorCode, GroupId, MemberId, NextOffset, Partition, RequestId,
    RetryClass, TopicName, limits,
};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::v1;
use tokio::time::Instant;
use tonic::Status;
use tonic::transport::Channel;

use super::attempts::{Attempts, Failure, PAUSE_MAX};
use super::connect::Dial;
use super::nodes::Nodes;
use super::retry::Backoff;
use super::wire;

/// Longest wait for one attempt, so that a node that went silent does not use up the whole deadline.
const ATTEMPT_MAX: Duration = Duration::from_secs(3);

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// Keep-alive of idle connections: a peer that is gone without a word is noticed within two of these.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// That wait at a node that has just gone silent, see [`Nodes::is_probed`].
const PROBE_MAX: Duration = Duration::from_millis(500);

/// After so long without an answer the other nodes are asked whether they know another raft leader. Much longer than a
/// commit takes, and shorter than an election with the wait before it.
const PATIENCE: Duration = Duration::from_millis(800);

/// Client for the coordinator's unary calls. Cheap to clone; clones share connections and what is known of the raft
/// leader.
///
/// Calls go to the raft leader: its address is learned from the answers of the other nodes. A call that certainly did
/// nothing is tried again until its deadline; one that may have happened only where a repetition does no harm.
#[derive(Clone)]
pub struct CoordinatorClient {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    dial: Option<Dial>,
}

struct State {
    /// Where calls go: where the last answer came from, or where a node said that the raft leader is.
    current: String,
    nodes: Nodes,
    channels: BTreeMap<String, Channel>,
}

/// Whether a call may be sent again when it is not known what became of the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// Yes: reads, and calls that name themselves (a commit's sequence, an operator's request id).
    Safe,
    /// No: only after an answer that says that nothing happened.
    OnlyWhenNothingHappened,
}

/// One offset to commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffsetCommit {
    /// The partition.
    pub partition: Partition,
    /// Epoch of the grant.
    pub epoch: Epoch,
    /// From 1, rising within one epoch. A repetition carries the same one.
    pub sequence: CommitSequence,
    /// Record to read next.
    pub next_offset: NextOffset,
    /// At most 4096 bytes.
    pub metadata: Vec<u8>,
}

/// A grant that is current.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyOk {
    /// Committed offset, if the coordinator is the home and ever had one.
    pub next_offset: Option<NextOffset>,
    /// Whether the home certainly has an offset.
    pub home_initialised: bool,
    /// Whether the partition appeared after the group knew its topic.
    pub starts_at_earliest: bool,
}

/// A committed offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedOffset {
    /// The partition.
    pub partition: Partition,
    /// Name of its topic.
    pub topic: TopicName,
    /// Nothing: no offset was ever committed.
    pub next_offset: Option<NextOffset>,
    /// Epoch under which it was committed.
    pub epoch: Option<Epoch>,
    /// As committed.
    pub metadata: Vec<u8>,
}

/// The coordinator's no.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refused {
    /// Stable code.
    pub code: ErrorCode,
    /// For people, with the next step.
    pub message: String,
    /// `FENCED`: the epoch that is current now, if any.
    pub current_epoch: Option<Epoch>,
}

/// The coordinator's no to one offset.
pub type CommitRefused = Refused;

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The call was refused; nothing happened.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// No definite answer within the deadline: it may or may not have happened.
    #[error("no definite answer after {attempts} attempts, the last one: {last}")]
    Unknown {
        /// How many were made.
        attempts: u32,
        /// What became of the last one.
        last: String,
    },
}

impl fmt::Debug for CoordinatorClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("CoordinatorClient")
            .field("nodes", &state.nodes)
            .field("current", &state.current)
            .finish_non_exhaustive()
    }
}

impl CoordinatorClient {
    /// Client for the nodes at `coordinators` (`host:port`); connects at the first call.
    #[must_use]
    pub fn new(coordinators: Vec<String>) -> Self {
        Self::dialling(coordinators, None)
    }

    /// As [`CoordinatorClient::new`], with connections made by `dial`. For simulations; not an interface.
    #[doc(hidden)]
    #[must_use]
    pub fn over(coordinators: Vec<String>, dial: Dial) -> Self {
        Self::dialling(coordinators, Some(dial))
    }

    pub(super) fn dialling(coordinators: Vec<String>, dial: Option<Dial>) -> Self {
        let mut nodes = Nodes::new(coordinators);
        let state = State { current: nodes.next(), nodes, channels: BTreeMap::new() };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), dial }) }
    }

    /// Commits offsets; one verdict each, in order. Repeats itself until `deadline` has passed.
    ///
    /// # Errors
    ///
    /// [`CallError::Refused`] when all of it was refused; [`CallError::Unknown`] when no answer came in time: commit
    /// the same sequence again to find out.
    pub async fn commit(
        &self,
        group: &GroupId,
        member: &MemberId,
        commits: Vec<OffsetCommit>,
        deadline: Duration,
    ) -> Result<Vec<Result<(), CommitRefused>>, CallError> {
        let started = Instant::now();
        let mut verdicts = Vec::with_capacity(commits.len());
        for part in commits.chunks(limits::REQUEST_PARTITIONS_MAX) {
            let request = v1::CommitRequest {
                group: group.to_string(),
                member: member.to_string(),
                commits: part.iter().map(wire::offset_commit).collect(),
            };
            let left = deadline.saturating_sub(started.elapsed());
            let response = self
                .call(Repeat::Safe, left, |channel| {
                    let request = request.clone();
                    async move {
                        let mut client = v1::offsets_client::OffsetsClient::new(channel);
                        client.commit(request).await.map(tonic::Response::into_inner)
                    }
                })
                .await?;
            same_count(part.len(), response.verdicts.len())?;
            verdicts.extend(response.verdicts.into_iter().map(|verdict| match verdict.error {
                None => Ok(()),
                Some(error) => Err(wire::refused(&error)),
            }));
        }
        Ok(verdicts)
    }

    /// Moves one offset to any place, also back, under the grant that it names. `request` makes it happen once: repeating
    /// it does nothing, whatever was committed since.
    ///
    /// # Errors
    ///
    /// [`CallError`]; after [`CallError::Unknown`] repeat it under the same name.
    pub async fn rewind(
        &self,
        group: &GroupId,
        member: &MemberId,
        commit: OffsetCommit,
        request: &RequestId,
        deadline: Duration,
    ) -> Result<(), CallError> {
        let request = v1::RewindRequest {
            group: group.to_string(),
            member: member.to_string(),
            commit: Some(wire::offset_commit(&commit)),
            request: request.to_string(),
        };
        self.call(Repeat::Safe, deadline, |channel| {
            let request = request.clone();
            async move {
                let mut client = v1::offsets_client::OffsetsClient::new(channel);
                client.rewind(request).await.map(|_index| ())
            }
        })
        .await
    }

    /// Asks whether grants are current; one verdict each, in order. Linearizable.
    ///
    /// # Errors
    ///
    /// [`CallError::Refused`] when all of it was refused; [`CallError::Unknown`] when no answer came in time.
    pub async fn verify(
        &self,
        group: &GroupId,
        member: &MemberId,
        grants: &[(Partition, Epoch)],
        deadline: Duration,
    ) -> Result<Vec<Result<VerifyOk, Refused>>, CallError> {
        let started = Instant::now();
        let mut verdicts = Vec::with_capacity(grants.len());
        for part in grants.chunks(limits::REQUEST_PARTITIONS_MAX) {
            let request = v1::VerifyRequest {
                group: group.to_string(),
                member: member.to_string(),
                grants: part
                    .iter()
                    .map(|(partition, epoch)| wire::grant(*partition, *epoch))
                    .collect(),
            };
            let left = deadline.saturating_sub(started.elapsed());
            let response = self
                .call(Repeat::Safe, left, |channel| {
                    let request = request.clone();
                    async move {
                        let mut client = v1::ownership_client::OwnershipClient::new(channel);
                        client.verify(request).await.map(tonic::Response::into_inner)
                    }
                })
                .await?;
            same_count(part.len(), response.verdicts.len())?;
            for verdict in response.verdicts {
                verdicts.push(wire::verify_verdict(verdict).map_err(malformed)?);
            }
        }
        Ok(verdicts)
    }

    /// Reads committed offsets; all of the group when `partitions` is empty. Linearizable.
    ///
    /// # Errors
    ///
    /// [`CallError::Refused`], for example without such a group; [`CallError::Unknown`] when no answer came in time,
    /// which never means that there is no offset.
    pub async fn fetch(
        &self,
        group: &GroupId,
        partitions: &[Partition],
        deadline: Duration,
    ) -> Result<Vec<CommittedOffset>, CallError> {
        let request = v1::FetchRequest {
            group: group.to_string(),
            partitions: partitions.iter().map(|partition| partition_to_wire(*partition)).collect(),
        };
        let response = self
            .call(Repeat::Safe, deadline, |channel| {
                let request = request.clone();
                async move {
                    let mut client = v1::offsets_client::OffsetsClient::new(channel);
                    client.fetch(request).await.map(tonic::Response::into_inner)
                }
            })
            .await?;
        response
            .offsets
            .into_iter()
            .map(|offset| wire::committed_offset(offset).map_err(malformed))
            .collect()
    }

    /// Makes any unary call at the raft leader: `send` gets a connection and answers with the response or the status.
    ///
    /// # Errors
    ///
    /// [`CallError::Refused`] when the answer was no, or when all that came until `deadline` was that nothing happened;
    /// [`CallError::Unknown`] when it may have happened.
    pub async fn call<T, F, S>(
        &self,
        repeat: Repeat,
        deadline: Duration,
        send: S,
    ) -> Result<T, CallError>
    where
        S: Fn(Channel) -> F,
        F: Future<Output = Result<T, Status>>,
    {
        let mut attempts = Attempts::new(deadline);
        loop {
            let address = self.lock().current.clone();
            let failure = match self.attempt(&address, attempts.left(), repeat, &send).await {
                Ok((answer, by)) => {
                    self.found_leader(&by);
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            tracing::debug!(address, code = %failure.refused.code, error = failure.refused.message, "call failed");
            self.lock().learn(&address, &failure);
            if let Some(pause) = attempts.next(failure, repeat)? {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Asks one node; gives the answer, and who gave it.
    ///
    /// While the node says nothing, the others are asked as well, where a repetition does no harm.
    async fn attempt<T, F, S>(
        &self,
        address: &str,
        left: Duration,
        repeat: Repeat,
        send: &S,
    ) -> Result<(T, String), Failure>
    where
        S: Fn(Channel) -> F,
        F: Future<Output = Result<T, Status>>,
    {
        let is_probed = self.lock().nodes.is_probed(address);
        let longest = if is_probed { PROBE_MAX } else { ATTEMPT_MAX };
        let asked = self.ask(address, longest.min(left), send);
        match repeat {
            Repeat::OnlyWhenNothingHappened => Ok((asked.await?, address.to_owned())),
            Repeat::Safe => tokio::select! {
                biased;
                answer = asked => Ok((answer?, address.to_owned())),
                answer = self.look_around(address, send) => answer,
            },
        }
    }

    /// Asks the others once `silent` has said nothing for a while, until one of them answers or names another raft
    /// leader.
    async fn look_around<T, F, S>(&self, silent: &str, send: &S) -> Result<(T, String), Failure>
    where
        S: Fn(Channel) -> F,
        F: Future<Output = Result<T, Status>>,
    {
        tokio::time::sleep(PATIENCE).await;
        let others = self.lock().nodes.others(silent);
        let mut backoff = Backoff::new(rand::random(), PAUSE_MAX);
        for other in others.iter().cycle() {
            let failure = match self.ask(other, PROBE_MAX, send).await {
                Ok(answer) => return Ok((answer, other.clone())),
                Err(failure) => failure,
            };
            if failure.refused.code.retry_class() == RetryClass::Never {
                return Err(failure.instead_of(silent, other));
            }
            if let Some(leader) = failure.leader.clone().filter(|leader| leader != silent) {
                return Err(failure.instead_of(silent, &leader));
            }
            tokio::time::sleep(backoff.pause()).await;
        }
        // Nobody else to ask.
        std::future::pending().await
    }

    async fn ask<T, F, S>(&self, address: &str, limit: Duration, send: &S) -> Result<T, Failure>
    where
        S: Fn(Channel) -> F,
        F: Future<Output = Result<T, Status>>,
    {
        let connect = tokio::time::timeout(CONNECT_MAX.min(limit), self.channel(address));
        let channel = match connect.await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => return Err(Failure::unreachable(address, &error)),
            Err(_elapsed) => return Err(Failure::unreachable(address, "no connection in time")),
        };
        match tokio::time::timeout(limit, send(channel)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(status)) => Err(Failure::answered(address, &status)),
            Err(_elapsed) => Err(Failure::silent(address)),
        }
    }

    async fn channel(&self, address: &str) -> Result<Channel, String> {
        if let Some(channel) = self.lock().channels.get(address) {
            return Ok(channel.clone());
        }
        let dial = self.shared.dial.as_ref();
        let channel = super::connect::connect(address, CONNECT_MAX, KEEP_ALIVE, dial).await?;
        self.lock().channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Notes where the raft leader is.
    pub(super) fn found_leader(&self, address: &str) {
        if !address.is_empty() {
            let mut state = self.lock();
            address.clone_into(&mut state.current);
            state.nodes.heard();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Keeps what a failed attempt at `asked` told about the nodes.
    fn learn(&mut self, asked: &str, failure: &Failure) {
        if let Some(broken) = &failure.broken {
            // A fresh connection resolves the name again.
            self.channels.remove(broken);
        }
        let is_no = failure.refused.code.retry_class() == RetryClass::Never;
        // Of calls that failed together the first one moves the others: what they say is older.
        if (is_no && failure.silent.is_none()) || self.current != asked {
            return;
        }
        if let Some(silent) = &failure.silent {
            self.nodes.give_up(silent);
        }
        self.current = match &failure.leader {
            Some(leader) if leader != asked => leader.clone(),
            Some(_) | None => self.nodes.next(),
        };
    }
}

fn same_count(asked: usize, answered: usize) -> Result<(), CallError> {
    if asked == answered {
        Ok(())
    } else {
        let last = format!("{answered} verdicts for {asked} questions");
        Err(CallError::Unknown { attempts: 1, last })
    }
}

fn malformed(problem: tenure_proto::convert::Malformed) -> CallError {
    CallError::Unknown { attempts: 1, last: format!("malformed answer: {problem}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let client = CoordinatorClient::new(vec!["a".into(), "b".into(), "c".into()]);
        let shared = Arc::into_inner(client.shared).unwrap();
        shared.state.into_inner().unwrap()
    }

    fn not_leader(asked: &str, leader: &str) -> Failure {
        let status = tenure_proto::status_of_error(ErrorCode::NotLeader, "not the leader", leader);
        Failure::answered(asked, &status)
    }

    #[test]
    fn calls_that_failed_together_at_a_silent_node_move_on_once() {
        let mut state = state();
        for _ in 0..16 {
            state.learn("a", &Failure::silent("a"));
        }
        assert_eq!(state.current, "b");
        assert!(state.nodes.is_probed("a"), "it was given up once");
    }

    #[test]
    fn node_that_cannot_be_reached_counts_as_silent() {
        let mut state = state();
        state.learn("a", &Failure::unreachable("a", "deadline has elapsed"));
        assert_eq!(state.current, "b");
        assert!(state.nodes.is_probed("a"));
    }

    #[test]
    fn failure_of_a_call_that_began_earlier_does_not_hide_the_raft_leader() {
        let mut state = state();
        state.learn("a", &not_leader("b", "c").instead_of("a", "c"));
        assert_eq!(state.current, "c");
        state.learn("a", &Failure::silent("a"));
        assert_eq!(state.current, "c");
    }

    #[test]
    fn node_that_others_still_name_gets_a_short_wait() {
        let mut state = state();
        state.learn("a", &Failure::silent("a"));
        state.learn("b", &not_leader("b", "a"));
        assert_eq!(state.current, "a");
        assert!(state.nodes.is_probed("a"));
    }
}
