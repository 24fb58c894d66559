//! The fence row, kept in the metadata of the committed offset.
//!
//! `tenure1;EPOCH;SEQUENCE;NEXT;HOLDER`, where `NEXT` is `-` before the first offset. The brokers move metadata and
//! offset in one step, and only a transaction of the newest initialised producer moves them at all.

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::sink::{FenceRow, SinkError};

const FORMAT: &str = "tenure1";

/// Metadata that says `row`.
pub(crate) fn write(row: &FenceRow) -> String {
    let next = row.next_offset.map_or_else(|| "-".to_owned(), |next| next.to_string());
    format!("{FORMAT};{};{};{next};{}", row.epoch.get(), row.sequence, row.holder)
}

/// Offset to commit with `row`; the metadata tells whether it counts.
pub(crate) fn offset(row: &FenceRow) -> i64 {
    row.next_offset.unwrap_or(NextOffset::ZERO).signed()
}

/// Reads what was committed.
///
/// # Errors
///
/// [`SinkError::Misconfigured`] when something else has committed there.
pub(crate) fn read(committed: i64, metadata: &str) -> Result<FenceRow, SinkError> {
    let row = parse(metadata)
        .ok_or_else(|| foreign(format!("metadata {metadata:?} at offset {committed}")))?;
    if offset(&row) == committed {
        Ok(row)
    } else {
        Err(foreign(format!("offset {committed} under the metadata {metadata:?}")))
    }
}

fn parse(metadata: &str) -> Option<FenceRow> {
    let mut fields = metadata.splitn(5, ';');
    if fields.next()? != FORMAT {
        return None;
    }
    let epoch = Epoch::new(fields.next()?.parse().ok()?).ok()?;
    let sequence = fields.next()?.parse().ok()?;
    let next_offset = match fields.next()? {
        "-" => None,
        text => Some(NextOffset::new(text.parse().ok()?).ok()?),
    };
    Some(FenceRow { epoch, holder: fields.next()?.to_owned(), next_offset, sequence })
}

fn foreign(what: String) -> SinkError {
    SinkError::Misconfigured(format!(
        "{what} is not of this sink: another program has committed in its private group"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(next_offset: Option<u64>) -> FenceRow {
        let next_offset = next_offset.map(|value| NextOffset::new(value).unwrap());
        FenceRow { epoch: Epoch::new(7).unwrap(), holder: "a;b".into(), next_offset, sequence: 3 }
    }

    #[test]
    fn row_survives_the_metadata() {
        assert_eq!(write(&row(Some(12))), "tenure1;7;3;12;a;b");
        assert_eq!(read(12, "tenure1;7;3;12;a;b").unwrap(), row(Some(12)));
        assert_eq!(read(0, &write(&row(None))).unwrap(), row(None));
    }

    #[test]
    fn offset_that_another_program_moved_is_no_resume_point() {
        for (committed, metadata) in [(9, "tenure1;7;3;12;ann"), (12, ""), (12, "tenure1;0;3;12;a")]
        {
            let answer = read(committed, metadata);
            assert!(matches!(answer, Err(SinkError::Misconfigured(_))), "{answer:?}");
        }
    }
}
