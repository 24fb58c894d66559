//! The replicated machine: the group state machine behind the raft log.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use tenure_core::command::{Context, MemberRef};
use tenure_core::{Applied, Command, Event, State};
use tenure_model::{Clock, Index, Tick};
use tokio::sync::{broadcast, watch};

use crate::digests::Digests;
use crate::raft::{EntryContext, Fatal, Machine};
use crate::silences::Silences;
use crate::stored;
use crate::versions;

/// Entries that a slow subscriber may lag behind before it has to look at the whole state again.
pub const CHANGES_BUFFERED_MAX: usize = 4096;

/// What one step of the log did to the state.
#[derive(Clone, Debug)]
pub enum Change {
    /// An entry was applied.
    Applied {
        /// Its index.
        index: Index,
        /// One outcome per command of the entry.
        outcomes: Arc<[Applied]>,
    },
    /// The state was replaced by a snapshot: whoever follows events looks at the whole state again.
    Restored {
        /// Index that the snapshot stands at.
        index: Index,
    },
}

impl Change {
    /// Events of the change, in order; none for a restored state.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        let outcomes: &[Applied] = match self {
            Self::Applied { outcomes, .. } => outcomes,
            Self::Restored { .. } => &[],
        };
        outcomes.iter().flat_map(|outcome| &outcome.events)
    }
}

/// The group state machine as the raft log drives it.
pub struct GroupMachine {
    /// Shared with a snapshot that is being written; copied only if an entry comes meanwhile.
    state: Arc<State>,
    changes: broadcast::Sender<Change>,
    /// Revision of the newest change in the history.
    newest_change: watch::Sender<Index>,
    clock: Arc<dyn Clock>,
    /// When this replica first applied, installed or replayed each silence that the state still names
    /// (DESIGN.md, section 5, rule 4).
    silences: Silences,
    digests: Digests,
}

impl GroupMachine {
    /// Makes an empty machine. `clock` is asked only for the moments at which silences are first seen; the state never
    /// sees it.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            state: Arc::default(),
            changes: broadcast::Sender::new(CHANGES_BUFFERED_MAX),
            newest_change: watch::Sender::default(),
            clock,
            silences: Silences::default(),
            digests: Digests::default(),
        }
    }

    /// Keeps the moments of silences in the file at `path`, over restarts of the process.
    #[must_use]
    pub fn keeping_silences_at(mut self, path: PathBuf) -> Self {
        self.silences = Silences::kept_at(path, self.clock.now());
        self
    }

    /// The state as applied.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The state as applied, to keep: it does not change any more.
    #[must_use]
    pub fn state_now(&self) -> Arc<State> {
        Arc::clone(&self.state)
    }

    /// Changes from now on. A receiver that lags is told so and looks at the whole state.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    /// Sender of the changes, for subscribing without the machine's lock.
    #[must_use]
    pub fn changes(&self) -> broadcast::Sender<Change> {
        self.changes.clone()
    }

    /// Revision of the newest change in the history; wakes watchers.
    #[must_use]
    pub fn newest_change(&self) -> watch::Receiver<Index> {
        self.newest_change.subscribe()
    }

    /// Digests that this replica took of its state.
    #[must_use]
    pub const fn digests(&self) -> &Digests {
        &self.digests
    }

    /// When this replica first saw the silence that the log says of `member`.
    #[must_use]
    pub fn silent_since(&self, member: &MemberRef, silence: Index) -> Option<Tick> {
        self.silences.get(&(member.clone(), silence))
    }

    /// Keeps one moment per silence in the state: known ones stay as they are.
    fn note_silences(&mut self) {
        let now = self.clock.now();
        let silences = self
            .state
            .members()
            .filter_map(|(member, _, _, silence)| Some((member, silence?.index)));
        self.silences.follow(silences, now);
    }

    /// Takes and compares the digests that an entry asks for.
    fn compare(&self, index: Index, commands: &[Command]) -> Result<(), Fatal> {
        if commands.iter().any(|command| matches!(command, Command::MarkDigest)) {
            self.digests.mark(index, &self.state);
        }
        for command in commands {
            if let Command::CompareDigest { index, digest } = command {
                self.digests.expect(*index, *digest);
            }
        }
        self.digests.check()
    }

    fn tell(&self, change: Change) {
        let changes = &self.state.changes;
        let newest = changes.newest.back().map_or(changes.compacted, |last| last.at.revision);
        self.newest_change.send_if_modified(|known| std::mem::replace(known, newest) != newest);
        // Nobody listening is fine: followers have few subscribers.
        let _listeners = self.changes.send(change).unwrap_or(0);
    }
}

impl Machine for GroupMachine {
    type Reply = Arc<[Applied]>;

    fn apply(&mut self, at: EntryContext, payload: &Bytes) -> Result<Self::Reply, Fatal> {
        let batch = stored::decode_batch(payload)
            .map_err(|error| Fatal(format!("entry {}: {error}", at.index)))?;
        for command in &batch.commands {
            check_command(command)
                .map_err(|error| Fatal(format!("entry {}: {error}", at.index)))?;
        }
        let context = Context { term: at.term, index: at.index, proposed_at: batch.proposed_at };
        let outcomes: Arc<[Applied]> =
            Arc::make_mut(&mut self.state).apply_batch(context, &batch.commands).into();
        let about_silence = |event: &Event| {
            matches!(
                event,
                Event::MemberSilenced { .. }
                    | Event::MemberHeard { .. }
                    | Event::MemberExpired { .. }
                    | Event::MemberLeft { .. }
                    | Event::MemberAway { .. }
            )
        };
        if outcomes.iter().flat_map(|outcome| &outcome.events).any(about_silence) {
            self.note_silences();
        }
        self.tell(Change::Applied { index: at.index, outcomes: Arc::clone(&outcomes) });
        self.compare(at.index, &batch.commands)?;
        Ok(outcomes)
    }

    fn snapshot(&self) -> Box<dyn FnOnce() -> Vec<u8> + Send> {
        let state = Arc::clone(&self.state);
        Box::new(move || stored::encode_snapshot(&state))
    }

    fn restore(&mut self, bytes: &[u8]) -> Result<(), Fatal> {
        let state = stored::decode_snapshot(bytes).map_err(|error| Fatal(error.to_string()))?;
        let index = state.applied;
        self.state = Arc::new(state);
        self.digests.clear();
        self.note_silences();
        self.tell(Change::Restored { index });
        Ok(())
    }

    fn answer(&self, question: &[u8]) -> Vec<u8> {
        versions::answer(&self.digests, question)
    }
}

/// Refuses a command that leads to rules which this build does not know.
fn check_command(command: &Command) -> Result<(), stored::StoredError> {
    if let Command::RaiseFeatureLevel { level } = command {
        stored::check_level("command", *level)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tenure_core::Command;
    use tenure_core::command::{JoinGroup, SilentMember};
    use tenure_core::level::NEWEST;
    use tenure_model::{
        FeatureLevel, GroupSettings, ManualClock, MemberEpoch, StateDigest, Term, Timestamp,
    };

    use super::*;

    fn join() -> Command {
        Command::JoinGroup(JoinGroup {
            group: "g".parse().unwrap(),
            member: "m".parse().unwrap(),
            instance: None,
            topics: vec!["orders".parse().unwrap()],
            settings: GroupSettings::default(),
            ttl_ms: 10_000,
            heartbeat_interval_ms: 3_000,
            client: String::new(),
            partitions_max: None,
            report: vec![],
            rejoin: None,
            prepares: false,
            weight: 1,
        })
    }

    fn apply(machine: &mut GroupMachine, index: u64, command: Command) {
        let payload = stored::encode_batch(Timestamp(0), &[command]);
        let at = EntryContext { term: Term(1), index: Index(index) };
        let outcomes = machine.apply(at, &payload).unwrap();
        assert!(outcomes[0].result.is_ok(), "{:?}", outcomes[0].result);
    }

    #[test]
    fn silence_keeps_its_first_moment_over_a_snapshot() {
        let clock = ManualClock::default();
        let mut machine = GroupMachine::new(Arc::new(clock.clone()));
        let member = MemberRef {
            group: "g".parse().unwrap(),
            member: "m".parse().unwrap(),
            member_epoch: MemberEpoch(1),
        };
        apply(&mut machine, 1, join());
        clock.advance(Duration::from_nanos(100));
        let silent = SilentMember { member: member.clone(), silent_for_ms: 4_000 };
        apply(&mut machine, 2, Command::MarkMembersSilent { term: Term(1), members: vec![silent] });
        assert_eq!(machine.silent_since(&member, Index(2)), Some(Tick(100)));

        let bytes = machine.snapshot()();
        clock.advance(Duration::from_nanos(100));
        machine.restore(&bytes).unwrap();
        assert_eq!(machine.silent_since(&member, Index(2)), Some(Tick(100)), "same replica");

        let mut other = GroupMachine::new(Arc::new(clock));
        other.restore(&bytes).unwrap();
        assert_eq!(other.silent_since(&member, Index(2)), Some(Tick(200)), "first seen there now");

        let heard = Command::MarkMembersHeard { term: Term(1), members: vec![member.clone()] };
        apply(&mut machine, 3, heard);
        assert_eq!(machine.silent_since(&member, Index(2)), None);
    }

    fn entry(machine: &mut GroupMachine, index: u64, command: Command) -> Result<(), Fatal> {
        let payload = stored::encode_batch(Timestamp(0), &[command]);
        let at = EntryContext { term: Term(1), index: Index(index) };
        machine.apply(at, &payload).map(drop)
    }

    #[test]
    fn replica_with_another_state_than_the_majority_stops_and_says_as_of_which_entry() {
        let clock = ManualClock::default();
        let mut right = GroupMachine::new(Arc::new(clock.clone()));
        let mut wrong = GroupMachine::new(Arc::new(clock));
        for machine in [&mut right, &mut wrong] {
            apply(machine, 1, join());
        }
        // As if a bit of its memory had flipped.
        Arc::make_mut(&mut wrong.state).epoch_counter ^= 1 << 7;
        for machine in [&mut right, &mut wrong] {
            apply(machine, 2, Command::MarkDigest);
        }
        let digest = right.digests().at(Index(2)).unwrap();
        assert_ne!(wrong.digests().at(Index(2)), Some(digest));
        let compare = Command::CompareDigest { index: Index(2), digest };
        assert_eq!(entry(&mut right, 3, compare.clone()), Ok(()));
        assert_eq!(right.digests().agreed(), Index(2));
        let fatal = entry(&mut wrong, 3, compare).unwrap_err().to_string();
        assert!(fatal.contains("as of entry 2") && fatal.contains("majority"), "{fatal}");
    }

    #[test]
    fn replica_that_was_away_at_the_mark_is_not_compared() {
        let mut machine = GroupMachine::new(Arc::new(ManualClock::default()));
        let compare = Command::CompareDigest { index: Index(2), digest: StateDigest(1) };
        assert_eq!(entry(&mut machine, 3, compare), Ok(()));
        assert_eq!(machine.digests().agreed(), Index(0));
    }

    #[test]
    fn higher_feature_level_stops_the_node_and_says_what_to_run() {
        let mut machine = GroupMachine::new(Arc::new(ManualClock::default()));
        let level = FeatureLevel(NEWEST.0 + 1);
        let fatal = entry(&mut machine, 1, Command::RaiseFeatureLevel { level }).unwrap_err();
        let fatal = fatal.to_string();
        assert!(fatal.starts_with("entry 1: command has feature level"), "{fatal}");
        assert!(fatal.ends_with("run the newer version on this node"), "{fatal}");
        assert_eq!(machine.state().level, FeatureLevel::FIRST);
    }

    #[test]
    fn unknown_command_stops_the_node() {
        let mut machine = GroupMachine::new(Arc::new(ManualClock::default()));
        let at = EntryContext { term: Term(1), index: Index(1) };
        let payload = Bytes::from_static(&[0x08, 1, 0x1a, 4, 0xa2, 0x06, 1, 0]);
        let fatal = machine.apply(at, &payload).unwrap_err();
        assert!(fatal.to_string().starts_with("entry 1: unknown command"), "{fatal}");
    }
}
