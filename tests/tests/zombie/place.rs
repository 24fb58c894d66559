//! The rounds of one place: a keeper that is never stopped, and a sleeper that is, again and again.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tenure_sink_postgres::sql;
use tenure_tests::cluster::{Cluster, block_on};
use tenure_tests::effects::{Audit, Database, EFFECTS, HISTORY};
use tenure_tests::feed::{Feed, Rate};
use tenure_tests::process::Process;
use tenure_tests::proxy::Proxy;
use tenure_tests::servers::{Kafka, Postgres, unique_name, wait_until};
use tenure_tests::zombie::{Line, OFFSET_TABLE, OffsetHome, Point, What};

use crate::audit::{Outcome, Stop};
use crate::matrix::Checks;

/// One for the keeper, one for the sleeper.
const PARTITIONS: u16 = 2;

const TTL_MS: u64 = 2000;

const RATE: Rate = Rate { pause: Duration::from_millis(50), records: 1 };

/// Longest wait for any one thing to happen, on a busy machine.
const STEP_MAX: Duration = Duration::from_secs(60);

const CALL_MAX: Duration = Duration::from_secs(5);

/// Pause between two looks at the coordinator's offsets.
const SAMPLE_PAUSE: Duration = Duration::from_millis(25);

/// How long the end may take, and what is still to be copied before it.
const END_MAX: Duration = Duration::from_secs(30);

struct Place<'a> {
    point: Point,
    home: OffsetHome,
    cluster: &'a Cluster,
    group: String,
    database: Database,
    proxy: Proxy,
    keeper: Process,
    sleeper: Process,
    /// Lines of the sleeper that were read.
    read: Cell<usize>,
}

/// Runs `stops` rounds at `point` and audits what they left.
pub(crate) fn run(
    postgres: &Postgres,
    kafka: &Kafka,
    cluster: &Cluster,
    point: Point,
    checks: Checks,
    stops: usize,
) -> Result<Outcome, String> {
    let home = home_of(point, checks);
    let name = postgres.new_database();
    postgres.sql(&name, &format!("{}; {EFFECTS}; {OFFSET_TABLE}; {HISTORY}", sql::MIGRATE));
    let topic = kafka.new_topic("zombie", PARTITIONS);
    let group = unique_name("zombie");
    let proxy = Proxy::to_port(postgres.port());
    let worker = |name: &str, url: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zombie-worker"));
        command.args(["--name", name, "--group", &group, "--topic", &topic, "--postgres", url]);
        command.args(["--kafka", kafka.bootstrap(), "--offsets", &value(home)]);
        command.args(["--coordinators", &cluster.addresses().join(",")]);
        command.args(["--ttl-ms", &TTL_MS.to_string()]);
        if checks == Checks::Off && home != OffsetHome::Table {
            command.arg("--without-fencing");
        }
        command.env("RUST_LOG", "warn,tenure_sdk=info");
        command
    };
    let url = postgres.url_of(&name, postgres.port());
    let feed = Feed::start(kafka, &topic, PARTITIONS.into(), RATE);
    let keeper = Process::spawn("keeper", &mut worker("keeper", &url));
    let database = Database::connect(&url);
    let is_all_kept =
        || database.number("SELECT count(DISTINCT part) FROM effects") == Some(PARTITIONS.into());
    if !wait_until(STEP_MAX, is_all_kept) {
        return Err(format!("the keeper does not copy:\n{}\n{}", keeper.tail(), cluster.output()));
    }
    let mut command = worker("sleeper", &postgres.url_of(&name, proxy.port()));
    command.args(["--point", &value(point), "--stops", &stops.to_string()]);
    let sleeper = Process::spawn("sleeper", &mut command);
    let read = Cell::new(0);
    let place = Place { point, home, cluster, group, database, proxy, keeper, sleeper, read };
    let (rounds, moved_back) = place.watching_offsets(|| place.rounds(stops));
    let stops_seen = rounds?;
    let mut audit = place.finish(feed, checks)?;
    audit.offsets_moved_back += moved_back;
    Ok(Outcome { stops: stops_seen, stops_wanted: stops, audit })
}

const fn home_of(point: Point, checks: Checks) -> OffsetHome {
    match (point, checks) {
        (Point::BeforeOffsetCommit, Checks::On) => OffsetHome::Coordinator,
        (Point::BeforeOffsetCommit, Checks::Off) => OffsetHome::Table,
        (
            Point::BeforeRegister
            | Point::BeforeVerify
            | Point::BeforeResume
            | Point::AfterBegin
            | Point::AfterData
            | Point::CommitUnanswered,
            Checks::On | Checks::Off,
        ) => OffsetHome::Sink,
    }
}

impl Place<'_> {
    fn rounds(&self, stops: usize) -> Result<Vec<Stop>, String> {
        let round = |number| {
            self.round(number).map_err(|error| {
                let point = self.point;
                format!("{point:?}, stop {number}: {error}\n{}", self.output())
            })
        };
        (1..=u32::try_from(stops).unwrap()).map(round).collect()
    }

    /// The last lines of everyone.
    fn output(&self) -> String {
        let (sleeper, keeper) = (self.sleeper.tail(), self.keeper.tail());
        format!("--- sleeper\n{sleeper}\n--- keeper\n{keeper}\n{}", self.cluster.output())
    }

    /// One stop: asleep at the point, somebody else has written under a newer epoch, awake, refused.
    fn round(&self, number: u32) -> Result<Stop, String> {
        let stopped = if self.point == Point::CommitUnanswered {
            self.stop_before_the_answer()?
        } else {
            let line = self.line(What::Stopping)?;
            self.wait("the sleeper to stand still", || self.sleeper.is_stopped())?;
            line
        };
        self.wait("another owner to write", || self.is_taken_over(&stopped))?;
        if self.point == Point::CommitUnanswered {
            // The answer comes after all, or never.
            if number.is_multiple_of(2) {
                self.proxy.cut();
            }
            self.proxy.release();
        }
        self.sleeper.resume();
        let before = self.read.get();
        let through = self.line(What::Through)?;
        if through.stop != number {
            return Err(format!("the sleeper counts stop {}", through.stop));
        }
        let late = self.sleeper.lines()[before..self.read.get()]
            .iter()
            .filter_map(|text| Line::read(text))
            .filter(|line| line.what == What::Late)
            .collect();
        Ok(Stop { number, epoch: stopped.epoch, late })
    }

    /// Lets the sleeper commit with the answer held back, and stops it while it waits for it.
    fn stop_before_the_answer(&self) -> Result<Line, String> {
        let arming = self.line(What::Arming)?;
        self.wait("the sleeper to stand still", || self.sleeper.is_stopped())?;
        let written = || {
            let (part, epoch) = (arming.partition, arming.epoch);
            let query = "SELECT count(*) FROM effects WHERE";
            self.database.number(&format!("{query} part = {part} AND epoch = {epoch}"))
        };
        let before = written();
        // With its end: BEGIN names the isolation READ COMMITTED.
        self.proxy.hold_answers_after(b"COMMIT\0");
        self.sleeper.resume();
        if !self.proxy.answer_kept(STEP_MAX) {
            return Err("no answer to COMMIT".to_owned());
        }
        self.sleeper.pause();
        let after = written();
        if after <= before {
            return Err(format!("nothing was committed: {before:?} rows before, {after:?} after"));
        }
        Ok(arming)
    }

    /// The sleeper's next line of a kind.
    fn line(&self, what: What) -> Result<Line, String> {
        let mut found = None;
        self.wait(&format!("the line {what:?}"), || {
            let lines = self.sleeper.lines();
            let new = lines.iter().enumerate().skip(self.read.get());
            let mut of_kind = new.filter_map(|(at, text)| Some((at, Line::read(text)?)));
            found = of_kind.find(|(_, line)| line.what == what);
            found.is_some()
        })?;
        let (at, line) = found.expect("it was waited for");
        self.read.set(at + 1);
        Ok(line)
    }

    fn wait(&self, what: &str, condition: impl FnMut() -> bool) -> Result<(), String> {
        if wait_until(STEP_MAX, condition) {
            Ok(())
        } else {
            Err(format!("waited {STEP_MAX:?} for {what}"))
        }
    }

    /// Whether another owner has written, and its offset is past what the sleeper has in hand.
    fn is_taken_over(&self, stopped: &Line) -> bool {
        let Line { partition, epoch, next, .. } = stopped;
        let query = "SELECT count(*) FROM effects WHERE";
        let newer =
            self.database.number(&format!("{query} part = {partition} AND epoch > {epoch}"));
        newer > Some(0) && self.offset(*partition).is_some_and(|offset| offset > *next)
    }

    /// The partition's offset at its home.
    fn offset(&self, partition: u32) -> Option<u64> {
        let table = match self.home {
            OffsetHome::Coordinator => return self.fetch().get(&partition).copied(),
            OffsetHome::Sink => "tenure_fence",
            OffsetHome::Table => "plain_offsets",
        };
        let query = format!("SELECT next_offset FROM {table} WHERE resource LIKE '%/{partition}'");
        self.database.number(&query).map(|offset| u64::try_from(offset).unwrap())
    }

    /// The coordinator's offsets; none while there is no answer.
    fn fetch(&self) -> BTreeMap<u32, u64> {
        let group = self.group.parse().unwrap();
        let offsets = block_on(self.cluster.client().fetch(&group, &[], CALL_MAX));
        let committed = offsets.unwrap_or_default().into_iter();
        committed
            .filter_map(|found| Some((found.partition.index.get(), found.next_offset?.get())))
            .collect()
    }

    /// Looks at the coordinator's offsets while `work` runs; answers how often one had moved back.
    fn watching_offsets<T>(&self, work: impl FnOnce() -> T) -> (T, i64) {
        if self.home != OffsetHome::Coordinator {
            return (work(), 0);
        }
        let ending = AtomicBool::new(false);
        let (group, client) = (self.group.parse().unwrap(), self.cluster.client());
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let (mut highest, mut moved_back) = (BTreeMap::new(), 0);
                while !ending.load(Ordering::SeqCst) {
                    let offsets = block_on(client.fetch(&group, &[], CALL_MAX));
                    for found in offsets.unwrap_or_default() {
                        let seen = highest.insert(found.partition, found.next_offset);
                        moved_back += i64::from(seen.is_some_and(|seen| seen > found.next_offset));
                    }
                    thread::sleep(SAMPLE_PAUSE);
                }
                moved_back
            });
            let done = work();
            ending.store(true, Ordering::SeqCst);
            (done, watch.join().unwrap())
        })
    }

    /// Lets everything be copied, ends both workers and audits.
    fn finish(mut self, feed: Feed, checks: Checks) -> Result<Audit, String> {
        let records = feed.end();
        let wanted = i64::from(PARTITIONS) * i64::try_from(records).unwrap();
        let effects = "SELECT count(DISTINCT (part, at_offset)) FROM effects";
        // What is lost does not come; the audit counts it.
        let copied = wait_until(END_MAX, || {
            self.database.number(effects) == Some(wanted)
                && (0..PARTITIONS).all(|index| self.offset(index.into()) >= Some(records))
        });
        if checks == Checks::On && !copied {
            let offsets: Vec<_> = (0..PARTITIONS).map(|index| self.offset(index.into())).collect();
            return Err(format!(
                "{:?}: {:?} of {wanted} records came through, offsets {offsets:?}\n{}",
                self.point,
                self.database.number(effects),
                self.output()
            ));
        }
        self.sleeper.terminate();
        self.keeper.terminate();
        for process in [&mut self.sleeper, &mut self.keeper] {
            let status = process.wait(END_MAX);
            let is_clean = status.is_some_and(|status| status.success());
            if checks == Checks::On && !is_clean {
                return Err(format!("a worker ended with {status:?}:\n{}", process.tail()));
            }
        }
        Ok(Audit::of(&self.database, PARTITIONS.into(), records))
    }
}

/// The value as the worker's command line takes it.
fn value(of: impl clap::ValueEnum) -> String {
    of.to_possible_value().expect("no value is skipped").get_name().to_owned()
}
