//! The acceptance suite of fencing: worker processes with real Kafka and real PostgreSQL, stopped by SIGSTOP at exact
//! places, woken once another owner has written, and going on recklessly.
//!
//! Every place has a group, a topic and a database of its own; all places run side by side. The negative control runs
//! the same rounds and the same audit with the comparison of epochs taken out, and must come out red.

#![allow(
    clippy::unwrap_used,
    reason = "a test fails by panicking; clippy exempts only test functions"
)]

mod audit;
mod matrix;
mod place;

use audit::{Outcome, faults};
use matrix::{Checks, outcome};
use tenure_tests::servers::{Kafka, Postgres, require};
use tenure_tests::zombie::Point;

/// Runs all places once, and hands out what became of this one. Nothing: a real part is missing.
fn stopped(point: Point, checks: Checks) -> Option<Outcome> {
    let postgres = require(Postgres::shared())?;
    let kafka = require(Kafka::shared())?;
    Some(outcome(postgres, kafka, point, checks).unwrap_or_else(|error| panic!("{error}")))
}

fn is_refused(point: Point) {
    let Some(outcome) = stopped(point, Checks::On) else { return };
    let faults = faults(&outcome);
    assert!(faults.is_empty(), "{point:?}: {}\n{outcome:#?}", faults.join("; "));
}

fn is_damaged(point: Point) {
    let Some(outcome) = stopped(point, Checks::Off) else { return };
    let faults = faults(&outcome);
    assert!(!faults.is_empty(), "the audit does not see what is missing: {outcome:#?}");
    assert!(outcome.audit.is_damaged(), "no damage: {}\n{outcome:#?}", faults.join("; "));
}

#[test]
fn owner_stopped_before_register_is_refused() {
    is_refused(Point::BeforeRegister);
}

#[test]
fn owner_stopped_between_register_and_verify_is_refused() {
    is_refused(Point::BeforeVerify);
}

#[test]
fn owner_stopped_between_verify_and_resume_point_is_refused() {
    is_refused(Point::BeforeResume);
}

#[test]
fn owner_stopped_after_begin_is_refused() {
    is_refused(Point::AfterBegin);
}

#[test]
fn owner_stopped_after_the_data_before_commit_is_refused() {
    is_refused(Point::AfterData);
}

#[test]
fn owner_stopped_before_the_answer_to_commit_is_refused_its_next_write() {
    is_refused(Point::CommitUnanswered);
}

#[test]
fn owner_stopped_before_an_offset_commit_is_refused() {
    is_refused(Point::BeforeOffsetCommit);
}

#[test]
fn owner_stopped_before_register_without_the_epoch_check_is_damaged() {
    is_damaged(Point::BeforeRegister);
}

#[test]
fn owner_stopped_between_register_and_verify_without_the_epoch_check_is_damaged() {
    is_damaged(Point::BeforeVerify);
}

#[test]
fn owner_stopped_between_verify_and_resume_point_without_the_epoch_check_is_damaged() {
    is_damaged(Point::BeforeResume);
}

#[test]
fn owner_stopped_after_begin_without_the_epoch_check_is_damaged() {
    is_damaged(Point::AfterBegin);
}

#[test]
fn owner_stopped_after_the_data_before_commit_without_the_epoch_check_is_damaged() {
    is_damaged(Point::AfterData);
}

#[test]
fn owner_stopped_before_the_answer_to_commit_without_the_epoch_check_is_damaged() {
    is_damaged(Point::CommitUnanswered);
}

#[test]
fn owner_stopped_before_an_offset_commit_without_the_epoch_check_is_damaged() {
    is_damaged(Point::BeforeOffsetCommit);
}
