//! A throw-away PostgreSQL.

use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;
use std::{env, fs};

use super::guarded::{Guarded, User};
use super::{Missing, free_port, refuse_in_fast_tier, unique_name, wait_until};

const PART: &str = "PostgreSQL";
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Another process may take the port between the look and the start.
const START_ATTEMPTS: usize = 3;

/// A PostgreSQL server on a loopback port, with 200 connections and a superuser `tenure` without a
/// password. Its commits are durable as in production. Dropping it stops it and removes its data.
#[derive(Debug)]
pub struct Postgres {
    server: Guarded,
    programs: PathBuf,
    port: u16,
}

impl Postgres {
    /// Starts a server, in about a second.
    ///
    /// # Errors
    ///
    /// [`Missing`] where no `initdb` is found or in the fast tier.
    ///
    /// # Panics
    ///
    /// When PostgreSQL is there and does not start.
    pub fn start() -> Result<Self, Missing> {
        refuse_in_fast_tier(PART)?;
        let programs = find_programs().ok_or_else(|| {
            Missing::new(
                PART,
                "no initdb found; apt-get install postgresql, or run tests/run as root",
            )
        })?;
        let mut last_log = String::new();
        for _ in 0..START_ATTEMPTS {
            match Self::start_once(&programs) {
                Ok(postgres) => return Ok(postgres),
                Err(log) => last_log = log,
            }
        }
        panic!("PostgreSQL did not start; the end of its log:\n{last_log}");
    }

    /// The one server of this test process, started by the first caller. Tests keep apart by
    /// [`Postgres::new_database`].
    ///
    /// # Errors
    ///
    /// As [`Postgres::start`].
    pub fn shared() -> Result<&'static Self, Missing> {
        static SHARED: OnceLock<Result<Postgres, Missing>> = OnceLock::new();
        SHARED.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    /// URL of the database `postgres`.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of("postgres", self.port)
    }

    /// URL of `database` through `port`, for a proxy in between.
    #[must_use]
    pub fn url_of(&self, database: &str, port: u16) -> String {
        format!("postgres://tenure@127.0.0.1:{port}/{database}")
    }

    /// Port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Process id of the server's first process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Makes an empty database and returns its name.
    #[must_use]
    pub fn new_database(&self) -> String {
        let name = unique_name("t");
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        name
    }

    /// Runs `statements` in `database` by psql and returns the rows, one a line, columns separated
    /// by `|`.
    ///
    /// # Panics
    ///
    /// When PostgreSQL refuses a statement.
    pub fn sql(&self, database: &str, statements: &str) -> String {
        let output = Command::new(self.programs.join("psql"))
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", statements])
            .arg(self.url_of(database, self.port))
            .output()
            .expect("psql starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "PostgreSQL refused {statements:?}: {error}");
        String::from_utf8(output.stdout).expect("psql prints UTF-8").trim_end().to_owned()
    }

    fn start_once(programs: &Path) -> Result<Self, String> {
        let user = User::unprivileged();
        let folder = tempfile::Builder::new().prefix("tenure-pg-").tempdir().expect("a folder");
        if let Some(user) = user {
            chown(folder.path(), Some(user.uid), Some(user.gid)).expect("root may give a folder");
        }
        init(programs, folder.path(), user);
        let port = free_port();
        let command = [
            programs.join("postgres").to_string_lossy().into_owned(),
            "-D".into(),
            folder.path().join("data").to_string_lossy().into_owned(),
            "-k".into(),
            folder.path().to_string_lossy().into_owned(),
            "-c".into(),
            "listen_addresses=127.0.0.1".into(),
            "-c".into(),
            format!("port={port}"),
            "-c".into(),
            "max_connections=200".into(),
        ];
        // SIGQUIT: PostgreSQL ends at once without waiting for clients.
        let server = Guarded::spawn(folder, user, "QUIT", &command);
        let is_ready = || server.log().contains("database system is ready to accept connections");
        wait_until(START_TIMEOUT, || is_ready() || !server.is_running());
        if is_ready() && server.is_running() {
            Ok(Self { server, programs: programs.to_owned(), port })
        } else {
            Err(server.log_tail())
        }
    }
}

fn init(programs: &Path, folder: &Path, user: Option<User>) {
    let mut initdb = Command::new(programs.join("initdb"));
    // -N skips fsync while the cluster is made, not for its later commits.
    initdb.args(["-U", "tenure", "-A", "trust", "-E", "UTF8", "--no-locale", "-N", "-D"]);
    initdb.arg(folder.join("data")).current_dir(folder);
    if let Some(user) = user {
        user.apply(&mut initdb);
    }
    let output = initdb.output().expect("initdb starts");
    assert!(output.status.success(), "initdb: {}", String::from_utf8_lossy(&output.stderr));
}

/// Folder with initdb, postgres and psql: Debian's newest version, else what is in `PATH`.
fn find_programs() -> Option<PathBuf> {
    let version =
        |folder: &PathBuf| -> Option<u32> { folder.parent()?.file_name()?.to_str()?.parse().ok() };
    let mut debian: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("bin")))
        .collect();
    debian.sort_by_key(|folder| std::cmp::Reverse(version(folder)));
    let path = env::var_os("PATH").unwrap_or_default();
    debian.into_iter().chain(env::split_paths(&path)).find(|folder| {
        ["initdb", "postgres", "psql"].iter().all(|name| folder.join(name).is_file())
    })
}
