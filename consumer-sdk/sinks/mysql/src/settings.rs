//! Settings.

use std::time::Duration;

use tenure_sdk::lease::Lease;
use tenure_sdk::sink::{Fencing, SinkError};

/// No bound that the server is told is shorter: it counts these in whole seconds and 0 would mean none at all.
pub const TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// Which server it is: the two differ in how a pause inside a transaction can be bounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flavour {
    /// Asks the server. A proxy in between may answer for another one: then name it.
    #[default]
    Detect,
    /// MariaDB 10.3 or newer: `idle_transaction_timeout` and `max_statement_time`.
    MariaDb,
    /// MySQL, which has only `wait_timeout`: it is set for the transaction and given back after it. A statement that is
    /// no lock wait is bounded by this process alone.
    MySql,
}

/// Settings of a [`MysqlSink`](crate::MysqlSink).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MysqlSettings {
    /// Name of the sink in the group's settings. Default `mysql`.
    pub name: String,
    /// Fence table in the connection's database: lower-case letters, digits and `_`. Default `tenure_fence`.
    pub table: String,
    /// Connections of the sink, at least 1. A write in progress holds one. Default 16.
    pub connections_max: u32,
    /// How long to wait for a connection, in the pool and from the server. Default 5 s.
    pub connect_timeout: Duration,
    /// Longest single statement and longest wait for a lock; the rest of the lease, if that is shorter. In whole seconds,
    /// at least [`TIMEOUT_MIN`]. Default 10 s.
    pub statement_timeout: Duration,
    /// Longest pause between two statements of one transaction, after which the server ends it; the rest of the lease,
    /// if that is shorter. Bounds how long a paused owner delays the next one. In whole seconds, at least
    /// [`TIMEOUT_MIN`]. Default 3 s.
    pub idle_in_transaction_timeout: Duration,
    /// Default [`Flavour::Detect`].
    pub flavour: Flavour,
    /// Switches the fence **off**: an old owner's write goes through and damages the data. Only for negative controls
    /// that show the damage. Default false.
    pub dangerously_without_fencing: bool,
}

impl Default for MysqlSettings {
    fn default() -> Self {
        Self {
            name: "mysql".into(),
            table: "tenure_fence".into(),
            connections_max: 16,
            connect_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(10),
            idle_in_transaction_timeout: Duration::from_secs(3),
            flavour: Flavour::default(),
            dangerously_without_fencing: false,
        }
    }
}

/// What the server is told for one transaction, in whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) statement: Duration,
    pub(crate) idle: Duration,
}

impl MysqlSettings {
    pub(crate) const fn fencing(&self) -> Fencing {
        if self.dangerously_without_fencing { Fencing::Off } else { Fencing::On }
    }

    /// Bounds that no lease shortens.
    pub(crate) fn bounds(&self) -> Bounds {
        Bounds {
            statement: whole(self.statement_timeout),
            idle: whole(self.idle_in_transaction_timeout),
        }
    }

    /// Bounds of a write under `lease`, which its check has let through: with nothing left, the check is off.
    pub(crate) fn bounds_under(&self, lease: &Lease) -> Bounds {
        let full = self.bounds();
        let left = lease.remaining();
        if left.is_zero() {
            return full;
        }
        let left = whole(left);
        Bounds { statement: full.statement.min(left), idle: full.idle.min(left) }
    }

    pub(crate) fn validate(&self) -> Result<(), SinkError> {
        let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if self.table.is_empty()
            || !self.table.chars().all(is_word)
            || self.table.starts_with(|c: char| c.is_ascii_digit())
        {
            return Err(SinkError::Misconfigured(format!(
                "table {:?} is not a name of lower-case letters, digits and '_'",
                self.table
            )));
        }
        if self.connections_max == 0 {
            return Err(SinkError::Misconfigured("connections_max is 0, give at least 1".into()));
        }
        Ok(())
    }
}

/// Rounded down, but never to none.
fn whole(bound: Duration) -> Duration {
    Duration::from_secs(bound.as_secs()).max(TIMEOUT_MIN)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenure_model::{ManualClock, Tick};
    use tenure_sdk::lease::LeaseCheck;

    use super::*;

    #[test]
    fn bounds_end_with_the_lease_and_never_reach_zero() {
        let settings = MysqlSettings::default();
        let lease = |left: Duration| {
            let ends_at = Tick(0).after(left);
            Lease::new(Arc::new(ManualClock::default()), ends_at, LeaseCheck::On)
        };
        let idle = |left| settings.bounds_under(&lease(left)).idle;
        assert_eq!(idle(Duration::from_secs(60)), Duration::from_secs(3));
        assert_eq!(idle(Duration::from_millis(2_900)), Duration::from_secs(2));
        assert_eq!(idle(Duration::from_millis(1)), TIMEOUT_MIN);
    }

    #[test]
    fn odd_table_names_are_refused() {
        for table in ["", "a.b", "a;b", "A", "1a", "a`"] {
            let settings = MysqlSettings { table: table.into(), ..Default::default() };
            assert!(settings.validate().is_err(), "{table}");
        }
    }
}
