//! What goes between a member's session and the driver.

use tenure_core::command::MemberRef;
use tenure_core::queries::Assignment;
use tenure_model::{Epoch, ErrorCode, Index, Partition, Tick};
use tenure_proto::{convert, v1};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::places::{Asker, Place};
use crate::soft::{Held, Labels, Phase};

/// One message down, or the end of the stream.
pub type Down = Result<v1::SessionDown, Status>;

/// Tells the sessions of one node apart; a later one is higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// What sessions tell the driver.
pub enum Input {
    /// A member joined, or took its session up again; answered with `Joined`.
    Open(Open),
    /// Answered once leadership was confirmed after it.
    Heartbeat(Heartbeat),
    /// The stream is gone; the membership stays.
    Close {
        member: MemberRef,
        session: SessionId,
        /// The other end closed the connection.
        by_peer: bool,
    },
    /// A process wants the place of a static member.
    AskPlace { asker: Asker, answer: oneshot::Sender<Place> },
}

/// See [`Input::Open`].
pub struct Open {
    pub member: MemberRef,
    pub session: SessionId,
    /// When the join was received.
    pub receipt: Tick,
    pub labels: Labels,
    pub outbound: mpsc::Sender<Down>,
    /// Sent when the driver said the last word; dropped when another session took over or the member left.
    pub ended: oneshot::Sender<LastWordSaid>,
}

/// The driver has sent an end down the stream: nothing may follow.
pub struct LastWordSaid;

/// See [`Input::Heartbeat`].
pub struct Heartbeat {
    pub session: SessionId,
    pub receipt: Tick,
    pub sequence: u64,
    pub said: Said,
    /// The member understands an answer without a list.
    pub takes_as_held: bool,
}

/// What a heartbeat says is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// One by one.
    List(Vec<Held>),
    /// All of the list of this version that went down the stream, running; positions in the list's order.
    AsListed { version: Index, positions: Vec<u64>, lags: Vec<u64> },
}

/// What a heartbeat named, as far as its answer depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// Exactly the list of this version, by a member that then needs no list in the answer.
    AsListed(Index),
    /// Some list: the member's last heartbeat in `Beats`.
    Something,
    /// A list that was not the newest any more: there is nothing to compare.
    Unknown,
}

/// The grants of the newest list that went down a stream, where none was revoked. What a version stands for does not
/// change: every entry that changes a member's list raises it.
#[derive(Debug)]
pub struct Listed {
    version: Index,
    grants: Vec<(Partition, Epoch)>,
}

impl Listed {
    /// Nothing where a grant is revoked: what remains of its drain is told in every answer.
    pub fn of(assignment: &Assignment) -> Option<Self> {
        if assignment.partitions.iter().any(|assigned| assigned.revoking) {
            return None;
        }
        let grants = assignment.partitions.iter();
        let grants = grants.map(|assigned| (assigned.partition, assigned.epoch)).collect();
        Some(Self { version: assignment.version, grants })
    }

    fn is_held(&self, held: &[Held]) -> bool {
        let held = held.iter().map(|held| (held.partition, held.epoch));
        held.eq(self.grants.iter().copied())
    }

    fn running_at<'a>(
        &'a self,
        positions: &'a [u64],
        lags: &'a [u64],
    ) -> impl Iterator<Item = Held> + 'a {
        let lags = lags.iter().copied().chain(std::iter::repeat(0));
        let grants = self.grants.iter().zip(positions).zip(lags);
        grants.map(|(((partition, epoch), position), lag)| Held {
            partition: *partition,
            epoch: *epoch,
            phase: Phase::Running,
            position: *position,
            phase_ms: 0,
            error: String::new(),
            // A grant that stands still for long is not said in short.
            still_ms: 0,
            end_offset: lag.checked_sub(1).map(|lag| position.saturating_add(lag)),
        })
    }
}

/// A session as the driver keeps it.
pub struct Session {
    pub id: SessionId,
    pub is_joined: bool,
    pub labels: Labels,
    listed: Option<Listed>,
    outbound: mpsc::Sender<Down>,
    ended: oneshot::Sender<LastWordSaid>,
}

impl Session {
    pub fn new(open: Open) -> (MemberRef, Tick, Self) {
        let Open { member, session, receipt, labels, outbound, ended } = open;
        (
            member,
            receipt,
            Self { id: session, is_joined: false, labels, listed: None, outbound, ended },
        )
    }

    /// A whole list goes down the stream.
    pub fn list(&mut self, listed: Option<Listed>) {
        self.listed = listed;
    }

    /// Compares what a heartbeat says with the list that went down last, and writes it over what was `held` before.
    /// That stays as it is where the heartbeat speaks of another list.
    pub fn read(&self, said: Said, takes_as_held: bool, held: &mut Vec<Held>) -> Named {
        match said {
            Said::List(said) => {
                *held = said;
                let listed = self.listed.as_ref();
                let listed = listed.filter(|listed| takes_as_held && listed.is_held(held));
                listed.map_or(Named::Something, |listed| Named::AsListed(listed.version))
            }
            Said::AsListed { version, positions, lags } => match &self.listed {
                Some(listed)
                    if listed.version == version && listed.grants.len() == positions.len() =>
                {
                    held.clear();
                    held.extend(listed.running_at(&positions, &lags));
                    Named::AsListed(version)
                }
                Some(_) | None => Named::Unknown,
            },
        }
    }

    /// Sends one message; false when the member lets too much pile up, or is gone.
    pub fn send(&self, down: v1::session_down::Down) -> bool {
        self.outbound.try_send(Ok(v1::SessionDown { down: Some(down) })).is_ok()
    }

    /// Ends the membership's stream with the reason.
    pub fn end(self, code: ErrorCode, message: String) {
        let error = v1::Error { code: code.as_str().to_owned(), message, ..v1::Error::default() };
        self.send(v1::session_down::Down::Ended(v1::Ended { error: Some(error) }));
        self.say_last_word();
    }

    /// Ends the stream with a status; the membership stays.
    pub fn refuse(self, status: Status) {
        // A member that does not read sees the stream end.
        drop(self.outbound.try_send(Err(status)));
        self.say_last_word();
    }

    fn say_last_word(self) {
        // The session's task may be gone.
        drop(self.ended.send(LastWordSaid));
    }
}

/// Writes an assignment; `drain_remaining_ms` is asked for revoking partitions.
pub fn assignment_to_wire(
    assignment: &Assignment,
    drain_remaining_ms: impl Fn(&tenure_core::queries::Assigned) -> u64,
) -> v1::Assignment {
    let partitions = assignment.partitions.iter().map(|assigned| v1::Assigned {
        partition: Some(convert::partition_to_wire(assigned.partition)),
        topic: assigned.topic.to_string(),
        epoch: assigned.epoch.get(),
        revoking: assigned.revoking,
        drain_remaining_ms: if assigned.revoking { drain_remaining_ms(assigned) } else { 0 },
        home_initialised: assigned.home_initialised,
        handoff: assigned.handoff.0,
        // Set at the stream, see `grpc::signing`.
        token: String::new(),
    });
    v1::Assignment {
        version: assignment.version.0,
        partitions: partitions.collect(),
        preparing: vec![],
    }
}
