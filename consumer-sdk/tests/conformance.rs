//! The conformance kit bites: a right sink in memory passes it, and each wrong one fails the check named after its fault.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and the report is for the reader of a failure"
)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure_model::{Epoch, Home, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject};
use tenure_sdk::sink::{
    BoxError, Capabilities, Enforcement, FenceRow, FencedSink, FencedWriter, Fencing, Registered,
    Resolved, Role, Scope, SinkError, Standing, Takeover, Verified,
};
use tokio::sync::OwnedMutexGuard;

/// What is wrong with the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    ChecksBeforeTheWrite,
    LastRegistrationWins,
    RefusesRepeatedRegistration,
    ReadsOffsetWhileRegistering,
    SetsStartAgain,
    TakesAbsentForFresh,
    TakesUnregistered,
    RetireLowersTheFence,
    ForgetsWithTheProcess,
    DeclaresABoundItDoesNotKeep,
    RegistersOnlyWhenIdle,
    TakesLostForNotApplied,
    SaysNotNow,
}

#[derive(Debug, Default)]
struct Cell {
    fence: Option<FenceRow>,
    rows: Vec<Row>,
}

type SharedCell = Arc<tokio::sync::Mutex<Cell>>;
type Cells = Arc<Mutex<BTreeMap<String, SharedCell>>>;

#[derive(Debug)]
struct MemorySubject {
    fault: Fault,
    cells: Cells,
}

#[derive(Debug)]
struct MemorySink {
    fault: Fault,
    cells: Cells,
}

#[derive(Debug)]
struct MemoryWriter {
    fault: Fault,
    cell: SharedCell,
    standing: Standing,
    /// Offset read while registering, by the sink that does so.
    snapshot: Option<NextOffset>,
    /// Where the last write began.
    wrote_from: NextOffset,
    has_put_off: bool,
}

fn cell_of(cells: &Cells, grant: &Grant) -> SharedCell {
    Arc::clone(cells.lock().unwrap().entry(grant.resource.to_string()).or_default())
}

impl MemorySink {
    fn writer(&self, grant: &Grant, role: Role) -> MemoryWriter {
        let standing = Standing::new(grant.epoch, role, Fencing::On);
        let cell = cell_of(&self.cells, grant);
        let wrote_from = NextOffset::ZERO;
        let fault = self.fault;
        MemoryWriter { fault, cell, standing, snapshot: None, wrote_from, has_put_off: false }
    }

    async fn lock(&self, cell: &SharedCell) -> OwnedMutexGuard<Cell> {
        if self.fault != Fault::RegistersOnlyWhenIdle {
            return Arc::clone(cell).lock_owned().await;
        }
        loop {
            match Arc::clone(cell).try_lock_owned() {
                Ok(guard) => return guard,
                Err(_busy) => tokio::time::sleep(Duration::from_millis(3)).await,
            }
        }
    }
}

impl FencedSink for MemorySink {
    type Writer = MemoryWriter;

    fn name(&self) -> &str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        let takeover = if self.fault == Fault::DeclaresABoundItDoesNotKeep {
            Takeover::Bounded(Duration::from_millis(50))
        } else {
            Takeover::Unbounded
        };
        let enforcement = Enforcement::Cooperative;
        Capabilities { scope: Scope::Partition, home: Home::Sink, enforcement, takeover }
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<MemoryWriter>, SinkError> {
        let mut writer = self.writer(grant, Role::Home);
        if self.fault == Fault::ReadsOffsetWhileRegistering {
            // As a statement's snapshot: what was there before the wait for the lock.
            writer.snapshot = Some(NextOffset::ZERO);
        }
        let cell = Arc::clone(&writer.cell);
        let mut cell = self.lock(&cell).await;
        let (epoch, holder) = (grant.epoch, grant.member.to_string());
        let displaced = match &mut cell.fence {
            None => {
                cell.fence = Some(FenceRow { epoch, holder, next_offset: None, sequence: 0 });
                None
            }
            Some(row) if row.epoch < epoch || self.fault == Fault::LastRegistrationWins => {
                let displaced = row.epoch;
                (row.epoch, row.holder) = (epoch, holder);
                Some(displaced)
            }
            Some(row) if self.fault == Fault::RefusesRepeatedRegistration => {
                return Err(SinkError::Fenced { ours: epoch, seen: Some(row.epoch) });
            }
            Some(row) => {
                writer.standing.registered(row, &holder)?;
                None
            }
        };
        Ok(Registered { writer, displaced })
    }
}

impl FencedWriter for MemoryWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        let cell = self.cell.lock().await;
        let fresh = Verified::without_coordinator(false);
        let verified = if self.fault == Fault::TakesAbsentForFresh { &fresh } else { verified };
        let row = cell
            .fence
            .clone()
            .map(|row| FenceRow { next_offset: self.snapshot.or(row.next_offset), ..row });
        self.standing.resume(row.as_ref(), verified)
    }

    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.standing.check()?;
        let mut cell = self.cell.lock().await;
        let ours = self.standing.epoch();
        if let Some(row) = cell.fence.as_mut().filter(|row| row.epoch == ours)
            && (row.next_offset.is_none() || self.fault == Fault::SetsStartAgain)
        {
            row.next_offset = Some(start);
        }
        self.standing.initialised(cell.fence.as_ref())
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        if self.fault == Fault::TakesLostForNotApplied {
            self.standing.landed(self.wrote_from);
            return Ok(Resolved::NotApplied(self.wrote_from));
        }
        let cell = self.cell.lock().await;
        self.standing.resolve(cell.fence.as_ref())
    }

    async fn retire(self) -> Result<(), SinkError> {
        if self.fault == Fault::RetireLowersTheFence
            && let Some(row) = &mut self.cell.lock().await.fence
        {
            row.epoch = Epoch::FIRST;
        }
        Ok(())
    }
}

impl MemoryWriter {
    async fn write(&mut self, rows: Rows, pauses: &Pauses) -> Result<(), SinkError> {
        self.standing.check()?;
        if self.fault == Fault::SaysNotNow && self.standing.epoch() > Epoch::FIRST {
            let first_time = !std::mem::replace(&mut self.has_put_off, true);
            if first_time {
                return Err(SinkError::Transient { retry_after: None, source: "not now".into() });
            }
        }
        let mut cell = Arc::clone(&self.cell).lock_owned().await;
        if self.fault == Fault::TakesUnregistered && self.standing.role() == Role::Also {
            let (epoch, holder) = (self.standing.epoch(), String::new());
            cell.fence.get_or_insert(FenceRow { epoch, holder, next_offset: None, sequence: 0 });
        }
        let mut row = cell.fence.clone();
        if matches!(self.fault, Fault::ReadsOffsetWhileRegistering | Fault::TakesLostForNotApplied)
        {
            // The pattern that was measured compares the epoch and not the offset.
            row = row.map(|row| FenceRow { next_offset: Some(rows.first), ..row });
        }
        let before = self.standing.admit(row)?;
        let target = self.standing.target(&before, rows.next)?;
        if self.fault == Fault::ChecksBeforeTheWrite {
            drop(cell);
            pauses.here().await;
            cell = Arc::clone(&self.cell).lock_owned().await;
        } else {
            pauses.here().await;
        }
        self.standing.sent(&before, target);
        self.wrote_from = rows.first;
        // The way to the resource.
        tokio::task::yield_now().await;
        cell.rows.extend(rows.offsets().map(|offset| Row { offset, epoch: rows.epoch }));
        if let Some(row) = &mut cell.fence {
            row.next_offset = Some(target);
            row.sequence += 1;
        }
        // And the way back.
        tokio::task::yield_now().await;
        self.standing.landed(target);
        Ok(())
    }
}

impl Subject for MemorySubject {
    type Sink = MemorySink;

    async fn connect(&self) -> Result<MemorySink, SinkError> {
        let forgets = self.fault == Fault::ForgetsWithTheProcess;
        let cells = if forgets { Cells::default() } else { Arc::clone(&self.cells) };
        Ok(MemorySink { fault: self.fault, cells })
    }

    async fn write(
        &self,
        writer: &mut MemoryWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        writer.write(rows, pauses).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        let cell = cell_of(&self.cells, &conformance::grant("reader", partition, Epoch::FIRST));
        let mut rows = cell.lock().await.rows.clone();
        rows.sort_by_key(|row| row.offset);
        Ok(rows)
    }

    fn beside(&self, sink: &MemorySink, grant: &Grant) -> Option<MemoryWriter> {
        Some(sink.writer(grant, Role::Also))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn right_sink_passes_every_check() {
    let subject = Arc::new(MemorySubject { fault: Fault::None, cells: Cells::default() });
    let report = conformance::run(&subject, Options::with_seed(rand::random())).await;
    println!("{report}");
    assert_eq!(report.failed(), Vec::new());
}

async fn assert_caught(fault: Fault, check: Check) {
    let subject = Arc::new(MemorySubject { fault, cells: Cells::default() });
    let outcome = conformance::run_one(&subject, Options::with_seed(rand::random()), check).await;
    println!("{fault:?}: {outcome}");
    assert!(matches!(outcome.verdict, conformance::Verdict::Failed(_)), "{outcome}");
}

macro_rules! caught {
    ($($name:ident: $fault:ident fails $check:ident;)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            assert_caught(Fault::$fault, Check::$check).await;
        }
    )*};
}

caught! {
    naive_sink_that_checks_before_the_write_is_caught: ChecksBeforeTheWrite fails StaleWrite;
    naive_sink_does_damage_under_the_hammer: ChecksBeforeTheWrite fails Hammer;
    sink_where_the_last_registration_wins_is_caught: LastRegistrationWins fails LateRegistration;
    sink_that_refuses_its_own_retry_is_caught: RefusesRepeatedRegistration fails ReRegistration;
    offset_read_in_the_registering_statement_is_caught: ReadsOffsetWhileRegistering fails ReadOrder;
    second_start_is_caught: SetsStartAgain fails InitialiseOnce;
    absent_offset_taken_for_a_fresh_start_is_caught: TakesAbsentForFresh fails AbsentOffset;
    writer_that_needs_no_registration_is_caught: TakesUnregistered fails Unregistered;
    fence_that_is_lowered_by_retiring_is_caught: RetireLowersTheFence fails Retire;
    fence_that_dies_with_the_process_is_caught: ForgetsWithTheProcess fails Restart;
    bound_that_is_not_kept_is_caught: DeclaresABoundItDoesNotKeep fails PausedHolder;
    registration_that_starves_is_caught: RegistersOnlyWhenIdle fails Starvation;
    lost_write_that_is_taken_for_none_is_caught: TakesLostForNotApplied fails CutOff;
    sink_that_says_not_now_too_often_is_caught: SaysNotNow fails ReadOrder;
}
