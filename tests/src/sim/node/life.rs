//! What a node keeps on its disk, and how its process ends and starts anew.

use std::sync::Arc;

use tenure_coordinator::raft::Machine as _;
use tenure_coordinator::stored::{decode_snapshot, encode_snapshot};
use tenure_core::State;

use super::super::control::Protection;
use super::super::invariants::Fact;
use super::super::rng::Rng;
use super::super::world::{Event, World};
use super::{Node, Snapshot, new_clock};

impl World {
    pub(super) fn snapshot_now_and_then(&mut self, node: usize) {
        if self.rng.below(200) == 0 {
            self.take_snapshot(node);
        }
    }

    /// Writes a snapshot of a node to its disk.
    pub fn take_snapshot(&mut self, node: usize) {
        let found = &mut self.nodes[node];
        if !found.is_up || found.applied == 0 {
            return;
        }
        let mut bytes = found.machine.snapshot()();
        if let Some(gone) = self.plan.without {
            bytes = forget(gone, bytes);
        }
        let state = found.machine.state_now();
        found.snapshot = Some(Snapshot { index: found.applied, bytes: Arc::new(bytes), state });
    }

    /// Gives a node the newest snapshot of another, if it is ahead.
    pub(super) fn install_snapshot(&mut self, node: usize) {
        let others = self.nodes.iter().filter_map(|other| other.snapshot.as_ref());
        let Some(newest) = others.max_by_key(|snapshot| snapshot.index) else { return };
        if newest.index <= self.nodes[node].applied {
            return;
        }
        let (index, bytes) = (newest.index, Arc::clone(&newest.bytes));
        let expected = Arc::clone(&newest.state);
        self.say(|| format!("node {node} installs a snapshot of entry {index}"));
        self.restore(node, index, bytes, expected);
    }

    fn restore(&mut self, node: usize, index: u64, bytes: Arc<Vec<u8>>, expected: Arc<State>) {
        self.node_clock(node);
        let found = &mut self.nodes[node];
        found.machine.restore(&bytes).expect("snapshots of this build");
        found.applied = index;
        found.known = found.known.max(index);
        let state = found.machine.state_now();
        found.snapshot = Some(Snapshot { index, bytes, state: Arc::clone(&expected) });
        self.fact(&Fact::Replica { node, index, state: &state, expected: &expected });
    }

    /// Ends the process of a node.
    pub fn crash_node(&mut self, node: usize) {
        if self.log.leader == Some(node) {
            self.log.leader = None;
        }
        let found = &mut self.nodes[node];
        found.is_up = false;
        found.boot += 1;
        found.paused = None;
        found.reign = None;
        found.sessions.clear();
        found.queue.clear();
        found.flight = None;
        found.reads.clear();
        let streams: Vec<u64> = self
            .network
            .streams
            .iter()
            .filter(|(_, stream)| stream.node == node)
            .map(|(number, _)| *number)
            .collect();
        for stream in streams {
            self.break_stream(stream);
        }
    }

    /// Starts a node from its disk: its snapshot, and the log after it.
    pub fn start_node(&mut self, node: usize) {
        if self.nodes[node].is_up {
            return;
        }
        let mut fresh = Self::node_from(&mut self.rng, self.now);
        let before = &mut self.nodes[node];
        fresh.boot = before.boot;
        fresh.snapshot = before.snapshot.take();
        let applied = before.applied;
        self.nodes[node] = fresh;
        self.fact(&Fact::NodeStarted { node });
        if let Some(snapshot) = self.nodes[node].snapshot.take() {
            self.restore(node, snapshot.index, snapshot.bytes, snapshot.state);
        }
        let from = self.nodes[node].applied;
        let upto = if applied > from { self.rng.within(from, applied) } else { from };
        self.apply(node, upto);
        self.say(|| format!("node {node} has started, with entries up to {upto}"));
        let boot = self.nodes[node].boot;
        self.after(0, Event::Tick { node, boot });
    }

    fn node_from(rng: &mut Rng, now: u64) -> Node {
        let mut node = Node::new(rng);
        node.clock = new_clock(now, rng);
        node
    }
}

/// What a control run leaves out of a snapshot.
fn forget(gone: Protection, bytes: Vec<u8>) -> Vec<u8> {
    let mut state = decode_snapshot(&bytes).expect("what was written a moment ago");
    match gone {
        Protection::SnapshotSilence => {
            for group in state.groups.values_mut() {
                for member in Arc::make_mut(group).members.values_mut() {
                    member.silent = None;
                }
            }
        }
        Protection::SnapshotCounter => state.epoch_counter = 0,
        Protection::SinkEpoch
        | Protection::CommitEpoch
        | Protection::Verify
        | Protection::ResumeAfterRegister
        | Protection::LeaseFromSend
        | Protection::ExpiryTerm
        | Protection::FinalOffset
        | Protection::AckEpoch => return bytes,
    }
    encode_snapshot(&state)
}
