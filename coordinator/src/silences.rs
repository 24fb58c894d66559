//! When this replica first saw each silence, kept over restarts of the process.
//!
//! A raft leader that restarts again and again, and is elected again each time, would otherwise count the rest of a
//! dead member's lease from the start each time. The file is a help and no part of the log: without it, or after the
//! machine was restarted, a silence counts from when it is replayed, which is later and never too early.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use tenure_core::command::MemberRef;
use tenure_model::{Index, MemberEpoch, Tick};

/// Which silence of which membership.
pub(crate) type Key = (MemberRef, Index);

/// Moments by silence, and the file that they are kept in.
#[derive(Debug, Default)]
pub(crate) struct Silences {
    moments: BTreeMap<Key, Tick>,
    file: Option<File>,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    /// Names the run of the machine, and with it the origin of its clock.
    clock: String,
    /// What an earlier process left, until the first look at the state says which of it still counts.
    left: BTreeMap<Key, Tick>,
}

impl Silences {
    /// Reads what an earlier process of this run of the machine left at `path`, and keeps the moments there. `now` is
    /// the clock's: what claims to be later is not of it.
    pub(crate) fn kept_at(path: PathBuf, now: Tick) -> Self {
        let Some(clock) = clock_id() else { return Self::default() };
        let left = match fs::read_to_string(&path) {
            Ok(text) => parse(&text, &clock, now),
            Err(_) => BTreeMap::new(),
        };
        Self { moments: BTreeMap::new(), file: Some(File { path, clock, left }) }
    }

    /// When the silence was first seen.
    pub(crate) fn get(&self, key: &Key) -> Option<Tick> {
        self.moments.get(key).copied()
    }

    /// Keeps one moment for each of `silences`: known ones stay as they are, new ones are `now`.
    pub(crate) fn follow(&mut self, silences: impl Iterator<Item = Key>, now: Tick) {
        let left = self.file.as_ref().map(|file| &file.left);
        let moments: BTreeMap<Key, Tick> = silences
            .map(|key| {
                let known = self.get(&key).or_else(|| left?.get(&key).copied());
                (key, known.unwrap_or(now))
            })
            .collect();
        if moments == self.moments {
            return;
        }
        self.moments = moments;
        if let Some(file) = &self.file
            && let Err(error) = file.write(&self.moments)
        {
            tracing::warn!(path = %file.path.display(), %error, "the moments of silences are not kept over a restart");
        }
    }
}

impl File {
    /// Whole or not at all. Not flushed: what the machine forgets when it goes down, its clock has forgotten, too.
    fn write(&self, moments: &BTreeMap<Key, Tick>) -> io::Result<()> {
        let mut text = format!("{}\n", self.clock);
        for ((member, index), since) in moments {
            let MemberRef { group, member, member_epoch } = member;
            writeln!(text, "{group} {member} {} {} {}", member_epoch.0, index.0, since.0)
                .map_err(io::Error::other)?;
        }
        let part = self.path.with_extension("part");
        fs::write(&part, text)?;
        fs::rename(&part, &self.path)
    }
}

/// Nothing of it counts if any of it is odd.
fn parse(text: &str, clock: &str, now: Tick) -> BTreeMap<Key, Tick> {
    let mut lines = text.lines();
    if lines.next() != Some(clock) {
        return BTreeMap::new();
    }
    lines.map(|line| read(line, now)).collect::<Option<_>>().unwrap_or_default()
}

fn read(line: &str, now: Tick) -> Option<(Key, Tick)> {
    let words: Vec<&str> = line.split(' ').collect();
    let [group, member, member_epoch, index, since] = words.as_slice() else { return None };
    let member = MemberRef {
        group: group.parse().ok()?,
        member: member.parse().ok()?,
        member_epoch: MemberEpoch(member_epoch.parse().ok()?),
    };
    let since = Tick(since.parse().ok()?);
    (since <= now).then_some(((member, Index(index.parse().ok()?)), since))
}

/// Run of the machine and, in a container with a clock of its own, which one; nothing where the system does not say.
fn clock_id() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let clock = fs::read_link("/proc/self/ns/time").ok();
    let clock = clock.as_deref().unwrap_or(Path::new("-")).display().to_string();
    Some(format!("{} {clock}", boot.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(index: u64) -> Key {
        let member = MemberRef {
            group: "g".parse().unwrap(),
            member: "m".parse().unwrap(),
            member_epoch: MemberEpoch(3),
        };
        (member, Index(index))
    }

    #[test]
    fn moment_is_the_first_one_over_a_restart_of_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("silences");
        let mut before = Silences::kept_at(path.clone(), Tick(0));
        before.follow([key(7)].into_iter(), Tick(100));

        let mut after = Silences::kept_at(path.clone(), Tick(500));
        assert_eq!(after.get(&key(7)), None, "the state has not said so yet");
        after.follow([key(7), key(8)].into_iter(), Tick(600));
        assert_eq!((after.get(&key(7)), after.get(&key(8))), (Some(Tick(100)), Some(Tick(600))));
        // Heard and silent again: another entry, another moment.
        after.follow([key(9)].into_iter(), Tick(700));
        let mut last = Silences::kept_at(path, Tick(800));
        last.follow([key(7), key(9)].into_iter(), Tick(900));
        assert_eq!((last.get(&key(7)), last.get(&key(9))), (Some(Tick(900)), Some(Tick(700))));
    }

    #[test]
    fn file_of_another_run_of_the_machine_or_with_anything_odd_in_it_counts_for_nothing() {
        let good = "boot -\ng m 3 7 100\n";
        assert_eq!(parse(good, "boot -", Tick(100)), BTreeMap::from([(key(7), Tick(100))]));
        for (text, clock, now) in [
            (good, "other -", 100),
            (good, "boot -", 99),
            ("boot -\ng m 3 7 100\ng m", "boot -", 100),
            ("boot -\ng m 3 7 1e9", "boot -", 100),
            ("", "boot -", 100),
        ] {
            assert_eq!(parse(text, clock, Tick(now)), BTreeMap::new(), "{text:?} {clock} {now}");
        }
    }
}
