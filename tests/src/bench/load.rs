//! Members that put load on a cluster: sessions and commits as the wire has them, without the SDK between.

mod commits;
mod session;
mod wire;

use std::time::{Duration, Instant};

use futures::future::try_join_all;
use hdrhistogram::Histogram;
use tenure_model::{TopicId, TopicName};
use tenure_proto::v1;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tonic::Response;
use tonic::transport::{Channel, Endpoint};

use super::{BenchError, Measured};
pub(super) use commits::{Calls, Committer, Stretch, commit_all};
use session::Session;
pub(super) use session::{Beats, Pace};

/// Longest wait until every member has its share.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause between two looks at the group.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// Times of operations in microseconds, up to a minute.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000, 3).expect("the bounds are sound")
}

pub(super) fn record(histogram: &mut Histogram<u64>, started: Instant) {
    let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    histogram.saturating_record(micros);
}

#[allow(clippy::cast_precision_loss, reason = "a bench counts far below 2^52")]
pub(super) fn quantile_ms(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / 1_000.0
}

/// Operations in a second.
#[allow(clippy::cast_precision_loss, reason = "a bench counts far below 2^52")]
pub(super) fn rate(count: u64, wall_s: f64) -> f64 {
    count as f64 / wall_s
}

/// Notes p50 and p99 under names that end in `_ms`.
pub(super) fn note_times(
    measured: &mut Measured,
    [p50, p99]: [&'static str; 2],
    histogram: &Histogram<u64>,
) {
    measured.metric(p50, quantile_ms(histogram, 0.5));
    measured.metric(p99, quantile_ms(histogram, 0.99));
}

/// A group under load.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) group: String,
    pub(super) members: u32,
    /// Partitions of each member.
    pub(super) share: u32,
    /// Lease of the members; they heartbeat three times as often.
    pub(super) ttl: Duration,
}

impl Shape {
    fn topic(&self) -> String {
        format!("{}-topic", self.group)
    }

    fn join(&self, member: u32) -> v1::Join {
        let topic = self.topic();
        let name: TopicName = topic.parse().expect("a bench's topic has a plain name");
        let report = v1::TopicReport {
            topic: topic.clone(),
            topic_id: TopicId::of_name(&name).to_string(),
            partition_count: self.members * self.share,
        };
        let ttl_ms = u64::try_from(self.ttl.as_millis()).expect("a lease is short");
        v1::Join {
            group: self.group.clone(),
            member: format!("m{member:04}"),
            topics: vec![topic],
            ttl_ms,
            heartbeat_interval_ms: ttl_ms / 3,
            client: "bench".to_owned(),
            report: vec![report],
            ..v1::Join::default()
        }
    }
}

/// One member with its session.
pub(super) struct Member {
    pub(super) name: String,
    /// Of the raft leader that it joined at.
    address: String,
    pub(super) channel: Channel,
    held: watch::Receiver<Vec<v1::HeldPartition>>,
    session: JoinHandle<Result<Beats, BenchError>>,
    /// Ends the session when dropped.
    _open: oneshot::Sender<()>,
}

/// All members of a group, each with its session on a connection of its own.
pub(super) struct Crew {
    pub(super) shape: Shape,
    pub(super) members: Vec<Member>,
    pace: watch::Sender<Pace>,
}

impl Crew {
    /// Joins all members at the raft leader, and waits until each runs its share.
    ///
    /// # Errors
    ///
    /// When that does not come to be.
    pub(super) async fn join(leader: &str, shape: Shape) -> Result<Self, BenchError> {
        let (pace, paced) = watch::channel(Pace::Calm);
        let members = (0..shape.members).map(|member| {
            let (join, paced) = (shape.join(member), paced.clone());
            async move {
                let name = join.member.clone();
                // For calls beside the session; there is no connection before the first of them.
                let channel = endpoint(leader)?.connect_lazy();
                let interval = Duration::from_millis(join.heartbeat_interval_ms);
                let session = Session::open(leader, join).await?;
                let held = session.held();
                let (open, closing) = oneshot::channel();
                let session = tokio::spawn(session.run(interval, paced, closing));
                let address = leader.to_owned();
                Ok::<_, BenchError>(Member { name, address, channel, held, session, _open: open })
            }
        });
        let crew = Self { members: try_join_all(members).await?, shape, pace };
        crew.settled().await?;
        Ok(crew)
    }

    /// Waits until every partition is acquired and every member has its share.
    async fn settled(&self) -> Result<(), BenchError> {
        let share = self.shape.share as usize;
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        let mut client =
            v1::ownership_client::OwnershipClient::new(self.members[0].channel.clone())
                .max_decoding_message_size(256 * 1024 * 1024);
        loop {
            if let Some(gone) = self.members.iter().find(|member| member.session.is_finished()) {
                return Err(format!("the session of {} has ended", gone.name).into());
            }
            let request = v1::DescribeGroupRequest { group: self.shape.group.clone() };
            // The group is there once the first join is applied.
            let group = client.describe_group(request).await;
            let group = group.map_or_else(|_unknown| Default::default(), Response::into_inner);
            let is_fair = group.members.len() == self.members.len()
                && group.members.iter().all(|member| member.owned as usize == share);
            let is_told = self.members.iter().all(|member| member.held.borrow().len() == share);
            if is_fair && is_told && group.partitions.iter().all(|partition| partition.acquired) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let summary = group.summary.unwrap_or_default();
                return Err(format!("group did not settle: {summary:?}").into());
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// How fast all sessions heartbeat from now on.
    pub(super) fn set_pace(&self, pace: Pace) {
        self.pace.send_replace(pace);
    }

    /// Ends all sessions; the memberships stay.
    ///
    /// # Errors
    ///
    /// The first error of a session.
    pub(super) async fn close(self) -> Result<Beats, BenchError> {
        let mut all = Beats::default();
        for Member { session, _open: open, .. } in self.members {
            drop(open);
            all.add(&session.await??);
        }
        Ok(all)
    }
}

impl Member {
    /// What it runs.
    pub(super) fn held(&self) -> Vec<v1::HeldPartition> {
        self.held.borrow().clone()
    }
}

/// Connects to a node.
///
/// # Errors
///
/// When nobody answers.
pub(super) async fn connect(address: &str) -> Result<Channel, BenchError> {
    Ok(endpoint(address)?.connect().await?)
}

pub(super) fn endpoint(address: &str) -> Result<Endpoint, BenchError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    Ok(endpoint.tcp_nodelay(true).connect_timeout(Duration::from_secs(5)))
}

/// Joins the one member of `shape` and waits for its partitions; it says of none that it runs.
///
/// # Errors
///
/// When the session ends first.
pub(super) async fn grants_of(
    address: &str,
    shape: &Shape,
) -> Result<(String, Vec<v1::Assigned>), BenchError> {
    let join = shape.join(0);
    let member = join.member.clone();
    let grants = session::first_grants(address, join, shape.share as usize).await?;
    Ok((member, grants))
}
