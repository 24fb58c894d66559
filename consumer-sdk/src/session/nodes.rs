//! Which node is asked next, for sessions and for unary calls.

/// Short waits at a node that has gone silent; after them it gets the usual one, for it may be slow.
const PROBES_MAX: u32 = 2;

/// As [`PROBES_MAX`], at one that takes no connections: as long as an election lasts, others send callers back to it.
const PROBES_UNREACHABLE_MAX: u32 = 4;

/// The nodes in the order in which they are asked, and the one that was silent.
#[derive(Debug)]
pub(super) struct Nodes {
    addresses: Vec<String>,
    next: usize,
    silent: Option<Silent>,
}

#[derive(Debug)]
struct Silent {
    address: String,
    /// How many more times it gets a short wait only.
    probes: u32,
    /// It comes last in its round, once.
    is_skipped: bool,
}

impl Nodes {
    pub(super) const fn new(addresses: Vec<String>) -> Self {
        Self { addresses, next: 0, silent: None }
    }

    /// The next one of the round. The one that went silent is passed over once.
    pub(super) fn next(&mut self) -> String {
        let address = self.addresses.get(self.next).cloned().unwrap_or_default();
        self.next = (self.next + 1) % self.addresses.len().max(1);
        match &mut self.silent {
            Some(silent) if silent.address == address && !silent.is_skipped => {
                silent.is_skipped = true;
                self.next()
            }
            Some(_) | None => address,
        }
    }

    /// All but this one.
    pub(super) fn others(&self, address: &str) -> Vec<String> {
        self.addresses.iter().filter(|other| *other != address).cloned().collect()
    }

    /// `address` has said nothing for too long.
    pub(super) fn give_up(&mut self, address: &str) {
        self.note_silent(address, PROBES_MAX);
    }

    /// `address` takes no connection.
    pub(super) fn unreachable(&mut self, address: &str) {
        self.note_silent(address, PROBES_UNREACHABLE_MAX);
    }

    fn note_silent(&mut self, address: &str, probes: u32) {
        match &mut self.silent {
            Some(silent) if silent.address == address => {
                silent.probes = silent.probes.saturating_sub(1);
            }
            Some(_) | None => {
                let address = address.to_owned();
                self.silent = Some(Silent { address, probes, is_skipped: false });
            }
        }
    }

    /// The raft leader was heard: nobody counts as silent any more.
    pub(super) fn heard(&mut self) {
        self.silent = None;
    }

    /// Whether `address` has just gone silent, and gets a short wait only: a node that does not know yet that the raft
    /// leader stands still sends callers back to it.
    pub(super) fn is_probed(&self, address: &str) -> bool {
        self.silent.as_ref().is_some_and(|silent| silent.probes > 0 && silent.address == address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(names: &[&str]) -> Nodes {
        Nodes::new(names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn round(nodes: &mut Nodes, count: usize) -> String {
        (0..count).map(|_| nodes.next()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn silent_node_is_passed_over_once() {
        let mut nodes = nodes(&["a", "b", "c"]);
        assert_eq!(nodes.next(), "a");
        nodes.give_up("b");
        assert_eq!(round(&mut nodes, 4), "c a b c");
    }

    #[test]
    fn only_node_is_asked_again_though_it_was_silent() {
        let mut nodes = nodes(&["a"]);
        nodes.give_up("a");
        assert_eq!(round(&mut nodes, 2), "a a");
    }

    #[test]
    fn silent_node_gets_two_short_waits_and_a_node_that_was_heard_none() {
        let mut nodes = nodes(&["a", "b"]);
        assert!(!nodes.is_probed("a"));
        nodes.give_up("a");
        for _ in 0..PROBES_MAX {
            assert!(nodes.is_probed("a") && !nodes.is_probed("b"));
            nodes.give_up("a");
        }
        assert!(!nodes.is_probed("a"), "it may be slow");
        nodes.give_up("b");
        assert!(nodes.is_probed("b"));
        nodes.heard();
        assert!(!nodes.is_probed("b"));
    }

    #[test]
    fn node_that_takes_no_connections_gets_four_short_waits() {
        let mut nodes = nodes(&["a", "b"]);
        for _ in 0..=PROBES_UNREACHABLE_MAX {
            nodes.unreachable("a");
        }
        assert!(!nodes.is_probed("a"), "its network may be slow");
    }
}
