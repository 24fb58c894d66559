//! A throw-away Redis.

use std::env;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::guarded::{Guarded, User};
use super::{Missing, free_port, refuse_in_fast_tier, wait_until};

const PART: &str = "Redis";
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Another process may take the port between the look and the start.
const START_ATTEMPTS: usize = 3;

/// A Redis server on a loopback port, with an append-only file that is synced each second: synced with each command, a busy
/// disk would stop it for seconds. Dropping it stops it and removes its data.
#[derive(Debug)]
pub struct Redis {
    // Kept for its end.
    _server: Guarded,
    client: PathBuf,
    port: u16,
}

impl Redis {
    /// Starts a server, at once.
    ///
    /// # Errors
    ///
    /// [`Missing`] where no `redis-server` is found or in the fast tier.
    ///
    /// # Panics
    ///
    /// When Redis is there and does not start.
    pub fn start() -> Result<Self, Missing> {
        Self::start_with(&[])
    }

    /// Starts a replica of a server and waits until it has everything. `port` is that server's, or a proxy's in
    /// between.
    ///
    /// # Errors
    ///
    /// As [`Redis::start`].
    ///
    /// # Panics
    ///
    /// When the replica does not catch up.
    pub fn start_replica(port: u16) -> Result<Self, Missing> {
        let replica = Self::start_with(&["--replicaof", "127.0.0.1", &port.to_string()])?;
        let linked = || replica.call(&["INFO", "replication"]).contains("master_link_status:up");
        assert!(wait_until(START_TIMEOUT, linked), "the replica does not catch up");
        Ok(replica)
    }

    fn start_with(more: &[&str]) -> Result<Self, Missing> {
        refuse_in_fast_tier(PART)?;
        let (server, client) = find("redis-server").zip(find("redis-cli")).ok_or_else(|| {
            Missing::new(
                PART,
                "no redis-server found; apt-get install redis-server, or run tests/run as root",
            )
        })?;
        let mut last_log = String::new();
        for _ in 0..START_ATTEMPTS {
            match Self::start_once(&server, &client, more) {
                Ok(redis) => return Ok(redis),
                Err(log) => last_log = log,
            }
        }
        panic!("Redis did not start; the end of its log:\n{last_log}");
    }

    /// Port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Runs one command by redis-cli and returns what it prints.
    ///
    /// # Panics
    ///
    /// When redis-cli fails; an error of the server is in the text.
    pub fn call(&self, arguments: &[&str]) -> String {
        let output = Command::new(&self.client)
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string()])
            .args(arguments)
            .output()
            .expect("redis-cli starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "redis-cli {arguments:?}: {error}");
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    fn start_once(server: &Path, client: &Path, more: &[&str]) -> Result<Self, String> {
        let user = User::unprivileged();
        let folder = tempfile::Builder::new().prefix("tenure-redis-").tempdir().expect("a folder");
        if let Some(user) = user {
            chown(folder.path(), Some(user.uid), Some(user.gid)).expect("root may give a folder");
        }
        let port = free_port().to_string();
        let data = folder.path().to_string_lossy().into_owned();
        let server = server.to_string_lossy().into_owned();
        let fixed = [
            &*server,
            "--bind",
            "127.0.0.1",
            "--port",
            &port,
            "--dir",
            &data,
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "everysec",
            "--maxmemory-policy",
            "noeviction",
            // A replica is served at once instead of in five seconds.
            "--repl-diskless-sync-delay",
            "0",
        ];
        let command: Vec<String> =
            fixed.iter().chain(more).map(|argument| (*argument).to_owned()).collect();
        let server = Guarded::spawn(folder, user, "KILL", &command);
        let is_ready = || server.log().contains("Ready to accept connections");
        wait_until(START_TIMEOUT, || is_ready() || !server.is_running());
        if is_ready() && server.is_running() {
            let port = port.parse().expect("it was a number");
            Ok(Self { _server: server, client: client.to_owned(), port })
        } else {
            Err(server.log_tail())
        }
    }
}

fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
}
