//! Runs one coordinator node.

use std::path::Path;

use tenure_coordinator::Node;
use tenure_coordinator::raft::StopReason;
use tenure_coordinator::settings::NodeSettings;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::ServeArgs;
use crate::output::line;
use crate::{Failure, exit};

pub(crate) async fn run(args: ServeArgs) -> Result<(), Failure> {
    let usage = |message: String| Failure { message, exit: exit::USAGE };
    // Goes away with the process.
    let mut temporary = None;
    let mut settings = match &args.config {
        Some(file) => read(file)?,
        // Where the other commands look when they are told nothing.
        None => NodeSettings {
            client_listen: NodeSettings::default().client_listen,
            ..NodeSettings::dev()
        },
    };
    if args.dev && args.data_dir.is_none() {
        let folder =
            tempfile::tempdir().map_err(|error| usage(format!("no temporary folder: {error}")))?;
        settings.data_dir = folder.path().join("node");
        temporary = Some(folder);
    }
    override_by_flags(&mut settings, &args)?;
    settings.validate().map_err(|error| usage(error.to_string()))?;
    // From here on the signals end the program in order, also while it waits for the other founders.
    let asked = asked_to_stop();
    tokio::pin!(asked);
    let node = tokio::select! {
        () = &mut asked => return Ok(()),
        started = Node::start(settings) => started
            .map_err(|error| Failure { message: error.to_string(), exit: exit::FAILED })?,
    };
    line(format_args!("serving clients at {}", node.client_address()));
    let ended = tokio::select! {
        () = asked => None,
        reason = node.stopped() => Some(reason),
    };
    node.shutdown().await;
    drop(temporary);
    match ended {
        None | Some(StopReason::Shutdown) => Ok(()),
        Some(StopReason::Failed(reason)) => Err(Failure {
            message: format!(
                "the node stopped: {reason}\nnext: docs/operations.md, \"A node that stopped\""
            ),
            exit: exit::FAILED,
        }),
    }
}

fn read(file: &Path) -> Result<NodeSettings, Failure> {
    let usage = |message: String| Failure { message, exit: exit::USAGE };
    let text = std::fs::read_to_string(file)
        .map_err(|error| usage(format!("{}: {error}", file.display())))?;
    NodeSettings::from_toml(&text).map_err(|error| usage(format!("{}: {error}", file.display())))
}

fn override_by_flags(settings: &mut NodeSettings, args: &ServeArgs) -> Result<(), Failure> {
    let address = |flag: &str, text: &str| {
        text.parse().map_err(|error| Failure {
            message: format!(
                "--{flag} {text:?}: {error}: write IP:PORT, for example 127.0.0.1:7400"
            ),
            exit: exit::USAGE,
        })
    };
    if let Some(text) = &args.listen {
        settings.client_listen = address("listen", text)?;
    }
    if let Some(text) = &args.raft_listen {
        settings.raft_listen = address("raft-listen", text)?;
    }
    if args.advertised.is_some() {
        settings.client_advertised.clone_from(&args.advertised);
    }
    if args.raft_advertised.is_some() {
        settings.raft_advertised.clone_from(&args.raft_advertised);
    }
    if let Some(folder) = &args.data_dir {
        settings.data_dir.clone_from(folder);
    }
    Ok(())
}

/// Takes the signals over at once, and waits for one.
fn asked_to_stop() -> impl Future<Output = ()> {
    let handlers = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    async move {
        let (Ok(mut terminate), Ok(mut interrupt)) = handlers else {
            // Without handlers the signals end the process by themselves.
            return std::future::pending().await;
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}
