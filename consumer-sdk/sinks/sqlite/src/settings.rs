//! Settings.

use std::time::Duration;

use tenure_sdk::sink::{Fencing, SinkError};

/// How far a commit must have got before it is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Synchronous {
    /// On the disk: survives a power cut.
    #[default]
    Full,
    /// With the operating system: survives the process; a power cut may take the last commits, data and offset alike.
    Normal,
}

/// Settings of a [`SqliteSink`](crate::SqliteSink).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqliteSettings {
    /// Name of the sink in the group's settings. Default `sqlite`.
    pub name: String,
    /// Fence table: letters, digits and `_`. Default `tenure_fence`.
    pub table: String,
    /// How long to wait for the file's lock before the call is [`SinkError::Transient`]. Default 5 s.
    pub busy_timeout: Duration,
    /// Default [`Synchronous::Full`].
    pub synchronous: Synchronous,
    /// Switches the fence **off**: an old owner's write goes through and damages the data. Only for negative controls
    /// that show the damage. Default false.
    pub dangerously_without_fencing: bool,
}

impl Default for SqliteSettings {
    fn default() -> Self {
        Self {
            name: "sqlite".into(),
            table: "tenure_fence".into(),
            busy_timeout: Duration::from_secs(5),
            synchronous: Synchronous::default(),
            dangerously_without_fencing: false,
        }
    }
}

impl SqliteSettings {
    pub(crate) const fn fencing(&self) -> Fencing {
        if self.dangerously_without_fencing { Fencing::Off } else { Fencing::On }
    }

    pub(crate) fn validate(&self) -> Result<(), SinkError> {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if self.table.is_empty()
            || !self.table.chars().all(is_word)
            || self.table.starts_with(|c: char| c.is_ascii_digit())
        {
            return Err(SinkError::Misconfigured(format!(
                "table {:?} is not a name of letters, digits and '_'",
                self.table
            )));
        }
        Ok(())
    }
}
