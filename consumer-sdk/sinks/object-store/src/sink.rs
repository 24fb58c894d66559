//! The sink: registers grants.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use rand::Rng;
use tenure_model::{Epoch, Home};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    Capabilities, Enforcement, FencedSink, Fencing, Registered, Role, Scope, SinkError, Standing,
    Takeover,
};

use crate::error::transient;
use crate::manifest::{Layout, Manifest};
use crate::reader::Reader;
use crate::settings::ObjectStoreSettings;
use crate::swing::{Current, NotSwung, Pivot, Swing};
use crate::writer::ObjectStoreWriter;

/// Swings of a registration before it is [`SinkError::Transient`].
const SWING_TRIES: usize = 100;

/// Sink over one object store. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ObjectStoreSink {
    store: Arc<dyn ObjectStore>,
    swing: Swing,
    settings: Arc<ObjectStoreSettings>,
}

impl ObjectStoreSink {
    /// Sink over `store`. Whether it honours conditions is not looked at here, see
    /// [`prove_conditional_put`](crate::prove_conditional_put).
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a bad setting.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        swing: Swing,
        settings: ObjectStoreSettings,
    ) -> Result<Self, SinkError> {
        settings.validate()?;
        Ok(Self { store, swing, settings: Arc::new(settings) })
    }

    /// Sink over a local folder, which is made where there is none. What is answered is on the disk.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a bad setting or a folder that cannot be used.
    pub fn local(
        folder: impl AsRef<Path>,
        settings: ObjectStoreSettings,
    ) -> Result<Self, SinkError> {
        let folder = folder.as_ref();
        let unusable = |error: &dyn std::fmt::Display| {
            SinkError::Misconfigured(format!("folder {}: {error}", folder.display()))
        };
        fs::create_dir_all(folder).map_err(|error| unusable(&error))?;
        let store = LocalFileSystem::new_with_prefix(folder).map_err(|error| unusable(&error))?;
        Self::new(Arc::new(store.with_fsync(true)), Swing::Numbered, settings)
    }

    /// Reader of what is published.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::new(Arc::clone(&self.store), self.swing, &self.settings.prefix)
    }

    /// Writer beside the home, for a grant that the SDK has registered here. Registers nothing: each write compares the
    /// epoch, so that a grant that is not registered is refused.
    #[must_use]
    pub fn writer(&self, grant: &Grant) -> ObjectStoreWriter {
        self.writer_as(grant, Role::Also)
    }

    fn writer_as(&self, grant: &Grant, role: Role) -> ObjectStoreWriter {
        ObjectStoreWriter::new(self.pivot(grant), &self.settings, grant.clone(), role)
    }

    fn pivot(&self, grant: &Grant) -> Pivot {
        Pivot {
            store: Arc::clone(&self.store),
            layout: Layout::new(&self.settings.prefix, grant.resource.as_str()),
            swing: self.swing,
            fencing: self.settings.fencing(),
        }
    }

    async fn raise(&self, grant: &Grant) -> Result<Option<Epoch>, SinkError> {
        let pivot = self.pivot(grant);
        let mut standing = Standing::new(grant.epoch, Role::Home, pivot.fencing);
        let holder = grant.member.to_string();
        for _ in 0..SWING_TRIES {
            let found = pivot.load().await?;
            let raised = match &found {
                None => Manifest::new(grant.epoch, holder.clone()),
                Some(_) if pivot.fencing == Fencing::Off => return Ok(None),
                Some((manifest, _)) if manifest.epoch >= grant.epoch.get() => {
                    standing.registered(&manifest.row()?, &holder)?;
                    return Ok(manifest.displaced.and_then(|epoch| Epoch::new(epoch).ok()));
                }
                Some((manifest, _)) => Manifest {
                    epoch: grant.epoch.get(),
                    holder: holder.clone(),
                    displaced: Some(manifest.epoch),
                    ..manifest.clone()
                },
            };
            match swap(&pivot, found, raised).await {
                Ok(manifest) => {
                    return Ok(manifest.displaced.and_then(|epoch| Epoch::new(epoch).ok()));
                }
                Err(NotSwung::Overtaken) => {
                    let pause = rand::rng().random_range(0..=2);
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                }
                Err(NotSwung::Refused(error)) => return Err(error),
                Err(NotSwung::InDoubt(error)) => return Err(SinkError::Unknown(Box::new(error))),
            }
        }
        Err(transient("the manifest was swung by others again and again"))
    }
}

async fn swap(
    pivot: &Pivot,
    found: Option<Current>,
    mut manifest: Manifest,
) -> Result<Manifest, NotSwung> {
    let version = found.map_or(crate::swing::Version::Absent, |(_, version)| version);
    pivot.swap(&version, &mut manifest).await?;
    Ok(manifest)
}

impl FencedSink for ObjectStoreSink {
    type Writer = ObjectStoreWriter;

    fn name(&self) -> &str {
        &self.settings.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Partition,
            home: Home::Sink,
            enforcement: match self.settings.fencing() {
                Fencing::On => Enforcement::Resource,
                Fencing::Off => Enforcement::BestEffort("the fence is switched off"),
            },
            // Nothing is held between two calls.
            takeover: Takeover::Bounded(Duration::ZERO),
        }
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<ObjectStoreWriter>, SinkError> {
        let displaced = self.raise(grant).await?;
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = displaced.map(Epoch::get), "epoch registered");
        Ok(Registered { writer: self.writer_as(grant, Role::Home), displaced })
    }
}
