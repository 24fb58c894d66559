//! Snapshot files.
//!
//! | bytes | content                                              |
//! |-------|------------------------------------------------------|
//! | 8     | `TENURESN`                                           |
//! | 4     | format version, little endian                        |
//! | 4     | length of the description, little endian             |
//! | 8     | length of the body, little endian                    |
//! | …     | description: last log id and membership              |
//! | …     | body: what the machine wrote                         |
//! | 4     | CRC32 of all bytes before, little endian             |
//!
//! A file appears under its name only when it is complete and synced: written as `.tmp`, synced, renamed, folder
//! synced. The older ones are removed after that.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::stored::{SnapshotMetaRecord, invalid};
use super::types::{Snapshot, SnapshotMeta};

const MAGIC: &[u8; 8] = b"TENURESN";
const FORMAT: u32 = 1;
const HEADER_BYTES: usize = 24;
const EXTENSION: &str = "snapshot";

/// Folder with the newest snapshot. Clones share it.
#[derive(Clone)]
pub(crate) struct SnapshotStore {
    folder: Arc<Path>,
    /// Held while files are written or removed.
    changing: Arc<Mutex<()>>,
}

impl SnapshotStore {
    /// Opens or makes `folder` and removes files that were never finished.
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        for file in list(folder, "tmp")? {
            fs::remove_file(file)?;
        }
        Ok(Self { folder: folder.into(), changing: Arc::default() })
    }

    /// Reads the newest snapshot; nothing when there is none.
    ///
    /// # Errors
    ///
    /// With the file's name when it is damaged. An older one is never taken instead: the log may not reach back.
    pub(crate) fn newest(&self) -> io::Result<Option<Snapshot>> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(file) = list(&self.folder, EXTENSION)?.pop() else { return Ok(None) };
        let read = fs::read(&file).and_then(decode);
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", file.display()));
        read.map(Some).map_err(named)
    }

    /// Writes a snapshot and removes those before it. Blocks until it is on disk.
    ///
    /// One that is older than what is there is left unwritten.
    pub(crate) fn write(&self, meta: &SnapshotMeta, body: &[u8]) -> io::Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let target = self.folder.join(file_name(meta));
        let existing = list(&self.folder, EXTENSION)?;
        if existing.last().is_some_and(|newest| *newest > target) {
            return Ok(());
        }
        let temporary = target.with_extension("tmp");
        let mut file = File::create(&temporary)?;
        let head = encode_head(meta, body.len())?;
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&head);
        checksum.update(body);
        file.write_all(&head)?;
        file.write_all(body)?;
        file.write_all(&checksum.finalize().to_le_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &target)?;
        sync_folder(&self.folder)?;
        for old in existing.into_iter().filter(|old| *old != target) {
            fs::remove_file(old)?;
        }
        Ok(())
    }
}

/// Makes new names in a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Names sort as the snapshots do: a later one never has a lower index.
fn file_name(meta: &SnapshotMeta) -> String {
    let (index, term) = meta.last_log_id.map_or((0, 0), |id| (id.index, id.leader_id.term));
    format!("{index:020}-{term:020}.{EXTENSION}")
}

/// Files with that extension, oldest first.
fn list(folder: &Path, extension: &str) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let file = entry?.path();
        if file.extension().is_some_and(|found| found == extension) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn encode_head(meta: &SnapshotMeta, body_bytes: usize) -> io::Result<Vec<u8>> {
    let description =
        postcard::to_stdvec(&SnapshotMetaRecord::from(meta)).map_err(io::Error::other)?;
    let description_bytes = u32::try_from(description.len()).map_err(io::Error::other)?;
    let mut head = Vec::with_capacity(HEADER_BYTES + description.len());
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&FORMAT.to_le_bytes());
    head.extend_from_slice(&description_bytes.to_le_bytes());
    head.extend_from_slice(&(body_bytes as u64).to_le_bytes());
    head.extend_from_slice(&description);
    Ok(head)
}

fn decode(file: Vec<u8>) -> io::Result<Snapshot> {
    let file = Bytes::from(file);
    let short = || invalid("the snapshot is shorter than its header says");
    if file.len() < HEADER_BYTES + 4 {
        return Err(short());
    }
    if &file[..8] != MAGIC {
        return Err(invalid("this is no snapshot"));
    }
    let number =
        |at: usize| u32::from_le_bytes([file[at], file[at + 1], file[at + 2], file[at + 3]]);
    let end = file.len() - 4;
    if crc32fast::hash(&file[..end]) != number(end) {
        return Err(invalid("the snapshot does not match its checksum"));
    }
    if number(8) != FORMAT {
        return Err(invalid(format!(
            "snapshot has format {}, this version knows {FORMAT}",
            number(8)
        )));
    }
    let body_at = HEADER_BYTES + number(12) as usize;
    let body_bytes = u64::from(number(16)) | (u64::from(number(20)) << 32);
    if body_at > end || (end - body_at) as u64 != body_bytes {
        return Err(short());
    }
    let description: SnapshotMetaRecord =
        postcard::from_bytes(&file[HEADER_BYTES..body_at]).map_err(invalid)?;
    Ok(Snapshot { meta: description.into_meta()?, snapshot: file.slice(body_at..end) })
}
