//! Who may depend on whom, what the pure crates may not use, and how long a file may be.
//!
//! Change these tables only together with docs/architecture.md.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest source file before its tests, in lines.
const FILE_MAX_LINES: usize = 600;

/// A crate and what it may depend on directly, apart from dev- and build-dependencies.
struct Layer {
    package: &'static str,
    /// Crates of this workspace.
    ours: &'static [&'static str],
    /// Other crates.
    others: &'static [&'static str],
}

#[rustfmt::skip]
const LAYERS: &[Layer] = &[
    Layer { package: "tenure-model", ours: &[], others: &["thiserror"] },
    Layer { package: "tenure-core", ours: &["tenure-model"], others: &["thiserror"] },
    Layer {
        package: "tenure-token",
        ours: &["tenure-model"],
        others: &["base64", "ed25519-dalek", "thiserror"],
    },
    Layer { package: "tenure-planner", ours: &["tenure-model"], others: &[] },
    Layer {
        package: "tenure-proto",
        ours: &["tenure-model"],
        others: &["bytes", "prost", "thiserror", "tonic", "tonic-prost"],
    },
    Layer {
        package: "tenure-coordinator",
        ours: &["tenure-model", "tenure-core", "tenure-planner", "tenure-proto", "tenure-token"],
        others: &[
            "bytes", "codeq", "crc32fast", "dashmap", "futures", "openraft", "postcard", "prost",
            "raft-log", "rand", "rustix", "serde", "thiserror", "tokio", "tokio-stream", "toml",
            "tonic", "tonic-health", "tonic-reflection", "tracing",
        ],
    },
    Layer {
        package: "tenure-sdk",
        ours: &["tenure-model", "tenure-proto"],
        others: &[
            "bytes", "dashmap", "futures", "metrics", "rand", "regex", "rustix", "thiserror",
            "tokio", "tokio-stream", "tonic", "tracing",
        ],
    },
    Layer {
        package: "tenure-kafka",
        ours: &["tenure-model", "tenure-sdk"],
        others: &["bytes", "futures", "rdkafka", "rdkafka-sys", "thiserror", "tokio", "tracing"],
    },
    Layer {
        package: "tenure-sink-sqlite",
        ours: &["tenure-model", "tenure-sdk"],
        others: &["rusqlite", "thiserror", "tokio", "tracing"],
    },
    Layer {
        package: "tenure-sink-postgres",
        ours: &["tenure-model", "tenure-sdk"],
        others: &["deadpool-postgres", "thiserror", "tokio", "tokio-postgres", "tracing"],
    },
    Layer {
        package: "tenure-sink-postgres-sqlx",
        ours: &["tenure-model", "tenure-sdk", "tenure-sink-postgres"],
        others: &["sqlx", "tokio", "tracing"],
    },
    Layer {
        package: "tenure-sink-mysql",
        ours: &["tenure-model", "tenure-sdk"],
        others: &["sqlx", "tokio", "tracing"],
    },
    Layer {
        package: "tenure-sink-redis",
        ours: &["tenure-model", "tenure-sdk"],
        others: &["redis", "tokio", "tracing"],
    },
    Layer {
        package: "tenure-sink-kafka",
        ours: &["tenure-model", "tenure-sdk"],
        others: &["rand", "rdkafka", "tokio", "tracing"],
    },
    Layer {
        package: "tenure-sink-object-store",
        ours: &["tenure-model", "tenure-sdk"],
        others: &[
            "bytes", "futures", "object_store", "rand", "reqwest", "rustls", "serde", "serde_json",
            "tokio", "tracing",
        ],
    },
    Layer {
        package: "tenure-sink-http",
        ours: &["tenure-model", "tenure-sdk", "tenure-token"],
        others: &[
            "bytes", "deadpool-postgres", "futures", "http", "http-body-util", "hyper-util",
            "thiserror", "tokio", "tokio-postgres", "tonic", "tower-layer", "tower-service",
            "tracing",
        ],
    },
];

/// Top of the house: the program and the tests may use every crate.
const TOP: &[&str] = &["tenure-cli", "tenure-examples", "tenure-tests"];

/// What the pure crates' clippy.toml must ban: anything that two replicas would see differently.
const BANS: &[&str] = &[
    "std::collections::HashMap",
    "std::collections::HashSet",
    "std::collections::hash_map::RandomState::new",
    "std::sync::Mutex",
    "std::thread::spawn",
    "std::time::Instant",
    "std::time::Instant::now",
    "std::time::SystemTime",
    "std::time::SystemTime::now",
];

#[test]
fn each_layer_depends_only_on_what_the_table_allows() {
    let mut forbidden = Vec::new();
    for layer in LAYERS {
        let allowed: BTreeSet<&str> = layer.ours.iter().chain(layer.others).copied().collect();
        let dependencies = cargo_tree(layer.package, &["--depth", "1"]);
        let more = dependencies.into_iter().filter(|dependency| !allowed.contains(&**dependency));
        forbidden.extend(more.map(|dependency| format!("{} -> {dependency}", layer.package)));
    }
    assert!(forbidden.is_empty(), "not in the table: {}", forbidden.join(", "));
}

#[test]
fn no_layer_reaches_another_of_ours_through_a_third() {
    // Two seams of DESIGN.md that a direct list cannot show: the SDK and what stands on it know
    // nothing of the coordinator's logic, and the pure crates reach no runtime.
    for package in [
        "tenure-sdk",
        "tenure-kafka",
        "tenure-sink-sqlite",
        "tenure-sink-postgres",
        "tenure-sink-postgres-sqlx",
        "tenure-sink-mysql",
        "tenure-sink-redis",
        "tenure-sink-kafka",
        "tenure-sink-object-store",
        "tenure-sink-http",
    ] {
        let all = cargo_tree(package, &[]);
        for forbidden in ["tenure-core", "tenure-planner", "tenure-coordinator", "openraft"] {
            assert!(!all.contains(forbidden), "{package} must not reach {forbidden}");
        }
    }
    // Drivers of sinks that a build must ask for.
    let program = tree("tenure-cli", &[]);
    for driver in ["sqlx", "redis", "object_store"] {
        assert!(!program.contains(driver), "the program must not bring {driver} by itself");
    }
    for package in ["tenure-model", "tenure-core", "tenure-planner", "tenure-proto"] {
        let all = cargo_tree(package, &[]);
        for forbidden in ["rdkafka", "rusqlite", "tokio-postgres", "openraft"] {
            assert!(!all.contains(forbidden), "{package} must not reach {forbidden}");
        }
    }
    for package in ["tenure-model", "tenure-core", "tenure-planner"] {
        let all = cargo_tree(package, &[]);
        for forbidden in ["tokio", "rand", "serde", "prost"] {
            assert!(!all.contains(forbidden), "{package} must not reach {forbidden}");
        }
    }
}

#[test]
fn every_crate_of_the_workspace_has_a_layer() {
    let known: BTreeSet<String> = LAYERS
        .iter()
        .map(|layer| layer.package)
        .chain(TOP.iter().copied())
        .map(Into::into)
        .collect();
    assert_eq!(members(), known);
}

#[test]
fn pure_crates_ban_clocks_threads_and_unordered_maps() {
    for folder in ["coordinator/core", "coordinator/planner"] {
        let text = fs::read_to_string(root().join(folder).join("clippy.toml")).unwrap();
        let paths: BTreeSet<&str> = text
            .lines()
            .filter(|line| !line.trim_start().starts_with('#'))
            .filter_map(|line| line.split_once("path = \"")?.1.split('"').next())
            .collect();
        for ban in BANS {
            assert!(paths.contains(ban), "{folder}/clippy.toml does not ban {ban}");
        }
    }
}

#[test]
fn pure_crates_have_no_async_and_lift_no_ban() {
    for folder in ["coordinator/core/src", "coordinator/planner/src", "proto/model/src"] {
        for path in source_files(&root().join(folder)) {
            let text = fs::read_to_string(&path).unwrap();
            for word in
                ["async fn", "async move", ".await", "disallowed_types", "disallowed_methods"]
            {
                assert!(!text.contains(word), "{} has {word:?}", path.display());
            }
        }
    }
}

#[test]
fn only_the_kafka_crate_lifts_the_ban_on_unsafe_code() {
    for path in source_files(&root()) {
        let relative = path.strip_prefix(root()).unwrap();
        if relative.starts_with("consumer-sdk/kafka") || relative == Path::new(file!()) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains("unsafe_code"), "{} lifts the ban", relative.display());
    }
}

#[test]
fn no_source_file_is_too_long() {
    for path in source_files(&root()) {
        let relative = path.strip_prefix(root()).unwrap();
        if is_test(relative) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split_once("\n#[cfg(test)]\nmod tests {").map_or(&*text, |(code, _)| code);
        let count = code.lines().count();
        let path = relative.display();
        assert!(count <= FILE_MAX_LINES, "{path} has {count} lines before its tests; split it");
    }
}

/// Whether a path is for tests alone: below a folder `tests`, or a module of that name.
fn is_test(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs")
}

fn root() -> PathBuf {
    // Tests run in the folder of their package; one that was compiled in may be another checkout's.
    Path::new("..").canonicalize().unwrap()
}

/// Names of the packages that `package` depends on for a build without tests, in all its features.
fn cargo_tree(package: &str, more: &[&str]) -> BTreeSet<String> {
    tree(package, &[&["--all-features"], more].concat())
}

/// As [`cargo_tree`], in the features that a build has by itself.
fn tree(package: &str, more: &[&str]) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--package", package, "--edges", "normal"])
        .args(["--prefix", "none", "--offline", "--locked"])
        .args(more)
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    let names: BTreeSet<String> = tree
        .lines()
        .skip(1)
        .filter_map(|line| line.split(' ').next())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect();
    assert!(tree.starts_with(package), "cargo tree spoke of something else: {tree}");
    names
}

/// Names of the workspace's packages.
fn members() -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline", "--locked"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    packages.iter().map(|package| package["name"].as_str().unwrap().to_owned()).collect()
}

/// All files `*.rs` below `folder`, without build output and hidden folders.
fn source_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    assert!(!files.is_empty(), "no source files below {}", folder.display());
    files
}
