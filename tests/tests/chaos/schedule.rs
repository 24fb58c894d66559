//! What is done to the workers, and when: made from a seed before anything runs, so that a seed repeats it.

use std::fmt;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Shortest and longest time that a worker stays impaired, in seconds.
const IMPAIRED_S: (u64, u64) = (1, 4);

/// One of so many seconds in which nobody is impaired hits all workers.
const ALL_ONE_IN: u32 = 12;

/// One act on the workers, which are numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// SIGSTOP.
    Stop(usize),
    /// SIGCONT after a stop.
    Wake(usize),
    /// SIGKILL.
    Kill(usize),
    /// A new process in place of one that was killed.
    Start(usize),
    /// SIGTERM, its end, and a new process.
    Restart(usize),
    /// The operator takes all partitions away.
    Drain(usize),
    /// The operator gives partitions again.
    Undrain(usize),
    /// SIGSTOP to all, within a moment.
    StopAll,
    /// SIGCONT to all.
    WakeAll,
    /// SIGKILL to all, within a moment.
    KillAll,
    /// New processes in place of all.
    StartAll,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stop(worker) => write!(f, "stop {worker}"),
            Self::Wake(worker) => write!(f, "wake {worker}"),
            Self::Kill(worker) => write!(f, "kill {worker}"),
            Self::Start(worker) => write!(f, "start {worker}"),
            Self::Restart(worker) => write!(f, "restart {worker}"),
            Self::Drain(worker) => write!(f, "drain {worker}"),
            Self::Undrain(worker) => write!(f, "undrain {worker}"),
            Self::StopAll => f.write_str("stop all"),
            Self::WakeAll => f.write_str("wake all"),
            Self::KillAll => f.write_str("kill all"),
            Self::StartAll => f.write_str("start all"),
        }
    }
}

/// Which acts a schedule has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All of them.
    Everything,
    /// Only stops, each longer than a lease: those that stale writes come from.
    LongStops,
}

/// Acts with the second in which each is due. At most one worker is impaired at a time, or all are; none is at the end.
pub(crate) fn schedule(seed: u64, seconds: u64, workers: usize, kind: Kind) -> Vec<(u64, Act)> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut acts = Vec::new();
    let mut cure: Option<(u64, Act)> = None;
    for second in 1..=seconds {
        if let Some((since, act)) = cure {
            let length = second - since;
            let (least, most) = match kind {
                Kind::Everything => IMPAIRED_S,
                Kind::LongStops => (IMPAIRED_S.1, IMPAIRED_S.1),
            };
            let is_over = length >= most || (length >= least && random.random_bool(0.5));
            if !is_over && second < seconds {
                continue;
            }
            acts.push((second, act));
        }
        if second == seconds {
            break;
        }
        let (act, cured_by) = impair(&mut random, workers, kind);
        acts.push((second, act));
        cure = cured_by.map(|cured_by| (second, cured_by));
    }
    acts
}

/// An act that impairs, and the one that ends it.
fn impair(random: &mut StdRng, workers: usize, kind: Kind) -> (Act, Option<Act>) {
    let worker = random.random_range(0..workers);
    if kind == Kind::LongStops {
        return (Act::Stop(worker), Some(Act::Wake(worker)));
    }
    if random.random_ratio(1, ALL_ONE_IN) {
        return match random.random_bool(0.5) {
            true => (Act::StopAll, Some(Act::WakeAll)),
            false => (Act::KillAll, Some(Act::StartAll)),
        };
    }
    match random.random_range(0..4) {
        0 => (Act::Stop(worker), Some(Act::Wake(worker))),
        1 => (Act::Kill(worker), Some(Act::Start(worker))),
        2 => (Act::Restart(worker), None),
        _ => (Act::Drain(worker), Some(Act::Undrain(worker))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_repeats_its_schedule_and_at_most_one_worker_or_all_are_impaired() {
        for seed in 0..200 {
            let acts = schedule(seed, 60, 3, Kind::Everything);
            assert_eq!(acts, schedule(seed, 60, 3, Kind::Everything));
            let mut impaired = None;
            for (_, act) in &acts {
                impaired = match (act, impaired) {
                    (Act::Restart(_), None) => None,
                    (
                        Act::Stop(_) | Act::Kill(_) | Act::Drain(_) | Act::StopAll | Act::KillAll,
                        None,
                    ) => Some(*act),
                    (Act::Wake(one), Some(Act::Stop(other)))
                    | (Act::Start(one), Some(Act::Kill(other)))
                    | (Act::Undrain(one), Some(Act::Drain(other)))
                        if *one == other =>
                    {
                        None
                    }
                    (Act::WakeAll, Some(Act::StopAll)) | (Act::StartAll, Some(Act::KillAll)) => {
                        None
                    }
                    other => panic!("seed {seed}: {other:?} in {acts:?}"),
                };
            }
            assert_eq!(impaired, None, "seed {seed}: {acts:?}");
        }
    }
}
