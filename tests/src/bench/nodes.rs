//! The three coordinators of a scenario.

use tokio::runtime::{Builder, Runtime};

use super::{BenchError, Measured};
use crate::cluster::Cluster;

/// Nodes of every cluster here.
pub(super) const COUNT: u64 = 3;

/// Settings of a small run: nothing is measured, so no election may come between on a machine that is full.
const PATIENT: &str = "
[raft]
election_timeout_min_ms = 3000
election_timeout_max_ms = 6000
";

/// Settings of the nodes where no election belongs to the scenario.
pub(super) const fn settings(is_small: bool) -> &'static str {
    if is_small { PATIENT } else { "" }
}

/// Threads of the client.
const CLIENT_THREADS: usize = 2;

/// Runtime of the client's side.
///
/// # Errors
///
/// When the system gives no threads.
pub(super) fn client_runtime() -> Result<Runtime, BenchError> {
    Ok(Builder::new_multi_thread().worker_threads(CLIENT_THREADS).enable_all().build()?)
}

/// Notes what the figures depend on.
pub(super) fn note(measured: &mut Measured, cluster: &Cluster) {
    measured.setup("nodes", COUNT);
    measured.setup("transport", "gRPC over loopback, one connection for each member");
    measured.setup("data", cluster.folder().display().to_string());
}

/// Where members reach the raft leader.
pub(super) fn leader_address(cluster: &Cluster) -> String {
    let (leader, _term) = cluster.raft_leader();
    let position = usize::try_from(leader - 1).expect("a small number");
    cluster.addresses()[position].clone()
}

/// Process ids of the nodes that run.
pub(super) fn processes(cluster: &Cluster) -> Vec<u32> {
    cluster.running().into_iter().filter_map(|node| cluster.pid(node)).collect()
}

/// Adds to an error what the nodes wrote last.
pub(super) fn with_output<T>(
    cluster: &Cluster,
    result: Result<T, BenchError>,
) -> Result<T, BenchError> {
    result.map_err(|error| format!("{error}\n{}", cluster.output()).into())
}
