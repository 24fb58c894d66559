//! `tenure lock`: runs a command while this process owns a name, and stops it before that may end.

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tenure_model::{GroupId, LeaseSettings, TopicName};
use tenure_sdk::consumer::{ConsumerError, End};
use tenure_sdk::resource::{Leading, Singleton};
use tenure_sdk::session::EndCause;
use tenure_sdk::sink::BoxError;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::args::LockArgs;
use crate::{Failure, exit, output};

/// SIGKILL goes out this long before the lease, or the drain, ends.
const KILL_MARGIN: Duration = Duration::from_millis(200);

/// How long leaving may take once the command has ended.
const LEAVE: Duration = Duration::from_secs(5);

/// Runs the command under the lock; answers its exit code, or one of the lock's own.
pub(crate) async fn run(args: &LockArgs) -> Result<ExitCode, Failure> {
    let usage = |message: String| Failure { message, exit: exit::USAGE };
    let group = GroupId::new(&args.group).map_err(|error| usage(format!("--group: {error}")))?;
    let name = TopicName::new(&args.name).map_err(|error| usage(format!("NAME: {error}")))?;
    let election = Singleton::new(group, name.clone(), args.coordinators.clone())
        .with(|consumer| consumer.lease(LeaseSettings::for_ttl(args.ttl_ms)))
        .build()
        .map_err(|error| usage(error.to_string()))?;
    let stopper = election.stopper();
    let held = Arc::new(Held {
        name,
        command: args.command.clone(),
        kill_after: Duration::from_millis(args.kill_after_ms),
        outcome: watch::Sender::new(None),
        has_begun: watch::Sender::new(false),
        signals: watch::Sender::new(None),
    });
    let job = Arc::clone(&held);
    let run = election.run(move |leading| Arc::clone(&job).hold(leading));
    tokio::pin!(run);
    let signals = pass_on_signals(Arc::clone(&held));
    tokio::pin!(signals);
    let wait = args.wait_ms.map_or(Duration::MAX, Duration::from_millis);
    let in_time = async {
        let mut begun = held.has_begun.subscribe();
        // The sender lives in `held`.
        let begun = begun.wait_for(|begun| *begun);
        if tokio::time::timeout(wait, begun).await.is_ok() {
            std::future::pending::<()>().await;
        }
    };
    tokio::pin!(in_time);
    let mut outcome = held.outcome.subscribe();
    let (mut gave_up, mut is_over) = (false, false);
    let ended = loop {
        tokio::select! {
            ended = &mut run => break ended,
            () = &mut in_time, if !gave_up => {
                gave_up = true;
                held.set_outcome(exit::LOCK_NOT_IN_TIME);
                output::complain(format_args!(
                    "error: {} is still owned by another after {} ms: wait longer, or look with `tenure describe {}`",
                    args.name, args.wait_ms.unwrap_or(0), args.group
                ));
            }
            number = &mut signals, if !is_over => held.set_outcome(128_u8.saturating_add(number)),
            // Whatever it is: nothing is owned a second time.
            Ok(_) = outcome.wait_for(Option::is_some), if !is_over => {
                is_over = true;
                stopper.stop(LEAVE);
            }
        }
    };
    let outcome = *held.outcome.borrow();
    match (outcome, ended) {
        (Some(code), _) => Ok(ExitCode::from(code)),
        (None, Ok(_)) => Ok(ExitCode::from(exit::LOCK_LOST)),
        (None, Err(error)) => Err(refused(&error)),
    }
}

fn refused(error: &ConsumerError) -> Failure {
    let message = match error {
        ConsumerError::MembershipEnded(EndCause::Refused { code, message }) => {
            format!("{code}: {message}")
        }
        ConsumerError::MembershipEnded(
            EndCause::Left | EndCause::LeaveUnanswered | EndCause::Failed(_),
        )
        | ConsumerError::SessionGone => error.to_string(),
    };
    Failure { message, exit: exit::LOCK_REFUSED }
}

/// The command, and what became of it.
struct Held {
    name: TopicName,
    command: Vec<OsString>,
    kill_after: Duration,
    /// Exit code; the first one counts.
    outcome: watch::Sender<Option<u8>>,
    has_begun: watch::Sender<bool>,
    /// The last signal to hand on to the command.
    signals: watch::Sender<Option<Signal>>,
}

/// Answers the number of a signal that came while no command ran; others go to the command.
async fn pass_on_signals(held: Arc<Held>) -> u8 {
    let kinds = [
        (SignalKind::interrupt(), Signal::INT),
        (SignalKind::terminate(), Signal::TERM),
        (SignalKind::hangup(), Signal::HUP),
    ];
    let mut streams = Vec::new();
    for (kind, number) in kinds {
        match signal(kind) {
            Ok(stream) => streams.push((stream, number)),
            Err(error) => tracing::warn!(%error, "a signal cannot be listened for"),
        }
    }
    loop {
        let received = streams.iter_mut().map(|(stream, number)| {
            Box::pin(async {
                stream.recv().await;
                *number
            })
        });
        if received.len() == 0 {
            std::future::pending::<()>().await;
        }
        let (number, _, _) = futures::future::select_all(received).await;
        if *held.has_begun.borrow() {
            held.signals.send_replace(Some(number));
        } else {
            return u8::try_from(number.as_raw()).unwrap_or(0);
        }
    }
}

impl Held {
    fn set_outcome(&self, code: u8) {
        self.outcome.send_modify(|outcome| {
            outcome.get_or_insert(code);
        });
    }

    /// Runs the command once; a lead that comes again later finds it done.
    async fn hold(self: Arc<Self>, leading: Leading) -> Result<(), BoxError> {
        // Before the command can be seen to run: no signal is lost in between.
        let signals = self.signals.subscribe();
        if self.has_begun.send_replace(true) {
            return Ok(());
        }
        let code = match self.start(&leading) {
            Ok(run) => self.watch_over(&leading, run, signals).await,
            Err(error) => {
                let program = self.command[0].to_string_lossy();
                output::complain(format_args!("error: {program} does not start: {error}"));
                if error.kind() == std::io::ErrorKind::NotFound {
                    exit::COMMAND_NOT_FOUND
                } else {
                    exit::COMMAND_NOT_STARTED
                }
            }
        };
        self.set_outcome(code);
        Ok(())
    }

    /// Starts the command, in a process group of its own unless it may talk to a terminal.
    fn start(&self, leading: &Leading) -> std::io::Result<Running> {
        let grant = leading.grant();
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .env("TENURE_LOCK", self.name.as_str())
            .env("TENURE_EPOCH", grant.epoch.get().to_string())
            .env("TENURE_FENCE", grant.resource.as_str());
        if let Some(token) = &grant.token {
            command.env("TENURE_TOKEN", &**token);
        }
        let whole_group = !std::io::stdin().is_terminal();
        if whole_group {
            command.process_group(0);
        }
        let child = command.spawn()?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        Ok(Running { child, pid, whole_group })
    }

    /// Waits for the command, or stops it; answers the exit code.
    async fn watch_over(
        &self,
        leading: &Leading,
        mut run: Running,
        mut signals: watch::Receiver<Option<Signal>>,
    ) -> u8 {
        let why = loop {
            tokio::select! {
                biased;
                status = run.child.wait() => return run.ended(status),
                end = leading.ended() => match end {
                    End::Shutdown { .. } | End::Revoked { .. } => break "it is asked for",
                    End::Lost { .. } => {
                        run.signal(Signal::KILL);
                        return self.stopped(run, "it is lost").await;
                    }
                },
                _ends_at = leading.lease_at_risk() => break "its lease is at risk",
                Ok(()) = signals.changed() => {
                    let number = *signals.borrow_and_update();
                    // A terminal has told the command itself.
                    if let Some(number) = number.filter(|_| run.whole_group) {
                        run.signal(number);
                    }
                }
            }
        };
        run.signal(Signal::TERM);
        let left = leading.grant().lease.remaining().saturating_sub(KILL_MARGIN);
        let grace = self.kill_after.min(left);
        tokio::select! {
            biased;
            _status = run.child.wait() => {}
            _lost = leading.lost() => run.signal(Signal::KILL),
            () = tokio::time::sleep(grace) => run.signal(Signal::KILL),
        }
        self.stopped(run, why).await
    }

    async fn stopped(&self, mut run: Running, why: &str) -> u8 {
        output::complain(format_args!("{} is given up, {why}: the command was stopped", self.name));
        // Killed or gone: this does not wait long.
        let status = run.child.wait().await;
        let _code = run.ended(status);
        exit::LOCK_LOST
    }
}

/// A command that runs. Dropped, it is killed.
struct Running {
    child: Child,
    /// Nothing once it has ended: the number may be another's then.
    pid: Option<Pid>,
    whole_group: bool,
}

impl Running {
    fn signal(&self, number: Signal) {
        let Some(pid) = self.pid else { return };
        let sent = match self.whole_group {
            true => kill_process_group(pid, number),
            false => kill_process(pid, number),
        };
        if let Err(error) = sent {
            tracing::debug!(%error, ?number, "the command takes no signal");
        }
    }

    /// Reads how it ended. What it has left behind in its group is killed.
    fn ended(&mut self, status: std::io::Result<ExitStatus>) -> u8 {
        if self.whole_group {
            self.signal(Signal::KILL);
        }
        self.pid = None;
        match status {
            Ok(status) => {
                let code = status.code().or_else(|| status.signal().map(|number| 128 + number));
                code.and_then(|code| u8::try_from(code).ok()).unwrap_or(exit::FAILED)
            }
            Err(error) => {
                output::complain(format_args!("error: the command's end is not known: {error}"));
                exit::UNKNOWN
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}
