//! Runs a session's machine on a thread of its own.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tenure_model::{Clock, Epoch, ErrorCode, MemberId, Partition};
use tenure_proto::{error_of_status, v1};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;

use super::client::CoordinatorClient;
use super::config::SessionConfig;
use super::connect::{Dial, connect};
use super::event::{EndCause, SessionEvent};
use super::handle::{DROPPED_LEAVE, Order, SessionHandle, View, ViewState};
use super::machine::{Act, Granted, Input, LeaseChange, Machine, Output, Settings};
use crate::grant::{Grant, Resource};
use crate::lease::Lease;

/// Longest sleep. Timers stand still while the machine is suspended, the lease clock does not.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(1);

/// Messages that came down and were not handled yet.
const DOWN_MAX: usize = 64;

/// Largest message down: an assignment of all partitions that a group may have.
const DOWN_BYTES_MAX: usize = 128 * 1024 * 1024;

/// A session with the coordinator.
#[derive(Clone, Copy, Debug)]
pub struct Session;

impl Session {
    /// Starts a session on a thread of its own. Events are not lost when nobody reads them; the last one is
    /// [`SessionEvent::Ended`].
    ///
    /// Settings that contradict each other end it at once, with `INVALID_ARGUMENT`.
    #[must_use]
    pub fn start(config: SessionConfig) -> (SessionHandle, mpsc::UnboundedReceiver<SessionEvent>) {
        let Prepared { handle, events_seen, events, driver } = Prepared::new(config, None);
        let Some(driver) = driver else { return (handle, events_seen) };
        let failed = events.clone();
        let started =
            std::thread::Builder::new().name("tenure-session".to_owned()).spawn(move || {
                let runtime =
                    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                        Ok(runtime) => runtime,
                        Err(error) => {
                            let cause =
                                EndCause::Failed(format!("no runtime for the session: {error}"));
                            return say(&events, SessionEvent::Ended { cause });
                        }
                    };
                runtime.block_on(driver.run());
                // A look-up of a name may still hang; nobody waits for it.
                runtime.shutdown_background();
            });
        if let Err(error) = started {
            let cause = EndCause::Failed(format!("no thread for the session: {error}"));
            say(&failed, SessionEvent::Ended { cause });
        }
        (handle, events_seen)
    }

    /// As [`Session::start`], on the caller's runtime and over connections made by `dial`: the future is the session.
    /// For simulations, whose time is their own; not an interface.
    #[doc(hidden)]
    pub fn prepare(
        config: SessionConfig,
        dial: Dial,
    ) -> (SessionHandle, mpsc::UnboundedReceiver<SessionEvent>, impl Future<Output = ()>) {
        let Prepared { handle, events_seen, driver, .. } = Prepared::new(config, Some(dial));
        let run = async {
            if let Some(driver) = driver {
                driver.run().await;
            }
        };
        (handle, events_seen, run)
    }
}

/// A session that does not run yet.
struct Prepared {
    handle: SessionHandle,
    events_seen: mpsc::UnboundedReceiver<SessionEvent>,
    events: mpsc::UnboundedSender<SessionEvent>,
    /// Nothing when the settings contradict each other, which was said.
    driver: Option<Box<Driver>>,
}

impl Prepared {
    fn new(config: SessionConfig, dial: Option<Dial>) -> Self {
        let (events, events_seen) = mpsc::unbounded_channel();
        let (orders, orders_taken) = mpsc::unbounded_channel();
        let member = config.member.clone().unwrap_or_else(random_member);
        let state = RwLock::new(ViewState { member: member.clone(), lease_ends_at: None });
        let view = Arc::new(View { clock: Arc::clone(&config.clock), state });
        let client = CoordinatorClient::dialling(config.coordinators.clone(), dial.clone());
        let handle = SessionHandle::new(orders, Arc::clone(&view), client.clone());
        let driver = match check(&config) {
            Ok(()) => {
                let told = events.clone();
                let driver = Driver::new(config, member, told, orders_taken, view, client, dial);
                Some(Box::new(driver))
            }
            Err(message) => {
                let code = ErrorCode::InvalidArgument;
                say(&events, SessionEvent::Ended { cause: EndCause::Refused { code, message } });
                None
            }
        };
        Self { handle, events_seen, events, driver }
    }
}

fn check(config: &SessionConfig) -> Result<(), String> {
    if config.coordinators.is_empty() {
        return Err("no coordinator is named: give the host:port of at least one node".to_owned());
    }
    if config.topics.is_empty() {
        return Err("no topic is named: give at least one".to_owned());
    }
    if config.returning_within.is_some() && config.instance.is_none() {
        return Err("returning_within needs an instance id to return by: give one".to_owned());
    }
    config.lease.validate().map_err(|error| error.to_string())?;
    config.settings.clone().validate().map_err(|error| error.to_string())?;
    Ok(())
}

fn random_member() -> MemberId {
    let text = format!("m-{:016x}", rand::random::<u64>());
    MemberId::new(&text).expect("made of letters, digits and a dash")
}

fn say(events: &mpsc::UnboundedSender<SessionEvent>, event: SessionEvent) {
    // A run loop that is gone needs no event.
    let _sent = events.send(event);
}

/// One connection, or the attempt at one. Dropping it gives it up.
struct Connection {
    task: JoinHandle<()>,
    up: mpsc::UnboundedSender<v1::SessionUp>,
    down: mpsc::Receiver<Input>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    fn open(address: String, timeout: Duration, keep_alive: Duration, dial: Option<Dial>) -> Self {
        // No limit of its own: what does not get through ends the connection within 1.5 intervals.
        let (up, ups) = mpsc::unbounded_channel();
        let (downs, down) = mpsc::channel(DOWN_MAX);
        let task = tokio::spawn(async move {
            let connecting = connect(&address, timeout, keep_alive, dial.as_ref());
            let last = match connecting.await {
                Ok(channel) => carry(channel, ups, &downs).await,
                Err(error) => Input::ConnectFailed { error: format!("{address}: {error}") },
            };
            // Nobody waits for a connection that was given up.
            let _sent = downs.send(last).await;
        });
        Self { task, up, down }
    }
}

/// Carries messages until the connection ends; answers how it ended.
async fn carry(
    channel: Channel,
    ups: mpsc::UnboundedReceiver<v1::SessionUp>,
    downs: &mpsc::Sender<Input>,
) -> Input {
    if downs.send(Input::Connected).await.is_err() {
        return Input::Disconnected { error: None };
    }
    let mut client = v1::membership_client::MembershipClient::new(channel)
        .max_decoding_message_size(DOWN_BYTES_MAX);
    let mut stream = match client.session(UnboundedReceiverStream::new(ups)).await {
        Ok(response) => response.into_inner(),
        Err(status) => return Input::Disconnected { error: Some(error_of_status(&status)) },
    };
    loop {
        match stream.message().await {
            Ok(Some(down)) => {
                if downs.send(Input::Received(down)).await.is_err() {
                    return Input::Disconnected { error: None };
                }
            }
            Ok(None) => return Input::Disconnected { error: None },
            Err(status) => return Input::Disconnected { error: Some(error_of_status(&status)) },
        }
    }
}

async fn next_down(connection: &mut Option<Connection>) -> Input {
    match connection {
        Some(connection) => {
            connection.down.recv().await.unwrap_or(Input::Disconnected { error: None })
        }
        None => std::future::pending().await,
    }
}

struct Driver {
    config: SessionConfig,
    machine: Machine,
    events: mpsc::UnboundedSender<SessionEvent>,
    orders: mpsc::UnboundedReceiver<Order>,
    view: Arc<View>,
    client: CoordinatorClient,
    connection: Option<Connection>,
    leases: BTreeMap<(Partition, Epoch), Lease>,
    /// When the thread ends, answered or not.
    leave_by: Option<Instant>,
    /// Dropped with the driver: tells those who wait for the leave.
    leaving: Vec<oneshot::Sender<()>>,
    dial: Option<Dial>,
}

impl Driver {
    fn new(
        config: SessionConfig,
        member: MemberId,
        events: mpsc::UnboundedSender<SessionEvent>,
        orders: mpsc::UnboundedReceiver<Order>,
        view: Arc<View>,
        client: CoordinatorClient,
        dial: Option<Dial>,
    ) -> Self {
        let machine = Machine::new(Settings {
            coordinators: config.coordinators.clone(),
            group: config.group.clone(),
            member,
            instance: config.instance.clone(),
            returning_within: config.returning_within,
            topics: config.topics.clone(),
            settings: config.settings.clone(),
            lease: config.lease,
            partitions_max: config.partitions_max,
            client: config.client.clone(),
            rejoin: config.rejoin,
            prepares: config.prepares,
            weight: config.weight,
            labels: config.labels.clone(),
            seed: rand::random(),
        });
        Self {
            config,
            machine,
            events,
            orders,
            view,
            client,
            connection: None,
            leases: BTreeMap::new(),
            leave_by: None,
            leaving: Vec::new(),
            dial,
        }
    }

    async fn run(mut self) {
        loop {
            if self.leave_by.is_some_and(|leave_by| leave_by <= Instant::now()) {
                self.say(SessionEvent::Ended { cause: EndCause::LeaveUnanswered });
                break;
            }
            let input = self.next_input().await;
            let now = self.config.clock.now();
            let ended = matches!(input, Input::ConnectFailed { .. } | Input::Disconnected { .. });
            if ended {
                self.connection = None;
            }
            for output in self.machine.handle(input, now) {
                self.apply(output);
            }
            if self.machine.has_ended() {
                break;
            }
        }
        for lease in self.leases.values() {
            lease.stop();
        }
        self.view.change(|state| state.lease_ends_at = None);
    }

    async fn next_input(&mut self) -> Input {
        let now = self.config.clock.now();
        let wake = self.machine.next_wake().map_or(SLEEP_MAX, |wake| wake.since(now));
        let mut wake_at = Instant::now() + wake.min(SLEEP_MAX);
        if let Some(leave_by) = self.leave_by {
            wake_at = wake_at.min(leave_by);
        }
        tokio::select! {
            // What came down goes first: after a sleep, an answer that is already here must not be overlooked.
            biased;
            input = next_down(&mut self.connection) => input,
            order = self.orders.recv(), if self.leave_by.is_none() => self.order(order),
            () = tokio::time::sleep_until(wake_at) => Input::Tick,
        }
    }

    fn order(&mut self, order: Option<Order>) -> Input {
        let deadline = match order {
            Some(Order::Act(act)) => return Input::Act(act),
            Some(Order::Leave { deadline, done }) => {
                self.leaving.push(done);
                deadline
            }
            None => DROPPED_LEAVE,
        };
        self.leave_by = Some(Instant::now() + deadline);
        Input::Act(Act::Leave { reason: "shutdown".to_owned() })
    }

    fn apply(&mut self, output: Output) {
        match output {
            Output::Connect { address } => self.connect(address),
            Output::Disconnect => self.connection = None,
            Output::Send(up) => {
                if let Some(connection) = &self.connection {
                    // A connection that just ended says so by itself.
                    let _sent = connection.up.send(up);
                }
            }
            Output::Joined { member, member_epoch } => {
                tracing::info!(group = %self.config.group, member = %member, %member_epoch, "joined");
                self.view.change(|state| state.member = member);
                self.say(SessionEvent::Joined { member_epoch });
            }
            Output::LeaderFound { address } => self.client.found_leader(&address),
            Output::LeaseEnds { at } => self.view.change(|state| state.lease_ends_at = at),
            Output::LeaseAtRisk { ends_at } => {
                let remaining = ends_at.since(self.config.clock.now());
                tracing::warn!(
                    group = %self.config.group, ?remaining,
                    "lease at risk: heartbeats are not answered"
                );
                self.say(SessionEvent::LeaseAtRisk { ends_at });
            }
            Output::LeaseRenewed => {
                tracing::info!(group = %self.config.group, "lease renewed");
                self.say(SessionEvent::LeaseRenewed);
            }
            Output::Prepare(preparing) => {
                tracing::info!(
                    group = %self.config.group, topic = %preparing.topic,
                    partition = %preparing.partition, "to be prepared"
                );
                self.say(SessionEvent::Prepare(preparing));
            }
            Output::PreparationEnded { partition } => {
                self.say(SessionEvent::PreparationEnded { partition });
            }
            Output::Granted(granted) => self.granted(granted),
            Output::Lease { partition, epoch, change } => self.move_lease(partition, epoch, change),
            Output::Revoked { partition, epoch, deadline } => {
                tracing::info!(group = %self.config.group, %partition, %epoch, "revoked");
                self.say(SessionEvent::Revoked { partition, epoch, deadline });
            }
            Output::Lost { partition, epoch, cause } => {
                tracing::warn!(group = %self.config.group, %partition, %epoch, ?cause, "lost");
                self.say(SessionEvent::Lost { partition, epoch, cause });
            }
            Output::Ended { cause } => {
                tracing::info!(group = %self.config.group, ?cause, "session ended");
                self.say(SessionEvent::Ended { cause });
            }
        }
    }

    fn connect(&mut self, address: String) {
        tracing::debug!(group = %self.config.group, member = %self.machine.member(), address, "connecting");
        let keep_alive = (self.config.lease.ttl() / 4).max(Duration::from_millis(100));
        let timeout = CONNECT_MAX.min(keep_alive.max(Duration::from_millis(250)));
        let dial = self.dial.clone();
        self.connection = Some(Connection::open(address, timeout, keep_alive, dial));
    }

    fn granted(&mut self, granted: Granted) {
        let clock: Arc<dyn Clock> = Arc::clone(&self.config.clock);
        let lease = Lease::new(clock, granted.ends_at, self.config.lease_check);
        self.leases.insert((granted.partition, granted.epoch), lease.clone());
        tracing::info!(
            group = %self.config.group,
            member = %granted.member,
            topic = %granted.topic,
            partition = %granted.partition,
            epoch = %granted.epoch,
            "granted"
        );
        self.say(SessionEvent::Granted(Grant {
            group: self.config.group.clone(),
            member: granted.member,
            topic: granted.topic,
            partition: granted.partition,
            epoch: granted.epoch,
            handoff: granted.handoff,
            home_initialised: granted.home_initialised,
            resource: Resource::of_partition(&self.config.group, granted.partition),
            token: granted.token,
            lease,
        }));
    }

    fn move_lease(&mut self, partition: Partition, epoch: Epoch, change: LeaseChange) {
        let Some(lease) = self.leases.get(&(partition, epoch)) else { return };
        match change {
            LeaseChange::Extended(ends_at) => lease.extend(ends_at),
            LeaseChange::Shortened(ends_at) => lease.shorten(ends_at),
            LeaseChange::Stopped => {
                lease.stop();
                self.leases.remove(&(partition, epoch));
            }
        }
    }

    fn say(&self, event: SessionEvent) {
        say(&self.events, event);
    }
}
