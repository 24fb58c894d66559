//! How fast the disk is on which the nodes keep their logs.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use super::{BenchError, Measured, median, percentile};

/// Syncs that are timed. In the fast mode of a virtual disk they take a tenth of a millisecond, in the slow one 4 ms.
const SYNCS: usize = 200;

/// Bytes appended before each sync: a small entry.
const APPENDED_BYTES: usize = 512;

/// Times of appends with fdatasync, in milliseconds.
#[derive(Debug, Default)]
pub(super) struct Syncs(Vec<f64>);

impl Syncs {
    /// Times some more in `folder`, while nothing else of this bench writes.
    ///
    /// # Errors
    ///
    /// When the folder cannot be written.
    pub(super) fn time(&mut self, folder: &Path) -> Result<(), BenchError> {
        let path = folder.join("fdatasync");
        let mut file = File::create(&path)?;
        for _ in 0..SYNCS {
            let started = Instant::now();
            file.write_all(&[7; APPENDED_BYTES])?;
            file.sync_data()?;
            self.0.push(started.elapsed().as_secs_f64() * 1_000.0);
        }
        std::fs::remove_file(path)?;
        Ok(())
    }

    pub(super) fn p50_ms(&self) -> f64 {
        median(&self.0)
    }

    /// Notes how many there were, and how long they took.
    pub(super) fn note(&self, measured: &mut Measured) {
        measured.setup("fdatasync_count", self.0.len());
        measured.metric("fdatasync_p50_ms", self.p50_ms());
        measured.metric("fdatasync_p99_ms", percentile(&self.0, 99));
    }
}
