//! A throw-away MariaDB.

use std::env;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use super::guarded::{Guarded, User};
use super::{Missing, free_port, refuse_in_fast_tier, unique_name, wait_until};

const PART: &str = "MariaDB";
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Another process may take the port between the look and the start.
const START_ATTEMPTS: usize = 3;

/// A MariaDB server on a loopback port, with 300 connections and a superuser `root` without a password. Its commits are
/// durable as in production. Dropping it stops it and removes its data.
#[derive(Debug)]
pub struct MariaDb {
    // Kept for its end.
    _server: Guarded,
    programs: Programs,
    port: u16,
}

#[derive(Clone, Debug)]
struct Programs {
    server: PathBuf,
    install: PathBuf,
    client: PathBuf,
}

impl MariaDb {
    /// Starts a server, in about two seconds.
    ///
    /// # Errors
    ///
    /// [`Missing`] where no `mariadbd` is found or in the fast tier.
    ///
    /// # Panics
    ///
    /// When MariaDB is there and does not start.
    pub fn start() -> Result<Self, Missing> {
        refuse_in_fast_tier(PART)?;
        let programs = Programs::find().ok_or_else(|| {
            Missing::new(
                PART,
                "no mariadbd found; apt-get install mariadb-server, or run tests/run as root",
            )
        })?;
        let mut last_log = String::new();
        for _ in 0..START_ATTEMPTS {
            match Self::start_once(&programs) {
                Ok(mariadb) => return Ok(mariadb),
                Err(log) => last_log = log,
            }
        }
        panic!("MariaDB did not start; the end of its log:\n{last_log}");
    }

    /// The one server of this test process, started by the first caller. Tests keep apart by
    /// [`MariaDb::new_database`].
    ///
    /// # Errors
    ///
    /// As [`MariaDb::start`].
    pub fn shared() -> Result<&'static Self, Missing> {
        static SHARED: OnceLock<Result<MariaDb, Missing>> = OnceLock::new();
        SHARED.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    /// Port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Makes an empty database and returns its name.
    #[must_use]
    pub fn new_database(&self) -> String {
        let name = unique_name("t");
        self.sql("mysql", &format!("CREATE DATABASE {name}"));
        name
    }

    /// Runs `statements` in `database` by the client and returns the rows, one a line, columns separated by tabs.
    ///
    /// # Panics
    ///
    /// When MariaDB refuses a statement.
    pub fn sql(&self, database: &str, statements: &str) -> String {
        let output = Command::new(&self.programs.client)
            .args(["--no-defaults", "--batch", "--skip-column-names", "--user=root"])
            .args(["--host=127.0.0.1", "--protocol=tcp", &format!("--port={}", self.port)])
            .arg(format!("--execute={statements}"))
            .arg(database)
            .output()
            .expect("the client starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "MariaDB refused {statements:?}: {error}");
        String::from_utf8(output.stdout).expect("the client prints UTF-8").trim_end().to_owned()
    }

    fn start_once(programs: &Programs) -> Result<Self, String> {
        let user = User::unprivileged();
        let folder =
            tempfile::Builder::new().prefix("tenure-mariadb-").tempdir().expect("a folder");
        if let Some(user) = user {
            chown(folder.path(), Some(user.uid), Some(user.gid)).expect("root may give a folder");
        }
        install(programs, folder.path(), user);
        let port = free_port();
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        let command = [
            programs.server.to_string_lossy().into_owned(),
            "--no-defaults".into(),
            format!("--datadir={}", path("data")),
            format!("--socket={}", path("socket")),
            format!("--pid-file={}", path("pid")),
            "--bind-address=127.0.0.1".into(),
            format!("--port={port}"),
            "--skip-name-resolve".into(),
            "--max-connections=300".into(),
            "--innodb-buffer-pool-size=64M".into(),
            // Otherwise a paused client that is cut off fills the log.
            "--log-warnings=1".into(),
        ];
        let server = Guarded::spawn(folder, user, "KILL", &command);
        let is_ready = || server.log().contains("ready for connections");
        wait_until(START_TIMEOUT, || is_ready() || !server.is_running());
        if is_ready() && server.is_running() {
            Ok(Self { _server: server, programs: programs.clone(), port })
        } else {
            Err(server.log_tail())
        }
    }
}

fn install(programs: &Programs, folder: &Path, user: Option<User>) {
    let mut install = Command::new(&programs.install);
    install.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]);
    install.arg(format!("--datadir={}", folder.join("data").display())).current_dir(folder);
    if let Some(user) = user {
        user.apply(&mut install);
    }
    let output = install.output().expect("mariadb-install-db starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "mariadb-install-db: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Programs {
    fn find() -> Option<Self> {
        let path = env::var_os("PATH").unwrap_or_default();
        let folders: Vec<PathBuf> =
            env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]).collect();
        let find = |name: &str| {
            folders.iter().map(|folder| folder.join(name)).find(|program| program.is_file())
        };
        Some(Self {
            server: find("mariadbd")?,
            install: find("mariadb-install-db")?,
            client: find("mariadb")?,
        })
    }
}
