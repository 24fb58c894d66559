//! What readers of the data see: published files only.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::sink::{Fencing, SinkError};

use crate::error::classify;
use crate::manifest::{File, Layout, Manifest, decode_index};
use crate::swing::{Pivot, Swing};

/// A published file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedFile {
    /// Path in the store.
    pub path: String,
    /// Epoch that wrote it.
    pub epoch: Epoch,
    /// First offset of the write that it is of.
    pub first: NextOffset,
    /// Offset after the last one of the write that it is of.
    pub next: NextOffset,
    /// Length in bytes.
    pub bytes: u64,
}

/// What is published of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Highest epoch that was registered.
    pub epoch: Epoch,
    /// The offset; nothing before the first.
    pub next_offset: Option<NextOffset>,
    /// All files, in the order in which they were written.
    pub files: Vec<PublishedFile>,
}

/// Reads what is published. A list of the store's objects would also show what is not.
#[derive(Clone, Debug)]
pub struct Reader {
    store: Arc<dyn ObjectStore>,
    swing: Swing,
    prefix: String,
}

impl Reader {
    /// Reader of what sinks over `store` with the same `swing` and `prefix` publish.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, swing: Swing, prefix: &str) -> Self {
        Self { store, swing, prefix: prefix.to_owned() }
    }

    /// What is published of `resource` (`group/topic id/partition`); nothing when it was never registered.
    ///
    /// # Errors
    ///
    /// [`SinkError::Transient`], or [`SinkError::Misconfigured`] for objects that do not read.
    pub async fn published(&self, resource: &str) -> Result<Option<Published>, SinkError> {
        let pivot = Pivot {
            store: Arc::clone(&self.store),
            layout: Layout::new(&self.prefix, resource),
            swing: self.swing,
            fencing: Fencing::On,
        };
        let Some((manifest, _)) = pivot.load().await? else { return Ok(None) };
        let row = manifest.row()?;
        let listing = listing(self.store.as_ref(), manifest).await?;
        let files = listing.files.into_iter().map(published).collect::<Result<_, _>>()?;
        Ok(Some(Published { epoch: row.epoch, next_offset: row.next_offset, files }))
    }
}

/// Everything that a manifest leads to.
pub(crate) struct Listing {
    /// In the order in which they were written.
    pub(crate) files: Vec<File>,
    pub(crate) index_paths: Vec<String>,
}

pub(crate) async fn listing(
    store: &dyn ObjectStore,
    manifest: Manifest,
) -> Result<Listing, SinkError> {
    let (mut parts, mut index_paths) = (vec![manifest.files], Vec::new());
    let mut next = manifest.index;
    while let Some(reference) = next {
        let path = Path::parse(&reference.path).map_err(|error| {
            SinkError::Misconfigured(format!("index {}: {error}", reference.path))
        })?;
        let found = store.get(&path).await.map_err(classify)?;
        let index = decode_index(&found.bytes().await.map_err(classify)?)?;
        index_paths.push(reference.path);
        parts.push(index.files);
        next = index.previous;
    }
    let files = parts.into_iter().rev().flatten().collect();
    Ok(Listing { files, index_paths })
}

fn published(file: File) -> Result<PublishedFile, SinkError> {
    let damaged = |error: &dyn std::fmt::Display| {
        SinkError::Misconfigured(format!("file {} in the manifest: {error}", file.path))
    };
    Ok(PublishedFile {
        epoch: Epoch::new(file.epoch).map_err(|error| damaged(&error))?,
        first: NextOffset::new(file.first).map_err(|error| damaged(&error))?,
        next: NextOffset::new(file.next).map_err(|error| damaged(&error))?,
        bytes: file.bytes,
        path: file.path,
    })
}
