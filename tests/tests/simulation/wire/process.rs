//! Runs as processes of their own.

use std::env;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

use super::scenes::Scene;

/// Names a run: `scene:seed`.
const ASKED: &str = "TENURE_WIRE";

/// Set in the process of a run.
const INSIDE: &str = "TENURE_WIRE_INSIDE";

/// Test that plays what is asked for.
const ENTRY: &str = "wire::one_run_plays";

/// Begins the line by which a run says how it went.
const RESULT: &str = "wire-run";

/// What became of a run.
pub(super) struct Played {
    scene: Scene,
    seed: u64,
    is_good: bool,
    /// The same for the same seed; nothing when the run was not played to its end.
    pub(super) trace: Option<String>,
    pub(super) output: String,
}

impl Played {
    pub(super) fn is_good(&self) -> bool {
        self.is_good && self.trace.is_some()
    }

    /// Whether it ended because a connection was not let go in time, at the end that `which` says.
    pub(super) fn missed(&self, which: &str) -> bool {
        let says = |line: &str| line.starts_with(which) && line.contains(": let go after ");
        !self.is_good && self.output.lines().any(says)
    }
}

impl fmt::Display for Played {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scene, seed) = (self.scene.as_str(), self.seed);
        if self.is_good() {
            return write!(f, "{scene}:{seed} {}", self.trace.as_deref().unwrap_or_default());
        }
        write!(
            f,
            "{}\n{scene}:{seed} failed: play it again with\n  {ASKED}={scene}:{seed} cargo test -p tenure-tests --test \
             simulation -- --exact {ENTRY} --nocapture",
            self.output
        )
    }
}

/// The run that the environment names.
pub(super) fn asked_for() -> Option<(Scene, u64)> {
    let text = env::var(ASKED).ok()?;
    let parsed = text
        .split_once(':')
        .and_then(|(scene, seed)| Some((Scene::parse(scene)?, seed.parse().ok()?)));
    Some(parsed.unwrap_or_else(|| panic!("{ASKED} is {text:?}; give scene:seed")))
}

/// Whether this process is there for one run.
pub(super) fn is_inside() -> bool {
    env::var_os(INSIDE).is_some()
}

/// Plays a run in this process.
pub(super) fn play_here(scene: Scene, seed: u64) {
    tenure_coordinator::parts::block_in_place();
    if let Ok(wanted) = env::var("RUST_LOG") {
        let log = tracing_subscriber::fmt().with_ansi(false).with_timer(SimulatedTime);
        log.with_env_filter(wanted).with_writer(std::io::stdout).init();
    }
    let world = scene.play(seed);
    if env::var_os("TENURE_WIRE_STORY").is_some() {
        println!("{}", world.shared.story(true));
    }
    println!(
        "\n{RESULT} trace {:016x}, {} lines, {} commits, {:?} simulated",
        world.shared.trace(),
        world.shared.line_count(),
        world.commits(),
        world.now(),
    );
}

/// Stamps what the system logs with the time of the run.
struct SimulatedTime;

impl FormatTime for SimulatedTime {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let time = turmoil::sim_elapsed().unwrap_or_default();
        write!(writer, "{:>9.3}", time.as_secs_f64() * 1000.0)
    }
}

/// Plays a run in a process of its own.
pub(super) fn play_apart(scene: Scene, seed: u64) -> Played {
    let program = env::current_exe().expect("a test knows its program");
    let ran = Command::new(program)
        .args(["--exact", ENTRY, "--nocapture", "--test-threads=1"])
        .env(ASKED, format!("{}:{seed}", scene.as_str()))
        .env(INSIDE, "1")
        .env("LD_PRELOAD", &*ENTROPY)
        .env("TENURE_ENTROPY", seed.to_string())
        .output()
        .expect("a test can start itself");
    let output = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    let trace = output.lines().find_map(|line| line.strip_prefix(RESULT)?.strip_prefix(' '));
    let (trace, is_good) = (trace.map(str::to_owned), ran.status.success());
    Played { scene, seed, is_good, trace, output: output.into_owned() }
}

/// What is preloaded: compiled once for each test process, which needs no more than a build does.
static ENTROPY: LazyLock<PathBuf> = LazyLock::new(|| {
    let source = "tests/simulation/wire/entropy.c";
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let library = folder.join(format!("entropy-{}.so", std::process::id()));
    let compiled = Command::new("cc")
        .args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source)
        .status()
        .expect("a C compiler, which the build needs as well");
    assert!(compiled.success(), "{source} does not compile");
    // One name for all: whoever comes last replaces what is the same.
    let shared = folder.join("entropy.so");
    std::fs::rename(&library, &shared).expect("a file in the folder of the tests");
    shared
});
