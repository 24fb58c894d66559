//! How long nothing is committed when the raft leader is killed, and when it hands over.

mod writers;

use std::time::{Duration, Instant};

use rand::Rng as _;
use tenure_proto::v1;
use tokio::runtime::Runtime;

use super::beside::{self, Peer};
use super::disk::Syncs;
use super::load::{Crew, Shape, connect};
use super::{BenchError, Bound, Measured, Options, Scenario, median, nodes};
use crate::cluster::Cluster;
pub(super) use writers::{Acks, CALL_LIMIT, RETRY_PAUSE, WRITE_PAUSE, first_after};
use writers::{Writers, longest_gap};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "failover",
    about: "commits go on while the raft leader is killed, time after time, and while it hands over",
    run,
};

/// Members that commit.
pub(super) const WRITERS: u32 = 8;
const SHARE: u32 = 4;
/// Their sessions are closed: the lease outlasts the bench.
const TTL: Duration = Duration::from_secs(3_000);

const KILLS: u32 = 30;
const TRANSFERS: u32 = 10;

/// Before a kill, all nodes are up for at least and at most so long.
const CALM_MS: std::ops::Range<u64> = 300..700;
/// Longest wait for a restarted node to catch up, or for a commit after a kill.
const PATIENCE: Duration = Duration::from_secs(60);
/// Commits are watched for so long after a hand-over was asked for.
const TRANSFER_WATCH: Duration = Duration::from_millis(700);

const GAP_P50_MS_MAX: f64 = 1_500.0;
const GAP_MAX_MS_MAX: f64 = 3_000.0;
const TRANSFER_MS_MAX: f64 = 100.0;

fn run(options: &Options) -> Result<Measured, BenchError> {
    let kills = options.rounds.unwrap_or(if options.is_small { 1 } else { KILLS });
    let transfers = if options.is_small { 1 } else { TRANSFERS };
    let mut measured = Measured::default();
    let mut cluster = Cluster::start_with(nodes::COUNT, "");
    let own = measure(&mut measured, &mut cluster, kills, transfers);
    let own = nodes::with_output(&cluster, own)?;
    drop(cluster);
    match options.beside {
        None => {}
        Some(Peer::Etcd) => {
            let (version, gaps) = beside::etcd::failover(kills.min(10))?;
            measured.setup("beside", version);
            measured.metric("etcd_gap_p50_ms", median(&gaps));
            measured.metric("etcd_gap_max_ms", largest(&gaps));
            measured.metric("ratio_to_etcd", own / median(&gaps));
        }
        Some(Peer::Kafka) => return Err("kafka stands beside `commits` only".into()),
    }
    Ok(measured)
}

pub(super) fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// Gives the median gap after a kill.
fn measure(
    measured: &mut Measured,
    cluster: &mut Cluster,
    kills: u32,
    transfers: u32,
) -> Result<f64, BenchError> {
    nodes::note(measured, cluster);
    measured.setup("kills", kills);
    measured.setup("transfers", transfers);
    measured.setup("writers", WRITERS);
    let mut syncs = Syncs::default();
    syncs.time(cluster.folder())?;
    syncs.note(measured);
    let runtime = nodes::client_runtime()?;
    let leader = nodes::leader_address(cluster);
    let shape = Shape { group: "failover".to_owned(), members: WRITERS, share: SHARE, ttl: TTL };
    let crew = runtime.block_on(Crew::join(&leader, shape))?;
    let writers = runtime.block_on(async { Writers::start(&crew, cluster.addresses()) });
    runtime.block_on(crew.close())?;

    let mut gaps = Vec::new();
    for _ in 0..kills {
        gaps.push(kill(cluster, &runtime, writers.acks())?);
    }
    let mut handovers = Vec::new();
    for _ in 0..transfers {
        handovers.push(hand_over(cluster, &runtime, writers.acks())?);
    }
    let commits = writers.acks().len();
    runtime.block_on(writers.stop_and_check())?;

    measured.bounded("gap_p50_ms", median(&gaps), Bound::AtMost(GAP_P50_MS_MAX));
    measured.bounded("gap_max_ms", largest(&gaps), Bound::AtMost(GAP_MAX_MS_MAX));
    measured.metric("transfer_gap_p50_ms", median(&handovers));
    measured.bounded("transfer_gap_max_ms", largest(&handovers), Bound::AtMost(TRANSFER_MS_MAX));
    measured.setup("commits_acknowledged", commits);
    Ok(median(&gaps))
}

/// Kills the raft leader once all nodes are even, and starts it again. Gives the milliseconds from the kill to the
/// answer of the first commit that was sent after it.
fn kill(cluster: &mut Cluster, runtime: &Runtime, acks: &Acks) -> Result<f64, BenchError> {
    runtime.block_on(all_even(cluster))?;
    let calm = Duration::from_millis(rand::rng().random_range(CALM_MS));
    runtime.block_on(async { tokio::time::sleep(calm).await });
    let (leader, _term) = cluster.raft_leader();
    let at = Instant::now();
    cluster.kill(leader);
    let answered = runtime.block_on(first_after(acks, at, PATIENCE))?;
    cluster.run(leader);
    Ok((answered - at).as_secs_f64() * 1_000.0)
}

/// Asks for a hand-over. Gives the longest time without an answered commit around it, in milliseconds.
fn hand_over(cluster: &Cluster, runtime: &Runtime, acks: &Acks) -> Result<f64, BenchError> {
    runtime.block_on(all_even(cluster))?;
    let leader = nodes::leader_address(cluster);
    let change = v1::ClusterChange { reason: "bench".to_owned(), actor: "bench".to_owned() };
    let at = runtime.block_on(async {
        let mut client = v1::cluster_client::ClusterClient::new(connect(&leader).await?);
        let at = Instant::now();
        client.transfer_leader(v1::TransferLeaderRequest { change: Some(change), to: 0 }).await?;
        tokio::time::sleep(TRANSFER_WATCH).await;
        Ok::<_, BenchError>(at)
    })?;
    let gap = longest_gap(acks, at, at + TRANSFER_WATCH);
    Ok(gap.as_secs_f64() * 1_000.0)
}

/// Waits until the raft leader says that every other node has all entries but the newest few.
async fn all_even(cluster: &Cluster) -> Result<(), BenchError> {
    const LAG_MAX: u64 = 100;
    const SILENCE_MAX_MS: u64 = 1_000;
    let deadline = Instant::now() + PATIENCE;
    loop {
        for address in cluster.addresses() {
            let Ok(channel) = connect(address).await else { continue };
            let mut client = v1::cluster_client::ClusterClient::new(channel);
            let Ok(status) = client.status(v1::ClusterStatusRequest { local: true }).await else {
                continue;
            };
            let status = status.into_inner();
            let others = status.nodes.iter().filter(|node| node.node != status.node);
            let even = others.filter(|node| {
                node.lag.is_some_and(|lag| lag <= LAG_MAX)
                    && node.acked_ago_ms.is_some_and(|ago| ago <= SILENCE_MAX_MS)
            });
            if status.leader == status.node && even.count() as u64 == nodes::COUNT - 1 {
                return Ok(());
            }
        }
        if Instant::now() >= deadline {
            return Err("the nodes did not become even".into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
