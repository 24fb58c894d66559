//! Tasks beside the raft library's own: who leads, when it stops, when a snapshot is due.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use openraft::Instant as _;
use openraft::async_runtime::watch::WatchReceiver as _;
use tenure_model::Term;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::failure::Failure;
use super::identity::{Identity, IdentityFile, Stage};
use super::log::Wal;
use super::machine::Machine;
use super::service::Library;
use super::types::{Metrics, NodeId};
use super::{Leadership, StopReason};
use crate::in_place::off_thread;

/// How often the size of the log is looked at.
const SIZE_PERIOD: Duration = Duration::from_millis(500);

/// Handles of the tasks.
#[derive(Default)]
pub(crate) struct Background(Mutex<Vec<JoinHandle<()>>>);

impl Background {
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(tokio::spawn(task));
    }

    pub(crate) fn stop(&self) {
        for task in self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }
}

/// Publishes who leads and why the node stopped, until it did.
pub(crate) async fn observe<M: Machine>(
    library: Library<M>,
    me: NodeId,
    leadership: watch::Sender<Leadership>,
    stopped: Arc<watch::Sender<Option<StopReason>>>,
    failure: Failure,
) {
    let mut metrics = library.metrics();
    drop(library);
    loop {
        let now = metrics.borrow_and_update().clone();
        publish(&leadership, leadership_of(&now, me));
        let ended = now.running_state.err();
        if ended.is_none() && metrics.changed().await.is_ok() {
            continue;
        }
        let term = Term(now.current_term);
        publish(&leadership, Leadership { term, ..Leadership::default() });
        // A shutdown on request has said so before.
        let reason = match (failure.get(), ended) {
            (Some(first), _) => StopReason::Failed(first.to_owned()),
            (None, Some(fatal)) => StopReason::Failed(fatal.to_string()),
            (None, None) => StopReason::Failed("the raft task ended".to_owned()),
        };
        stopped.send_if_modified(|stopped| {
            let first = stopped.is_none();
            if first {
                tracing::error!(?reason, "raft stopped");
                *stopped = Some(reason);
            }
            first
        });
        return;
    }
}

fn publish(sender: &watch::Sender<Leadership>, now: Leadership) {
    sender.send_if_modified(|before| {
        let changed = *before != now;
        if changed {
            tracing::info!(term = %now.term, leader = ?now.leader, is_me = now.is_me, "raft leadership");
            *before = now;
        }
        changed
    });
}

fn leadership_of(metrics: &Metrics, me: NodeId) -> Leadership {
    let term = metrics.current_term;
    let leader = metrics.current_leader;
    let node = leader.and_then(|id| metrics.membership_config.get_node(&id));
    let applied_term = metrics.last_applied.map(|id| id.leader_id.term);
    Leadership {
        term: Term(term),
        leader,
        leader_client_address: node.map(|node| node.client_address.clone()),
        is_me: leader == Some(me) && metrics.state.is_leader() && applied_term == Some(term),
    }
}

/// Writes down that the folder has a log, once a joining node got its first entry.
pub(crate) async fn establish<M: Machine>(
    library: Library<M>,
    file: IdentityFile,
    mut identity: Identity,
    failure: Failure,
) {
    let mut metrics = library.metrics();
    drop(library);
    while metrics.borrow_and_update().last_log_index.is_none() {
        if metrics.changed().await.is_err() {
            return;
        }
    }
    identity.stage = Stage::Established;
    let written = off_thread(move || file.write(&identity)).await;
    let written = written.and_then(|done| done.map_err(std::io::Error::other));
    // The node stops with the next write after a failure.
    drop(failure.check("write identity", written));
}

/// Triggers a snapshot whenever the log on disk has grown to `threshold_bytes`.
///
/// If entries must be kept although a snapshot has them, the log stays large: then only when it has grown by
/// another quarter.
pub(crate) async fn snapshot_by_size<M: Machine>(
    library: Library<M>,
    wal: Wal,
    threshold_bytes: u64,
) {
    let metrics = library.metrics();
    let mut smallest_since = 0;
    let mut ticks = tokio::time::interval(SIZE_PERIOD);
    loop {
        ticks.tick().await;
        let Some(size_bytes) = wal.size_bytes() else { return };
        smallest_since = size_bytes.min(smallest_since);
        if size_bytes < threshold_bytes || size_bytes < smallest_since + threshold_bytes / 4 {
            continue;
        }
        let (applied, snapshot) = {
            let now = metrics.borrow_watched();
            (now.last_applied, now.snapshot)
        };
        if applied == snapshot {
            continue;
        }
        tracing::info!(wal_bytes = size_bytes, "the raft log has grown, writing a snapshot");
        smallest_since = size_bytes;
        if library.trigger().snapshot().await.is_err() {
            return;
        }
    }
}

/// Gives leadership up once no majority has answered for `patience`.
///
/// The others hear a leader that does not hear them, and would wait for it for ever.
pub(crate) async fn step_down<M: Machine>(library: Library<M>, patience: Duration) {
    let metrics = library.metrics();
    let period = patience / 8;
    let mut last_look = tokio::time::Instant::now();
    // When this node was first seen to lead its term: there may be no answer yet.
    let mut leads_since: Option<(u64, tokio::time::Instant)> = None;
    let mut attempts = 0;
    loop {
        tokio::time::sleep(period).await;
        let now = tokio::time::Instant::now();
        let stood_still = now - last_look > 2 * period;
        last_look = now;
        let (term, leads, acked_ago, next) = {
            let seen = metrics.borrow_watched();
            let others: Vec<NodeId> =
                seen.membership_config.voter_ids().filter(|voter| *voter != seen.id).collect();
            let leads = seen.state.is_leader() && !others.is_empty();
            // Another one each time: the first may be dead.
            let next = others.get(attempts % others.len().max(1)).copied();
            (seen.current_term, leads, seen.last_quorum_acked.map(|at| at.elapsed()), next)
        };
        // After a pause of this process the others get their time to answer.
        if !leads || stood_still {
            leads_since = None;
            continue;
        }
        let since = match leads_since {
            Some((known, since)) if known == term => since,
            Some(_) | None => leads_since.insert((term, now)).1,
        };
        let unheard = now - since;
        if acked_ago.unwrap_or(unheard) < patience || unheard < patience {
            continue;
        }
        tracing::warn!(term, ?acked_ago, to = ?next, "no majority answers, leadership is given up");
        leads_since = None;
        attempts += 1;
        // From then on it sends no heartbeats: the other may take over, and so may everybody else in time.
        let Some(next) = next else { continue };
        if library.trigger().transfer_leader(next).await.is_err() {
            return;
        }
    }
}
