//! Offset commits through three durable nodes.

use std::time::Duration;

use super::beside::{self, Peer, PeerCommits};
use super::disk::Syncs;
use super::load::{
    Calls, Committer, Crew, Shape, Stretch, commit_all, note_times, quantile_ms, rate,
};
use super::usage::{Meter, Used, disk_flushes};
use super::{BenchError, Bound, Measured, Options, Scenario, nodes};
use crate::cluster::Cluster;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "commits",
    about: "offset commits: members, each with one request for all its partitions under way; then one alone",
    run,
};

/// Members, each over a connection of its own.
const MEMBERS: u32 = 64;
/// Partitions of each member, all in one request.
const SHARE: u32 = 16;
const TTL: Duration = Duration::from_secs(10);

const LENGTH: Duration = Duration::from_secs(10);
const WARM_UP: Duration = Duration::from_secs(2);
const LONE_LENGTH: Duration = Duration::from_secs(3);

/// Partitions whose offset is committed, in a second.
const RATE_MIN: f64 = 150_000.0;
/// How many times the fenced writes of etcd.
const ETCD_RATIO_MIN: f64 = 10.0;
/// How many times the offset commits of Kafka.
const KAFKA_RATIO_MIN: f64 = 4.0;

/// A lone commit takes at most this many syncs of the disk, and a millisecond.
const LONE_SYNCS_MAX: f64 = 3.0;

fn run(options: &Options) -> Result<Measured, BenchError> {
    let length = options.length(LENGTH);
    let mut measured = Measured::default();
    let cluster = Cluster::start_with(nodes::COUNT, nodes::settings(options.is_small));
    let own_rate = measure(&mut measured, &cluster, length, options);
    let own_rate = nodes::with_output(&cluster, own_rate)?;
    drop(cluster);
    let Some(peer) = options.beside else { return Ok(measured) };
    let (bound, found) = match peer {
        Peer::Etcd => (ETCD_RATIO_MIN, beside::etcd::commits(MEMBERS, SHARE, length)?),
        Peer::Kafka => (KAFKA_RATIO_MIN, beside::kafka::commits(MEMBERS, SHARE, length)?),
    };
    note_peer(&mut measured, own_rate, peer, bound, &found);
    Ok(measured)
}

fn note_peer(measured: &mut Measured, own: f64, peer: Peer, bound: f64, found: &PeerCommits) {
    measured.setup("beside", found.version.as_str());
    match peer {
        Peer::Etcd => {
            measured.metric("etcd_rate_per_s", found.rate_per_s);
            measured.metric("etcd_p50_ms", found.p50_ms);
            measured.bounded("ratio_to_etcd", own / found.rate_per_s, Bound::AtLeast(bound));
            if let Some(batched) = found.batched_rate_per_s {
                measured.metric("etcd_batched_rate_per_s", batched);
                measured.metric("ratio_to_etcd_batched", own / batched);
            }
        }
        Peer::Kafka => {
            measured.metric("kafka_rate_per_s", found.rate_per_s);
            measured.metric("kafka_p50_ms", found.p50_ms);
            measured.bounded("ratio_to_kafka", own / found.rate_per_s, Bound::AtLeast(bound));
        }
    }
}

/// Gives the partitions per second, as called the way that a peer is if there is one.
fn measure(
    measured: &mut Measured,
    cluster: &Cluster,
    length: Duration,
    &Options { is_small, beside, .. }: &Options,
) -> Result<f64, BenchError> {
    let (members, warm_up) = if is_small { (4, Duration::ZERO) } else { (MEMBERS, WARM_UP) };
    nodes::note(measured, cluster);
    measured.setup("members", members);
    measured.setup("partitions_per_request", SHARE);
    measured.setup("seconds", length.as_secs_f64());
    let mut syncs = Syncs::default();
    syncs.time(cluster.folder())?;

    let leader = nodes::leader_address(cluster);
    let shape = Shape { group: "commits".to_owned(), members, share: SHARE, ttl: TTL };
    let runtime = nodes::client_runtime()?;
    let crew = runtime.block_on(Crew::join(&leader, shape))?;
    let group = &crew.shape.group;
    let all = |member| Committer::of(group, member, SHARE as usize);
    let committers = crew.members.iter().map(all).collect();
    let (committers, _) = runtime.block_on(commit_all(committers, Calls::Lean, warm_up))?;

    let meter = Meter::start(nodes::processes(cluster))?;
    let flushes = disk_flushes(cluster.folder());
    let (committers, stretch) = runtime.block_on(commit_all(committers, Calls::Lean, length))?;
    let used = meter.stop()?;
    let flushed = disk_flushes(cluster.folder()).zip(flushes).map(|(after, before)| after - before);
    let lean_rate = note_many(measured, &stretch, used, flushed);
    let (committers, own_rate) = match beside {
        None => (committers, lean_rate),
        Some(_) => {
            let (committers, stretch) =
                runtime.block_on(commit_all(committers, Calls::Common, length))?;
            let partitions = stretch.times.len() * u64::from(SHARE);
            let common_rate = rate(partitions, length.as_secs_f64());
            measured.metric("common_client_rate_per_s", common_rate);
            (committers, common_rate)
        }
    };

    runtime.block_on(async {
        for mut committer in committers {
            committer.check().await?;
        }
        Ok::<_, BenchError>(())
    })?;
    let mut lone = Committer::of(group, &crew.members[0], 1);
    runtime.block_on(lone.resume())?;
    let lone_length = if is_small { length } else { LONE_LENGTH };
    let (_, lone) = runtime.block_on(commit_all(vec![lone], Calls::Lean, lone_length))?;
    syncs.time(cluster.folder())?;
    note_times(measured, ["lone_p50_ms", "lone_p99_ms"], &lone.times);
    syncs.note(measured);
    let syncs_in_lone = (quantile_ms(&lone.times, 0.5) - 1.0) / syncs.p50_ms();
    measured.bounded(
        "lone_p50_less_1_ms_in_fdatasyncs",
        syncs_in_lone,
        Bound::AtMost(LONE_SYNCS_MAX),
    );
    runtime.block_on(crew.close())?;
    Ok(own_rate)
}

fn note_many(measured: &mut Measured, stretch: &Stretch, used: Used, flushed: Option<u64>) -> f64 {
    let requests = stretch.times.len();
    let partitions = requests * u64::from(SHARE);
    let own_rate = rate(partitions, used.wall_s);
    measured.bounded("rate_per_s", own_rate, Bound::AtLeast(RATE_MIN));
    measured.metric("requests_per_s", rate(requests, used.wall_s));
    note_times(measured, ["p50_ms", "p99_ms"], &stretch.times);
    let (nodes_us, client_us) = used.per_operation_us(partitions);
    measured.metric("nodes_cpu_us_per_partition", nodes_us);
    measured.metric("client_cpu_us_per_partition", client_us);
    measured.metric("cpus_used", (used.nodes_s + used.client_s) / used.wall_s);
    let entries = stretch.entries.1.saturating_sub(stretch.entries.0) + 1;
    measured.metric("requests_per_entry", rate(requests, 1.0) / rate(entries, 1.0));
    if let Some(flushed) = flushed {
        measured.metric("disk_flushes_per_s", rate(flushed, used.wall_s));
    }
    own_rate
}
