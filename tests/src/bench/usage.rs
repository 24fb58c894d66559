//! What processes have used of the machine.

use std::fs;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{major, minor, stat};

use super::BenchError;

/// Unit of the times in /proc: the kernel's interface has hundredths of a second, whatever its own clock does.
const TICKS_PER_S: f64 = 100.0;

/// Processor time of the nodes and of this program, over a stretch of time.
pub(super) struct Meter {
    nodes: Vec<u32>,
    nodes_s: f64,
    own_s: f64,
    started: Instant,
}

/// What [`Meter::stop`] found, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    pub(super) wall_s: f64,
    pub(super) nodes_s: f64,
    /// Of this program, which is the client.
    pub(super) client_s: f64,
}

impl Meter {
    /// Starts now.
    ///
    /// # Errors
    ///
    /// When a process is gone.
    pub(super) fn start(nodes: Vec<u32>) -> Result<Self, BenchError> {
        let nodes_s = sum(&nodes)?;
        Ok(Self { nodes_s, own_s: cpu_s(std::process::id())?, nodes, started: Instant::now() })
    }

    /// Ends now.
    ///
    /// # Errors
    ///
    /// As of [`Meter::start`].
    pub(super) fn stop(&self) -> Result<Used, BenchError> {
        Ok(Used {
            wall_s: self.started.elapsed().as_secs_f64(),
            nodes_s: sum(&self.nodes)? - self.nodes_s,
            client_s: cpu_s(std::process::id())? - self.own_s,
        })
    }
}

impl Used {
    /// Microseconds of the nodes and of the client for each of `count` operations.
    pub(super) fn per_operation_us(self, count: u64) -> (f64, f64) {
        #[allow(clippy::cast_precision_loss, reason = "a bench counts far below 2^52")]
        let count = count.max(1) as f64;
        (self.nodes_s * 1e6 / count, self.client_s * 1e6 / count)
    }
}

fn sum(processes: &[u32]) -> Result<f64, BenchError> {
    processes.iter().map(|process| cpu_s(*process)).sum()
}

/// Processor seconds that a process has used, its threads that have ended included.
fn cpu_s(process: u32) -> Result<f64, BenchError> {
    let text = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name before it is in brackets and may itself hold brackets and spaces.
    let fields = text.rsplit_once(") ").ok_or("/proc/PID/stat has no name")?.1;
    let mut times = fields.split(' ').skip(11).map(str::parse::<f64>);
    match (times.next(), times.next()) {
        (Some(Ok(user)), Some(Ok(system))) => Ok((user + system) / TICKS_PER_S),
        _ => Err(format!("/proc/{process}/stat has no times").into()),
    }
}

/// What all processors of the machine do, over a stretch of time.
pub(super) struct Load {
    busy: f64,
    all: f64,
}

impl Load {
    /// Starts now.
    ///
    /// # Errors
    ///
    /// Where the kernel does not tell.
    pub(super) fn start() -> Result<Self, BenchError> {
        let text = fs::read_to_string("/proc/stat")?;
        let line = text.lines().next().and_then(|line| line.strip_prefix("cpu "));
        let fields = line.ok_or("/proc/stat has no processors")?.split_whitespace();
        let times: Vec<f64> = fields.take(8).map(str::parse).collect::<Result<_, _>>()?;
        let all = times.iter().sum();
        // Idle, and idle while a disk works.
        let idle: f64 = times.iter().skip(3).take(2).sum();
        Ok(Self { busy: all - idle, all })
    }

    /// Share of their time that the processors were busy, whoever with, 0 to 1.
    ///
    /// # Errors
    ///
    /// As of [`Load::start`].
    pub(super) fn busy_share(&self) -> Result<f64, BenchError> {
        let now = Self::start()?;
        Ok((now.busy - self.busy) / (now.all - self.all).max(1.0))
    }
}

/// Memory of a process in MiB: now, and at most so far.
///
/// # Errors
///
/// When the process is gone.
pub(super) fn resident_mib(process: u32) -> Result<(f64, f64), BenchError> {
    let text = fs::read_to_string(format!("/proc/{process}/status"))?;
    let field = |name: &str| -> Result<f64, BenchError> {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        let kib: f64 =
            kib.ok_or_else(|| format!("/proc/{process}/status has no {name}"))?.parse()?;
        Ok(kib / 1024.0)
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}

/// Flushes that the disk under `folder` has done, whoever asked for them; nothing where that is not counted.
pub(super) fn disk_flushes(folder: &Path) -> Option<u64> {
    let device = stat(folder).ok()?.st_dev;
    let node = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let node = fs::canonicalize(node).ok()?;
    let disk = if node.join("partition").exists() { node.parent()? } else { &node };
    let text = fs::read_to_string(disk.join("stat")).ok()?;
    text.split_whitespace().nth(15)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_costs_processor_time_and_memory_is_told() {
        let (meter, load) = (Meter::start(vec![]).unwrap(), Load::start().unwrap());
        let mut sum = 0_u64;
        while meter.stop().unwrap().client_s < 0.02 {
            sum = (0..1_000_000_u64).fold(sum, |sum, next| sum.wrapping_mul(31).wrapping_add(next));
        }
        assert_ne!(sum, 1);
        assert!(load.busy_share().unwrap() > 0.0);
        let (now, most) = resident_mib(std::process::id()).unwrap();
        assert!(now > 1.0 && now <= most + 0.5, "{now} {most}");
    }
}
