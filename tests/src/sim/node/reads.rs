//! Confirmations of leadership, and what waits for them.

use super::super::world::{Event, World};
use super::{AGAIN, PATIENCE, Purpose, Read};

impl World {
    /// Begins to confirm that this node still leads.
    pub(super) fn read(&mut self, node: usize, purpose: Purpose) {
        let found = &mut self.nodes[node];
        let term = found.term.map_or(0, |term| term.number);
        let first = if term == self.log.term { self.log.first_entry } else { 0 };
        found.next_read += 1;
        let (read, boot) = (found.next_read, found.boot);
        let index = found.known.max(first);
        found.reads.insert(read, Read { purpose, term, index, give_up_at: self.now + PATIENCE });
        let delay = self.rng.within(200_000, 2_500_000);
        self.after(delay, Event::Confirm { node, boot, read });
    }

    /// A quorum confirms the raft leader, or does not.
    pub fn confirm(&mut self, node: usize, boot: u64, read: u64) {
        if !self.is_now(node, boot) {
            return;
        }
        let Some(found) = self.nodes[node].reads.get(&read) else { return };
        let leads = self.log.leader == Some(node) && self.log.term == found.term;
        let is_confirmed = leads && self.has_quorum(node);
        if is_confirmed || self.now >= found.give_up_at {
            let delay = self.rng.within(100_000, 2_000_000);
            self.after(delay, Event::Confirmed { node, boot, read, is_confirmed });
        } else {
            self.after(AGAIN, Event::Confirm { node, boot, read });
        }
    }

    /// The confirmation is back: what waits is answered once the state has everything that was committed before.
    pub fn confirmed(&mut self, node: usize, boot: u64, read: u64, is_confirmed: bool) {
        if !self.is_now(node, boot) {
            return;
        }
        let Some(found) = self.nodes[node].reads.get(&read) else { return };
        if is_confirmed && self.nodes[node].applied < found.index {
            self.after(5_000_000, Event::Confirmed { node, boot, read, is_confirmed });
            return;
        }
        let Some(Read { purpose, term, .. }) = self.nodes[node].reads.remove(&read) else { return };
        self.follow(node);
        match purpose {
            Purpose::Heartbeats(waiting) => {
                self.node_clock(node);
                let found = &mut self.nodes[node];
                if let Some(reign) = &mut found.reign
                    && reign.term.0 == term
                {
                    let state = is_confirmed.then(|| found.machine.state());
                    reign.confirmed(waiting, state);
                }
                self.pump_sessions(node);
            }
            Purpose::Call(call) => self.read_decided(node, call, is_confirmed),
        }
    }
}
