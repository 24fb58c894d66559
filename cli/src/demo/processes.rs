//! Processes of the demo: this same program, as nodes and workers.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

/// A process that was started here, and is killed when it is dropped.
pub(crate) struct Process {
    pub(crate) name: String,
    child: Child,
    pid: Pid,
    orders: Option<ChildStdin>,
}

impl Process {
    /// Starts this program with `arguments`; its log goes to `log`, its events to `events` together with its name.
    pub(crate) fn start(
        name: &str,
        arguments: &[String],
        log: &Path,
        events: mpsc::UnboundedSender<(String, Value)>,
    ) -> io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(log)?)
            .kill_on_drop(true)
            .spawn()?;
        let pid =
            child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)).ok_or_else(|| {
                io::Error::other(format!("{name} ended at once: see {}", log.display()))
            })?;
        let orders = child.stdin.take();
        if let Some(output) = child.stdout.take() {
            let name = name.to_owned();
            drop(tokio::spawn(async move {
                let mut lines = BufReader::new(output).lines();
                while let Ok(Some(text)) = lines.next_line().await {
                    let event = serde_json::from_str(&text).unwrap_or(Value::String(text));
                    if events.send((name.clone(), event)).is_err() {
                        return;
                    }
                }
            }));
        }
        Ok(Self { name: name.to_owned(), child, pid, orders })
    }

    pub(crate) fn id(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Writes one line to its standard input.
    pub(crate) async fn order(&mut self, order: &str) -> io::Result<()> {
        let orders =
            self.orders.as_mut().ok_or_else(|| io::Error::other("standard input is closed"))?;
        orders.write_all(format!("{order}\n").as_bytes()).await?;
        orders.flush().await
    }

    /// Stops it with SIGSTOP, and waits until it stands still.
    pub(crate) async fn freeze(&self) -> io::Result<()> {
        kill_process(self.pid, Signal::STOP)?;
        while !self.is_stopped()? {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// Lets it go on with SIGCONT.
    pub(crate) fn wake(&self) -> io::Result<()> {
        Ok(kill_process(self.pid, Signal::CONT)?)
    }

    /// Ends it with SIGKILL.
    pub(crate) async fn kill(&mut self) -> io::Result<()> {
        self.child.kill().await
    }

    /// Waits for its end.
    pub(crate) async fn wait(&mut self, limit: Duration) -> io::Result<bool> {
        match tokio::time::timeout(limit, self.child.wait()).await {
            Ok(status) => Ok(status?.success()),
            Err(_elapsed) => Ok(false),
        }
    }

    fn is_stopped(&self) -> io::Result<bool> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id()))?;
        // The state follows the name, which is in brackets and may hold anything.
        let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
        Ok(state == Some('T'))
    }
}
