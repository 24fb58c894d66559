//! Writes of one grant.

use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, ObjectStore, PutMode, PutOptions, PutPayload};
use tenure_model::NextOffset;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    FenceRow, FencedWriter, Fencing, Resolved, Role, SinkError, Standing, Verified, look_up,
};

use crate::error::{classify, transient};
use crate::manifest::{File, IndexReference, Manifest, encode};
use crate::settings::ObjectStoreSettings;
use crate::swing::{Current, NotSwung, Pivot, Version};

/// Swings against others before the call is given up.
const SWING_TRIES: usize = 20;

/// A write whose answer is lost.
#[derive(Clone, Debug)]
struct InDoubt {
    attempt: u64,
    sequence: u64,
    target: NextOffset,
    /// What it was to replace.
    replaces: Version,
}

/// Writer of one grant.
#[derive(Debug)]
pub struct ObjectStoreWriter {
    pub(crate) pivot: Pivot,
    files_max: usize,
    pub(crate) grant: Grant,
    pub(crate) standing: Standing,
    /// The manifest as this writer left it; nothing when it must be read again.
    pub(crate) current: Option<Current>,
    in_doubt: Option<InDoubt>,
}

impl ObjectStoreWriter {
    pub(crate) fn new(
        pivot: Pivot,
        settings: &ObjectStoreSettings,
        grant: Grant,
        role: Role,
    ) -> Self {
        let standing = Standing::new(grant.epoch, role, pivot.fencing);
        let files_max = settings.files_max;
        Self { pivot, files_max, grant, standing, current: None, in_doubt: None }
    }

    /// Begins a write: compares epoch and offset, so that an old owner does no needless work. What refuses it for
    /// certain is the commit.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`], [`SinkError::Fenced`], [`SinkError::OffsetConflict`], [`SinkError::Unknown`] while an
    /// earlier write is not resolved, [`SinkError::Transient`]; any other.
    pub async fn begin(&mut self) -> Result<ObjectTx<'_>, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        // Only the home's owner is alone with its manifest.
        let may_keep = self.standing.role() == Role::Home && self.pivot.fencing == Fencing::On;
        if !may_keep || self.current.is_none() {
            self.current = self.pivot.load().await?;
        }
        let row = self.current.as_ref().map(|(manifest, _)| manifest.row()).transpose()?;
        let row = self.standing.admit(row)?;
        Ok(ObjectTx { writer: self, row, files: Vec::new() })
    }

    async fn row(&mut self) -> Result<Option<FenceRow>, SinkError> {
        self.current = self.pivot.load().await?;
        self.current.as_ref().map(|(manifest, _)| manifest.row()).transpose()
    }

    /// Creates an object that is never written again.
    async fn create(&self, path: &Path, payload: PutPayload) -> Result<(), SinkError> {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.pivot.store.put_opts(path, payload, options).await {
            // The name is of a random id: there already, it is ours, and the client's own repetition met it.
            Ok(_) | Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(()),
            Err(error) => Err(classify(error)),
        }
    }

    /// Moves the older files of a manifest that lists too many into an index object.
    async fn roll(&self, manifest: &mut Manifest) -> Result<(), SinkError> {
        let Some(index) = manifest.split_off(self.files_max) else { return Ok(()) };
        let path = self.pivot.layout.index(self.standing.epoch(), rand::random());
        self.create(&path, PutPayload::from(encode(&index)?)).await?;
        manifest.index = Some(IndexReference { path: path.to_string(), files: index.file_count() });
        Ok(())
    }

    /// Finds out about the write in doubt; nothing when it must be looked at again.
    async fn look(&mut self, doubt: &InDoubt) -> Result<Option<Resolved>, SinkError> {
        let unknown = |error: SinkError| SinkError::Unknown(Box::new(error));
        let found = self.row().await.map_err(unknown)?;
        let landed =
            self.current.as_ref().is_some_and(|(found, _)| found.recent.contains(&doubt.attempt));
        let mut standing = self.standing.clone();
        // The shared judgement tells by the sequence; the id is better where others write under the same epoch.
        let judged = found.clone().map(|row| FenceRow {
            sequence: doubt.sequence + u64::from(landed),
            next_offset: if landed { Some(doubt.target) } else { row.next_offset },
            ..row
        });
        let resolved = match standing.resolve(judged.as_ref()) {
            Ok(resolved) => resolved,
            Err(error) => {
                self.standing = standing;
                return Err(error);
            }
        };
        let Some((manifest, version)) = self.current.clone() else { return Ok(None) };
        if !landed && self.standing.role() == Role::Home && manifest.sequence != doubt.sequence {
            let found = found.and_then(|row| row.next_offset).unwrap_or(NextOffset::ZERO);
            return Err(SinkError::OffsetConflict { expected: doubt.target, found });
        }
        if !landed && version == doubt.replaces {
            // It may still be on its way. Once the manifest is another one it has nothing to replace.
            let mut barrier = manifest;
            match self.pivot.swap(&version, &mut barrier).await {
                Ok(version) => self.current = Some((barrier, version)),
                Err(NotSwung::Overtaken) => return Ok(None),
                Err(NotSwung::InDoubt(error) | NotSwung::Refused(error)) => {
                    return Err(unknown(error));
                }
            }
        }
        self.standing = standing;
        self.in_doubt = None;
        Ok(Some(resolved))
    }
}

impl FencedWriter for ObjectStoreWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.standing.check()?;
        let row = self.row().await?;
        self.standing.resume(row.as_ref(), verified)
    }

    /// As [`FencedWriter::initialise`]; a lost answer is [`SinkError::Transient`] here, because the next call looks
    /// first and sets the start only where there is none.
    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        for _ in 0..SWING_TRIES {
            let row = self.row().await?;
            let is_ours = self.pivot.fencing == Fencing::Off
                || row.as_ref().is_some_and(|row| row.epoch == self.standing.epoch());
            match self.current.clone() {
                Some((mut manifest, version)) if is_ours && manifest.next_offset.is_none() => {
                    manifest.next_offset = Some(start.get());
                    match self.pivot.swap(&version, &mut manifest).await {
                        Ok(version) => {
                            let row = manifest.row()?;
                            self.current = Some((manifest, version));
                            return self.standing.initialised(Some(&row));
                        }
                        Err(NotSwung::Overtaken) => {}
                        Err(NotSwung::InDoubt(error) | NotSwung::Refused(error)) => {
                            return Err(error);
                        }
                    }
                }
                Some(_) | None => return self.standing.initialised(row.as_ref()),
            }
        }
        Err(transient("the manifest was swung by others again and again"))
    }

    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        let Some(doubt) = self.in_doubt.clone() else {
            let row = self.row().await.map_err(|error| SinkError::Unknown(Box::new(error)))?;
            return self.standing.resolve(row.as_ref());
        };
        for _ in 0..SWING_TRIES {
            if let Some(resolved) = self.look(&doubt).await? {
                return Ok(resolved);
            }
        }
        Err(SinkError::Unknown("the manifest was swung by others again and again".into()))
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Open write of one grant. Dropped without a commit, its files stay unpublished and are cleaned up by a later owner.
#[derive(Debug)]
pub struct ObjectTx<'w> {
    writer: &'w mut ObjectStoreWriter,
    row: FenceRow,
    files: Vec<File>,
}

impl ObjectTx<'_> {
    /// The first offset that is not in yet: records below it are a replay and are skipped.
    ///
    /// Nothing before the first commit, and nothing without fencing.
    #[must_use]
    pub fn applied(&self) -> Option<NextOffset> {
        self.writer.standing.applied(&self.row)
    }

    /// Stores one file of the write. No reader sees it before the commit. It is sent in one piece, so it must fit the
    /// store's limit for that (5 GiB with S3).
    ///
    /// # Errors
    ///
    /// [`SinkError::Transient`] or [`SinkError::Misconfigured`]: nothing is published.
    pub async fn put(&mut self, content: impl Into<Bytes>) -> Result<(), SinkError> {
        let content = content.into();
        let (epoch, id) = (self.writer.standing.epoch(), rand::random());
        let first = self.row.next_offset.unwrap_or(NextOffset::ZERO);
        let path = self.writer.pivot.layout.data(epoch, first, id);
        let bytes = content.len() as u64;
        self.writer.create(&path, PutPayload::from(content)).await?;
        let (path, first) = (path.to_string(), first.get());
        self.files.push(File { path, epoch: epoch.get(), first, next: first, bytes });
        Ok(())
    }

    /// Publishes the files and moves the offset to `next`, in one swing. A lost answer is looked up.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Unknown`] when it could not be looked up either; any other: nothing was
    /// published.
    pub async fn commit(self, next: NextOffset) -> Result<(), SinkError> {
        let Self { writer, row, mut files } = self;
        let target = writer.standing.target(&row, next)?;
        writer.grant.lease.check()?;
        let (mut manifest, replaces) =
            writer.current.clone().ok_or_else(|| transient("the manifest must be read again"))?;
        for file in &mut files {
            file.next = next.get().max(file.first);
        }
        let attempt = rand::random();
        manifest.add_write(attempt, files, target);
        writer.roll(&mut manifest).await?;
        writer.standing.sent(&row, target);
        writer.current = None;
        let doubt = InDoubt { attempt, sequence: row.sequence, target, replaces };
        writer.in_doubt = Some(doubt.clone());
        let failure = match writer.pivot.swap(&doubt.replaces, &mut manifest).await {
            Ok(version) => {
                writer.in_doubt = None;
                writer.current = Some((manifest, version));
                writer.standing.landed(target);
                return Ok(());
            }
            Err(NotSwung::Refused(error)) => {
                writer.in_doubt = None;
                writer.standing.refused(&row);
                return Err(error);
            }
            Err(NotSwung::Overtaken) => transient("the manifest was swung by another"),
            Err(NotSwung::InDoubt(error)) => error,
        };
        tracing::debug!(resource = %writer.grant.resource, %failure, "swing in doubt, looking");
        look_up(writer, failure).await
    }

    /// Gives the write up.
    pub fn roll_back(self) {}
}
