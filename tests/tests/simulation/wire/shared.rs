//! What the hosts of one run share: names, the story, what members were told.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tenure_model::{Clock, MemberId, Partition, Tick};
use tenure_sdk::grant::Grant;
use tenure_tests::sim::rng::Rng;

/// Lines of the story that a failure shows.
const STORY_SHOWN: usize = 120;

/// See the module.
#[derive(Default)]
pub(super) struct Shared {
    /// Moment of the last step, for whoever looks from outside.
    now: AtomicU64,
    /// Which host a name stands for now.
    names: Mutex<BTreeMap<String, String>>,
    story: Mutex<Story>,
    lines: Mutex<Vec<LineRecord>>,
    breaker: Mutex<Option<Breaker>>,
    told: Mutex<Told>,
    pub(super) keepalive: Keepalive,
}

/// Which ends send pings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keepalive {
    pub(super) at_client: bool,
    pub(super) at_server: bool,
}

impl Default for Keepalive {
    fn default() -> Self {
        Self { at_client: true, at_server: true }
    }
}

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Client,
    Server,
}

/// One end of one connection.
#[derive(Clone, Debug)]
pub(super) struct LineRecord {
    pub(super) end: End,
    pub(super) host: String,
    pub(super) peer: String,
    pub(super) port: u16,
    pub(super) opened: Duration,
    /// When this end let go of it.
    pub(super) closed: Option<Duration>,
}

/// Breaks connections of members in the middle of what comes down.
struct Breaker {
    rng: Rng,
    longest: u64,
    broken: u64,
}

/// What members were told.
#[derive(Default)]
pub(super) struct Told {
    pub(super) members: BTreeMap<String, Seat>,
    /// The last offset acknowledged of each partition.
    pub(super) acknowledged: BTreeMap<Partition, u64>,
    pub(super) acknowledged_at: Vec<Duration>,
    /// Who got each epoch of each partition.
    pub(super) granted: BTreeMap<(Partition, u64), MemberId>,
    pub(super) violation: Option<String>,
}

/// One member, as it sees itself.
#[derive(Default)]
pub(super) struct Seat {
    pub(super) held: BTreeMap<Partition, Grant>,
    /// Identities of its memberships, in order.
    pub(super) memberships: Vec<u64>,
    pub(super) losses: u64,
    pub(super) refused: u64,
}

#[derive(Default)]
struct Story {
    lines: Vec<String>,
    trace: Trace,
}

/// FNV-1a over everything that happens, with its moment.
struct Trace(u64);

impl Default for Trace {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Trace {
    fn add(&mut self, text: &str) {
        for byte in text.as_bytes() {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(keepalive: Keepalive) -> Arc<Self> {
        Arc::new(Self { keepalive, ..Self::default() })
    }

    /// Simulated time since the start.
    pub(super) fn now(&self) -> Duration {
        turmoil::sim_elapsed()
            .unwrap_or_else(|| Duration::from_nanos(self.now.load(Ordering::SeqCst)))
    }

    pub(super) fn stepped(&self, now: Duration) {
        let nanos = u64::try_from(now.as_nanos()).expect("a run is short");
        self.now.store(nanos, Ordering::SeqCst);
    }

    /// Lets `name` stand for `host` from now on.
    pub(super) fn rename(&self, name: &str, host: &str) {
        lock(&self.names).insert(name.to_owned(), host.to_owned());
    }

    /// The host that `name` stands for now.
    pub(super) fn resolve(&self, name: &str) -> Option<String> {
        lock(&self.names).get(name).cloned()
    }

    pub(super) fn say(&self, what: &str) {
        let at = self.now().as_micros();
        let line = format!("{:>7}.{:03} {what}", at / 1_000, at % 1_000);
        let mut story = lock(&self.story);
        story.trace.add(&line);
        story.lines.push(line);
    }

    /// Something happened that must not; the first one counts.
    pub(super) fn fail(&self, what: &str) {
        self.say(&format!("VIOLATION: {what}"));
        self.told().violation.get_or_insert_with(|| what.to_owned());
    }

    pub(super) fn told(&self) -> MutexGuard<'_, Told> {
        lock(&self.told)
    }

    pub(super) fn trace(&self) -> u64 {
        lock(&self.story).trace.0
    }

    pub(super) fn line_count(&self) -> usize {
        lock(&self.story).lines.len()
    }

    pub(super) fn story(&self, all: bool) -> String {
        let story = lock(&self.story);
        let from = if all { 0 } else { story.lines.len().saturating_sub(STORY_SHOWN) };
        story.lines[from..].join("\n")
    }

    /// Notes a new end of a connection; gives its number.
    pub(super) fn opened(&self, end: End, host: &str, peer: &str, port: u16) -> usize {
        let record = LineRecord {
            end,
            host: host.to_owned(),
            peer: peer.to_owned(),
            port,
            opened: self.now(),
            closed: None,
        };
        let mut lines = lock(&self.lines);
        lines.push(record);
        lines.len() - 1
    }

    pub(super) fn closed(&self, line: usize) {
        let now = self.now();
        lock(&self.lines)[line].closed = Some(now);
    }

    pub(super) fn lines(&self) -> Vec<LineRecord> {
        lock(&self.lines).clone()
    }

    /// From now on every new connection of a member breaks within `longest` bytes of what comes down; nothing: no more.
    pub(super) fn break_lines(&self, seed: u64, longest: Option<u64>) {
        let mut breaker = lock(&self.breaker);
        *breaker = longest.map(|longest| Breaker { rng: Rng::new(seed), longest, broken: 0 });
    }

    /// How many bytes a new connection of `host` lets come down; nothing: no limit.
    pub(super) fn budget(&self, host: &str) -> Option<u64> {
        let mut breaker = lock(&self.breaker);
        let breaker = breaker.as_mut().filter(|_| host.starts_with("member"))?;
        Some(breaker.rng.within(1, breaker.longest))
    }

    pub(super) fn broke(&self) {
        if let Some(breaker) = lock(&self.breaker).as_mut() {
            breaker.broken += 1;
        }
    }

    /// How many connections have broken since [`Shared::break_lines`].
    pub(super) fn broken(&self) -> u64 {
        lock(&self.breaker).as_ref().map_or(0, |breaker| breaker.broken)
    }
}

/// The run's clock, for nodes and members.
pub(super) struct SimClock(pub(super) Arc<Shared>);

impl Clock for SimClock {
    fn now(&self) -> Tick {
        Tick(0).after(self.0.now())
    }
}
