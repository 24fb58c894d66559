//! The connection: which node, when, and whether its stream is still good.

use std::collections::BTreeMap;
use std::time::Duration;

use tenure_model::{ErrorCode, Index, LeaseSettings, MemberEpoch, RetryClass, Tick, TopicName};
use tenure_proto::convert::{Malformed, group_settings_to_wire};
use tenure_proto::v1;

use super::grants::Named;
use super::{Machine, Output};
use crate::session::nodes::Nodes;
use crate::session::wire;

/// Redirects followed at once, one after the other; the next one waits like any other failure, and those after it are
/// followed at once again: nodes that do not know yet that the raft leader fell must not use them up.
const REDIRECTS_MAX: u32 = 3;

/// Bounds of the wait for a connection and for `Joined`: 1.5 heartbeat intervals within these.
const JOIN_WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));

/// Bounds of the wait for `Joined` at a node that has just gone silent: half a heartbeat interval within these. A node
/// that does not know yet that the raft leader stands still sends members back to it.
const PROBE_WAIT: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));

/// Bounds of the wait for a connection there: a quarter of a heartbeat interval within these.
const PROBE_CONNECT_WAIT: (Duration, Duration) =
    (Duration::from_millis(250), Duration::from_millis(500));

/// Heartbeats without an answer that are remembered; an answer to an older one extends nothing.
const HEARTBEATS_MAX: usize = 64;

/// State of the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// Between two attempts.
    Waiting { until: Tick },
    /// A connection was asked for.
    Connecting { until: Tick },
    /// `Join` was sent.
    Joining { sent: Tick, until: Tick },
    /// Joined: heartbeats and acts go up.
    Live(Live),
    /// Over for good.
    Closed,
}

/// State of a joined stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Live {
    sequence: u64,
    /// Heartbeats without an answer.
    sent: BTreeMap<u64, Sent>,
    last_sent: Tick,
    last_answered: Tick,
    /// The node has answered without a list: it knows the short form of heartbeats.
    knows_as_listed: bool,
}

/// A heartbeat that was sent.
#[derive(Debug, PartialEq, Eq)]
struct Sent {
    at: Tick,
    named: Named,
}

impl Live {
    fn heartbeat_due(&self, lengths: &LeaseSettings) -> Tick {
        self.last_sent.after(lengths.heartbeat_interval())
    }

    /// When the stream is taken for dead: 1.5 intervals after the last answer, but never sooner than half an interval
    /// after the question, or a process that slept would give a good stream up.
    fn dead_at(&self, lengths: &LeaseSettings) -> Option<Tick> {
        let oldest = self.sent.values().next()?.at;
        let half = lengths.heartbeat_interval() / 2;
        Some(self.last_answered.after(half * 3).max(oldest.after(half)))
    }
}

impl Link {
    pub(super) const fn is_live(&self) -> bool {
        matches!(self, Self::Live(_))
    }

    pub(super) const fn is_connecting(&self) -> bool {
        matches!(self, Self::Connecting { .. })
    }

    pub(super) const fn is_open(&self) -> bool {
        matches!(self, Self::Connecting { .. } | Self::Joining { .. } | Self::Live(_))
    }

    pub(super) fn next_wake(&self, lengths: &LeaseSettings) -> Option<Tick> {
        match self {
            Self::Waiting { until } | Self::Connecting { until } | Self::Joining { until, .. } => {
                Some(*until)
            }
            Self::Live(live) => {
                let due = live.heartbeat_due(lengths);
                Some(live.dead_at(lengths).map_or(due, |dead| dead.min(due)))
            }
            Self::Closed => None,
        }
    }
}

/// Where the next connection goes.
#[derive(Debug)]
pub(super) struct Addresses {
    nodes: Nodes,
    /// Where a node said that the raft leader is.
    pub(super) leader: Option<String>,
    /// The node of the last stream that was joined.
    joined_at: Option<String>,
    /// What was taken last.
    taken: Option<String>,
    redirects: u32,
}

impl Addresses {
    pub(super) const fn new(nodes: Vec<String>) -> Self {
        let nodes = Nodes::new(nodes);
        Self { nodes, leader: None, joined_at: None, taken: None, redirects: 0 }
    }

    pub(super) fn take(&mut self) -> String {
        let address = match self.leader.take() {
            Some(leader) => leader,
            None => self.nodes.next(),
        };
        self.taken = Some(address.clone());
        address
    }

    /// The node taken last has said nothing for too long.
    pub(super) fn give_up(&mut self) {
        if let Some(address) = &self.taken {
            self.nodes.give_up(address);
        }
    }

    /// The node taken last takes no connection.
    pub(super) fn unreachable(&mut self) {
        if let Some(address) = &self.taken {
            self.nodes.unreachable(address);
        }
    }

    /// How long the node taken last may take to connect.
    pub(super) fn connect_wait(&self, lengths: &LeaseSettings) -> Duration {
        if self.is_probing() {
            (lengths.heartbeat_interval() / 4).clamp(PROBE_CONNECT_WAIT.0, PROBE_CONNECT_WAIT.1)
        } else {
            usual_wait(lengths)
        }
    }

    /// How long it may then take to answer the join.
    pub(super) fn join_wait(&self, lengths: &LeaseSettings) -> Duration {
        if self.is_probing() {
            (lengths.heartbeat_interval() / 2).clamp(PROBE_WAIT.0, PROBE_WAIT.1)
        } else {
            usual_wait(lengths)
        }
    }

    fn is_probing(&self) -> bool {
        self.taken.as_ref().is_some_and(|taken| self.nodes.is_probed(taken))
    }
}

fn usual_wait(lengths: &LeaseSettings) -> Duration {
    (lengths.heartbeat_interval() / 2 * 3).clamp(JOIN_WAIT.0, JOIN_WAIT.1)
}

impl Machine {
    /// Does what is due at `now`.
    pub(super) fn advance(&mut self, now: Tick, out: &mut Vec<Output>) {
        match &self.link {
            Link::Waiting { .. } | Link::Closed => {}
            Link::Connecting { until } => {
                if now >= *until {
                    out.push(Output::Disconnect);
                    self.addresses.unreachable();
                    self.pause(now);
                }
            }
            Link::Joining { until, .. } => {
                if now >= *until {
                    out.push(Output::Disconnect);
                    self.addresses.give_up();
                    self.pause(now);
                }
            }
            Link::Live(live) => {
                if live.dead_at(&self.lengths).is_some_and(|dead| now >= dead) {
                    self.log_broken("no answer to heartbeats");
                    out.push(Output::Disconnect);
                    self.addresses.give_up();
                    self.pause(now);
                }
            }
        }
        if let Link::Waiting { until } = self.link
            && now >= until
        {
            let address = self.addresses.take();
            self.link =
                Link::Connecting { until: now.after(self.addresses.connect_wait(&self.lengths)) };
            out.push(Output::Connect { address });
        }
        let due = match &self.link {
            Link::Live(live) => now >= live.heartbeat_due(&self.lengths),
            Link::Waiting { .. }
            | Link::Connecting { .. }
            | Link::Joining { .. }
            | Link::Closed => false,
        };
        if self.link.is_live() {
            self.say(now, out);
        }
        if due {
            self.heartbeat(now, out);
        }
    }

    /// Takes other topics. The join is the only message that names them, and a join of a live member is the same
    /// membership: a new stream costs no lease.
    pub(super) fn subscribe(&mut self, topics: Vec<TopicName>, now: Tick, out: &mut Vec<Output>) {
        if self.settings.topics == topics || self.leaving {
            return;
        }
        self.settings.topics = topics;
        if self.link.is_open() {
            out.push(Output::Disconnect);
            self.addresses.leader.clone_from(&self.addresses.joined_at);
            self.link = Link::Waiting { until: now };
            self.acts.unsend();
        }
    }

    fn heartbeat(&mut self, now: Tick, out: &mut Vec<Output>) {
        let Link::Live(live) = &mut self.link else { return };
        live.sequence += 1;
        live.last_sent = now;
        live.sent.insert(live.sequence, Sent { at: now, named: self.grants.named() });
        if live.sent.len() > HEARTBEATS_MAX {
            live.sent.pop_first();
        }
        let kept: Vec<_> = self.acts.kept_for_leave().collect();
        let is_short = live.knows_as_listed && kept.is_empty();
        let heartbeat = match self.grants.as_listed(now).filter(|_| is_short) {
            Some(as_listed) => v1::Heartbeat {
                sequence: live.sequence,
                assignment_version: as_listed.version,
                takes_as_held: true,
                as_listed: Some(as_listed),
                held: vec![],
            },
            None => {
                let mut heartbeat = self.grants.heartbeat(live.sequence, now);
                // An answer to more than what is held needs its list.
                heartbeat.takes_as_held = kept.is_empty();
                heartbeat.held.extend(kept);
                heartbeat
            }
        };
        out.push(Output::Send(v1::SessionUp {
            up: Some(v1::session_up::Up::Heartbeat(heartbeat)),
        }));
    }

    /// Waits a while before the next attempt.
    pub(super) fn pause(&mut self, now: Tick) {
        self.link = Link::Waiting { until: now.after(self.backoff.pause()) };
        self.addresses.redirects = 0;
        self.acts.unsend();
    }

    pub(super) fn connected(&mut self, now: Tick, out: &mut Vec<Output>) {
        if !matches!(self.link, Link::Connecting { .. }) {
            return;
        }
        self.link =
            Link::Joining { sent: now, until: now.after(self.addresses.join_wait(&self.lengths)) };
        self.join_sent = true;
        let join = v1::Join {
            group: self.settings.group.to_string(),
            member: self.member.to_string(),
            instance_id: self
                .settings
                .instance
                .as_ref()
                .map_or_else(String::new, ToString::to_string),
            topics: self.settings.topics.iter().map(ToString::to_string).collect(),
            settings: Some(group_settings_to_wire(&self.settings.settings)),
            ttl_ms: self.settings.lease.ttl_ms,
            heartbeat_interval_ms: self.settings.lease.heartbeat_interval_ms,
            client: self.settings.client.clone(),
            partitions_max: self.settings.partitions_max.unwrap_or(0),
            report: self.topics.iter().map(wire::topic_report).collect(),
            member_epoch: self.member_epoch.map_or(0, |epoch| epoch.0),
            weight: self.settings.weight,
            prepares: self.settings.prepares,
            labels: self.settings.labels.iter().map(wire::label).collect(),
        };
        out.push(Output::Send(v1::SessionUp { up: Some(v1::session_up::Up::Join(join)) }));
    }

    /// The stream has ended, by itself or with the coordinator's word.
    pub(super) fn disconnected(
        &mut self,
        error: Option<&v1::Error>,
        now: Tick,
        out: &mut Vec<Output>,
    ) {
        if matches!(self.link, Link::Waiting { .. } | Link::Closed) {
            return;
        }
        let Some(error) = error else {
            self.log_broken("the stream ended");
            return self.pause(now);
        };
        let refused = wire::refused(error);
        match refused.code.retry_class() {
            RetryClass::Never => {
                // The stream is gone already.
                self.link = Link::Waiting { until: now };
                return self.end_membership(refused, now, out);
            }
            RetryClass::OtherNode | RetryClass::AfterBackoff | RetryClass::Unknown => {}
        }
        if !error.leader_address.is_empty() {
            self.addresses.leader = Some(error.leader_address.clone());
            if self.addresses.redirects < REDIRECTS_MAX {
                self.addresses.redirects += 1;
                self.link = Link::Waiting { until: now };
                return self.acts.unsend();
            }
        }
        if refused.code == ErrorCode::InstanceWaits {
            self.log_waiting(&refused.message);
        } else {
            self.log_broken(&refused.to_string());
        }
        self.pause(now);
    }

    pub(super) fn joined(
        &mut self,
        joined: v1::Joined,
        now: Tick,
        out: &mut Vec<Output>,
    ) -> Result<(), Malformed> {
        let Link::Joining { sent, .. } = self.link else { return Ok(()) };
        if joined.member_epoch == 0 {
            return Err(Malformed::new("joined.member_epoch", "is 0"));
        }
        let lengths = LeaseSettings {
            ttl_ms: joined.ttl_ms,
            heartbeat_interval_ms: joined.heartbeat_interval_ms,
            clock_drift_max_ms: joined.clock_drift_max_ms,
        };
        let lengths = lengths.validate().map_err(|error| Malformed::new("joined.ttl_ms", error))?;
        let assignment = joined.assignment.map(wire::assignment).transpose()?;
        let member_epoch = MemberEpoch(joined.member_epoch);
        if self.member_epoch != Some(member_epoch) {
            if self.member_epoch.is_some() {
                self.lose_all("the coordinator has another membership under this id", out);
                self.grants.begin_membership();
            }
            self.member_epoch = Some(member_epoch);
            out.push(Output::Joined { member: self.member.clone(), member_epoch });
        }
        self.lengths = lengths;
        self.addresses.redirects = 0;
        self.addresses.nodes.heard();
        if !joined.node_address.is_empty() {
            self.addresses.joined_at = Some(joined.node_address.clone());
            out.push(Output::LeaderFound { address: joined.node_address });
        }
        self.link = Link::Live(Live {
            sequence: 0,
            sent: BTreeMap::new(),
            last_sent: sent,
            last_answered: now,
            knows_as_listed: false,
        });
        self.grants.begin_stream();
        if let Some(assignment) = assignment {
            self.assigned(assignment, Some(sent), now, out);
        }
        Ok(())
    }

    pub(super) fn heartbeat_answered(
        &mut self,
        answer: v1::HeartbeatAnswer,
        now: Tick,
        out: &mut Vec<Output>,
    ) -> Result<(), Malformed> {
        let Link::Live(live) = &mut self.link else { return Ok(()) };
        let sent = live.sent.remove(&answer.sequence);
        if sent.is_some() {
            // An answer speaks for the heartbeats before it.
            live.sent = live.sent.split_off(&answer.sequence);
            live.last_answered = now;
            // Not before: a stream that breaks as soon as it is joined must not be opened over and over.
            self.backoff.reset();
        }
        match (answer.assignment, answer.as_held) {
            (Some(assignment), _) => {
                let assignment = wire::assignment(assignment)?;
                self.assigned(assignment, sent.map(|sent| sent.at), now, out);
            }
            (None, 0) => {}
            (None, version) => {
                live.knows_as_listed = true;
                // Without the heartbeat it is not known what it named.
                if let Some(Sent { at, named }) = sent {
                    self.confirmed(Index(version), &named, at, now, out);
                }
            }
        }
        Ok(())
    }
}
