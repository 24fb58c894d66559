//! Heartbeats of many members, each with what it holds and how far it is.

use std::time::Duration;

use super::beside::{self, Peer};
use super::disk::Syncs;
use super::load::{Crew, Pace, Shape, note_times, rate};
use super::usage::Meter;
use super::{BenchError, Bound, Measured, Options, Scenario, nodes};
use crate::cluster::Cluster;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "heartbeats",
    about: "heartbeats with positions: members, each with the next one as soon as one is answered",
    run,
};

/// Members, each over a connection of its own.
const MEMBERS: u32 = 400;
/// Partitions of each member, all in every heartbeat and in every answer.
const SHARE: u32 = 16;
const TTL: Duration = Duration::from_secs(10);

const LENGTH: Duration = Duration::from_secs(10);
const WARM_UP: Duration = Duration::from_secs(2);

/// Heartbeats answered in a second.
const RATE_MIN: f64 = 50_000.0;

fn run(options: &Options) -> Result<Measured, BenchError> {
    let length = options.length(LENGTH);
    let mut measured = Measured::default();
    let cluster = Cluster::start_with(nodes::COUNT, nodes::settings(options.is_small));
    let own_rate = measure(&mut measured, &cluster, length, options.is_small);
    let own_rate = nodes::with_output(&cluster, own_rate)?;
    drop(cluster);
    match options.beside {
        None => {}
        Some(Peer::Etcd) => {
            let found = beside::etcd::keep_alives(MEMBERS, length)?;
            measured.setup("beside", found.version.as_str());
            measured.metric("etcd_rate_per_s", found.rate_per_s);
            measured.metric("etcd_p50_ms", found.p50_ms);
            measured.metric("ratio_to_etcd", own_rate / found.rate_per_s);
        }
        Some(Peer::Kafka) => return Err("kafka stands beside `commits` only".into()),
    }
    Ok(measured)
}

fn measure(
    measured: &mut Measured,
    cluster: &Cluster,
    length: Duration,
    is_small: bool,
) -> Result<f64, BenchError> {
    let (members, warm_up) =
        if is_small { (8, Duration::from_millis(100)) } else { (MEMBERS, WARM_UP) };
    nodes::note(measured, cluster);
    measured.setup("members", members);
    measured.setup("partitions_per_heartbeat", SHARE);
    measured.setup("seconds", length.as_secs_f64());
    let mut syncs = Syncs::default();
    syncs.time(cluster.folder())?;
    syncs.note(measured);

    let leader = nodes::leader_address(cluster);
    let shape = Shape { group: "heartbeats".to_owned(), members, share: SHARE, ttl: TTL };
    let runtime = nodes::client_runtime()?;
    let crew = runtime.block_on(Crew::join(&leader, shape))?;
    runtime.block_on(async {
        crew.set_pace(Pace::WarmUp);
        tokio::time::sleep(warm_up).await;
    });
    crew.set_pace(Pace::Timed);
    let meter = Meter::start(nodes::processes(cluster))?;
    runtime.block_on(async { tokio::time::sleep(length).await });
    crew.set_pace(Pace::Calm);
    let used = meter.stop()?;
    let beats = runtime.block_on(crew.close())?;

    let own_rate = rate(beats.0.len(), used.wall_s);
    measured.bounded("rate_per_s", own_rate, Bound::AtLeast(RATE_MIN));
    note_times(measured, ["p50_ms", "p99_ms"], &beats.0);
    let (nodes_us, client_us) = used.per_operation_us(beats.0.len());
    measured.metric("nodes_cpu_us_per_heartbeat", nodes_us);
    measured.metric("client_cpu_us_per_heartbeat", client_us);
    measured.metric("cpus_used", (used.nodes_s + used.client_s) / used.wall_s);
    Ok(own_rate)
}
