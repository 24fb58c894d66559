//! Proposals of a node: commands that wait become one entry, and each gets its own verdict.

use std::sync::Arc;

use tenure_coordinator::raft::ProposeError;
use tenure_core::Command;

use super::super::log::Flight;
use super::super::world::{Event, World};
use super::{Node, PATIENCE, Verdict, Waiter, address};

impl World {
    /// Queues a command; commands of one entry are proposed together.
    pub fn submit(&mut self, node: usize, command: Command, waiter: Waiter) {
        self.nodes[node].queue.push_back((command, waiter));
        self.propose_soon(node);
    }

    pub(super) fn propose_soon(&mut self, node: usize) {
        let found = &self.nodes[node];
        if found.flight.is_none() && !found.queue.is_empty() {
            let boot = found.boot;
            let delay = self.rng.within(20_000, 200_000);
            self.after(delay, Event::Propose { node, boot });
        }
    }

    /// Proposes everything that waits as one entry, in the term that the node is in now.
    pub fn propose(&mut self, node: usize, boot: u64) {
        if !self.is_now(node, boot) || self.nodes[node].flight.is_some() {
            return;
        }
        if self.nodes[node].stalled_until > self.now {
            self.at(self.nodes[node].stalled_until, Event::Propose { node, boot });
            return;
        }
        let (commands, waiters): (Vec<_>, Vec<_>) = self.nodes[node].queue.drain(..).unzip();
        if commands.is_empty() {
            return;
        }
        let found = &self.nodes[node];
        if !found.believes_to_lead(node) {
            let leader = found.term.map(|term| address(term.leader));
            let error = match leader {
                Some(leader) => ProposeError::NotLeader { leader: Some(leader) },
                None => ProposeError::NoLeader,
            };
            for waiter in waiters {
                self.answer(node, waiter, Err(error.clone()));
            }
            return;
        }
        let term = found.term.map_or(0, |term| term.number);
        let flight = self.log.fly(Flight { node, boot, term, commands });
        self.nodes[node].flight = Some((flight, waiters));
        let delay = self.rng.within(300_000, 4_000_000);
        self.after(delay, Event::Quorum { flight });
        self.after(PATIENCE, Event::Outcome { node, boot, flight, index: None });
    }

    /// The proposer hears what became of its entry.
    pub fn outcome(&mut self, node: usize, boot: u64, flight: u64, index: Option<u64>) {
        if !self.is_now(node, boot) {
            return;
        }
        if self.nodes[node].flight.as_ref().is_none_or(|(under_way, _)| *under_way != flight) {
            return;
        }
        let Some((_, waiters)) = self.nodes[node].flight.take() else { return };
        if let Some(index) = index {
            self.apply(node, index);
            self.follow(node);
        }
        let outcomes = index.map(|index| {
            let position = usize::try_from(index - 1).expect("a run is short");
            Arc::clone(&self.log.entries[position].outcomes)
        });
        for (position, waiter) in waiters.into_iter().enumerate() {
            let verdict = match &outcomes {
                Some(outcomes) => Ok((Arc::clone(outcomes), position)),
                None => Err(ProposeError::Unknown),
            };
            self.answer(node, waiter, verdict);
        }
        self.propose_soon(node);
    }

    /// Gives one command's verdict to whoever waits for it.
    pub(super) fn answer(&mut self, node: usize, waiter: Waiter, verdict: Verdict) {
        let now = self.node_clock(node);
        let known =
            verdict.as_ref().ok().map(|(outcomes, position)| outcomes[*position].result.as_ref());
        match waiter {
            Waiter::Lane { term, lane, members } => {
                let Node { reign, machine, .. } = &mut self.nodes[node];
                if let Some(reign) = reign
                    && reign.term.0 == term
                {
                    reign.proposed(lane, &members, known, machine.state(), now);
                }
                self.follow(node);
            }
            Waiter::Plan { term, group } => {
                if let Some(reign) = &mut self.nodes[node].reign
                    && reign.term.0 == term
                {
                    reign.planned(&group, known, now);
                }
            }
            Waiter::Join { stream } => self.join_decided(node, stream, &verdict),
            Waiter::Act { stream, request } => self.act_decided(node, stream, request, &verdict),
            Waiter::Call(call) => self.commit_decided(node, call, &verdict),
            Waiter::Nobody => {}
        }
    }
}
