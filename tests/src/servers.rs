//! Real servers that a test starts for itself, and what happens where one is missing.
//!
//! Each server has a temporary folder and a loopback port of its own. It ends with its value, and
//! with the test process however that ends, so that an aborted run leaves nothing behind.

pub mod kafka;
pub mod mariadb;
pub mod postgres;
pub mod redis;
pub mod s3_mock;

mod guarded;

use std::collections::BTreeSet;
use std::env;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rand::Rng;

pub use kafka::Kafka;
pub use mariadb::MariaDb;
pub use postgres::Postgres;
pub use redis::Redis;
pub use s3_mock::S3Mock;

use crate::tier::Tier;

/// A real part that this machine does not have. The text says why and how to get it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{part} is missing: {why}")]
pub struct Missing {
    part: &'static str,
    why: String,
}

impl Missing {
    /// Names `part` as missing. `why` says what was looked for and what to do.
    pub fn new(part: &'static str, why: impl Into<String>) -> Self {
        Self { part, why: why.into() }
    }
}

/// Hands out the part, or announces the calling test as skipped, which then returns.
///
/// Skips go to stderr and to the file named by `TENURE_SKIP_FILE`, one line each; `tests/run`
/// counts them. Call it from the test's own thread: the thread's name is the test's name.
///
/// # Panics
///
/// Where real parts are required: `TENURE_REQUIRE_PARTS=1` or `CI=true`, except in the fast tier.
pub fn require<T>(part: Result<T, Missing>) -> Option<T> {
    match part {
        Ok(part) => Some(part),
        Err(missing) if parts_are_required() => panic!("{missing}"),
        Err(missing) => {
            announce_skip(&missing.to_string());
            None
        }
    }
}

/// Whether a missing part fails the test instead of skipping it.
fn parts_are_required() -> bool {
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|set| set == value);
    Tier::current() != Tier::Fast && (is("TENURE_REQUIRE_PARTS", "1") || is("CI", "true"))
}

/// Refuses real parts in the fast tier, whether the machine has them or not.
fn refuse_in_fast_tier(part: &'static str) -> Result<(), Missing> {
    match Tier::current() {
        Tier::Fast => Err(Missing::new(part, "the fast tier starts no servers")),
        Tier::Ci | Tier::Full => Ok(()),
    }
}

/// Announces the calling test as skipped, as [`require`] does.
pub fn announce_skip(why: &str) {
    let thread = std::thread::current();
    let line = format!("{}::{}: {why}\n", test_binary(), thread.name().unwrap_or("unnamed"));
    std::io::stderr()
        .write_all(format!("SKIPPED: {line}").as_bytes())
        .expect("stderr takes the name of a skipped test");
    if let Some(path) = env::var_os("TENURE_SKIP_FILE") {
        // One write in append mode, so that lines of several threads do not mix.
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("the file named by TENURE_SKIP_FILE can be appended to");
    }
}

/// Name of the test target: the running file without folder and cargo's hash.
fn test_binary() -> String {
    let path = env::current_exe().expect("the running program has a path");
    let stem = path.file_stem().expect("a program has a file name").to_string_lossy().into_owned();
    stem.rsplit_once('-').map_or(stem.clone(), |(name, _)| name.to_owned())
}

/// A loopback port that nobody listens on, another one each time.
///
/// Below the range from which the kernel gives ports to outgoing connections, so that none of
/// them takes it before the server does.
///
/// # Panics
///
/// When no port in the range is free.
#[must_use]
pub fn free_port() -> u16 {
    /// All that this process has given out: servers that start together must not get one port twice.
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut random = rand::rng();
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    (0..1_000)
        .map(|_| random.random_range(12_000..32_000))
        .filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .find(|port| given.insert(*port))
        .expect("one loopback port from 12000 to 31999 is free")
}

/// Folder of downloads, where `tests/run` puts them; nothing where no cache folder is named.
pub(crate) fn downloads() -> Option<PathBuf> {
    let named = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(cache.join("tenure/downloads"))
}

/// Polls `condition` every 20 ms until it holds; `false` once `timeout` has passed.
pub fn wait_until(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Name for a topic, database or group that no other test and no earlier run has used.
#[must_use]
pub fn unique_name(prefix: &str) -> String {
    format!("{prefix}_{:016x}", rand::random::<u64>())
}
