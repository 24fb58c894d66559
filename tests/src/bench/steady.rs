//! Whether the raft leader stays on a machine that is full.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::load::{Calls, Committer, Crew, Shape, commit_all, note_times};
use super::{BenchError, Bound, Measured, Options, Scenario, nodes};
use crate::cluster::Cluster;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "steady",
    about: "elections while commits go on beside one busy loop for each processor",
    run,
};

const LENGTH: Duration = Duration::from_secs(50);
const MEMBERS: u32 = 4;
const SHARE: u32 = 4;
const TTL: Duration = Duration::from_secs(10);

fn run(options: &Options) -> Result<Measured, BenchError> {
    let length = options.length(LENGTH);
    let cluster = Cluster::start_with(nodes::COUNT, "");
    let mut measured = Measured::default();
    // What else runs beside a small one is load enough.
    let done = measure(&mut measured, &cluster, length, !options.is_small);
    nodes::with_output(&cluster, done)?;
    Ok(measured)
}

fn measure(
    measured: &mut Measured,
    cluster: &Cluster,
    length: Duration,
    has_busy_loops: bool,
) -> Result<(), BenchError> {
    nodes::note(measured, cluster);
    measured.setup("seconds", length.as_secs_f64());
    let runtime = nodes::client_runtime()?;
    let leader = nodes::leader_address(cluster);
    let shape = Shape { group: "steady".to_owned(), members: MEMBERS, share: SHARE, ttl: TTL };
    let crew = runtime.block_on(Crew::join(&leader, shape))?;
    let group = &crew.shape.group;
    let committers = crew.members.iter().map(|member| Committer::of(group, member, usize::MAX));
    let (_, term_before) = cluster.raft_leader();
    let loops = BusyLoops::start(has_busy_loops);
    measured.setup("busy_loops", loops.0.1);
    let started = Instant::now();
    let committed = runtime.block_on(commit_all(committers.collect(), Calls::Lean, length));
    drop(loops);
    let (_, term_after) = cluster.raft_leader();
    let elections = term_after - term_before;
    #[allow(clippy::cast_precision_loss, reason = "a bench sees few elections")]
    measured.bounded("elections", elections as f64, Bound::AtMost(0.0));
    let (committers, stretch) = committed.map_err(|error| {
        format!("{error}, after {elections} elections in {:?}", started.elapsed())
    })?;
    note_times(measured, ["p50_ms", "p99_ms"], &stretch.times);
    measured.metric("max_ms", super::load::quantile_ms(&stretch.times, 1.0));
    runtime.block_on(async {
        for mut committer in committers {
            committer.check().await?;
        }
        crew.close().await
    })?;
    Ok(())
}

/// One thread for each processor that never rests, until this is dropped; or none.
struct BusyLoops((Arc<AtomicBool>, usize));

impl BusyLoops {
    fn start(is_wanted: bool) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism();
        let count = if is_wanted { processors.map_or(1, std::num::NonZeroUsize::get) } else { 0 };
        for _ in 0..count {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self((stop, count))
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}
