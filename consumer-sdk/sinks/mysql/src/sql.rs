//! The statements, for drivers of one's own. `tenure_fence` stands for the table of the settings.
//!
//! A write, all in one transaction under READ COMMITTED with `autocommit = 0`: [`OPEN`], [`LOCK`], compare the row, and
//! send data only then; [`CHECK`], [`MOVE`], which must touch exactly one row; `COMMIT`. After any error: `ROLLBACK`,
//! because a lock wait that ran out ends its statement only, and a deadlock ends the transaction under the caller's feet.

/// Creates the fence table; does nothing when it is there. Binary text: no collation takes two resources for one.
pub const MIGRATE: &str = "\
CREATE TABLE IF NOT EXISTS tenure_fence (
    resource    VARBINARY(1024) NOT NULL PRIMARY KEY,
    epoch       BIGINT          NOT NULL CHECK (epoch > 0),
    holder      VARBINARY(255)  NOT NULL,
    next_offset BIGINT          NULL CHECK (next_offset >= 0),
    sequence    BIGINT          NOT NULL DEFAULT 0,
    displaced   BIGINT          NULL
) ENGINE = InnoDB";

/// Opens a transaction, whatever the session's defaults.
pub const OPEN: &str = "\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION READ WRITE; SAVEPOINT tenure_begin";

/// Fails (1305) when the transaction of [`OPEN`] is gone: rolled back by the server, or ended by a statement that commits
/// by itself, such as `CREATE TABLE`.
pub const CHECK: &str = "RELEASE SAVEPOINT tenure_begin";

/// Reads and locks the fence: resource. A plain read could be older than the lock.
pub const LOCK: &str = "\
SELECT epoch, holder, next_offset, sequence, displaced FROM tenure_fence WHERE resource = ? FOR UPDATE";

/// Reads the fence: resource.
pub const READ: &str = "\
SELECT epoch, holder, next_offset, sequence, displaced FROM tenure_fence WHERE resource = ?";

/// Makes a fence where [`LOCK`] found none: resource, epoch, holder. 1062: another was faster, look again.
pub const REGISTER: &str = "\
INSERT INTO tenure_fence (resource, epoch, holder) VALUES (?, ?, ?)";

/// Raises the fence that [`LOCK`] has found lower: epoch as found, epoch, holder, resource.
pub const RAISE: &str = "\
UPDATE tenure_fence SET displaced = ?, epoch = ?, holder = ? WHERE resource = ?";

/// Sets the first offset, once, under the epoch: offset, resource, epoch.
pub const INITIALISE: &str = "\
UPDATE tenure_fence SET next_offset = ? WHERE resource = ? AND epoch = ? AND next_offset IS NULL";

/// Moves the offset, in the data's transaction: new offset, resource, epoch, sequence as read. Anything but one row: roll
/// back. The sequence changes in any case, so that changed and found rows are the same count.
pub const MOVE: &str = "\
UPDATE tenure_fence SET next_offset = ?, sequence = sequence + 1
WHERE resource = ? AND epoch = ? AND sequence = ?";

const REGISTER_WITHOUT_FENCING: &str = "\
INSERT IGNORE INTO tenure_fence (resource, epoch, holder) VALUES (?, ?, ?)";

const INITIALISE_WITHOUT_FENCING: &str = "\
UPDATE tenure_fence SET next_offset = ? WHERE resource = ? AND ? IS NOT NULL AND next_offset IS NULL";

const MOVE_WITHOUT_FENCING: &str = "\
UPDATE tenure_fence SET next_offset = ?, sequence = sequence + 1
WHERE resource = ? AND ? IS NOT NULL AND ? IS NOT NULL";

/// The statements over one table.
#[derive(Debug)]
pub(crate) struct Statements {
    pub(crate) migrate: String,
    pub(crate) lock: String,
    pub(crate) read: String,
    pub(crate) register: String,
    pub(crate) raise: String,
    pub(crate) initialise: String,
    pub(crate) moving: String,
}

impl Statements {
    pub(crate) fn new(table: &str, fencing: tenure_sdk::sink::Fencing) -> Self {
        let over = |text: &str| text.replace("tenure_fence", table);
        let (lock, register, initialise, moving) = match fencing {
            tenure_sdk::sink::Fencing::On => (LOCK, REGISTER, INITIALISE, MOVE),
            tenure_sdk::sink::Fencing::Off => {
                (READ, REGISTER_WITHOUT_FENCING, INITIALISE_WITHOUT_FENCING, MOVE_WITHOUT_FENCING)
            }
        };
        Self {
            migrate: over(MIGRATE),
            lock: over(lock),
            read: over(READ),
            register: over(register),
            raise: over(RAISE),
            initialise: over(initialise),
            moving: over(moving),
        }
    }
}

/// A value that needs no escaping: several statements go out in one piece of text, which takes no parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Literal<'a> {
    Text(&'a str),
    Number(i64),
}

impl std::fmt::Display for Literal<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => {
                f.write_str("X'")?;
                text.bytes().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                f.write_str("'")
            }
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}

/// Puts the values where the statement has its question marks.
pub(crate) fn fill(statement: &str, values: &[Literal<'_>]) -> String {
    let mut parts = statement.split('?');
    let mut filled = parts.next().unwrap_or_default().to_owned();
    let mut values = values.iter();
    for part in parts {
        let value =
            values.next().expect("each statement is filled with as many values as it takes");
        filled.push_str(&value.to_string());
        filled.push_str(part);
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cannot_leave_their_place() {
        let filled = fill(REGISTER, &[Literal::Text("a'?"), Literal::Number(7), Literal::Text("")]);
        assert!(filled.ends_with("VALUES (X'61273f', 7, X'')"), "{filled}");
    }
}
