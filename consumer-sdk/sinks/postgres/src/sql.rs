//! The statements, for drivers of one's own. `tenure_fence` stands for the table of the settings.
//!
//! A write, all in one transaction under READ COMMITTED: [`BEGIN`], [`BOUND`], [`LOCK`], compare the row, and send data
//! only then; [`MOVE`], which must touch exactly one row; `COMMIT`.

/// Creates the fence table; does nothing when it is there.
pub const MIGRATE: &str = "\
CREATE TABLE IF NOT EXISTS tenure_fence (
    resource    text   NOT NULL PRIMARY KEY,
    epoch       bigint NOT NULL CHECK (epoch > 0),
    holder      text   NOT NULL,
    next_offset bigint CHECK (next_offset >= 0),
    sequence    bigint NOT NULL DEFAULT 0,
    displaced   bigint
) WITH (fillfactor = 50)";

/// Opens a transaction; names the isolation, because a database may have another default.
pub const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// Bounds the transaction and names the grant to the guard: resource, epoch as text, longest statement and longest pause
/// in milliseconds as text.
pub const BOUND: &str = "\
SELECT set_config('tenure.resource', $1, true), set_config('tenure.epoch', $2, true),
       set_config('statement_timeout', $3, true),
       set_config('idle_in_transaction_session_timeout', $4, true)";

/// Makes a registration durable where the database's default would answer before it is.
pub const DURABLE: &str = "\
SELECT set_config('synchronous_commit', 'on', true)
WHERE current_setting('synchronous_commit') = 'off'";

/// Raises the fence: resource, epoch, holder. No row back: the fence is already as high, see [`READ`].
pub const REGISTER: &str = "\
INSERT INTO tenure_fence AS fence (resource, epoch, holder) VALUES ($1, $2, $3)
ON CONFLICT (resource) DO UPDATE
    SET displaced = fence.epoch, epoch = excluded.epoch, holder = excluded.holder
    WHERE fence.epoch < excluded.epoch
RETURNING displaced";

/// Reads the fence: resource. Never in one statement with [`REGISTER`]: its snapshot would be older than the wait.
pub const READ: &str = "\
SELECT epoch, holder, next_offset, sequence, displaced FROM tenure_fence WHERE resource = $1";

/// Reads and locks the fence: resource. `FOR KEY SHARE` would not exclude a registration, `FOR SHARE` would starve it.
pub const LOCK: &str = "\
SELECT epoch, holder, next_offset, sequence, displaced FROM tenure_fence WHERE resource = $1
FOR NO KEY UPDATE";

/// Sets the first offset, once, under the epoch: resource, epoch, offset.
pub const INITIALISE: &str = "\
UPDATE tenure_fence SET next_offset = $3
WHERE resource = $1 AND epoch = $2 AND next_offset IS NULL";

/// Moves the offset, in the data's transaction: resource, epoch, sequence as read, new offset. Anything but one row:
/// roll back. The setting is gone when the transaction was ended from inside.
pub const MOVE: &str = "\
UPDATE tenure_fence SET next_offset = $4, sequence = sequence + 1
WHERE resource = $1 AND epoch = $2 AND sequence = $3
  AND current_setting('tenure.epoch', true) = $2::bigint::text";

/// Function of the optional guard, which refuses writers outside the SDK: SQLSTATE `TN001` without a grant, `TN002` with
/// one that is not current.
pub const GUARD_FUNCTION: &str = "\
CREATE OR REPLACE FUNCTION tenure_guard() RETURNS trigger LANGUAGE plpgsql AS $guard$
DECLARE
    given text := nullif(current_setting('tenure.epoch', true), '');
    named text := nullif(current_setting('tenure.resource', true), '');
    found bigint;
BEGIN
    IF given IS NULL OR named IS NULL THEN
        RAISE EXCEPTION 'write to % without an epoch', TG_TABLE_NAME USING ERRCODE = 'TN001';
    END IF;
    SELECT epoch INTO found FROM tenure_fence WHERE resource = named FOR NO KEY UPDATE;
    IF found IS DISTINCT FROM given::bigint THEN
        RAISE EXCEPTION 'fenced: given epoch %, current is %', given, found USING ERRCODE = 'TN002';
    END IF;
    RETURN NULL;
END
$guard$";

/// Trigger of the optional guard on one table; `tenure_data` stands for its name.
pub const GUARD_TRIGGER: &str = "\
CREATE OR REPLACE TRIGGER tenure_guard
BEFORE INSERT OR UPDATE OR DELETE ON tenure_data
FOR EACH STATEMENT EXECUTE FUNCTION tenure_guard()";

pub(crate) const REGISTER_WITHOUT_FENCING: &str = "\
INSERT INTO tenure_fence (resource, epoch, holder) VALUES ($1, $2, $3)
ON CONFLICT (resource) DO NOTHING RETURNING displaced";

pub(crate) const INITIALISE_WITHOUT_FENCING: &str = "\
UPDATE tenure_fence SET next_offset = $3
WHERE resource = $1 AND $2::bigint IS NOT NULL AND next_offset IS NULL";

pub(crate) const MOVE_WITHOUT_FENCING: &str = "\
UPDATE tenure_fence SET next_offset = $4, sequence = sequence + 1
WHERE resource = $1 AND $2::bigint IS NOT NULL AND $3::bigint IS NOT NULL";

/// The statements over one table, with or without the fence.
#[derive(Clone, Debug)]
pub struct Statements {
    /// [`MIGRATE`].
    pub migrate: String,
    /// [`REGISTER`].
    pub register: String,
    /// [`READ`].
    pub read: String,
    /// [`LOCK`].
    pub lock: String,
    /// [`INITIALISE`].
    pub initialise: String,
    /// [`MOVE`].
    pub moving: String,
}

impl Statements {
    /// Puts `table`, which [`PostgresSettings::validate`](crate::PostgresSettings::validate) has let through, into each.
    #[must_use]
    pub fn new(table: &str, fencing: tenure_sdk::sink::Fencing) -> Self {
        let over = |text: &str| text.replace("tenure_fence", table);
        let (register, lock, initialise, moving) = match fencing {
            tenure_sdk::sink::Fencing::On => (REGISTER, LOCK, INITIALISE, MOVE),
            tenure_sdk::sink::Fencing::Off => {
                (REGISTER_WITHOUT_FENCING, READ, INITIALISE_WITHOUT_FENCING, MOVE_WITHOUT_FENCING)
            }
        };
        Self {
            migrate: over(MIGRATE),
            register: over(register),
            read: over(READ),
            lock: over(lock),
            initialise: over(initialise),
            moving: over(moving),
        }
    }
}

/// The guard over one data table and one fence table: two statements.
#[must_use]
pub fn guard(fence_table: &str, data_table: &str) -> String {
    format!(
        "{};\n{};",
        GUARD_FUNCTION.replace("tenure_fence", fence_table),
        GUARD_TRIGGER.replace("tenure_data", data_table)
    )
}
