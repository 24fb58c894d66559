//! The raft leader's loop: leases, deadlines, plans and sessions of one term, owned by one task.
//!
//! The task runs on every node and does nothing while another one leads. Whatever it wants to happen is a command in
//! the log; a proposal that was refused or lost is proposed again until its outcome is applied or the term ends.

pub mod deadlines;
pub mod leading;
mod pause;
pub mod places;
pub(crate) mod proposer;
pub mod reign;
pub mod serving;
pub mod session;
pub mod settle;
mod standing;
mod work;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tenure_model::{Clock, ErrorCode, Tick};
use tenure_proto::status_of_error;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tonic::Status;

use crate::machine::{Change, GroupMachine};
use crate::raft::{Leadership, RaftNode};
use crate::settings::NodeSettings;
use crate::soft::Beats;
use pause::Pause;
use proposer::Proposer;
use reign::Reign;
use session::{Input, Session};
use work::{Done, Work};

/// Pause between two looks at deadlines.
const TICK: Duration = Duration::from_millis(20);

/// A loop that stood still for longer than this moves all deadlines.
const GAP_LEAST: Duration = Duration::from_millis(200);

/// Messages of sessions that wait for the driver.
const INPUTS_MAX: usize = 65_536;

/// What sessions reach the driver by. Clones share it.
#[derive(Clone)]
pub(crate) struct DriverHandle {
    inputs: mpsc::Sender<Input>,
    beats: Arc<Beats>,
}

impl DriverHandle {
    /// Hands over what a session received. False when the driver has ended.
    pub(crate) async fn tell(&self, input: Input) -> bool {
        self.inputs.send(input).await.is_ok()
    }

    /// The last heartbeats, while this node leads.
    pub(crate) fn beats(&self) -> &Beats {
        &self.beats
    }
}

/// What the driver works with.
pub(crate) struct Parts {
    pub(crate) raft: RaftNode<GroupMachine>,
    pub(crate) proposer: Proposer,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) settings: Arc<NodeSettings>,
    /// Where clients reach this node.
    pub(crate) node_address: String,
}

/// See the module.
pub(crate) struct Driver {
    parts: Parts,
    inputs: mpsc::Receiver<Input>,
    changes: broadcast::Receiver<Change>,
    leadership: watch::Receiver<Leadership>,
    beats: Arc<Beats>,
    work: FuturesUnordered<Work>,
    reign: Option<Reign>,
    last_tick: Tick,
    pause: Pause,
}

impl Driver {
    /// Makes the driver; [`Driver::run`] is its task.
    pub(crate) fn new(parts: Parts) -> (DriverHandle, Self) {
        let (sender, inputs) = mpsc::channel(INPUTS_MAX);
        let beats = Arc::new(Beats::new());
        let handle = DriverHandle { inputs: sender, beats: Arc::clone(&beats) };
        let changes = parts.raft.with_machine(GroupMachine::subscribe);
        let leadership = parts.raft.leadership();
        let last_tick = parts.clock.now();
        let driver = Self {
            parts,
            inputs,
            changes,
            leadership,
            beats,
            work: FuturesUnordered::new(),
            reign: None,
            last_tick,
            pause: Pause::new(Instant::now()),
        };
        (handle, driver)
    }

    /// Runs until `closing` is set.
    pub(crate) async fn run(mut self, mut closing: watch::Receiver<bool>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.leadership.mark_changed();
        loop {
            let reign = self.reign.as_ref();
            let is_confirming = reign.is_some_and(|reign| reign.is_confirming);
            let confirms = !is_confirming
                && (self.pause.is_on() || reign.is_some_and(Reign::wants_confirmation));
            tokio::select! {
                biased;
                _ = closing.wait_for(|closing| *closing) => break,
                changed = self.leadership.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    self.follow_leadership();
                }
                // Before all input: what is due is never starved by it.
                _ = tick.tick() => self.tick(),
                change = self.changes.recv() => {
                    if !self.follow_change(change) {
                        break;
                    }
                    self.flush();
                }
                Some(done) = self.work.next() => self.done(done),
                () = sleep_until(self.pause.look_at()), if confirms => {
                    if self.pause.look(Instant::now(), self.inputs.len()) {
                        self.take_all();
                        self.confirm_waiting();
                    }
                }
                // Whatever comes while no confirmation can begin is taken in at once before the next one: a loop that
                // wakes for each heartbeat costs more than the heartbeats.
                input = self.inputs.recv(), if !is_confirming && !self.pause.is_on() => {
                    let Some(input) = input else { break };
                    self.take(input);
                }
            }
        }
        let status = status_of_error(
            ErrorCode::ShuttingDown,
            "this node is shutting down: go to another one",
            "",
        );
        self.end_reign(&status);
    }

    fn follow_leadership(&mut self) {
        let now = self.leadership.borrow_and_update().clone();
        if let Some(reign) = &self.reign
            && (!now.is_me || reign.term != now.term)
        {
            tracing::info!(term = %reign.term, "this node leads no more");
            let status = not_leader(&now);
            self.end_reign(&status);
        }
        if now.is_me && self.reign.is_none() {
            tracing::info!(term = %now.term, "this node is the raft leader");
            let tick = self.parts.clock.now();
            self.last_tick = tick;
            let Parts { settings, node_address, .. } = &self.parts;
            let (settings, address) = (Arc::clone(settings), node_address.clone());
            let beats = Arc::clone(&self.beats);
            let begin = |machine: &GroupMachine| {
                Reign::begin(now.term, machine, settings, address, beats, tick)
            };
            self.reign = Some(self.parts.raft.with_machine(begin));
            self.flush();
        }
    }

    fn end_reign(&mut self, status: &Status) {
        if let Some(reign) = self.reign.take() {
            reign.end(status);
        }
    }

    /// False once there will be no more changes.
    fn follow_change(&mut self, change: Result<Change, broadcast::error::RecvError>) -> bool {
        let now = self.parts.clock.now();
        let Some(reign) = &mut self.reign else {
            return !matches!(change, Err(broadcast::error::RecvError::Closed));
        };
        match change {
            Ok(Change::Applied { index, outcomes }) => {
                let events = outcomes.iter().flat_map(|outcome| &outcome.events);
                reign.follow(index, events, now);
            }
            Ok(Change::Restored { .. }) | Err(broadcast::error::RecvError::Lagged(_)) => {
                self.parts.raft.with_machine(|machine| reign.rebuild(machine, now));
            }
            Err(broadcast::error::RecvError::Closed) => return false,
        }
        true
    }

    /// Takes over every change that is there already.
    fn catch_up(&mut self) {
        loop {
            let change = match self.changes.try_recv() {
                Ok(change) => Ok(change),
                Err(broadcast::error::TryRecvError::Lagged(count)) => {
                    Err(broadcast::error::RecvError::Lagged(count))
                }
                Err(
                    broadcast::error::TryRecvError::Empty | broadcast::error::TryRecvError::Closed,
                ) => break,
            };
            if !self.follow_change(change) {
                break;
            }
        }
        self.flush();
    }

    fn flush(&mut self) {
        if let Some(reign) = &mut self.reign
            && reign.needs_flush()
        {
            let now = self.parts.clock.now();
            self.parts.raft.with_machine(|machine| reign.flush(machine.state(), now));
        }
    }

    fn take(&mut self, input: Input) {
        if self.leadership.has_changed().unwrap_or(false) {
            self.follow_leadership();
        }
        if matches!(input, Input::Open(_)) {
            // The entry of the join was applied before the session opened.
            self.catch_up();
        }
        match (&mut self.reign, input) {
            (Some(reign), Input::Open(open)) => {
                let (member, receipt, session) = Session::new(open);
                reign.open(member, receipt, session);
            }
            (Some(reign), Input::Heartbeat(beat)) => reign.heartbeat(beat),
            (Some(reign), Input::Close { member, session, by_peer: false }) => {
                reign.close(&member, session);
            }
            (Some(reign), Input::Close { member, session, by_peer: true }) => {
                let now = self.parts.clock.now();
                self.parts.raft.with_machine(|machine| {
                    reign.closed_by_peer(&member, session, machine.state(), now);
                });
            }
            (Some(reign), Input::AskPlace { asker, answer }) => {
                let now = self.parts.clock.now();
                let place = self
                    .parts
                    .raft
                    .with_machine(|machine| reign.ask_for_place(&asker, machine.state(), now));
                // Whoever gave up asks again.
                let _asker_waits = answer.send(place);
            }
            (None, Input::Open(open)) => {
                let (_, _, session) = Session::new(open);
                session.refuse(not_leader(&self.leadership.borrow()));
            }
            // Its session was told when the term ended; an answer that is dropped says it too.
            (None, Input::Heartbeat(_) | Input::Close { .. } | Input::AskPlace { .. }) => {}
        }
    }

    fn tick(&mut self) {
        let now = self.parts.clock.now();
        let gap = now.since(self.last_tick).saturating_sub(TICK);
        self.last_tick = now;
        if gap >= GAP_LEAST
            && let Some(reign) = &mut self.reign
        {
            // Before what came meanwhile is taken in: that begins now.
            let gap_ms = u64::try_from(gap.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(gap_ms, "the raft leader's loop stood still, all deadlines move");
            reign.table.add_gap(gap, now);
            reign.timers.add_gap(gap);
        }
        self.catch_up();
        // Everything received so far counts before anyone expires.
        self.take_all();
        self.work_off(now);
    }

    /// Takes in everything received so far.
    fn take_all(&mut self) {
        for _ in 0..INPUTS_MAX {
            match self.inputs.try_recv() {
                Ok(input) => self.take(input),
                Err(_) => break,
            }
        }
    }

    fn done(&mut self, done: Done) {
        self.catch_up();
        self.take_done(done);
    }
}

fn not_leader(leadership: &Leadership) -> Status {
    match &leadership.leader_client_address {
        Some(address) => status_of_error(
            ErrorCode::NotLeader,
            &format!("this node is not the raft leader: go to {address}"),
            address,
        ),
        None => status_of_error(
            ErrorCode::NoLeader,
            "there is no raft leader at the moment: try again shortly",
            "",
        ),
    }
}
