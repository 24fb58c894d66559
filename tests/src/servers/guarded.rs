//! A server process that ends with the test process, however that ends.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use tempfile::TempDir;

/// Starts the server, again for each line of its standard input, waits for the end of that, stops the
/// server, removes the folder.
///
/// Neither `Drop` nor a static's end runs when a test process is killed; the kernel closes its end
/// of the pipe in every case.
const GUARD: &str = r#"
folder=$1 stop=$2; shift 2
cd "$folder"
start() {
    "$@" >>server.log 2>&1 </dev/null &
    server=$!
    echo "$server"
}
start "$@"
while read -r _; do
    kill -s KILL "$server" 2>/dev/null
    wait "$server"
    start "$@"
done
kill -s "$stop" "$server" 2>/dev/null
wait "$server"
cd / && rm -rf "$folder"
"#;

/// User and group that a server runs as.
#[derive(Clone, Copy, Debug)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl User {
    /// For servers that refuse root: `postgres` or else `nobody`; `None` when not root.
    pub(super) fn unprivileged() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let passwd = fs::read_to_string("/etc/passwd").expect("/etc/passwd is readable");
        let find = |name: &str| {
            passwd.lines().find_map(|line| {
                let mut fields = line.split(':');
                let found = fields.next() == Some(name);
                let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
                found.then_some(Self { uid, gid })
            })
        };
        Some(find("postgres").or_else(|| find("nobody")).expect("there is a user nobody"))
    }

    /// Makes `command` run as this user, without further groups.
    pub(super) fn apply(self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }
}

/// A running server with a folder of its own. Dropping it stops the server and waits.
#[derive(Debug)]
pub(super) struct Guarded {
    guard: Child,
    pipe: Option<ChildStdin>,
    pids: BufReader<ChildStdout>,
    server: u32,
    folder: PathBuf,
}

impl Guarded {
    /// Starts `command` in `folder`, which is removed at the end. `stop` is a signal's name.
    pub(super) fn spawn(
        folder: TempDir,
        user: Option<User>,
        stop: &str,
        command: &[String],
    ) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", GUARD, "guard"]).arg(folder.path()).arg(stop).args(command);
        // A group of its own: an interrupt from the keyboard must not end the guard first.
        shell.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        if let Some(user) = user {
            user.apply(&mut shell);
        }
        let mut guard = shell.spawn().expect("sh starts");
        let mut pids = BufReader::new(guard.stdout.take().expect("stdout is piped"));
        let server = next_pid(&mut pids);
        let pipe = guard.stdin.take();
        Self { guard, pipe, pids, server, folder: folder.keep() }
    }

    /// Kills the server and starts it again in its folder.
    pub(super) fn restart(&mut self) {
        let pipe = self.pipe.as_mut().expect("the pipe is there until drop");
        pipe.write_all(b"again\n").expect("the guard reads");
        self.server = next_pid(&mut self.pids);
    }

    /// Process id of the server.
    pub(super) fn pid(&self) -> u32 {
        self.server
    }

    /// Whether the server still runs. The guard has not waited for it, so its id is not reused.
    pub(super) fn is_running(&self) -> bool {
        crate::process::state_of(self.server).is_some_and(|state| state != 'Z')
    }

    /// What the server has written so far.
    pub(super) fn log(&self) -> String {
        fs::read(self.folder.join("server.log"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Last lines of the log, for a panic's message.
    pub(super) fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

fn next_pid(pids: &mut impl BufRead) -> u32 {
    let mut line = String::new();
    pids.read_line(&mut line).expect("the guard says a process id");
    line.trim().parse().expect("the guard says a process id")
}

impl Drop for Guarded {
    fn drop(&mut self) {
        drop(self.pipe.take());
        // The guard waits for the server; an error means that somebody else has waited already.
        if let Err(error) = self.guard.wait() {
            tracing::warn!(%error, "the guard of a server is gone");
        }
    }
}
