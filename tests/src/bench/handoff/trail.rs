//! When each owner of each partition did what.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tenure_sdk::consumer::AcquireStep;
use tenure_sdk::grant::Grant;

/// Moments of one grant.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Marks {
    pub(super) register: Option<Instant>,
    pub(super) verify: Option<Instant>,
    pub(super) resume: Option<Instant>,
    pub(super) open: Option<Instant>,
    /// The handler began.
    pub(super) started: Option<Instant>,
    /// The first record was delivered.
    pub(super) first: Option<Instant>,
    /// The last effect was accepted.
    pub(super) effect: Option<Instant>,
    /// The input had ended, and all work in hand was done.
    pub(super) ended: Option<Instant>,
}

/// Part of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// From the last effect until the owner has learned of the move and has nothing in hand.
    Revoke,
    /// From there until the next owner has the grant: source closed, release sent, entry in the raft log, push.
    Release,
    /// The epoch is registered at the sinks.
    Register,
    /// The grant is verified at the coordinator.
    Verify,
    /// The resume point is read.
    Resume,
    /// The source is opened there, and the handler begins.
    Open,
    /// Until the first record.
    FirstFetch,
}

impl Step {
    pub(super) const ALL: [Self; 7] = [
        Self::Revoke,
        Self::Release,
        Self::Register,
        Self::Verify,
        Self::Resume,
        Self::Open,
        Self::FirstFetch,
    ];
}

/// One move that is through, with its moments in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move([Instant; Step::ALL.len() + 1]);

impl Move {
    fn of(old: &Marks, new: &Marks) -> Option<Self> {
        Some(Self([
            old.effect?,
            old.ended?,
            new.register?,
            new.verify?,
            new.resume?,
            new.open?,
            new.started?,
            new.first?,
        ]))
    }

    fn between_ms(&self, from: usize, to: usize) -> f64 {
        self.0[to].saturating_duration_since(self.0[from]).as_secs_f64() * 1_000.0
    }

    pub(super) fn step_ms(&self, step: Step) -> f64 {
        let at = Step::ALL.iter().position(|one| *one == step).unwrap_or(0);
        self.between_ms(at, at + 1)
    }

    /// From the last effect of the old owner to the first record of the new one.
    pub(super) fn gap_ms(&self) -> f64 {
        self.between_ms(0, Step::ALL.len())
    }

    /// From the end of the old owner's work to the start of the new one's.
    pub(super) fn unowned_ms(&self) -> f64 {
        self.between_ms(1, Step::ALL.len() - 1)
    }
}

/// Marks of all grants, by partition and epoch.
#[derive(Default)]
pub(super) struct Trail {
    marks: Mutex<HashMap<(u32, u64), Marks>>,
    moved: Condvar,
    pauses: Mutex<Vec<f64>>,
}

impl Trail {
    pub(super) fn note_effect(&self, grant: &Grant) {
        let mut pause = None;
        self.note(grant, |marks, now| pause = marks.effect.replace(now).map(|last| now - last));
        if let Some(pause) = pause {
            let mut pauses = self.pauses.lock().unwrap_or_else(PoisonError::into_inner);
            pauses.push(pause.as_secs_f64() * 1_000.0);
        }
    }

    /// How long it was between two effects of one owner, in milliseconds, since this was last asked.
    pub(super) fn take_pauses(&self) -> Vec<f64> {
        std::mem::take(&mut *self.pauses.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(u32, u64), Marks>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, grant: &Grant, note: impl FnOnce(&mut Marks, Instant)) {
        let now = Instant::now();
        let key = (grant.partition.index.get(), grant.epoch.get());
        note(self.lock().entry(key).or_default(), now);
    }

    pub(super) fn note_step(&self, step: AcquireStep, grant: &Grant) {
        self.note(grant, |marks, now| match step {
            AcquireStep::Register => marks.register = Some(now),
            AcquireStep::Verify => marks.verify = Some(now),
            AcquireStep::Resume => marks.resume = Some(now),
            AcquireStep::Open => marks.open = Some(now),
        });
    }

    pub(super) fn note_first(&self, grant: &Grant) {
        self.note(grant, |marks, now| {
            marks.first.get_or_insert(now);
        });
        self.moved.notify_all();
    }

    pub(super) fn has_effect(&self, index: u32, epoch: u64) -> bool {
        self.lock().get(&(index, epoch)).is_some_and(|marks| marks.effect.is_some())
    }

    /// All marks of one partition, for people.
    pub(super) fn of(&self, index: u32) -> String {
        let marks = self.lock();
        let of: BTreeMap<u64, &Marks> = marks
            .iter()
            .filter(|((partition, _), _)| *partition == index)
            .map(|((_, epoch), marks)| (*epoch, marks))
            .collect();
        format!("{of:#?}")
    }

    /// Waits until a later owner than that of `epoch` has its first record; nothing when `until` passes before.
    pub(super) fn wait_for_move(&self, index: u32, epoch: u64, until: Instant) -> Option<Move> {
        let mut marks = self.lock();
        loop {
            let newer = marks.iter().filter(|((of, at), _)| *of == index && *at > epoch);
            let next = newer.min_by_key(|((_, at), _)| *at).map(|(_, marks)| *marks);
            let old = marks.get(&(index, epoch)).copied();
            if let (Some(old), Some(new)) = (old, next)
                && let Some(moved) = Move::of(&old, &new)
            {
                return Some(moved);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            marks = self.moved.wait_timeout(marks, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
