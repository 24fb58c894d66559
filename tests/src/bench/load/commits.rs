//! Commits of offsets, one request after the other for each member.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use hdrhistogram::Histogram;
use tenure_proto::v1;
use tonic::transport::Channel;

use super::super::BenchError;
use super::wire::Wire;
use super::{Member, histogram, record};

/// What one member commits.
pub(in crate::bench) struct Committer {
    address: String,
    client: v1::offsets_client::OffsetsClient<Channel>,
    request: v1::CommitRequest,
    /// Offset of every partition in the newest request that was acknowledged.
    acknowledged: u64,
}

/// How commits are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Calls {
    /// By HTTP/2 of this program's own, which leaves the processors to the nodes.
    Lean,
    /// By the gRPC client that services use, and that a peer is called by.
    Common,
}

/// What was acknowledged within a stretch of time.
pub(in crate::bench) struct Stretch {
    pub(in crate::bench) times: Histogram<u64>,
    /// First and last entry.
    pub(in crate::bench) entries: (u64, u64),
}

impl Default for Stretch {
    fn default() -> Self {
        Self { times: histogram(), entries: (u64::MAX, 0) }
    }
}

impl Stretch {
    pub(in crate::bench) fn add(&mut self, other: &Self) {
        self.times.add(&other.times).expect("histograms of one kind add up");
        self.entries.0 = self.entries.0.min(other.entries.0);
        self.entries.1 = self.entries.1.max(other.entries.1);
    }
}

impl Committer {
    /// Commits all that `member` holds, over its own connection; `first` partitions of it if that is fewer.
    pub(in crate::bench) fn of(group: &str, member: &Member, first: usize) -> Self {
        let commits = member.held().into_iter().take(first).map(|held| v1::OffsetCommit {
            partition: held.partition,
            epoch: held.epoch,
            sequence: 0,
            next_offset: 0,
            metadata: Vec::new(),
        });
        let request = v1::CommitRequest {
            group: group.to_owned(),
            member: member.name.clone(),
            commits: commits.collect(),
        };
        let client = v1::offsets_client::OffsetsClient::new(member.channel.clone());
        let address = member.address.clone();
        Self { address, client, request, acknowledged: 0 }
    }

    /// Commits to another node from now on.
    pub(in crate::bench) fn go_to(&mut self, channel: Channel) {
        self.client = v1::offsets_client::OffsetsClient::new(channel);
    }

    /// Moves all partitions one offset on: the next request is another one.
    pub(in crate::bench) fn advance(&mut self) {
        for commit in &mut self.request.commits {
            commit.sequence += 1;
            commit.next_offset += 1;
        }
    }

    /// Sends the request; again is the same request. Gives the index of the entry.
    ///
    /// # Errors
    ///
    /// The call's status; a verdict that is a refusal is one too.
    pub(in crate::bench) async fn send(&mut self) -> Result<u64, tonic::Status> {
        let answer = self.client.commit(self.request.clone()).await?.into_inner();
        self.take(answer)
    }

    fn take(&mut self, answer: v1::CommitResponse) -> Result<u64, tonic::Status> {
        if answer.verdicts.len() != self.request.commits.len() {
            return Err(tonic::Status::internal("verdicts are missing"));
        }
        if let Some(error) = answer.verdicts.into_iter().find_map(|verdict| verdict.error) {
            return Err(tonic::Status::failed_precondition(format!("{error:?}")));
        }
        self.acknowledged = self.request.commits.first().map_or(0, |commit| commit.next_offset);
        Ok(answer.index)
    }

    /// Goes on from what the cluster has: this program commits one offset for each sequence.
    ///
    /// # Errors
    ///
    /// The call's status.
    pub(in crate::bench) async fn resume(&mut self) -> Result<(), BenchError> {
        let newest = self.fetch().await?.into_iter().filter_map(|offset| offset.next_offset);
        let newest = newest.max().unwrap_or(0);
        for commit in &mut self.request.commits {
            commit.sequence = newest;
            commit.next_offset = newest;
        }
        self.acknowledged = newest;
        Ok(())
    }

    /// Commits until `stop`; lean calls go over a connection that lasts as long.
    async fn run(&mut self, calls: Calls, stop: &AtomicBool) -> Result<Stretch, BenchError> {
        let mut wire = match calls {
            Calls::Lean => Some(Wire::open(&self.address).await?),
            Calls::Common => None,
        };
        let mut stretch = Stretch::default();
        while !stop.load(Ordering::Relaxed) {
            let started = Instant::now();
            self.advance();
            let index = match &mut wire {
                Some(wire) => {
                    let answer = wire.call("/tenure.v1.Offsets/Commit", &self.request).await?;
                    self.take(answer)?
                }
                None => self.send().await?,
            };
            record(&mut stretch.times, started);
            stretch.entries.0 = stretch.entries.0.min(index);
            stretch.entries.1 = stretch.entries.1.max(index);
        }
        Ok(stretch)
    }

    /// Compares what the cluster has with what was acknowledged.
    ///
    /// # Errors
    ///
    /// When an acknowledged offset is missing.
    pub(in crate::bench) async fn check(&mut self) -> Result<(), BenchError> {
        let found = self.fetch().await?;
        let is_behind = |offset: &v1::CommittedOffset| {
            offset.next_offset.is_none_or(|next| next < self.acknowledged)
        };
        if found.len() != self.request.commits.len() {
            return Err("a fetch left partitions out".into());
        }
        match found.iter().find(|offset| is_behind(offset)) {
            None => Ok(()),
            Some(lost) => {
                Err(format!("acknowledged {}, committed is {lost:?}", self.acknowledged).into())
            }
        }
    }

    async fn fetch(&mut self) -> Result<Vec<v1::CommittedOffset>, BenchError> {
        let partitions = self.request.commits.iter().filter_map(|commit| commit.partition.clone());
        let request = v1::FetchRequest {
            group: self.request.group.clone(),
            partitions: partitions.collect(),
        };
        Ok(self.client.fetch(request).await?.into_inner().offsets)
    }
}

/// All of them at the same time, each with one request under way, for `length`.
///
/// # Errors
///
/// The first commit that was refused.
pub(in crate::bench) async fn commit_all(
    committers: Vec<Committer>,
    calls: Calls,
    length: Duration,
) -> Result<(Vec<Committer>, Stretch), BenchError> {
    let stop = Arc::new(AtomicBool::new(false));
    let tasks = committers.into_iter().map(|mut committer| {
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            let stretch = committer.run(calls, &stop).await;
            stretch.map(|stretch| (committer, stretch))
        })
    });
    let tasks: Vec<_> = tasks.collect();
    tokio::time::sleep(length).await;
    stop.store(true, Ordering::Relaxed);
    let mut all = Stretch::default();
    let mut back = Vec::new();
    for done in try_join_all(tasks).await? {
        let (committer, stretch) = done?;
        all.add(&stretch);
        back.push(committer);
    }
    Ok((back, all))
}
