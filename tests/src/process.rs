//! Programs under test: their output by lines, and the signals that stop, wake and end them.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use rustix::process::{Pid, Signal, kill_process};

use crate::servers::wait_until;

/// A child process. Dropping it kills it, also while it is paused; so does the end of the test
/// process, however that comes.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    output: Arc<Output>,
    /// Until the child has been waited for, since its id may then be reused.
    watch: Option<Watch>,
}

impl Process {
    /// Starts `command` with standard output and standard error captured. `name` is for messages.
    ///
    /// # Panics
    ///
    /// When the program does not start.
    #[must_use]
    pub fn spawn(name: &str, command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        let output = Arc::new(Output::default());
        output.lock().open_streams = 2;
        read_lines(child.stdout.take().expect("stdout is piped"), Arc::clone(&output));
        read_lines(child.stderr.take().expect("stderr is piped"), Arc::clone(&output));
        let watch = Some(Watch::on(&child));
        Self { name: name.to_owned(), child, output, watch }
    }

    /// Name given at the start.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Next line that `wanted` accepts, from standard output or standard error. Lines up to it
    /// count as read; later calls look behind it.
    ///
    /// # Errors
    ///
    /// [`NoLine`] when `timeout` passes or both streams end first. Nothing counts as read then.
    pub fn wait_for_line(
        &self,
        mut wanted: impl FnMut(&str) -> bool,
        timeout: Duration,
    ) -> Result<String, NoLine> {
        let deadline = Instant::now() + timeout;
        let mut lines = self.output.lock();
        let mut next = lines.read;
        loop {
            if let Some(found) = lines.all[next..].iter().position(|line| wanted(line)) {
                let index = next + found;
                lines.read = index + 1;
                return Ok(lines.all[index].clone());
            }
            next = lines.all.len();
            let left = deadline.saturating_duration_since(Instant::now());
            if lines.open_streams == 0 || left.is_zero() {
                let ended = lines.open_streams == 0;
                return Err(NoLine {
                    name: self.name.clone(),
                    ended,
                    output: lines.all.join("\n"),
                });
            }
            lines = self.output.wait(lines, left);
        }
    }

    /// All lines so far, both streams in the order of arrival.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.output.lock().all.clone()
    }

    /// The last lines so far, for a failure's message.
    #[must_use]
    pub fn tail(&self) -> String {
        const LINES_MAX: usize = 40;
        let lines = self.lines();
        lines[lines.len().saturating_sub(LINES_MAX)..].join("\n")
    }

    /// Whether the process and all its threads are stopped now.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        thread_states_of(self.pid()).all(|state| state == 'T')
    }

    /// SIGSTOP, and waits until the process really stands still.
    ///
    /// # Panics
    ///
    /// When the process has ended or does not stop within 10 s.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        let stops = wait_until(Duration::from_secs(10), || self.is_stopped());
        assert!(stops, "{} does not stop", self.name);
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGTERM, the request to end cleanly.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGKILL, and waits for the end.
    ///
    /// # Panics
    ///
    /// When the process cannot be waited for.
    pub fn kill(&mut self) -> ExitStatus {
        self.child.kill().expect("a child can be killed");
        drop(self.watch.take());
        self.child.wait().expect("a child can be waited for")
    }

    /// Exit status, or `None` when the process still runs after `timeout`.
    ///
    /// # Panics
    ///
    /// When the process cannot be waited for.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let mut status = None;
        wait_until(timeout, || {
            status = self.child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        if status.is_some() {
            drop(self.watch.take());
        }
        status
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.watch.take());
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            tracing::warn!(name = self.name, %error, "a child was not killed");
        }
    }
}

/// A shell that kills a process when this one is gone: its end of the pipe closes then, also after
/// SIGKILL. Dropping it calls it off.
#[derive(Debug)]
struct Watch(Child);

impl Watch {
    fn on(child: &Child) -> Self {
        let shell = Command::new("sh")
            .args(["-c", r#"read -r _ || kill -s KILL "$1""#, "watch", &child.id().to_string()])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        Self(shell)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            tracing::warn!(%error, "the watch over a child is gone");
        }
    }
}

/// No line was accepted. The text holds all that the process has written.
#[derive(Clone, Debug)]
pub struct NoLine {
    name: String,
    ended: bool,
    output: String,
}

impl fmt::Display for NoLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = if self.ended { "closed its output" } else { "ran out of time" };
        write!(f, "{} {why} before the wanted line; it wrote:\n{}", self.name, self.output)
    }
}

impl std::error::Error for NoLine {}

#[derive(Debug, Default)]
struct Output {
    lines: Mutex<Lines>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    all: Vec<String>,
    read: usize,
    open_streams: usize,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().expect("no reader panics with the lock held")
    }

    fn wait<'a>(&self, lines: MutexGuard<'a, Lines>, timeout: Duration) -> MutexGuard<'a, Lines> {
        self.changed.wait_timeout(lines, timeout).expect("no reader panics with the lock held").0
    }
}

fn read_lines(stream: impl Read + Send + 'static, output: Arc<Output>) {
    thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut bytes = Vec::new();
        while stream.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            output.lock().all.push(line);
            output.changed.notify_all();
        }
        output.lock().open_streams -= 1;
        output.changed.notify_all();
    });
}

/// Letter of the process's state (`T` stopped, `Z` ended, …), or `None` when there is no such
/// process.
pub(crate) fn state_of(pid: u32) -> Option<char> {
    state_in(&format!("/proc/{pid}/stat").into())
}

/// States of all threads: a stop reaches them one by one.
fn thread_states_of(pid: u32) -> impl Iterator<Item = char> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    threads.filter_map(|thread| state_in(&thread.ok()?.path().join("stat")))
}

fn state_in(stat: &PathBuf) -> Option<char> {
    // The name before it is in brackets and may itself hold brackets and spaces.
    fs::read_to_string(stat).ok()?.rsplit_once(") ")?.1.chars().next()
}

/// Path of the program `tenure`: `TENURE_BIN`, else what cargo has built beside the tests.
///
/// # Panics
///
/// When neither is there.
#[must_use]
pub fn tenure_bin() -> PathBuf {
    let path = env::var_os("TENURE_BIN").map_or_else(beside_the_tests, PathBuf::from);
    assert!(
        path.is_file(),
        "no program at {}; run `cargo build -p tenure-cli` first or name one in TENURE_BIN",
        path.display()
    );
    path
}

fn beside_the_tests() -> PathBuf {
    beside_this("tenure")
}

/// Path of a program that cargo has built beside this one, which may itself be a test or a program.
///
/// # Panics
///
/// When the running program has no path.
#[must_use]
pub fn beside_this(program: &str) -> PathBuf {
    // …/debug/deps/test-hash and …/debug/bench both stand for …/debug.
    let this = env::current_exe().expect("the running program has a path");
    let folders = this.ancestors().skip(1).filter(|folder| !folder.ends_with("deps"));
    let folder = folders.into_iter().next().expect("a program is in a folder");
    folder.join(program)
}
