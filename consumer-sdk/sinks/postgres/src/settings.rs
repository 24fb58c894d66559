//! Settings.

use std::time::Duration;

use tenure_sdk::lease::Lease;
use tenure_sdk::sink::{Fencing, SinkError};

/// No bound that the server is told is shorter: it counts in milliseconds and 0 would mean none at all.
pub const TIMEOUT_MIN: Duration = Duration::from_millis(100);

/// Settings of a PostgreSQL sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresSettings {
    /// Name of the sink in the group's settings. Default `postgres`.
    pub name: String,
    /// Fence table, `table` or `schema.table`: lower-case letters, digits and `_`. Default `tenure_fence`.
    pub table: String,
    /// Connections of the sink, at least 1. A write in progress holds one. Default 16.
    pub connections_max: usize,
    /// How long to wait for a connection, in the pool and from the server. Default 5 s.
    pub connect_timeout: Duration,
    /// Longest single statement; the rest of the lease, if that is shorter. At least [`TIMEOUT_MIN`]. Default 10 s.
    pub statement_timeout: Duration,
    /// Longest pause between two statements of one transaction, after which the server ends it; the rest of the lease,
    /// if that is shorter. Bounds how long a paused owner delays the next one. At least [`TIMEOUT_MIN`]. Default 3 s.
    pub idle_in_transaction_timeout: Duration,
    /// Switches the fence **off**: an old owner's write goes through and damages the data. Only for negative controls
    /// that show the damage. Default false.
    pub dangerously_without_fencing: bool,
}

impl Default for PostgresSettings {
    fn default() -> Self {
        Self {
            name: "postgres".into(),
            table: "tenure_fence".into(),
            connections_max: 16,
            connect_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(10),
            idle_in_transaction_timeout: Duration::from_secs(3),
            dangerously_without_fencing: false,
        }
    }
}

/// What the server is told for one transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Longest statement.
    pub statement: Duration,
    /// Longest pause between two statements.
    pub idle: Duration,
}

impl PostgresSettings {
    /// Whether the fence is on.
    #[must_use]
    pub const fn fencing(&self) -> Fencing {
        if self.dangerously_without_fencing { Fencing::Off } else { Fencing::On }
    }

    /// Bounds that no lease shortens.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        Bounds {
            statement: self.statement_timeout.max(TIMEOUT_MIN),
            idle: self.idle_in_transaction_timeout.max(TIMEOUT_MIN),
        }
    }

    /// Bounds of a write under `lease`, which its check has let through: with nothing left, the check is off.
    #[must_use]
    pub fn bounds_under(&self, lease: &Lease) -> Bounds {
        let full = self.bounds();
        let left = lease.remaining();
        if left.is_zero() {
            return full;
        }
        let within = |bound: Duration| bound.min(left).max(TIMEOUT_MIN);
        Bounds { statement: within(full.statement), idle: within(full.idle) }
    }

    /// Refuses settings that no sink can work with.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a table's name of another form, or without a connection.
    pub fn validate(&self) -> Result<(), SinkError> {
        let is_word = |word: &str| {
            !word.is_empty()
                && !word.starts_with(|c: char| c.is_ascii_digit())
                && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        let words: Vec<&str> = self.table.split('.').collect();
        if words.len() > 2 || !words.into_iter().all(is_word) {
            return Err(SinkError::Misconfigured(format!(
                "table {:?} is not `table` or `schema.table` of lower-case letters, digits and '_'",
                self.table
            )));
        }
        if self.connections_max == 0 {
            return Err(SinkError::Misconfigured("connections_max is 0, give at least 1".into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenure_model::{ManualClock, Tick};
    use tenure_sdk::lease::LeaseCheck;

    use super::*;

    #[test]
    fn bounds_end_with_the_lease_and_never_reach_zero() {
        let settings = PostgresSettings::default();
        let lease = |left: Duration| {
            let ends_at = Tick(0).after(left);
            Lease::new(Arc::new(ManualClock::default()), ends_at, LeaseCheck::On)
        };
        let idle = |left| settings.bounds_under(&lease(left)).idle;
        assert_eq!(idle(Duration::from_secs(60)), Duration::from_secs(3));
        assert_eq!(idle(Duration::from_secs(2)), Duration::from_secs(2));
        assert_eq!(idle(Duration::from_millis(1)), TIMEOUT_MIN);
    }

    #[test]
    fn odd_table_names_are_refused() {
        for table in ["", "a.b.c", "a;b", "A", "1a", "a."] {
            let settings = PostgresSettings { table: table.into(), ..Default::default() };
            assert!(settings.validate().is_err(), "{table}");
        }
        let settings = PostgresSettings { table: "audit.fence".into(), ..Default::default() };
        assert!(settings.validate().is_ok());
    }
}
