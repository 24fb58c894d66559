//! A large state: how long a snapshot takes, how long a node needs to be back, and how much memory it has then.

use std::time::{Duration, Instant};

use futures::StreamExt as _;
use futures::stream;
use tenure_proto::v1;
use tonic::transport::Channel;

use super::disk::Syncs;
use super::load::{Shape, connect, grants_of};
use super::usage::resident_mib;
use super::{BenchError, Bound, Measured, Options, Scenario, nodes};
use crate::cluster::Cluster;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "recovery",
    about: "a node with many partitions writes snapshots, is killed, and comes back",
    run,
};

/// Groups, each with one member that owns everything.
const GROUPS: u32 = 100;
/// Partitions of each group.
const SHARE: u32 = 10_000;
/// Partitions of one request.
const REQUEST: usize = 500;
/// Groups that are filled at the same time.
const AT_ONCE: usize = 8;
const TTL: Duration = Duration::from_secs(3_000);

/// Nothing is acknowledged as running here, so nothing may be taken back for that; snapshots come early and often.
const SETTINGS: &str = "
[deadlines]
acquire_deadline_ms = 86400000

# Filling writes less than the default: a snapshot of everything is wanted.
[raft]
snapshot_log_mib = 8
";

const RELOAD_S_MAX: f64 = 5.0;
const SNAPSHOT_S_MAX: f64 = 5.0;
const RSS_MIB_MAX: f64 = 1_024.0;
const PATIENCE: Duration = Duration::from_secs(120);
/// The nodes look at the size of their logs twice a second.
const SNAPSHOT_WAIT: Duration = Duration::from_secs(12);

fn run(options: &Options) -> Result<Measured, BenchError> {
    let (groups, share) = if options.is_small { (4, 500) } else { (GROUPS, SHARE) };
    let mut measured = Measured::default();
    let mut cluster = Cluster::start_with(nodes::COUNT, SETTINGS);
    let done = measure(&mut measured, &mut cluster, groups, share);
    nodes::with_output(&cluster, done)?;
    Ok(measured)
}

fn measure(
    measured: &mut Measured,
    cluster: &mut Cluster,
    groups: u32,
    share: u32,
) -> Result<(), BenchError> {
    nodes::note(measured, cluster);
    measured.setup("groups", groups);
    measured.setup("partitions", groups * share);
    let mut syncs = Syncs::default();
    syncs.time(cluster.folder())?;
    syncs.note(measured);

    let runtime = nodes::client_runtime()?;
    let leader = nodes::leader_address(cluster);
    let started = Instant::now();
    runtime.block_on(fill(&leader, groups, share))?;
    measured.metric("fill_s", started.elapsed().as_secs_f64());

    if share == SHARE {
        runtime.block_on(all_have_snapshots(cluster))?;
    }
    let (leader, _term) = cluster.raft_leader();
    let follower = cluster.running().into_iter().find(|node| *node != leader);
    let follower = follower.ok_or("there is no follower")?;
    let (mut now, mut peak) = (0.0_f64, 0.0_f64);
    for process in nodes::processes(cluster) {
        let (resident, most) = resident_mib(process)?;
        (now, peak) = (now.max(resident), peak.max(most));
    }
    let snapshot_s = longest_snapshot_s(cluster);
    let wanted = runtime.block_on(status(cluster, leader))?.committed;
    cluster.kill(follower);
    let started = Instant::now();
    cluster.run(follower);
    runtime.block_on(applied(cluster, follower, wanted))?;
    let reload_s = started.elapsed().as_secs_f64();
    let process = cluster.pid(follower).ok_or("the node has ended")?;
    let (resident, most) = resident_mib(process)?;
    runtime.block_on(check(cluster, follower, groups, share))?;

    measured.bounded("reload_s", reload_s, Bound::AtMost(RELOAD_S_MAX));
    measured.bounded("rss_mib", resident.max(now), Bound::AtMost(RSS_MIB_MAX));
    measured.metric("rss_peak_mib", peak.max(most));
    measured.metric("rss_after_reload_mib", resident);
    if let Some(snapshot_s) = snapshot_s {
        measured.bounded("snapshot_s", snapshot_s, Bound::AtMost(SNAPSHOT_S_MAX));
    }
    Ok(())
}

fn shape(group: u32, share: u32) -> Shape {
    Shape { group: format!("recovery-{group:03}"), members: 1, share, ttl: TTL }
}

/// Makes the groups, and commits an offset for every partition.
async fn fill(leader: &str, groups: u32, share: u32) -> Result<(), BenchError> {
    let channel = connect(leader).await?;
    let all = (0..groups).map(|group| fill_one(leader, channel.clone(), shape(group, share)));
    let mut done = stream::iter(all).buffer_unordered(AT_ONCE);
    while let Some(filled) = done.next().await {
        filled?;
    }
    Ok(())
}

async fn fill_one(leader: &str, channel: Channel, shape: Shape) -> Result<(), BenchError> {
    let (member, grants) = grants_of(leader, &shape).await?;
    let mut client = v1::offsets_client::OffsetsClient::new(channel);
    for part in grants.chunks(REQUEST) {
        let commits = part.iter().map(|grant| v1::OffsetCommit {
            partition: grant.partition.clone(),
            epoch: grant.epoch,
            sequence: 1,
            next_offset: 1_000_000,
            metadata: Vec::new(),
        });
        let (group, member) = (shape.group.clone(), member.clone());
        let request = v1::CommitRequest { group, member, commits: commits.collect() };
        let answer = client.commit(request).await?.into_inner();
        if let Some(error) = answer.verdicts.into_iter().find_map(|verdict| verdict.error) {
            return Err(format!("a commit was refused: {error:?}").into());
        }
    }
    Ok(())
}

async fn status(cluster: &Cluster, node: u64) -> Result<v1::ClusterStatusResponse, BenchError> {
    let position = usize::try_from(node - 1)?;
    let channel = connect(&cluster.addresses()[position]).await?;
    let mut client = v1::cluster_client::ClusterClient::new(channel);
    Ok(client.status(v1::ClusterStatusRequest { local: true }).await?.into_inner())
}

/// Waits a while until every node has written a snapshot; a small state has none.
async fn all_have_snapshots(cluster: &Cluster) -> Result<(), BenchError> {
    let deadline = Instant::now() + SNAPSHOT_WAIT;
    for node in cluster.running() {
        while status(cluster, node).await?.snapshot == 0 && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    Ok(())
}

/// Waits until `node` serves, and has applied the entry `wanted`.
async fn applied(cluster: &Cluster, node: u64, wanted: u64) -> Result<(), BenchError> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if status(cluster, node).await.is_ok_and(|status| status.applied >= wanted) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err(format!("node {node} did not come back:\n{}", cluster.output()).into())
}

/// Compares what `node` has with what was made.
async fn check(cluster: &Cluster, node: u64, groups: u32, share: u32) -> Result<(), BenchError> {
    let position = usize::try_from(node - 1)?;
    let channel = connect(&cluster.addresses()[position]).await?;
    let mut client = v1::ownership_client::OwnershipClient::new(channel);
    let list = client.list_groups(v1::ListGroupsRequest {}).await?.into_inner().groups;
    let is_whole = |group: &v1::GroupSummary| group.partitions == share && group.unowned == 0;
    if list.len() == groups as usize && list.iter().all(is_whole) {
        Ok(())
    } else {
        Err(format!("the node came back with less than it had: {} groups", list.len()).into())
    }
}

/// Longest time that a node says it took to write a snapshot; nothing when none did.
fn longest_snapshot_s(cluster: &Cluster) -> Option<f64> {
    let times = cluster.running().into_iter().filter_map(|node| cluster.process(node));
    let times = times.flat_map(|process| process.lines()).filter_map(|line| took_ms(&line));
    times.map(|took_ms| took_ms / 1_000.0).reduce(f64::max)
}

fn took_ms(line: &str) -> Option<f64> {
    let (_, rest) = line.split_once("snapshot written")?;
    // A colour may stand on both sides of the equals sign.
    let (_, value) = rest.split_once("took_ms")?.1.split_once('=')?;
    let value = value.strip_prefix("\u{1b}[0m").unwrap_or(value);
    let digits = value.chars().take_while(char::is_ascii_digit);
    digits.collect::<String>().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_snapshot_is_read_from_the_log_line() {
        let line = "INFO tenure: snapshot written index=7 size_bytes=12 took_ms=345";
        assert_eq!(took_ms(line), Some(345.0));
        let coloured =
            "INFO snapshot written \u{1b}[3mtook_ms\u{1b}[0m\u{1b}[2m=\u{1b}[0m345 \u{1b}[3mindex";
        assert_eq!(took_ms(coloured), Some(345.0));
        assert_eq!(took_ms("INFO tenure: raft leadership took_ms=1"), None);
    }
}
