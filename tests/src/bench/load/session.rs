//! One session: acknowledges grants, lets go of what is revoked, heartbeats at one of two paces.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use super::{BenchError, histogram, record};

/// Messages that wait for the connection.
const OUTBOUND_MAX: usize = 1_024;

/// How fast a session heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Pace {
    /// Once an interval.
    Calm,
    /// The next one as soon as one is answered.
    WarmUp,
    /// As [`Pace::WarmUp`], and timed.
    Timed,
}

/// Heartbeats that were answered at [`Pace::Timed`].
pub(in crate::bench) struct Beats(pub(in crate::bench) Histogram<u64>);

impl Default for Beats {
    fn default() -> Self {
        Self(histogram())
    }
}

impl Beats {
    pub(super) fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("histograms of one kind add up");
    }
}

/// Opens a session only until `count` partitions are assigned.
pub(super) async fn first_grants(
    channel: Channel,
    join: v1::Join,
    count: usize,
) -> Result<Vec<v1::Assigned>, BenchError> {
    let mut session = Session::open(channel, join).await?;
    loop {
        let message = session.down.message().await?.ok_or("the coordinator ended a session")?;
        let assignment = match message.down.ok_or("an empty message came down a session")? {
            Down::Joined(joined) => joined.assignment,
            Down::Assignment(assignment) => Some(assignment),
            Down::HeartbeatAnswer(answer) => answer.assignment,
            Down::ActAnswer(_) => None,
            Down::Ended(ended) => {
                return Err(format!("a membership ended: {:?}", ended.error).into());
            }
        };
        if let Some(assignment) = assignment.filter(|found| found.partitions.len() == count) {
            return Ok(assignment.partitions);
        }
    }
}

/// A session that is open.
pub(super) struct Session {
    up: mpsc::Sender<v1::SessionUp>,
    down: Streaming<v1::SessionDown>,
    /// Newest assignment that was acted on.
    version: u64,
    /// It is exactly what is held, and the node knows the short form of heartbeats.
    is_short: bool,
    /// What is held, by topic id and index: the order of lists, for all are of one topic.
    held: BTreeMap<(String, u32), v1::HeldPartition>,
    published: watch::Sender<Vec<v1::HeldPartition>>,
    requests: u64,
    sequence: u64,
    /// The heartbeat that is not answered yet.
    under_way: Option<Instant>,
    beats: Beats,
}

impl Session {
    pub(super) async fn open(channel: Channel, join: v1::Join) -> Result<Self, BenchError> {
        let (up, outbound) = mpsc::channel(OUTBOUND_MAX);
        up.send(v1::SessionUp { up: Some(Up::Join(join)) }).await?;
        let mut client = v1::membership_client::MembershipClient::new(channel);
        let down = client.session(ReceiverStream::new(outbound)).await?.into_inner();
        Ok(Self {
            up,
            down,
            version: 0,
            is_short: false,
            held: BTreeMap::new(),
            published: watch::Sender::default(),
            requests: 0,
            sequence: 0,
            under_way: None,
            beats: Beats::default(),
        })
    }

    pub(super) fn held(&self) -> watch::Receiver<Vec<v1::HeldPartition>> {
        self.published.subscribe()
    }

    /// Runs until `closing` is dropped.
    pub(super) async fn run(
        mut self,
        interval: Duration,
        mut pace: watch::Receiver<Pace>,
        mut closing: oneshot::Receiver<()>,
    ) -> Result<Beats, BenchError> {
        let mut ticks = tokio::time::interval(interval);
        let mut now = *pace.borrow_and_update();
        loop {
            tokio::select! {
                message = self.down.message() => {
                    let message = message?.ok_or("the coordinator ended a session")?;
                    self.take(message, now).await?;
                }
                changed = pace.changed() => {
                    changed?;
                    now = *pace.borrow_and_update();
                    if now != Pace::Calm && self.under_way.is_none() {
                        self.heartbeat().await?;
                    }
                }
                _ = ticks.tick(), if now == Pace::Calm => self.heartbeat().await?,
                _ = &mut closing => return Ok(self.beats),
            }
        }
    }

    async fn take(&mut self, message: v1::SessionDown, pace: Pace) -> Result<(), BenchError> {
        match message.down.ok_or("an empty message came down a session")? {
            Down::Joined(joined) => self.follow(joined.assignment.unwrap_or_default()).await,
            Down::Assignment(assignment) => self.follow(assignment).await,
            Down::ActAnswer(answer) => match answer.error {
                None => Ok(()),
                // Asked back before the word that it runs had arrived.
                Some(error) if error.code == "FENCED" || error.code == "NOT_OWNED" => Ok(()),
                Some(error) => Err(format!("an act was refused: {error:?}").into()),
            },
            Down::HeartbeatAnswer(answer) => {
                if answer.sequence == self.sequence
                    && let Some(sent) = self.under_way.take()
                {
                    if pace == Pace::Timed {
                        record(&mut self.beats.0, sent);
                    }
                    if pace != Pace::Calm {
                        self.heartbeat().await?;
                    }
                }
                match (answer.assignment, answer.as_held) {
                    (Some(assignment), _) => self.follow(assignment).await,
                    (None, 0) => Err("a heartbeat's answer extends nothing".into()),
                    (None, version) => {
                        self.is_short = version == self.version;
                        Ok(())
                    }
                }
            }
            Down::Ended(ended) => Err(format!("a membership ended: {:?}", ended.error).into()),
        }
    }

    async fn heartbeat(&mut self) -> Result<(), BenchError> {
        self.sequence += 1;
        self.under_way = Some(Instant::now());
        for held in self.held.values_mut() {
            held.position += 1;
        }
        let mut beat = v1::Heartbeat {
            sequence: self.sequence,
            assignment_version: self.version,
            takes_as_held: true,
            ..v1::Heartbeat::default()
        };
        if self.is_short {
            let positions = self.held.values().map(|held| held.position).collect();
            beat.as_listed =
                Some(v1::HeldAsListed { version: self.version, positions, lags: vec![] });
        } else {
            beat.held = self.held.values().cloned().collect();
        }
        self.send(Up::Heartbeat(beat)).await
    }

    /// Says of each new grant that it runs, and lets go of what is to be released.
    async fn follow(&mut self, assignment: v1::Assignment) -> Result<(), BenchError> {
        let is_known = assignment.version == self.version;
        if is_known && assignment.partitions.len() == self.held.len() {
            return Ok(());
        }
        if assignment.version < self.version {
            return Ok(());
        }
        self.version = assignment.version;
        self.is_short = false;
        let mut before = std::mem::take(&mut self.held);
        for assigned in assignment.partitions {
            let partition = assigned.partition.ok_or("an assigned partition has no name")?;
            let key = (partition.topic_id.clone(), partition.index);
            let known = before.remove(&key).filter(|known| known.epoch == assigned.epoch);
            self.requests += 1;
            let request = self.requests;
            if assigned.revoking {
                if known.is_some() {
                    self.release(request, partition, assigned.epoch).await?;
                }
                continue;
            }
            if known.is_none() {
                let acquired = v1::Acquired {
                    request,
                    partition: Some(partition.clone()),
                    epoch: assigned.epoch,
                    home_initialised: false,
                    resume: 0,
                };
                self.send(Up::Acquired(acquired)).await?;
            }
            let held = v1::HeldPartition {
                partition: Some(partition),
                epoch: assigned.epoch,
                phase: v1::Phase::Running.into(),
                position: known.map_or(0, |known| known.position),
                phase_ms: 1_000,
                error: String::new(),
                still_ms: 0,
                end_offset: None,
            };
            self.held.insert(key, held);
        }
        self.published.send_replace(self.held.values().cloned().collect());
        Ok(())
    }

    async fn release(
        &mut self,
        request: u64,
        partition: v1::Partition,
        epoch: u64,
    ) -> Result<(), BenchError> {
        let released = v1::Released {
            partition: Some(partition),
            epoch,
            next_offset: None,
            reason: v1::ReleaseReason::Revoked.into(),
            error: String::new(),
        };
        self.send(Up::Release(v1::Release { request, partitions: vec![released] })).await
    }

    async fn send(&self, up: Up) -> Result<(), BenchError> {
        self.up.send(v1::SessionUp { up: Some(up) }).await?;
        Ok(())
    }
}
