//! Fetches etcd by the Go tools, and runs three nodes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::super::super::load::connect;
use super::super::super::{BenchError, nodes};
use super::wire::EtcdClient;
use crate::process::Process;
use crate::servers::{downloads, free_port};

const VERSION: &str = "3.7.3";
const MODULE: &str = "go.etcd.io/etcd/server/v3";
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Three nodes on loopback. They end with this value.
pub(super) struct Etcd {
    // Before the folder, so that no node writes into it while it is removed.
    nodes: BTreeMap<String, Process>,
    commands: BTreeMap<String, Vec<String>>,
    addresses: Vec<String>,
    _folder: TempDir,
}

impl Etcd {
    /// Builds the program if it is not there, and starts the nodes.
    ///
    /// # Errors
    ///
    /// When there is no Go, the build fails, or the nodes do not start.
    pub(super) fn start() -> Result<Self, BenchError> {
        let program = program()?;
        let folder = tempfile::Builder::new().prefix("tenure-etcd-").tempdir()?;
        let ports: Vec<(u16, u16)> =
            (0..nodes::COUNT).map(|_| (free_port(), free_port())).collect();
        let peers = ports
            .iter()
            .enumerate()
            .map(|(node, (_, peer))| format!("n{node}=http://127.0.0.1:{peer}"));
        let peers = peers.collect::<Vec<_>>().join(",");
        let mut commands = BTreeMap::new();
        for (node, (client, peer)) in ports.iter().enumerate() {
            let data = folder.path().join(format!("n{node}"));
            let client = format!("127.0.0.1:{client}");
            let flags = [
                ("name", format!("n{node}")),
                ("data-dir", data.display().to_string()),
                ("listen-client-urls", format!("http://{client}")),
                ("advertise-client-urls", format!("http://{client}")),
                ("listen-peer-urls", format!("http://127.0.0.1:{peer}")),
                ("initial-advertise-peer-urls", format!("http://127.0.0.1:{peer}")),
                ("initial-cluster", peers.clone()),
                ("log-level", "error".to_owned()),
            ];
            let flags = flags.map(|(flag, value)| format!("--{flag}={value}"));
            let mut command = vec![program.display().to_string()];
            command.extend(flags);
            commands.insert(client, command);
        }
        let addresses: Vec<String> = commands.keys().cloned().collect();
        let mut etcd = Self { nodes: BTreeMap::new(), commands, addresses, _folder: folder };
        for address in etcd.addresses.clone() {
            etcd.run(&address)?;
        }
        Ok(etcd)
    }

    /// What is compared with.
    pub(super) fn version() -> String {
        format!("etcd {VERSION}")
    }

    pub(super) fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Starts the node at `address`, with the folder that it left.
    ///
    /// # Errors
    ///
    /// For an address of none.
    pub(super) fn run(&mut self, address: &str) -> Result<(), BenchError> {
        let command = self.commands.get(address).ok_or("no node has that address")?;
        let mut started = Command::new(&command[0]);
        started.args(&command[1..]);
        self.nodes.insert(address.to_owned(), Process::spawn("etcd", &mut started));
        Ok(())
    }

    /// Ends the node at `address` with SIGKILL.
    ///
    /// # Errors
    ///
    /// When it does not run.
    pub(super) fn kill(&mut self, address: &str) -> Result<(), BenchError> {
        self.nodes.remove(address).ok_or("that node does not run")?.kill();
        Ok(())
    }

    /// Address of the node that leads.
    ///
    /// # Errors
    ///
    /// When none does in time.
    pub(super) fn leader(&self, runtime: &Runtime) -> Result<String, BenchError> {
        let deadline = Instant::now() + START_TIMEOUT;
        while Instant::now() < deadline {
            for address in &self.addresses {
                let status = runtime.block_on(async {
                    EtcdClient::new(connect(address).await?)
                        .status()
                        .await
                        .map_err(BenchError::from)
                });
                if status.is_ok_and(|(_, leads)| leads) {
                    return Ok(address.clone());
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let output = self.nodes.values().map(Process::tail).collect::<Vec<_>>().join("\n");
        Err(format!("etcd has no leader:\n{output}").into())
    }
}

/// The program, built from its module in the folder of downloads.
fn program() -> Result<PathBuf, BenchError> {
    let downloads = downloads().ok_or("neither XDG_CACHE_HOME nor HOME is set")?;
    let folder = downloads.join(format!("etcd-{VERSION}"));
    let program = folder.join("etcd");
    if program.is_file() {
        return Ok(program);
    }
    fs::create_dir_all(&downloads)?;
    // Moved into place only when complete: an interrupted build is done again.
    let part = tempfile::Builder::new().prefix("part.etcd.").tempdir_in(&downloads)?;
    go(part.path(), &["mod", "init", "beside"])?;
    go(part.path(), &["get", &format!("{MODULE}@v{VERSION}")])?;
    go(part.path(), &["build", "-o", "etcd", MODULE])?;
    fs::create_dir_all(&folder)?;
    fs::rename(part.path().join("etcd"), &program)?;
    Ok(program)
}

fn go(folder: &Path, arguments: &[&str]) -> Result<(), BenchError> {
    let run = Command::new("go").args(arguments).current_dir(folder).output();
    let output = run.map_err(|error| format!("go: {error}: install Go to compare with etcd"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("go {}: {text}", arguments.join(" ")).into())
}
