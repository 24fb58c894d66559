//! What workers have left in a database, and what is wrong with it.

use tokio_postgres::{Client, NoTls};

use crate::cluster::block_on;

/// Table of effects: one row per copied record, in the order in which they took place. Nothing in it is unique, so that
/// damage shows instead of being refused.
pub const EFFECTS: &str = "\
CREATE TABLE effects (
    id        bigserial PRIMARY KEY,
    part      int    NOT NULL,
    at_offset bigint NOT NULL,
    epoch     bigint NOT NULL,
    worker    text   NOT NULL,
    payload   text   NOT NULL
)";

/// A service beside the database's transactions: it takes a charge once for each idempotency key, and counts how often
/// it was asked.
pub const CHARGES: &str = "\
CREATE TABLE charges (key text PRIMARY KEY);
CREATE TABLE attempts (key text NOT NULL)";

/// Notes each change of an offset and of an epoch in the transaction that makes it.
pub const HISTORY: &str = "\
CREATE TABLE moves (id bigserial PRIMARY KEY, what text, resource text, before bigint, after bigint);
CREATE FUNCTION note_offset() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO moves (what, resource, before, after)
    VALUES ('offset', NEW.resource, OLD.next_offset, NEW.next_offset);
    RETURN NULL;
END $$;
CREATE FUNCTION note_epoch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO moves (what, resource, before, after)
    VALUES ('epoch', NEW.resource, OLD.epoch, NEW.epoch);
    RETURN NULL;
END $$;
CREATE TRIGGER note_offset AFTER UPDATE ON tenure_fence FOR EACH ROW
    WHEN (OLD.next_offset IS DISTINCT FROM NEW.next_offset) EXECUTE FUNCTION note_offset();
CREATE TRIGGER note_offset AFTER UPDATE ON plain_offsets FOR EACH ROW
    WHEN (OLD.next_offset IS DISTINCT FROM NEW.next_offset) EXECUTE FUNCTION note_offset();
CREATE TRIGGER note_epoch AFTER UPDATE ON tenure_fence FOR EACH ROW
    WHEN (OLD.epoch IS DISTINCT FROM NEW.epoch) EXECUTE FUNCTION note_epoch();";

/// A database that is looked into.
pub struct Database {
    client: Client,
}

impl Database {
    /// Connects to the database at `url`.
    ///
    /// # Panics
    ///
    /// When it does not answer.
    #[must_use]
    pub fn connect(url: &str) -> Self {
        let client = block_on(async {
            let connected = tokio_postgres::connect(url, NoTls).await;
            let (client, connection) = connected.expect("the database takes a connection");
            drop(tokio::spawn(connection));
            client
        });
        Self { client }
    }

    /// A single number; nothing: NULL, or no row.
    ///
    /// # Panics
    ///
    /// When the database refuses the query.
    pub fn number(&self, query: &str) -> Option<i64> {
        self.rows(query).first()?.get(0)
    }

    /// Rows of a query without parameters.
    ///
    /// # Panics
    ///
    /// When the database refuses the query.
    pub fn rows(&self, query: &str) -> Vec<tokio_postgres::Row> {
        let rows = block_on(self.client.query(query, &[]));
        rows.unwrap_or_else(|error| panic!("{query}: {error:?}"))
    }

    fn count(&self, query: &str) -> i64 {
        self.number(query).unwrap_or(0)
    }
}

/// What the database and the offsets' home say in the end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Audit {
    /// Records that the feed has produced.
    pub produced: i64,
    /// Of them, without a row.
    pub lost: i64,
    /// Rows beyond the first of a record.
    pub duplicated: i64,
    /// Rows at or before the offset of the row before them, of the same partition.
    pub out_of_order: i64,
    /// Rows with another payload than their record.
    pub altered: i64,
    /// Changes of an offset in the database.
    pub offsets_moved: i64,
    /// Of them, backwards.
    pub offsets_moved_back: i64,
    /// Changes of an epoch in the database, backwards.
    pub epochs_moved_back: i64,
}

impl Audit {
    /// Reads a database in which nobody writes any more. Each of `partitions` partitions has `records` records.
    ///
    /// # Panics
    ///
    /// When the database refuses a query.
    #[must_use]
    pub fn of(database: &Database, partitions: u32, records: u64) -> Self {
        let produced =
            i64::from(partitions) * i64::try_from(records).expect("a feed counts far below 2^63");
        let lost = format!(
            "SELECT count(*) FROM (SELECT p, o FROM generate_series(0, {partitions} - 1) AS p, \
             generate_series(0::bigint, {records} - 1) AS o \
             EXCEPT SELECT part, at_offset FROM effects) AS missing"
        );
        let moved = |what: &str, more: &str| {
            database.count(&format!("SELECT count(*) FROM moves WHERE what = '{what}' {more}"))
        };
        Self {
            produced,
            lost: database.count(&lost),
            duplicated: database
                .count("SELECT count(*) - count(DISTINCT (part, at_offset)) FROM effects"),
            out_of_order: database.count(
                "SELECT count(*) FROM (SELECT at_offset, lag(at_offset) \
                 OVER (PARTITION BY part ORDER BY id) AS before FROM effects) AS steps \
                 WHERE at_offset <= before",
            ),
            altered: database
                .count("SELECT count(*) FROM effects WHERE payload <> part || '/' || at_offset"),
            offsets_moved: moved("offset", ""),
            offsets_moved_back: moved("offset", "AND after < before"),
            epochs_moved_back: moved("epoch", "AND after < before"),
        }
    }

    /// Whether data or offsets suffered.
    #[must_use]
    pub const fn is_damaged(&self) -> bool {
        self.lost + self.duplicated + self.out_of_order + self.altered + self.offsets_moved_back > 0
    }

    /// What is wrong, each with its count; empty: nothing.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let counts = [
            (self.lost, "records lost"),
            (self.duplicated, "records duplicated"),
            (self.out_of_order, "records out of order"),
            (self.altered, "records altered"),
            (self.offsets_moved_back, "offsets moved back"),
            (self.epochs_moved_back, "epochs moved back"),
        ];
        let found = counts.iter().filter(|(count, _)| *count > 0);
        found.map(|(count, what)| format!("{count} {what}")).collect()
    }
}
