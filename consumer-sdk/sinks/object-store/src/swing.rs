//! Replacing the manifest only if it is still the one that was read.

use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{
    Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion,
};
use tenure_sdk::sink::{Fencing, SinkError};

use crate::error::{classify, is_final, transient};
use crate::manifest::{Layout, Manifest, decode_manifest, encode};

/// Numbered manifests that are kept behind the newest.
const KEPT: u64 = 32;
/// Tries to read a newest numbered manifest that is being overtaken.
const LOAD_TRIES: usize = 10;

/// How the manifest is swung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swing {
    /// One object, replaced by a conditional put (`If-Match`). For stores that have it: S3 and many that speak its
    /// protocol, in memory.
    Update,
    /// Numbered objects, each created once; the newest counts. For stores that create atomically and list consistently
    /// but have no conditional put: a local folder.
    Numbered,
}

/// Which manifest was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    Absent,
    Tag(UpdateVersion),
    Number(u64),
}

/// A manifest and which one it is.
pub(crate) type Current = (Manifest, Version);

/// Why a swing is not known to have happened.
#[derive(Debug)]
pub(crate) enum NotSwung {
    /// Another one was first. Or it was our own, which the client's own repetition met: read and see.
    Overtaken,
    /// The answer is lost.
    InDoubt(SinkError),
    /// It certainly did not happen.
    Refused(SinkError),
}

/// The manifest of one resource.
#[derive(Clone, Debug)]
pub(crate) struct Pivot {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) layout: Layout,
    pub(crate) swing: Swing,
    pub(crate) fencing: Fencing,
}

impl Pivot {
    pub(crate) async fn load(&self) -> Result<Option<Current>, SinkError> {
        match self.swing {
            Swing::Update => self.load_tagged().await,
            Swing::Numbered => self.load_newest().await,
        }
    }

    /// Puts `manifest` in the place of `expected`; its counter is set here.
    pub(crate) async fn swap(
        &self,
        expected: &Version,
        manifest: &mut Manifest,
    ) -> Result<Version, NotSwung> {
        manifest.counter += 1;
        let bytes = encode(manifest).map_err(NotSwung::Refused)?;
        match expected {
            Version::Number(number) => self.create_number(number + 1, bytes).await,
            Version::Absent if self.swing == Swing::Numbered => self.create_number(1, bytes).await,
            Version::Absent => self.put(&self.layout.manifest(), bytes, PutMode::Create).await,
            Version::Tag(tag) => {
                self.put(&self.layout.manifest(), bytes, PutMode::Update(tag.clone())).await
            }
        }
    }

    async fn load_tagged(&self) -> Result<Option<Current>, SinkError> {
        let Some((bytes, tag)) = self.get(&self.layout.manifest()).await? else { return Ok(None) };
        if tag.e_tag.is_none() && tag.version.is_none() {
            return Err(SinkError::Misconfigured(
                "the store gives neither tag nor version: no conditional put is possible".into(),
            ));
        }
        Ok(Some((decode_manifest(&bytes)?, Version::Tag(tag))))
    }

    async fn load_newest(&self) -> Result<Option<Current>, SinkError> {
        for _ in 0..LOAD_TRIES {
            let Some(newest) = self.numbers().await?.into_iter().max() else { return Ok(None) };
            // Gone: it was overtaken and removed since the list was made.
            let Some((bytes, _)) = self.get(&self.layout.numbered_manifest(newest)).await? else {
                continue;
            };
            return Ok(Some((decode_manifest(&bytes)?, Version::Number(newest))));
        }
        Err(transient("the newest manifest was overtaken again and again while it was read"))
    }

    async fn numbers(&self) -> Result<Vec<u64>, SinkError> {
        let folder = self.layout.numbered_manifests();
        let objects: Vec<_> =
            self.store.list(Some(&folder)).try_collect().await.map_err(classify)?;
        let number = |path: &Path| path.filename()?.strip_suffix(".json")?.parse().ok();
        Ok(objects.iter().filter_map(|object| number(&object.location)).collect())
    }

    async fn get(&self, path: &Path) -> Result<Option<(Bytes, UpdateVersion)>, SinkError> {
        let found = match self.store.get(path).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(classify(error)),
        };
        let (e_tag, version) = (found.meta.e_tag.clone(), found.meta.version.clone());
        let bytes = found.bytes().await.map_err(classify)?;
        Ok(Some((bytes, UpdateVersion { e_tag, version })))
    }

    async fn put(&self, path: &Path, bytes: Vec<u8>, mode: PutMode) -> Result<Version, NotSwung> {
        let mode = match self.fencing {
            Fencing::On => mode,
            Fencing::Off => PutMode::Overwrite,
        };
        let options = PutOptions { mode, ..PutOptions::default() };
        match self.store.put_opts(path, PutPayload::from(bytes), options).await {
            Ok(put) => Ok(Version::Tag(put.into())),
            Err(
                Error::AlreadyExists { .. } | Error::Precondition { .. } | Error::NotFound { .. },
            ) => Err(NotSwung::Overtaken),
            Err(error) if is_final(&error) => Err(NotSwung::Refused(classify(error))),
            Err(error) => Err(NotSwung::InDoubt(classify(error))),
        }
    }

    /// Creates manifest `number`. Old numbers are removed, so that a writer which slept could create one of them again:
    /// only the newest counts, and whether it is that is looked up after.
    async fn create_number(&self, number: u64, bytes: Vec<u8>) -> Result<Version, NotSwung> {
        let path = self.layout.numbered_manifest(number);
        self.put(&path, bytes, PutMode::Create).await?;
        let numbers = self.numbers().await.map_err(NotSwung::InDoubt)?;
        if self.fencing == Fencing::On && numbers.iter().any(|other| *other > number) {
            return Err(NotSwung::Overtaken);
        }
        for old in numbers.into_iter().filter(|old| old + KEPT < number) {
            // Another one may have removed it; what stays is removed the next time.
            if let Err(error) = self.store.delete(&self.layout.numbered_manifest(old)).await {
                tracing::debug!(old, %error, "old manifest stays");
            }
        }
        Ok(Version::Number(number))
    }
}
