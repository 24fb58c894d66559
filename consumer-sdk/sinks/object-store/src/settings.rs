//! Settings.

use object_store::path::Path;
use tenure_sdk::sink::{Fencing, SinkError};

/// Settings of an [`ObjectStoreSink`](crate::ObjectStoreSink).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStoreSettings {
    /// Name of the sink in the group's settings. Default `object-store`.
    pub name: String,
    /// Folder below which everything is kept. Default `tenure`.
    pub prefix: String,
    /// Files that the manifest lists itself; the older half is moved into an index object beyond. 2 to 10,000, default
    /// 256.
    pub files_max: usize,
    /// Switches the fence **off**: the manifest is overwritten and an old owner damages the data. Only for negative
    /// controls that show the damage. Default false.
    pub dangerously_without_fencing: bool,
}

impl Default for ObjectStoreSettings {
    fn default() -> Self {
        Self {
            name: "object-store".into(),
            prefix: "tenure".into(),
            files_max: 256,
            dangerously_without_fencing: false,
        }
    }
}

impl ObjectStoreSettings {
    pub(crate) const fn fencing(&self) -> Fencing {
        if self.dangerously_without_fencing { Fencing::Off } else { Fencing::On }
    }

    pub(crate) fn validate(&self) -> Result<(), SinkError> {
        if !(2..=10_000).contains(&self.files_max) {
            return Err(SinkError::Misconfigured(format!(
                "files_max is {}, give 2 to 10000",
                self.files_max
            )));
        }
        Path::parse(&self.prefix)
            .map(drop)
            .map_err(|error| SinkError::Misconfigured(format!("prefix {:?}: {error}", self.prefix)))
    }
}
