//! The audit: what is in the SQLite file against what was produced.

use std::collections::BTreeMap;
use std::path::Path;

use rusqlite::{Connection, OpenFlags};

/// What the file holds, compared with what was produced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Audit {
    pub(crate) produced: u64,
    pub(crate) copied: u64,
    pub(crate) lost: u64,
    pub(crate) duplicated: u64,
    /// Rows that came after a row of a higher offset of the same partition and are no duplicates.
    pub(crate) out_of_order: u64,
}

/// Compares the rows of the file with the number of records produced to each partition.
pub(crate) fn audit(file: &Path, produced: &BTreeMap<u64, u64>) -> rusqlite::Result<Audit> {
    let connection = Connection::open_with_flags(file, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let mut rows =
        connection.prepare("SELECT partition_index, record_offset FROM copies ORDER BY id")?;
    let rows = rows.query_map([], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)))?;
    let rows: Vec<(i64, i64)> = rows.collect::<rusqlite::Result<_>>()?;
    let rows: Vec<(u64, u64)> = rows
        .into_iter()
        .map(|(partition, offset)| (partition.unsigned_abs(), offset.unsigned_abs()))
        .collect();
    Ok(compare(&rows, produced))
}

fn compare(rows: &[(u64, u64)], produced: &BTreeMap<u64, u64>) -> Audit {
    let mut audit = Audit { produced: produced.values().sum(), ..Audit::default() };
    let mut seen: BTreeMap<u64, Vec<bool>> = BTreeMap::new();
    let mut highest: BTreeMap<u64, u64> = BTreeMap::new();
    for (partition, offset) in rows.iter().copied() {
        audit.copied += 1;
        let seen = seen.entry(partition).or_default();
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        if seen.len() <= at {
            seen.resize(at + 1, false);
        }
        if std::mem::replace(&mut seen[at], true) {
            audit.duplicated += 1;
        } else if highest.get(&partition).is_some_and(|highest| offset < *highest) {
            audit.out_of_order += 1;
        }
        let highest = highest.entry(partition).or_insert(offset);
        *highest = offset.max(*highest);
    }
    for (partition, count) in produced {
        let copied = seen.get(partition).map_or(0, |seen| {
            let within = seen.iter().take(usize::try_from(*count).unwrap_or(usize::MAX));
            within.filter(|copied| **copied).count() as u64
        });
        audit.lost += count - copied;
    }
    audit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_duplicated_and_disordered_rows_are_told_apart() {
        let produced = BTreeMap::from([(0, 4), (1, 2)]);
        let whole = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)];
        let clean = Audit { produced: 6, copied: 6, ..Audit::default() };
        assert_eq!(compare(&whole, &produced), clean);
        let damaged = [(0, 0), (0, 2), (0, 1), (0, 2), (1, 1)];
        let want = Audit { produced: 6, copied: 5, lost: 2, duplicated: 1, out_of_order: 1 };
        assert_eq!(compare(&damaged, &produced), want);
    }
}
