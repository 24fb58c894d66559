//! Unary calls to the coordinator.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tenure_model::{
    CommitSequence, Epoch, ErrorCode, GroupId, MemberId, NextOffset, Partition, RequestId,
    RetryClass, TopicName, limits,
};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::{error_of_status, v1};
use tonic::Status;
use tonic::transport::Channel;

use super::retry::Backoff;
use super::wire;

/// Longest wait for one attempt, so that a node that went silent does not use up the whole deadline.
const ATTEMPT_MAX: Duration = Duration::from_secs(3);

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// Keep-alive of idle connections: a peer that is gone without a word is noticed within two of these.
const KEEP_ALIVE: Duration = Duration::from_secs(2);

/// Longest pause between two attempts: an election takes a second or two, and nobody should wait much longer for it.
const PAUSE_MAX: Duration = Duration::from_millis(400);

/// Redirects followed at once, one after the other; further ones wait like any other failure.
const REDIRECTS_MAX: u32 = 3;

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
    nodes: Vec<String>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Where the last answer came from, or where a node said that the raft leader is.
    leader: Option<String>,
    /// Next of `nodes` to try while the raft leader is not known.
    next_node: usize,
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
        f.debug_struct("CoordinatorClient")
            .field("nodes", &self.shared.nodes)
            .field("leader", &self.lock().leader)
            .finish_non_exhaustive()
    }
}

impl CoordinatorClient {
    /// Client for the nodes at `coordinators` (`host:port`); connects at the first call.
    #[must_use]
    pub fn new(coordinators: Vec<String>) -> Self {
        let shared = Shared { nodes: coordinators, state: Mutex::default() };
        Self { shared: Arc::new(shared) }
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
            let address = self.target();
            let failure = match self.attempt(&address, attempts.left(), &send).await {
                Ok(answer) => {
                    self.lock().leader = Some(address);
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            self.learn(&address, &failure);
            tracing::debug!(address, code = %failure.refused.code, error = failure.refused.message, "call failed");
            if let Some(pause) = attempts.next(failure, repeat)? {
                tokio::time::sleep(pause).await;
            }
        }
    }

    async fn attempt<T, F, S>(&self, address: &str, left: Duration, send: &S) -> Result<T, Failure>
    where
        S: Fn(Channel) -> F,
        F: Future<Output = Result<T, Status>>,
    {
        let connect = tokio::time::timeout(CONNECT_MAX.min(left), self.channel(address));
        let channel = match connect.await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => return Err(Failure::unreachable(address, &error)),
            Err(_elapsed) => return Err(Failure::unreachable(address, "no connection in time")),
        };
        match tokio::time::timeout(ATTEMPT_MAX.min(left), send(channel)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(status)) => Err(Failure::answered(&status)),
            Err(_elapsed) => Err(Failure::silent(address)),
        }
    }

    async fn channel(&self, address: &str) -> Result<Channel, String> {
        if let Some(channel) = self.lock().channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = super::connect::connect(address, CONNECT_MAX, KEEP_ALIVE).await?;
        self.lock().channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Where the next attempt goes.
    fn target(&self) -> String {
        let state = self.lock();
        let known = state.leader.clone();
        known.or_else(|| self.shared.nodes.get(state.next_node).cloned()).unwrap_or_default()
    }

    /// Keeps what a failed attempt told about the nodes.
    fn learn(&self, address: &str, failure: &Failure) {
        let mut state = self.lock();
        if failure.is_transport {
            // A fresh connection resolves the name again.
            state.channels.remove(address);
        }
        if failure.refused.code.retry_class() == RetryClass::Never {
            return;
        }
        state.leader = failure.leader.clone().filter(|leader| leader != address);
        if state.leader.is_none() {
            state.next_node = (state.next_node + 1) % self.shared.nodes.len().max(1);
        }
    }

    /// Notes where the raft leader is.
    pub(super) fn found_leader(&self, address: &str) {
        if !address.is_empty() {
            self.lock().leader = Some(address.to_owned());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One failed attempt.
struct Failure {
    refused: Refused,
    /// Where the raft leader is, by the node that was asked.
    leader: Option<String>,
    /// The connection itself is in doubt.
    is_transport: bool,
}

impl Failure {
    fn unreachable(address: &str, error: impl fmt::Display) -> Self {
        // Nothing was sent: as certain as a node's own word that there is no raft leader.
        let message = format!("{address} is not reachable: {error}");
        Self {
            refused: Refused { code: ErrorCode::NoLeader, message, current_epoch: None },
            leader: None,
            is_transport: true,
        }
    }

    fn silent(address: &str) -> Self {
        let message = format!("{address} did not answer in time");
        Self {
            refused: Refused { code: ErrorCode::Unknown, message, current_epoch: None },
            leader: None,
            is_transport: true,
        }
    }

    fn answered(status: &Status) -> Self {
        let error = error_of_status(status);
        let refused = wire::refused(&error);
        let leader = Some(error.leader_address).filter(|address| !address.is_empty());
        let is_transport = refused.code == ErrorCode::Unknown;
        Self { refused, leader, is_transport }
    }
}

/// Attempts of one call.
struct Attempts {
    started: Instant,
    deadline: Duration,
    made: u32,
    redirects: u32,
    /// Whether one of them may have happened.
    in_doubt: bool,
    backoff: Backoff,
}

impl Attempts {
    fn new(deadline: Duration) -> Self {
        let backoff = Backoff::new(rand::random(), PAUSE_MAX);
        Self { started: Instant::now(), deadline, made: 0, redirects: 0, in_doubt: false, backoff }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.started.elapsed())
    }

    /// Whether and when to try again: nothing is "at once".
    fn next(&mut self, failure: Failure, repeat: Repeat) -> Result<Option<Duration>, CallError> {
        self.made += 1;
        let redirected = failure.leader.is_some();
        match failure.refused.code.retry_class() {
            // An earlier attempt may have happened; this no is about the state after it.
            RetryClass::Never => return Err(failure.refused.into()),
            RetryClass::OtherNode | RetryClass::AfterBackoff => {}
            RetryClass::Unknown => {
                self.in_doubt = true;
                if repeat == Repeat::OnlyWhenNothingHappened {
                    return Err(self.give_up(failure.refused));
                }
            }
        }
        if redirected && self.redirects < REDIRECTS_MAX && !self.left().is_zero() {
            self.redirects += 1;
            return Ok(None);
        }
        let pause = self.backoff.pause();
        if pause >= self.left() {
            return Err(self.give_up(failure.refused));
        }
        Ok(Some(pause))
    }

    fn give_up(&self, last: Refused) -> CallError {
        if self.in_doubt {
            CallError::Unknown { attempts: self.made, last: last.to_string() }
        } else {
            CallError::Refused(last)
        }
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
