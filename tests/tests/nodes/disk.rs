//! A disk without room: no acknowledgement, and a node that says why it stopped.

use std::process::Command;
use std::time::Duration;

use tenure_tests::cluster::Cluster;
use tenure_tests::figures::tell;
use tenure_tests::load::{Load, Shape};
use tenure_tests::tier;

use super::{assert_undisturbed, beside_others, cluster};

/// Outlasts a node that is away for as long as these tests take.
const TTL_MS: u64 = 60_000;

fn load(cluster: &Cluster) -> Load {
    Load::start(
        cluster.addresses(),
        Shape { ttl_ms: TTL_MS, pause: Duration::ZERO, ..Shape::default() },
    )
}

/// The node has stopped by itself, and names what it was at and what the system said.
fn assert_says_why(cluster: &mut Cluster, node: u64, because: &str) {
    let (code, output) = cluster.wait_for_end(node);
    assert_eq!(code, Some(1), "{output}");
    for wanted in ["the node stopped: ", because, "docs/operations.md"] {
        assert!(output.contains(wanted), "lacks {wanted:?}: {output}");
    }
}

#[test]
fn node_whose_log_cannot_grow_acknowledges_nothing_more_and_has_all_that_it_acknowledged() {
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    let mut cluster = cluster(1);
    cluster.terminate(1);
    cluster.run_with_file_limit(1, 384);
    let load = load(&cluster);
    let before = load.report();
    assert_says_why(&mut cluster, 1, "File too large");
    let stopped = load.report().acknowledged_at.len();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(load.report().acknowledged_at.len(), stopped, "nothing is acknowledged any more");
    cluster.run(1);
    load.wait_for_more(30);
    let report = load.finish();
    tell(format_args!("{stopped} commits acknowledged before"));
    assert_undisturbed(&before, &report);
}

#[test]
fn node_of_three_on_a_full_disk_stops_alone_and_comes_back_with_room() {
    if !tier::has_time() {
        return;
    }
    let _machine = beside_others();
    let Some(disk) = SmallDisk::prepare() else { return };
    let mut cluster = cluster(3);
    let (leader, _) = cluster.raft_leader();
    let victim = *cluster.running().iter().find(|node| **node != leader).unwrap();
    cluster.terminate(victim);
    let folder = cluster.folder_of(victim);
    let disk = disk.mount(&folder);
    cluster.run(victim);
    let load = load(&cluster);
    let before = load.report();
    disk.fill();
    assert_says_why(&mut cluster, victim, "No space left on device");
    load.wait_for_more(100);
    disk.make_room();
    cluster.run(victim);
    cluster.wait_until_level();
    let report = load.finish();
    assert_undisturbed(&before, &report);
    cluster.kill(victim);
}

/// A file system in memory, where this process may mount one.
struct SmallDisk;

struct Mounted(std::path::PathBuf);

impl SmallDisk {
    fn prepare() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = mount(folder.path());
        if mounted {
            unmount(folder.path());
            return Some(Self);
        }
        tenure_tests::servers::announce_skip(
            "a full disk: mounting a small file system takes root",
        );
        None
    }

    /// Moves what is in `folder` onto the small disk.
    #[allow(clippy::unused_self, reason = "whoever has one may mount")]
    fn mount(self, folder: &std::path::Path) -> Mounted {
        let aside = folder.with_extension("aside");
        std::fs::rename(folder, &aside).unwrap();
        std::fs::create_dir(folder).unwrap();
        assert!(mount(folder));
        let copied =
            Command::new("cp").args(["-a", "--"]).arg(aside.join(".")).arg(folder).status();
        assert!(copied.unwrap().success());
        std::fs::remove_dir_all(aside).unwrap();
        Mounted(folder.to_owned())
    }
}

impl Mounted {
    /// Takes all the room that is left.
    fn fill(&self) {
        use std::io::Write as _;
        let mut file = std::fs::File::create(self.0.join("filling")).unwrap();
        while file.write_all(&[0; 4_096]).is_ok() {}
    }

    fn make_room(&self) {
        std::fs::remove_file(self.0.join("filling")).unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

fn mount(folder: &std::path::Path) -> bool {
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", "size=64m", "tmpfs"]).arg(folder);
    command.output().is_ok_and(|output| output.status.success())
}

fn unmount(folder: &std::path::Path) {
    // Lazily: a node that was killed may still be on its way out.
    let unmounted = Command::new("umount").arg("-l").arg(folder).status();
    assert!(unmounted.unwrap().success());
}
