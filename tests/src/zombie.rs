//! A worker that is stopped at an exact place and, once awake, goes on as if nothing had happened.
//!
//! The worker is a process of its own, the program `zombie-worker`: a consumer with Kafka as the source and PostgreSQL
//! as the sink. It tells what happens as JSON lines on standard output. Its local lease check is off, so that what
//! refuses it is PostgreSQL and the coordinator, and only their words are reported as refusals.

mod copy;
mod late;
mod offset_table;
pub mod worker;

use std::io::Write as _;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

pub use offset_table::OFFSET_TABLE;

/// Where the worker is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Point {
    /// Granted; the epoch is registered nowhere yet.
    BeforeRegister,
    /// Registered in PostgreSQL; the coordinator was not asked yet whether the grant still counts.
    BeforeVerify,
    /// Verified; the resume point was not read yet.
    BeforeResume,
    /// The transaction has locked and compared the fence row; no data was sent.
    AfterBegin,
    /// The data was sent; COMMIT was not.
    AfterData,
    /// COMMIT was sent and done; its answer has not arrived. The test stops the worker, see [`What::Arming`].
    CommitUnanswered,
    /// The data is committed in PostgreSQL; its offset was not sent to its home beside it.
    BeforeOffsetCommit,
}

/// Where the group's offsets live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OffsetHome {
    /// In PostgreSQL, in the data's transaction.
    Sink,
    /// At the coordinator, committed after the data.
    Coordinator,
    /// In a table that compares no epoch, committed after the data: the negative control of the coordinator.
    Table,
}

/// What a line tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// The worker stops itself now, for a moment: answers to COMMIT are to be held back from here on.
    Arming,
    /// The worker stops itself now, at its point.
    Stopping,
    /// A late act and its answer.
    Late,
    /// All late acts of one stop are through.
    Through,
    /// The worker has ended in an orderly way.
    Ended,
}

/// Who answered a late act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Judge {
    /// PostgreSQL.
    Database,
    /// The coordinator.
    Coordinator,
}

/// The answer to a late act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It was done.
    Accepted,
    /// Refused by the epoch: the line has both epochs.
    Fenced,
    /// A statement with the old epoch touched no row.
    NoRow,
    /// The transaction was ended meanwhile, by the server's own bound.
    Ended,
    /// Neither done nor refused: the line has the text.
    Failed,
}

impl Answer {
    /// Whether it is a refusal of this epoch.
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        match self {
            Self::Fenced | Self::NoRow | Self::Ended => true,
            Self::Accepted | Self::Failed => false,
        }
    }
}

/// One line of the worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Line {
    /// What it tells.
    pub what: What,
    /// Count of this worker's stops, from 1; 0 outside them.
    #[serde(default)]
    pub stop: u32,
    /// Partition.
    #[serde(default)]
    pub partition: u32,
    /// Epoch under which the worker acts.
    #[serde(default)]
    pub epoch: u64,
    /// Offset after the records in hand; 0 without any.
    #[serde(default)]
    pub next: u64,
    /// The late act.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub act: String,
    /// Who answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<Judge>,
    /// The answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<Answer>,
    /// The epoch that counts, by the one who answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<u64>,
    /// For people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

impl Line {
    /// A line with nothing but what it tells.
    #[must_use]
    pub const fn new(what: What) -> Self {
        Self {
            what,
            stop: 0,
            partition: 0,
            epoch: 0,
            next: 0,
            act: String::new(),
            judge: None,
            answer: None,
            current: None,
            text: String::new(),
        }
    }

    /// Reads a line; nothing when it is of another kind, such as a line of the log.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    fn say(&self) {
        let mut text = serde_json::to_string(self).expect("a line has only plain fields");
        text.push('\n');
        let mut out = std::io::stdout().lock();
        // The test is gone when nobody reads: so will be this process.
        let _written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

/// Payload of a record that the suite produces.
#[must_use]
pub fn payload(partition: u32, offset: u64) -> String {
    format!("{partition}/{offset}")
}
