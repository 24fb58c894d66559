//! What the figures were made on.

use std::fs;

use serde_json::{Value, json};

/// Processors, memory, system, load at this moment, and how this program was built.
pub(super) fn describe() -> Value {
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZeroUsize::get);
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim());
        value.unwrap_or("not told").to_owned()
    };
    json!({
        "cpus": cpus,
        "cpu": field(&read("/proc/cpuinfo"), "model name"),
        "memory": field(&read("/proc/meminfo"), "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "load": read("/proc/loadavg").split(' ').next().unwrap_or_default(),
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
    })
}
