//! The unary calls of a node: commit, verify and fetch.

use tenure_coordinator::parts::refusal::Refusal;
use tenure_coordinator::parts::verify;
use tenure_core::command::{CommitOffsets, OffsetCommit};
use tenure_core::{Command, Reply};
use tenure_model::{CommitSequence, Epoch, ErrorCode, MemberId, NextOffset, Partition};
use tenure_proto::v1;

use super::super::network::Host;
use super::super::world::{Event, World};
use super::{Purpose, Verdict, Waiter};

/// One call of a member.
#[derive(Clone, Debug)]
pub struct Call {
    pub member: usize,
    pub boot: u64,
    pub grant: (Partition, Epoch),
    pub id: u64,
    pub caller: MemberId,
    pub what: What,
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Commit {
        sequence: u64,
        next: u64,
    },
    Verify,
    /// Only where a control run reads the resume point another way.
    Fetch,
}

/// What a node answers.
#[derive(Clone, Debug)]
pub enum Answer {
    Committed,
    /// The offset, if there is one, and whether its home certainly has one.
    Verified {
        next: Option<u64>,
        home_initialised: bool,
    },
    Refused(v1::Error),
}

impl World {
    /// A call arrives.
    pub fn serve_call(&mut self, node: usize, call: Call) {
        if !self.nodes[node].is_up {
            return;
        }
        if self.nodes[node].reign.is_none() {
            let refusal = self.nodes[node].not_leader(node);
            self.refuse_call(node, call, &refusal);
            return;
        }
        match call.what {
            What::Commit { sequence, next } => {
                let (partition, epoch) = call.grant;
                let commit = OffsetCommit {
                    partition,
                    epoch,
                    sequence: CommitSequence(sequence),
                    next_offset: NextOffset::new(next).expect("a run is short"),
                    metadata: Vec::new(),
                };
                let command = CommitOffsets {
                    group: self.group.clone(),
                    member: call.caller.clone(),
                    commits: vec![commit],
                };
                self.submit(node, Command::CommitOffsets(command), Waiter::Call(call));
            }
            What::Verify | What::Fetch => self.read(node, Purpose::Call(call)),
        }
    }

    pub(super) fn commit_decided(&mut self, node: usize, call: Call, verdict: &Verdict) {
        let result = match verdict {
            Ok((outcomes, position)) => match &outcomes[*position].result {
                Ok(Reply::Verdicts(verdicts)) => verdicts
                    .first()
                    .map_or(Ok(()), |verdict| verdict.clone().map_err(Refusal::from)),
                Ok(_) => unreachable!("a commit is answered with verdicts"),
                Err(rejection) => Err(Refusal::from(rejection)),
            },
            Err(error) => Err(Refusal::from(error.clone())),
        };
        match result {
            Ok(()) => self.answer_call(node, call, Answer::Committed),
            Err(refusal) => self.refuse_call(node, call, &refusal),
        }
    }

    pub(super) fn read_decided(&mut self, node: usize, call: Call, is_confirmed: bool) {
        if !is_confirmed {
            let refusal = Refusal::new(ErrorCode::NoLeader, "no quorum confirmed the raft leader");
            self.refuse_call(node, call, &refusal);
            return;
        }
        let (partition, epoch) = call.grant;
        let state = self.nodes[node].machine.state();
        if call.what == What::Fetch {
            let committed = state.committed(&self.group, partition).ok().flatten();
            let next = committed.map(|committed| committed.next_offset.get());
            let home_initialised = next.is_some();
            self.answer_call(node, call, Answer::Verified { next, home_initialised });
            return;
        }
        let verdict = match verify(state, &self.group, &call.caller, &[(partition, epoch)]) {
            Ok(response) => response.verdicts.into_iter().next(),
            Err(rejection) => {
                let refusal = Refusal::from(rejection);
                return self.refuse_call(node, call, &refusal);
            }
        };
        let v1::VerifyVerdict { error, next_offset: next, home_initialised, .. } =
            verdict.expect("one verdict per grant");
        match error {
            None => self.answer_call(node, call, Answer::Verified { next, home_initialised }),
            Some(error) => {
                if let Some(code) = ErrorCode::parse(&error.code) {
                    self.oracle.count_refusal(code.as_str());
                }
                self.answer_call(node, call, Answer::Refused(error));
            }
        }
    }

    fn refuse_call(&mut self, node: usize, call: Call, refusal: &Refusal) {
        self.oracle.count_refusal(refusal.code.as_str());
        self.answer_call(node, call, Answer::Refused(refusal.to_wire()));
    }

    fn answer_call(&mut self, node: usize, call: Call, answer: Answer) {
        let (from, to) = (Host::Node(node), Host::Member(call.member));
        if self.network.is_cut(from, to) {
            return;
        }
        let delay = self.network.delay(from, to, &mut self.rng);
        self.after(delay, Event::CallAnswer { call, answer });
    }
}
