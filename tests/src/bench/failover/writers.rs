//! Members that commit all the time, wherever the raft leader is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tenure_proto::error_of_status;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;

use super::super::BenchError;
use super::super::load::{Committer, Crew, endpoint};

/// Pause between two commits of one writer: the machine is not to be full.
pub(in crate::bench) const WRITE_PAUSE: Duration = Duration::from_millis(2);
/// Pause before the next node is asked.
pub(in crate::bench) const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// A request that takes longer is asked of another node.
pub(in crate::bench) const CALL_LIMIT: Duration = Duration::from_secs(1);

/// When acknowledged commits were sent and answered, in the order of the answers.
#[derive(Clone, Debug, Default)]
pub(in crate::bench) struct Acks(Arc<Mutex<Vec<(Instant, Instant)>>>);

impl Acks {
    pub(in crate::bench) fn note(&self, sent: Instant) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((sent, Instant::now()));
    }

    pub(in crate::bench) fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn find(&self, wanted: impl Fn(Instant, Instant) -> bool) -> Option<Instant> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let from = all.partition_point(|(_, answered)| !wanted(*answered, *answered));
        all[from..].iter().find(|(sent, answered)| wanted(*sent, *answered)).map(|found| found.1)
    }
}

/// Waits for the answer of the first commit that was sent after `at`, and gives its moment.
pub(in crate::bench) async fn first_after(
    acks: &Acks,
    at: Instant,
    patience: Duration,
) -> Result<Instant, BenchError> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(answered) = acks.find(|sent, _| sent >= at) {
            return Ok(answered);
        }
        if Instant::now() >= deadline {
            return Err("nothing was committed any more".into());
        }
        sleep(Duration::from_millis(2)).await;
    }
}

/// Longest time between two answers from `from` to `until`, what is open at both ends included.
pub(in crate::bench) fn longest_gap(acks: &Acks, from: Instant, until: Instant) -> Duration {
    let all = acks.0.lock().unwrap_or_else(PoisonError::into_inner);
    let mut last = from;
    let mut longest = Duration::ZERO;
    for (_, answered) in all.iter().filter(|(_, at)| (from..until).contains(at)) {
        longest = longest.max(answered.saturating_duration_since(last));
        last = *answered;
    }
    longest.max(until.saturating_duration_since(last))
}

/// See the module.
pub(super) struct Writers {
    acks: Acks,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Result<Committer, BenchError>>>,
}

impl Writers {
    /// One for each member. Call it inside a runtime.
    pub(super) fn start(crew: &Crew, addresses: &[String]) -> Self {
        let acks = Acks::default();
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = crew.members.iter().map(|member| {
            let committer = Committer::of(&crew.shape.group, member, usize::MAX);
            let (route, acks) = (Route::new(addresses.to_vec()), acks.clone());
            tokio::spawn(write(committer, route, acks, Arc::clone(&stop)))
        });
        Self { acks: acks.clone(), tasks: tasks.collect(), stop }
    }

    pub(super) fn acks(&self) -> &Acks {
        &self.acks
    }

    /// Ends them, and compares what is committed with what was acknowledged.
    pub(super) async fn stop_and_check(self) -> Result<(), BenchError> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await??.check().await?;
        }
        Ok(())
    }
}

async fn write(
    mut committer: Committer,
    mut route: Route,
    acks: Acks,
    stop: Arc<AtomicBool>,
) -> Result<Committer, BenchError> {
    committer.go_to(route.channel()?);
    while !stop.load(Ordering::Relaxed) {
        committer.advance();
        loop {
            let sent = Instant::now();
            match timeout(CALL_LIMIT, committer.send()).await {
                Ok(Ok(_index)) => {
                    acks.note(sent);
                    break;
                }
                Ok(Err(status)) => {
                    let error = error_of_status(&status);
                    if error.leader_address.is_empty() {
                        sleep(RETRY_PAUSE).await;
                        route.turn();
                    } else if !route.follow(&error.leader_address) {
                        sleep(RETRY_PAUSE).await;
                    }
                }
                Err(_elapsed) => route.turn(),
            }
            committer.go_to(route.channel()?);
        }
        sleep(WRITE_PAUSE).await;
    }
    Ok(committer)
}

/// Which node is asked.
struct Route {
    nodes: Vec<String>,
    at: usize,
    channels: BTreeMap<String, Channel>,
}

impl Route {
    const fn new(nodes: Vec<String>) -> Self {
        Self { nodes, at: 0, channels: BTreeMap::new() }
    }

    fn channel(&mut self) -> Result<Channel, BenchError> {
        let address = &self.nodes[self.at];
        if let Some(channel) = self.channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = endpoint(address)?.connect_lazy();
        self.channels.insert(address.clone(), channel.clone());
        Ok(channel)
    }

    fn turn(&mut self) {
        self.at = (self.at + 1) % self.nodes.len();
    }

    /// Goes where a node said that the raft leader is; false when that is the node that was asked.
    fn follow(&mut self, address: &str) -> bool {
        let before = self.at;
        self.at = self.nodes.iter().position(|node| node == address).unwrap_or(before);
        self.at != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_counts_what_is_open_at_both_ends() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let acks = Acks::default();
        acks.0.lock().unwrap().extend([(at(0), at(10)), (at(11), at(50)), (at(51), at(60))]);
        assert_eq!(longest_gap(&acks, at(0), at(70)), Duration::from_millis(40));
        assert_eq!(longest_gap(&acks, at(0), at(200)), Duration::from_millis(140));
        assert_eq!(longest_gap(&acks, at(20), at(55)), Duration::from_millis(30));
        assert_eq!(acks.find(|sent, _| sent >= at(11)), Some(at(50)));
        assert_eq!(acks.find(|sent, _| sent >= at(12)), Some(at(60)));
    }
}
