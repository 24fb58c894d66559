//! Three etcd nodes, and what a user of etcd would do there: fenced writes and leases.

mod server;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use hdrhistogram::Histogram;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::super::failover::{self, Acks, first_after, largest};
use super::super::load::{connect, endpoint, histogram, quantile_ms, rate, record};
use super::super::{BenchError, median, nodes};
use super::{PeerBeats, PeerCommits};
use server::Etcd;
use wire::{Compare, EtcdClient, KeepAlive, Put, RequestOp, Txn};

const WARM_UP: Duration = Duration::from_secs(1);
/// Lease of a keep-alive, in seconds.
const TTL_S: i64 = 60;
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two kills.
const CALM: Duration = Duration::from_millis(1_500);

/// Fenced writes: put the offset if the owner's key is still what it was when the owner took it.
///
/// Each member first writes each partition by a transaction of its own, all at the same time; then all its partitions
/// by one transaction, in which one that is fenced fails its neighbours.
///
/// # Errors
///
/// When etcd is not to be had, or refuses.
pub(in crate::bench) fn commits(
    members: u32,
    share: u32,
    length: Duration,
) -> Result<PeerCommits, BenchError> {
    let etcd = Etcd::start()?;
    let runtime = nodes::client_runtime()?;
    let leader = etcd.leader(&runtime)?;
    let (each, batched) = runtime.block_on(async {
        let mut single = Vec::new();
        let mut whole = Vec::new();
        for member in 0..members {
            let channel = connect(&leader).await?;
            let mut partitions = Vec::new();
            for partition in 0..share {
                partitions.push(Fenced::own(&channel, member, partition).await?);
            }
            single.extend(partitions.iter().cloned().map(|one| (channel.clone(), vec![one])));
            whole.push((channel, partitions));
        }
        let each = write_all(single, length).await?;
        let batched = write_all(whole, length).await?;
        Ok::<_, BenchError>((each, batched))
    })?;
    Ok(PeerCommits {
        version: Etcd::version(),
        rate_per_s: rate(each.len(), length.as_secs_f64()),
        p50_ms: quantile_ms(&each, 0.5),
        batched_rate_per_s: Some(rate(batched.len() * u64::from(share), length.as_secs_f64())),
    })
}

/// One partition that a member owns.
#[derive(Clone)]
struct Fenced {
    owner: Vec<u8>,
    offset: Vec<u8>,
    /// Revision at which the owner took it.
    since: i64,
}

impl Fenced {
    async fn own(channel: &Channel, member: u32, partition: u32) -> Result<Self, BenchError> {
        let owner = format!("owner/{member}/{partition}").into_bytes();
        let put = Put { key: owner.clone(), value: b"member".to_vec(), lease: 0 };
        let since = EtcdClient::new(channel.clone()).put(put).await?;
        Ok(Self { owner, offset: format!("offset/{member}/{partition}").into_bytes(), since })
    }

    fn compare(&self) -> Compare {
        Compare::modified_at(self.owner.clone(), self.since)
    }

    fn put(&self, next: u64) -> RequestOp {
        let value = next.to_string().into_bytes();
        RequestOp::put(Put { key: self.offset.clone(), value, lease: 0 })
    }
}

/// All writers at the same time, each with one transaction under way; gives the times after the warm-up.
async fn write_all(
    writers: Vec<(Channel, Vec<Fenced>)>,
    length: Duration,
) -> Result<Histogram<u64>, BenchError> {
    let (timed, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let tasks = writers.into_iter().map(|(channel, partitions)| {
        let (timed, stop) = (Arc::clone(&timed), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut client = EtcdClient::new(channel);
            let mut times = histogram();
            for next in 1.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let txn = Txn {
                    compare: partitions.iter().map(Fenced::compare).collect(),
                    success: partitions.iter().map(|one| one.put(next)).collect(),
                };
                let is_timed = timed.load(Ordering::Relaxed);
                let started = Instant::now();
                if !client.txn(txn).await? {
                    return Err(BenchError::from("etcd says that the owner has changed"));
                }
                if is_timed {
                    record(&mut times, started);
                }
            }
            Ok(times)
        })
    });
    let tasks: Vec<_> = tasks.collect();
    tokio::time::sleep(WARM_UP).await;
    timed.store(true, Ordering::Relaxed);
    tokio::time::sleep(length).await;
    stop.store(true, Ordering::Relaxed);
    let mut all = histogram();
    for times in try_join_all(tasks).await? {
        all.add(times?)?;
    }
    Ok(all)
}

/// Keep-alives of one lease for each member, over a connection and a stream of its own.
///
/// # Errors
///
/// As [`commits`].
pub(in crate::bench) fn keep_alives(
    members: u32,
    length: Duration,
) -> Result<PeerBeats, BenchError> {
    let etcd = Etcd::start()?;
    let runtime = nodes::client_runtime()?;
    let leader = etcd.leader(&runtime)?;
    let times = runtime.block_on(async {
        let (timed, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut tasks = Vec::new();
        for _ in 0..members {
            let channel = connect(&leader).await?;
            let (timed, stop) = (Arc::clone(&timed), Arc::clone(&stop));
            tasks.push(tokio::spawn(keep_alive(channel, timed, stop)));
        }
        tokio::time::sleep(WARM_UP).await;
        timed.store(true, Ordering::Relaxed);
        tokio::time::sleep(length).await;
        stop.store(true, Ordering::Relaxed);
        let mut all = histogram();
        for times in try_join_all(tasks).await? {
            all.add(times?)?;
        }
        Ok::<_, BenchError>(all)
    })?;
    Ok(PeerBeats {
        version: Etcd::version(),
        rate_per_s: rate(times.len(), length.as_secs_f64()),
        p50_ms: quantile_ms(&times, 0.5),
    })
}

async fn keep_alive(
    channel: Channel,
    timed: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
) -> Result<Histogram<u64>, BenchError> {
    let mut client = EtcdClient::new(channel);
    let id = client.grant(TTL_S).await?;
    let (up, outbound) = mpsc::channel(4);
    let mut down = None;
    let mut times = histogram();
    let mut outbound = Some(outbound);
    while !stop.load(Ordering::Relaxed) {
        let is_timed = timed.load(Ordering::Relaxed);
        let started = Instant::now();
        up.send(KeepAlive { id }).await?;
        if let Some(outbound) = outbound.take() {
            down = Some(client.keep_alive(ReceiverStream::new(outbound)).await?);
        }
        let answers = down.as_mut().ok_or("the stream was not opened")?;
        let answer = answers.message().await?.ok_or("etcd ended a stream")?;
        if answer.ttl <= 0 {
            return Err("a lease ran out".into());
        }
        if is_timed {
            record(&mut times, started);
        }
    }
    Ok(times)
}

/// Kills the leader time after time while puts go on; gives the version and the gaps in milliseconds.
///
/// # Errors
///
/// As [`commits`].
pub(in crate::bench) fn failover(kills: u32) -> Result<(String, Vec<f64>), BenchError> {
    let mut etcd = Etcd::start()?;
    let runtime = nodes::client_runtime()?;
    let acks = Acks::default();
    let stop = Arc::new(AtomicBool::new(false));
    for writer in 0..failover::WRITERS {
        let (addresses, acks) = (etcd.addresses().to_vec(), acks.clone());
        runtime.spawn(put_on(addresses, writer, acks, Arc::clone(&stop)));
    }
    let mut gaps = Vec::new();
    for _ in 0..kills {
        runtime.block_on(async { tokio::time::sleep(CALM).await });
        let leader = etcd.leader(&runtime)?;
        let at = Instant::now();
        etcd.kill(&leader)?;
        let answered = runtime.block_on(first_after(&acks, at, PATIENCE))?;
        gaps.push((answered - at).as_secs_f64() * 1_000.0);
        etcd.run(&leader)?;
    }
    stop.store(true, Ordering::Relaxed);
    if largest(&gaps) > 0.0 && median(&gaps) > 0.0 {
        Ok((Etcd::version(), gaps))
    } else {
        Err("no gap was seen".into())
    }
}

/// Puts without end, at whichever node answers.
async fn put_on(addresses: Vec<String>, writer: u32, acks: Acks, stop: Arc<AtomicBool>) {
    let channels = addresses.iter().filter_map(|address| endpoint(address).ok());
    let channels: Vec<Channel> = channels.map(|endpoint| endpoint.connect_lazy()).collect();
    let key = format!("failover/{writer}").into_bytes();
    let mut at = 0;
    while !stop.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let put = Put { key: key.clone(), value: b"value".to_vec(), lease: 0 };
        let mut client = EtcdClient::new(channels[at].clone());
        match timeout(failover::CALL_LIMIT, client.put(put)).await {
            Ok(Ok(_revision)) => acks.note(sent),
            Ok(Err(_)) => {
                tokio::time::sleep(failover::RETRY_PAUSE).await;
                at = (at + 1) % channels.len();
            }
            Err(_elapsed) => at = (at + 1) % channels.len(),
        }
        tokio::time::sleep(failover::WRITE_PAUSE).await;
    }
}
