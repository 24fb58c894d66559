//! Judgement over a fence row, for sinks that keep one in the resource.
//!
//! A sink brings the statements and the lock; what a row means for a writer is decided here, once for all of them.

use tenure_model::{Epoch, NextOffset};

use super::{Resolved, SinkError, Verified};

/// One row of a sink's fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FenceRow {
    /// Highest epoch that was registered.
    pub epoch: Epoch,
    /// Who registered it.
    pub holder: String,
    /// The offset at its home; beside the home, the first offset that is not applied. Nothing before the first.
    pub next_offset: Option<NextOffset>,
    /// Writes that are in. Tells an own write whose answer was lost from one that never arrived.
    pub sequence: u64,
}

impl FenceRow {
    /// Makes a row of the signed numbers that a database carries.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a number that no sink writes.
    pub fn from_columns(
        epoch: i64,
        holder: String,
        next_offset: Option<i64>,
        sequence: i64,
    ) -> Result<Self, SinkError> {
        Ok(Self {
            epoch: epoch_from_column(epoch)?,
            holder,
            next_offset: next_offset.map(NextOffset::from_signed).transpose().map_err(damaged)?,
            sequence: u64::try_from(sequence).map_err(damaged)?,
        })
    }
}

/// Epoch from the signed number that a database carries.
///
/// # Errors
///
/// [`SinkError::Misconfigured`] for a number that is no epoch.
pub fn epoch_from_column(value: i64) -> Result<Epoch, SinkError> {
    Epoch::new(u64::try_from(value).map_err(damaged)?).map_err(damaged)
}

/// Epoch as a database carries it.
#[must_use]
pub const fn epoch_to_column(epoch: Epoch) -> i64 {
    epoch.get().cast_signed()
}

fn damaged(error: impl std::fmt::Display) -> SinkError {
    SinkError::Misconfigured(format!("the fence row is damaged: {error}"))
}

/// What the row's offset means to a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The sink is the offset's home: a write moves it from exactly the expected offset.
    Home,
    /// The sink stands beside the home: the offset is a watermark that tells a replay, and only rises.
    Also,
}

/// Whether a writer compares anything at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fencing {
    /// Epoch and offset are compared.
    #[default]
    On,
    /// Nothing is compared and every write goes through: the negative control that shows the damage.
    Off,
}

/// Where one writer stands: what it expects at the resource, and whether it may still ask.
///
/// | from    | event                    | to      |
/// |---------|--------------------------|---------|
/// | Unread  | resumed, initialised     | At      |
/// | At      | write sent               | InDoubt |
/// | InDoubt | answered, resolved       | At      |
/// | any     | a newer epoch was seen   | Fenced  |
///
/// There is no edge out of `Fenced`.
#[derive(Clone, Debug)]
pub struct Standing {
    ours: Epoch,
    role: Role,
    fencing: Fencing,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Unread,
    At(Option<NextOffset>),
    InDoubt { sequence: u64, next: NextOffset },
    Fenced { seen: Option<Epoch> },
}

impl Standing {
    /// Standing of a new writer.
    #[must_use]
    pub const fn new(ours: Epoch, role: Role, fencing: Fencing) -> Self {
        Self { ours, role, fencing, state: State::Unread }
    }

    /// Epoch of the writer.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.ours
    }

    /// What the row's offset means to the writer.
    #[must_use]
    pub const fn role(&self) -> Role {
        self.role
    }

    /// Refuses a call on a writer that was fenced or has a write in doubt.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`], for good, or [`SinkError::Unknown`], until the write is resolved.
    pub fn check(&self) -> Result<(), SinkError> {
        match self.state {
            State::Fenced { seen } => Err(SinkError::Fenced { ours: self.ours, seen }),
            State::InDoubt { next, .. } => Err(SinkError::Unknown(
                format!("the write up to {next} is not resolved: resolve it first").into(),
            )),
            State::Unread | State::At(_) => Ok(()),
        }
    }

    /// Judges the row that a write has locked.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`], [`SinkError::FenceRegressed`], [`SinkError::OffsetConflict`], or
    /// [`SinkError::Misconfigured`] without a row, or at the home before the resume point was read.
    pub fn admit(&mut self, row: Option<FenceRow>) -> Result<FenceRow, SinkError> {
        let row = row.ok_or_else(|| {
            SinkError::Misconfigured(
                "no fence row: the grant is not registered here, or the table was emptied".into(),
            )
        })?;
        if self.fencing == Fencing::Off {
            return Ok(row);
        }
        self.compare(&row)?;
        match (self.role, &self.state) {
            (Role::Also, _) => Ok(row),
            (Role::Home, State::At(Some(expected))) => match row.next_offset {
                Some(found) if found == *expected => Ok(row),
                Some(found) => Err(SinkError::OffsetConflict { expected: *expected, found }),
                None => Err(SinkError::Misconfigured(format!(
                    "the offset at the home is gone, {expected} was expected"
                ))),
            },
            (Role::Home, State::Unread | State::At(None)) => Err(SinkError::Misconfigured(
                "the home's offset was not read: resume, and initialise if there is none".into(),
            )),
            (Role::Home, State::InDoubt { .. } | State::Fenced { .. }) => {
                Err(self.check().expect_err("both states are refused"))
            }
        }
    }

    /// Judges the row as the resume point.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] when the home was initialised and has no offset; [`SinkError::FenceRegressed`]
    /// when the row is gone or below ours; [`SinkError::Fenced`].
    pub fn resume(
        &mut self,
        row: Option<&FenceRow>,
        verified: &Verified,
    ) -> Result<Option<NextOffset>, SinkError> {
        let must_exist = verified.home_initialised() && self.role == Role::Home;
        let absent = |what: &str| {
            SinkError::Misconfigured(format!(
                "the home was initialised and {what}: another or an emptied database"
            ))
        };
        let Some(row) = row else {
            return Err(if must_exist {
                absent("has no fence row")
            } else {
                SinkError::FenceRegressed { ours: self.ours, seen: None }
            });
        };
        if self.fencing == Fencing::On {
            self.compare(row)?;
        }
        if row.next_offset.is_none() && must_exist {
            return Err(absent("its fence row has no offset"));
        }
        self.state = State::At(row.next_offset);
        Ok(row.next_offset)
    }

    /// Judges the row after the start was set where there was none; answers the offset that counts.
    ///
    /// # Errors
    ///
    /// As [`Standing::admit`].
    pub fn initialised(&mut self, row: Option<&FenceRow>) -> Result<NextOffset, SinkError> {
        let row = row.ok_or(SinkError::FenceRegressed { ours: self.ours, seen: None })?;
        if self.fencing == Fencing::On {
            self.compare(row)?;
        }
        let offset = row.next_offset.ok_or_else(|| {
            SinkError::Misconfigured("the start was set and is not there: a trigger?".into())
        })?;
        self.state = State::At(Some(offset));
        Ok(offset)
    }

    /// The first offset that is not in yet, as a locked row says it: records below it are a replay. Nothing without
    /// fencing.
    #[must_use]
    pub const fn applied(&self, row: &FenceRow) -> Option<NextOffset> {
        match self.fencing {
            Fencing::On => row.next_offset,
            Fencing::Off => None,
        }
    }

    /// The offset that the row must have once the write up to `next` is in.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] when the home would move back, which only a named rewind may do.
    pub fn target(&self, row: &FenceRow, next: NextOffset) -> Result<NextOffset, SinkError> {
        match (self.role, self.fencing, row.next_offset) {
            (_, Fencing::Off, _) | (_, Fencing::On, None) => Ok(next),
            (Role::Also, Fencing::On, Some(found)) => Ok(found.max(next)),
            (Role::Home, Fencing::On, Some(found)) if next < found => {
                Err(SinkError::Misconfigured(format!(
                    "the write ends at {next} and the home is at {found}: a rewind has a name"
                )))
            }
            (Role::Home, Fencing::On, Some(_)) => Ok(next),
        }
    }

    /// Notes that a write is about to be sent whose answer may be lost.
    pub const fn sent(&mut self, row: &FenceRow, target: NextOffset) {
        self.state = State::InDoubt { sequence: row.sequence, next: target };
    }

    /// Notes that the write certainly is in.
    pub const fn landed(&mut self, target: NextOffset) {
        self.state = State::At(Some(target));
    }

    /// Notes that the write certainly did not happen and the row is as it was.
    pub const fn refused(&mut self, row: &FenceRow) {
        self.state = State::At(row.next_offset);
    }

    /// Judges a row that was read after everything of the write in doubt had ended at the resource.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`], [`SinkError::FenceRegressed`], [`SinkError::OffsetConflict`] when another writer of the
    /// same epoch was there, [`SinkError::Misconfigured`] when nothing is in doubt and nothing was read.
    pub fn resolve(&mut self, row: Option<&FenceRow>) -> Result<Resolved, SinkError> {
        let (sequence, next) = match self.state {
            State::Fenced { seen } => return Err(SinkError::Fenced { ours: self.ours, seen }),
            State::At(Some(offset)) => return Ok(Resolved::Applied(offset)),
            State::Unread | State::At(None) => {
                return Err(SinkError::Misconfigured("nothing was written yet".into()));
            }
            State::InDoubt { sequence, next } => (sequence, next),
        };
        let row = row.ok_or(SinkError::FenceRegressed { ours: self.ours, seen: None })?;
        if self.fencing == Fencing::On {
            self.compare(row)?;
        }
        let at = row.next_offset.unwrap_or(NextOffset::ZERO);
        if row.sequence == sequence {
            self.state = State::At(row.next_offset);
            Ok(Resolved::NotApplied(at))
        } else if row.sequence == sequence + 1 && at == next {
            self.state = State::At(Some(next));
            Ok(Resolved::Applied(next))
        } else {
            Err(SinkError::OffsetConflict { expected: next, found: at })
        }
    }

    /// Answers a registration that touched no row: an own retry, or a newer owner. `Ok` is the retry, and anything without
    /// fencing.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`]; also for the same epoch under another holder, which no coordinator gives out.
    pub fn registered(&mut self, row: &FenceRow, holder: &str) -> Result<(), SinkError> {
        if self.fencing == Fencing::Off {
            return Ok(());
        }
        self.compare(row)?;
        if row.holder == holder { Ok(()) } else { Err(self.poison(row.epoch)) }
    }

    fn compare(&mut self, row: &FenceRow) -> Result<(), SinkError> {
        match row.epoch.cmp(&self.ours) {
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Greater => Err(self.poison(row.epoch)),
            std::cmp::Ordering::Less => {
                Err(SinkError::FenceRegressed { ours: self.ours, seen: Some(row.epoch) })
            }
        }
    }

    const fn poison(&mut self, seen: Epoch) -> SinkError {
        self.state = State::Fenced { seen: Some(seen) };
        SinkError::Fenced { ours: self.ours, seen: Some(seen) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(value: u64) -> Epoch {
        Epoch::new(value).unwrap()
    }

    fn row(at_epoch: u64, next_offset: Option<u64>, sequence: u64) -> FenceRow {
        let next_offset = next_offset.map(|value| NextOffset::new(value).unwrap());
        FenceRow { epoch: epoch(at_epoch), holder: "ann".into(), next_offset, sequence }
    }

    fn home() -> Standing {
        let mut standing = Standing::new(epoch(5), Role::Home, Fencing::On);
        standing.resume(Some(&row(5, Some(10), 3)), &Verified::without_coordinator(true)).unwrap();
        standing
    }

    #[test]
    fn newer_epoch_poisons_the_writer_for_good() {
        let mut standing = home();
        assert!(matches!(standing.admit(Some(row(6, Some(10), 3))), Err(SinkError::Fenced { .. })));
        assert!(matches!(standing.check(), Err(SinkError::Fenced { .. })));
        assert!(matches!(standing.resolve(None), Err(SinkError::Fenced { .. })));
    }

    #[test]
    fn fence_below_ours_is_never_raised_silently() {
        let mut standing = home();
        let answer = standing.admit(Some(row(4, Some(10), 3)));
        assert!(matches!(answer, Err(SinkError::FenceRegressed { .. })));
    }

    #[test]
    fn absent_offset_at_an_initialised_home_is_no_fresh_start() {
        let verified = Verified::without_coordinator(true);
        for found in [None, Some(row(5, None, 0))] {
            let mut standing = Standing::new(epoch(5), Role::Home, Fencing::On);
            let answer = standing.resume(found.as_ref(), &verified);
            assert!(matches!(answer, Err(SinkError::Misconfigured(_))), "{answer:?}");
        }
    }

    #[test]
    fn write_in_doubt_blocks_the_writer_until_the_row_tells() {
        let mut standing = home();
        let before = standing.admit(Some(row(5, Some(10), 3))).unwrap();
        let next = NextOffset::new(12).unwrap();
        standing.sent(&before, next);
        assert!(matches!(standing.check(), Err(SinkError::Unknown(_))));
        let mut other = standing.clone();
        assert_eq!(standing.resolve(Some(&row(5, Some(12), 4))).unwrap(), Resolved::Applied(next));
        let stayed = other.resolve(Some(&row(5, Some(10), 3))).unwrap();
        assert_eq!(stayed, Resolved::NotApplied(NextOffset::new(10).unwrap()));
        standing.check().unwrap();
        other.check().unwrap();
    }

    #[test]
    fn watermark_beside_the_home_only_rises() {
        let standing = Standing::new(epoch(5), Role::Also, Fencing::On);
        let at = NextOffset::new(10).unwrap();
        let target = standing.target(&row(5, Some(10), 3), NextOffset::new(4).unwrap());
        assert_eq!(target.unwrap(), at);
    }

    #[test]
    fn home_is_not_moved_back_by_a_write() {
        let answer = home().target(&row(5, Some(10), 3), NextOffset::new(4).unwrap());
        assert!(matches!(answer, Err(SinkError::Misconfigured(_))));
    }
}
