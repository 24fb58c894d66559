//! Clean-up of what fenced owners left behind.

use std::collections::HashSet;

use futures::TryStreamExt;
use object_store::{Error, ObjectStoreExt};
use tenure_sdk::sink::SinkError;

use crate::error::classify;
use crate::manifest::Layout;
use crate::reader::listing;
use crate::swing::NotSwung;
use crate::writer::ObjectStoreWriter;

impl ObjectStoreWriter {
    /// Deletes the unpublished files of lower epochs and answers how many there were.
    ///
    /// They can never be published any more: their owners are fenced. Files of the own epoch stay, also those of writes
    /// that were given up; the next owner cleans them. Up to where it is clean is written down in the manifest, so that
    /// the next call looks at little. A file that a fenced owner stores after that stays; nobody sees it.
    ///
    /// # Errors
    ///
    /// [`SinkError::Fenced`], [`SinkError::LeaseEnded`], [`SinkError::Unknown`] while a write is not resolved,
    /// [`SinkError::Transient`]; any other. It may be repeated.
    pub async fn clean(&mut self) -> Result<usize, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let epoch = self.standing.epoch();
        let found = self.pivot.load().await?;
        let (row, found) = match found {
            Some(found) => (Some(found.0.row()?), Some(found)),
            None => (None, None),
        };
        self.standing.clone().admit(row)?;
        let Some((mut manifest, version)) = found else { return Ok(0) };
        let store = self.pivot.store.as_ref();
        let known = listing(store, manifest.clone()).await?;
        let published: HashSet<&str> = known
            .files
            .iter()
            .map(|file| file.path.as_str())
            .chain(known.index_paths.iter().map(String::as_str))
            .collect();
        let mut deleted = 0;
        for folder in self.pivot.layout.by_epoch() {
            let start = Layout::start_of(&folder, manifest.cleaned_below);
            let objects: Vec<_> = store
                .list_with_offset(Some(&folder), &start)
                .try_collect()
                .await
                .map_err(classify)?;
            for object in objects {
                let path = object.location;
                let is_lower = Layout::epoch_of(&path).is_some_and(|lower| lower < epoch.get());
                if is_lower && !published.contains(path.as_ref()) {
                    match store.delete(&path).await {
                        Ok(()) | Err(Error::NotFound { .. }) => deleted += 1,
                        Err(error) => return Err(classify(error)),
                    }
                }
            }
        }
        // One epoch back: the last owner may have had a file on its way.
        manifest.cleaned_below = manifest.displaced.unwrap_or(epoch.get());
        self.current = match self.pivot.swap(&version, &mut manifest).await {
            Ok(version) => Some((manifest, version)),
            Err(NotSwung::Overtaken) => None,
            Err(NotSwung::InDoubt(error) | NotSwung::Refused(error)) => {
                self.current = None;
                return Err(error);
            }
        };
        Ok(deleted)
    }
}
