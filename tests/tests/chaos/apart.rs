//! Parts of tests that need a process of their own: one whose threads are counted, one whose log is read.

use std::process::Command;
use std::{env, fs};

use tenure_tests::process::Process;

/// Names what a process of this kind is there for.
const ASKED: &str = "TENURE_CHAOS_APART";

/// Starts this program once more, for its test `entry` alone, which finds `told` in its environment.
pub(crate) fn start(name: &str, entry: &str, told: &[(&str, &str)]) -> Process {
    let program = env::current_exe().expect("a test knows its program");
    let mut command = Command::new(program);
    command.args(["--exact", entry, "--nocapture", "--test-threads=1"]).env(ASKED, entry);
    command.envs(told.iter().copied());
    Process::spawn(name, &mut command)
}

/// Whether this process was started for `entry`; otherwise that test has nothing to do.
pub(crate) fn is_for(entry: &str) -> bool {
    env::var(ASKED).is_ok_and(|asked| asked == entry)
}

/// What the process was told under `name`.
pub(crate) fn told(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not told"))
}

/// Names of all threads of this process, sorted.
pub(crate) fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").expect("a process sees its threads");
    let name = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.ok()?.path().join("comm")).ok().map(|name| name.trim().to_owned())
    };
    let mut names: Vec<String> = tasks.filter_map(name).collect();
    names.sort();
    names
}
