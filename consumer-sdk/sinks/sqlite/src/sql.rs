//! The statements, for drivers of one's own. `tenure_fence` stands for the table of the settings.

/// Creates the fence table; does nothing when it is there.
pub const MIGRATE: &str = "\
CREATE TABLE IF NOT EXISTS tenure_fence (
    resource    TEXT    NOT NULL PRIMARY KEY,
    epoch       INTEGER NOT NULL CHECK (epoch > 0),
    holder      TEXT    NOT NULL,
    next_offset INTEGER CHECK (next_offset >= 0),
    sequence    INTEGER NOT NULL DEFAULT 0,
    displaced   INTEGER
) WITHOUT ROWID";

/// Raises the fence: resource, epoch, holder. No row back: the fence is already as high, see [`READ`].
pub const REGISTER: &str = "\
INSERT INTO tenure_fence (resource, epoch, holder) VALUES (?1, ?2, ?3)
ON CONFLICT (resource) DO UPDATE
    SET displaced = tenure_fence.epoch, epoch = excluded.epoch, holder = excluded.holder
    WHERE tenure_fence.epoch < excluded.epoch
RETURNING displaced";

/// Reads the fence: resource.
pub const READ: &str = "\
SELECT epoch, holder, next_offset, sequence, displaced FROM tenure_fence WHERE resource = ?1";

/// Sets the first offset, once, under the epoch: resource, epoch, offset.
pub const INITIALISE: &str = "\
UPDATE tenure_fence SET next_offset = ?3
WHERE resource = ?1 AND epoch = ?2 AND next_offset IS NULL";

/// Moves the offset, in the data's transaction: resource, epoch, sequence as read, new offset. Anything but one row: roll
/// back.
pub const COMMIT: &str = "\
UPDATE tenure_fence SET next_offset = ?4, sequence = sequence + 1
WHERE resource = ?1 AND epoch = ?2 AND sequence = ?3";

pub(crate) const REGISTER_WITHOUT_FENCING: &str = "\
INSERT INTO tenure_fence (resource, epoch, holder) VALUES (?1, ?2, ?3)
ON CONFLICT (resource) DO NOTHING RETURNING displaced";

pub(crate) const INITIALISE_WITHOUT_FENCING: &str = "\
UPDATE tenure_fence SET next_offset = ?3
WHERE resource = ?1 AND ?2 = ?2 AND next_offset IS NULL";

pub(crate) const COMMIT_WITHOUT_FENCING: &str = "\
UPDATE tenure_fence SET next_offset = ?4, sequence = sequence + 1
WHERE resource = ?1 AND ?2 = ?2 AND ?3 = ?3";

/// The statements over one table.
#[derive(Debug)]
pub(crate) struct Statements {
    pub(crate) migrate: String,
    pub(crate) register: String,
    pub(crate) read: String,
    pub(crate) initialise: String,
    pub(crate) commit: String,
}

impl Statements {
    pub(crate) fn new(table: &str, fencing: tenure_sdk::sink::Fencing) -> Self {
        let over = |text: &str| text.replace("tenure_fence", table);
        let (register, initialise, commit) = match fencing {
            tenure_sdk::sink::Fencing::On => (REGISTER, INITIALISE, COMMIT),
            tenure_sdk::sink::Fencing::Off => {
                (REGISTER_WITHOUT_FENCING, INITIALISE_WITHOUT_FENCING, COMMIT_WITHOUT_FENCING)
            }
        };
        Self {
            migrate: over(MIGRATE),
            register: over(register),
            read: over(READ),
            initialise: over(initialise),
            commit: over(commit),
        }
    }
}
