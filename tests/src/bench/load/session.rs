//! One session: acknowledges grants, lets go of what is revoked, heartbeats at one of two paces.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tokio::sync::{oneshot, watch};

use super::wire::Wire;
use super::{BenchError, histogram};

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
    fn of(times: &[u32]) -> Self {
        let mut beats = Self::default();
        for micros in times {
            beats.0.saturating_record(u64::from(*micros));
        }
        beats
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("histograms of one kind add up");
    }
}

/// Opens a session only until `count` partitions are assigned.
pub(super) async fn first_grants(
    address: &str,
    join: v1::Join,
    count: usize,
) -> Result<Vec<v1::Assigned>, BenchError> {
    let mut session = Session::open(address, join).await?;
    loop {
        let message: v1::SessionDown = session.wire.message().await?;
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
    wire: Wire,
    /// Newest assignment that was acted on.
    version: u64,
    /// It is exactly what is held, and the node knows the short form of heartbeats.
    is_short: bool,
    /// What is held, by topic id and index: the order of lists, for all are of one topic.
    held: BTreeMap<(String, u32), v1::HeldPartition>,
    /// Of all that is held, in the order of `held`.
    positions: Vec<u64>,
    published: watch::Sender<Vec<v1::HeldPartition>>,
    requests: u64,
    sequence: u64,
    /// The heartbeat that is not answered yet.
    under_way: Option<Instant>,
    /// Of the heartbeats that count, in microseconds.
    times: Vec<u32>,
}

impl Session {
    pub(super) async fn open(address: &str, join: v1::Join) -> Result<Self, BenchError> {
        let mut wire = Wire::open(address).await?;
        wire.begin("/tenure.v1.Membership/Session")?;
        wire.send(&v1::SessionUp { up: Some(Up::Join(join)) })?;
        Ok(Self {
            wire,
            version: 0,
            is_short: false,
            held: BTreeMap::new(),
            positions: Vec::new(),
            published: watch::Sender::default(),
            requests: 0,
            sequence: 0,
            under_way: None,
            times: Vec::new(),
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
        loop {
            let now = *pace.borrow_and_update();
            if now == Pace::Calm {
                tokio::select! {
                    message = self.wire.message() => self.take(message?, now)?,
                    changed = pace.changed() => changed?,
                    _ = ticks.tick() => self.heartbeat()?,
                    _ = &mut closing => return Ok(Beats::of(&self.times)),
                }
                continue;
            }
            if self.under_way.is_none() {
                self.heartbeat()?;
            }
            // One is always under way now: a change of pace is seen with its answer.
            tokio::select! {
                message = self.wire.message() => self.take(message?, now)?,
                _ = &mut closing => return Ok(Beats::of(&self.times)),
            }
        }
    }

    fn take(&mut self, message: v1::SessionDown, pace: Pace) -> Result<(), BenchError> {
        match message.down.ok_or("an empty message came down a session")? {
            Down::Joined(joined) => self.follow(joined.assignment.unwrap_or_default()),
            Down::Assignment(assignment) => self.follow(assignment),
            Down::ActAnswer(answer) => match answer.error {
                None => Ok(()),
                // Asked back before the word that it runs had arrived.
                Some(error) if error.code == "FENCED" || error.code == "NOT_OWNED" => Ok(()),
                Some(error) => Err(format!("an act was refused: {error:?}").into()),
            },
            Down::HeartbeatAnswer(answer) => {
                if answer.sequence == self.sequence
                    && let Some(sent) = self.under_way.take()
                    && pace == Pace::Timed
                {
                    self.times.push(u32::try_from(sent.elapsed().as_micros()).unwrap_or(u32::MAX));
                }
                match (answer.assignment, answer.as_held) {
                    (Some(assignment), _) => self.follow(assignment),
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

    fn heartbeat(&mut self) -> Result<(), BenchError> {
        self.sequence += 1;
        self.under_way = Some(Instant::now());
        for position in &mut self.positions {
            *position += 1;
        }
        let mut beat = v1::Heartbeat {
            sequence: self.sequence,
            assignment_version: self.version,
            takes_as_held: true,
            ..v1::Heartbeat::default()
        };
        if self.is_short {
            let positions = self.positions.clone();
            beat.as_listed =
                Some(v1::HeldAsListed { version: self.version, positions, lags: vec![] });
        } else {
            let held = self.held.values().zip(&self.positions);
            let held = held
                .map(|(held, position)| v1::HeldPartition { position: *position, ..held.clone() });
            beat.held = held.collect();
        }
        self.send(Up::Heartbeat(beat))
    }

    /// Says of each new grant that it runs, and lets go of what is to be released.
    fn follow(&mut self, assignment: v1::Assignment) -> Result<(), BenchError> {
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
                    self.release(request, partition, assigned.epoch)?;
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
                self.send(Up::Acquired(acquired))?;
            }
            let held = v1::HeldPartition {
                partition: Some(partition),
                epoch: assigned.epoch,
                phase: v1::Phase::Running.into(),
                position: 0,
                phase_ms: 1_000,
                error: String::new(),
                still_ms: 0,
                end_offset: None,
            };
            self.held.insert(key, held);
        }
        self.positions = vec![0; self.held.len()];
        self.published.send_replace(self.held.values().cloned().collect());
        Ok(())
    }

    fn release(
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
        self.send(Up::Release(v1::Release { request, partitions: vec![released] }))
    }

    fn send(&mut self, up: Up) -> Result<(), BenchError> {
        self.wire.send(&v1::SessionUp { up: Some(up) })
    }
}
