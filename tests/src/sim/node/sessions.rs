//! The sessions of a node, as `Membership.Session` serves them.

use std::collections::VecDeque;
use std::sync::Arc;

use tenure_coordinator::parts::refusal::Refusal;
use tenure_coordinator::parts::session::{
    Down, Heartbeat, LastWordSaid, Open, Session as DriverSession, SessionId,
};
use tenure_coordinator::parts::{edge, judge};
use tenure_core::command::MemberRef;
use tenure_core::{Command, Reply};
use tenure_model::{GroupId, MemberId, Tick};
use tenure_proto::convert::Malformed;
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down as DownKind;
use tenure_proto::v1::session_up::Up;
use tokio::sync::{mpsc, oneshot};

use super::super::invariants::Fact;
use super::super::network::Host;
use super::super::world::{Event, LEASE, World};
use super::{Verdict, Waiter};

/// Messages that wait for one member to read them.
const OUTBOUND_MAX: usize = 256;

/// One session.
pub enum Session {
    /// The join is being proposed.
    Joining {
        group: GroupId,
        member: MemberId,
        receipt: Tick,
    },
    Open(OpenSession),
}

/// A session that the driver knows.
pub struct OpenSession {
    member: MemberRef,
    outbound: mpsc::Receiver<Down>,
    ended: oneshot::Receiver<LastWordSaid>,
    /// Acts in the order in which they came, with what they are answered.
    acts: VecDeque<Act>,
    /// The driver let go: what has an answer is still answered.
    is_let_go: bool,
}

struct Act {
    request: u64,
    is_leave: bool,
    answer: Option<Result<(), v1::Error>>,
}

impl World {
    /// A message of a stream arrives at its node.
    pub fn up(&mut self, number: u64) {
        let Some(stream) = self.network.streams.get(&number) else { return };
        let (node, member) = (stream.node, stream.member);
        if !self.is_now(node, stream.node_boot) {
            return;
        }
        if self.network.is_cut(Host::Member(member), Host::Node(node)) {
            // It waits, as data that is sent again and again, until the connection is given up.
            if self.rng.chance(4) {
                self.break_stream(number);
            }
            self.after(50_000_000, Event::Up { stream: number });
            return;
        }
        let Some(stream) = self.network.streams.get_mut(&number) else { return };
        let Some(message) = stream.up.pop_front() else { return };
        match message {
            None => self.stream_ended(node, number),
            Some(v1::SessionUp { up: Some(up) }) => self.take(node, number, up),
            Some(v1::SessionUp { up: None }) => {}
        }
    }

    fn stream_ended(&mut self, node: usize, number: u64) {
        let found = &mut self.nodes[node];
        if let Some(Session::Open(open)) = found.sessions.remove(&number)
            && let Some(reign) = &mut found.reign
        {
            reign.close(&open.member, SessionId(number));
        }
        self.end_stream(number, None);
    }

    fn take(&mut self, node: usize, number: u64, up: Up) {
        let receipt = self.node_clock(node);
        let member = match self.nodes[node].sessions.get(&number) {
            None => return self.join(node, number, up, receipt),
            Some(Session::Joining { .. }) => return,
            Some(Session::Open(open)) if open.is_let_go => return,
            Some(Session::Open(open)) => open.member.clone(),
        };
        match up {
            Up::Join(_) => {}
            Up::Heartbeat(beat) => {
                let session = SessionId(number);
                let (sequence, takes_as_held) = (beat.sequence, beat.takes_as_held);
                let said = edge::said(beat).expect("the SDK's heartbeats are well-formed");
                let heard = member.member.clone();
                self.fact(&Fact::Heard { member: &heard });
                if let Some(reign) = &mut self.nodes[node].reign {
                    reign.heartbeat(Heartbeat { session, receipt, sequence, said, takes_as_held });
                }
                self.pump_sessions(node);
            }
            Up::Acquired(wire) => {
                let command = edge::acquired(&member, &wire).map(Command::AcknowledgeAcquired);
                self.act(node, number, wire.request, command);
            }
            Up::Prepared(wire) => {
                let command = edge::prepared(&member, &wire).map(Command::AcknowledgePrepared);
                self.act(node, number, wire.request, command);
            }
            Up::Release(wire) => {
                let command = edge::release(&member, &wire).map(Command::ReleasePartitions);
                self.act(node, number, wire.request, command);
            }
            Up::ReportTopics(wire) => {
                let command = edge::report_topics(&member, &wire).map(Command::ReportTopics);
                self.act(node, number, wire.request, command);
            }
            Up::Leave(wire) => {
                let command = edge::leave(&member, &wire).map(Command::LeaveGroup);
                self.act(node, number, wire.request, command);
            }
        }
    }

    fn act(&mut self, node: usize, number: u64, request: u64, command: Result<Command, Malformed>) {
        let command = command.expect("the SDK's acts are well-formed");
        let is_leave = matches!(command, Command::LeaveGroup(_));
        if let Some(Session::Open(open)) = self.nodes[node].sessions.get_mut(&number) {
            open.acts.push_back(Act { request, is_leave, answer: None });
        }
        self.submit(node, command, Waiter::Act { stream: number, request });
    }

    fn join(&mut self, node: usize, number: u64, up: Up, receipt: Tick) {
        let Up::Join(wire) = up else { return };
        if self.nodes[node].reign.is_none() {
            let refusal = self.nodes[node].not_leader(node);
            self.oracle.count_refusal(refusal.code.as_str());
            self.end_stream(number, Some(refusal.to_wire()));
            return;
        }
        let join = edge::join(&wire, LEASE).expect("the SDK's joins are well-formed");
        let session =
            Session::Joining { group: join.group.clone(), member: join.member.clone(), receipt };
        self.nodes[node].sessions.insert(number, session);
        self.submit(node, Command::JoinGroup(join), Waiter::Join { stream: number });
    }

    pub(super) fn join_decided(&mut self, node: usize, number: u64, verdict: &Verdict) {
        let found = self.nodes[node].sessions.remove(&number);
        let Some(Session::Joining { group, member, receipt }) = found else { return };
        let joined = match verdict {
            Ok((outcomes, position)) => outcomes[*position].result.as_ref().map_err(Refusal::from),
            Err(error) => Err(Refusal::from(error.clone())),
        };
        let member_epoch = match joined {
            Ok(Reply::Joined { member_epoch, .. }) => *member_epoch,
            Ok(_) => unreachable!("a join is answered with Joined"),
            Err(refusal) => {
                self.oracle.count_refusal(refusal.code.as_str());
                self.end_stream(number, Some(refusal.to_wire()));
                return;
            }
        };
        self.follow(node);
        self.fact(&Fact::Heard { member: &member });
        let member = MemberRef { group, member, member_epoch };
        let (sender, outbound) = mpsc::channel(OUTBOUND_MAX);
        let (say_ended, ended) = oneshot::channel();
        let open = Open {
            member: member.clone(),
            session: SessionId(number),
            receipt,
            labels: Arc::default(),
            outbound: sender,
            ended: say_ended,
        };
        let acts = VecDeque::new();
        let session = OpenSession { member, outbound, ended, acts, is_let_go: false };
        self.nodes[node].sessions.insert(number, Session::Open(session));
        let (member, receipt, session) = DriverSession::new(open);
        let found = &mut self.nodes[node];
        let refusal = found.not_leader(node);
        match &mut found.reign {
            Some(reign) => reign.open(member, receipt, session),
            None => session.refuse(refusal.into()),
        }
        self.pump_sessions(node);
    }

    pub(super) fn act_decided(
        &mut self,
        node: usize,
        number: u64,
        request: u64,
        verdict: &Verdict,
    ) {
        let Some(Session::Open(open)) = self.nodes[node].sessions.get_mut(&number) else { return };
        let Some(act) =
            open.acts.iter_mut().find(|act| act.request == request && act.answer.is_none())
        else {
            return;
        };
        let result = match verdict {
            Ok((outcomes, position)) => judge(outcomes[*position].result.as_ref(), act.is_leave),
            Err(error) => Err(Refusal::from(error.clone())),
        };
        let code = result.as_ref().err().map(|refusal| refusal.code);
        act.answer = Some(result.map_err(|refusal| refusal.to_wire()));
        if let Some(code) = code {
            self.oracle.count_refusal(code.as_str());
        }
        self.pump_sessions(node);
    }

    /// Sends on what the driver said to sessions, and what acts were answered.
    pub(super) fn pump_sessions(&mut self, node: usize) {
        let numbers: Vec<u64> = self.nodes[node].sessions.keys().copied().collect();
        for number in numbers {
            self.pump_session(node, number);
        }
    }

    fn pump_session(&mut self, node: usize, number: u64) {
        let Some(Session::Open(open)) = self.nodes[node].sessions.get_mut(&number) else { return };
        let mut said = Vec::new();
        while let Ok(down) = open.outbound.try_recv() {
            said.push(down);
        }
        let has_last_word = match open.ended.try_recv() {
            Ok(LastWordSaid) => true,
            Err(oneshot::error::TryRecvError::Empty) => false,
            Err(oneshot::error::TryRecvError::Closed) => {
                open.is_let_go = true;
                false
            }
        };
        let mut has_left = false;
        while open.acts.front().is_some_and(|act| act.answer.is_some())
            && let Some(act) = open.acts.pop_front()
        {
            let error = act.answer.and_then(Result::err);
            has_left |= act.is_leave && error.is_none();
            let answer = DownKind::ActAnswer(v1::ActAnswer { request: act.request, error });
            said.push(Ok(v1::SessionDown { down: Some(answer) }));
        }
        let is_done = open.is_let_go && open.acts.is_empty();
        if has_left {
            let ended = DownKind::Ended(v1::Ended { error: None });
            said.push(Ok(v1::SessionDown { down: Some(ended) }));
        }
        let mut last = None;
        for down in said {
            match down {
                Ok(message) => self.send_down(number, message),
                Err(status) => last = Some(tenure_proto::error_of_status(&status)),
            }
        }
        if has_last_word || has_left || is_done || last.is_some() {
            self.nodes[node].sessions.remove(&number);
            self.end_stream(number, last);
        }
    }
}
