//! What the manifest and the index objects say, as JSON.
//!
//! Fields are only added; a reader that meets one it does not know, or another format, stops.

use object_store::path::Path;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::sink::{FenceRow, SinkError};

const FORMAT: u32 = 1;
/// Writes that are told by name, more than any write whose answer is lost can lie back.
const RECENT_MAX: usize = 32;

/// The manifest of one resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    /// Highest epoch that was registered.
    pub(crate) epoch: u64,
    /// Who registered it.
    pub(crate) holder: String,
    /// Epoch that the last registration replaced.
    pub(crate) displaced: Option<u64>,
    pub(crate) next_offset: Option<u64>,
    /// Writes that are in.
    pub(crate) sequence: u64,
    /// Swings. No two manifests of a resource are the same bytes, or a tag made of their content would come again.
    pub(crate) counter: u64,
    /// Ids of the last writes: tells an own one whose answer was lost.
    pub(crate) recent: Vec<u64>,
    /// Unpublished files of lower epochs are deleted.
    pub(crate) cleaned_below: u64,
    /// The newest files, by offset.
    pub(crate) files: Vec<File>,
    /// Where the older ones are listed.
    pub(crate) index: Option<IndexReference>,
}

/// A published file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct File {
    pub(crate) path: String,
    pub(crate) epoch: u64,
    pub(crate) first: u64,
    pub(crate) next: u64,
    pub(crate) bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct IndexReference {
    pub(crate) path: String,
    /// Files in it and in those before it.
    pub(crate) files: u64,
}

/// A list of older files. Written once; leads to the one before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Index {
    pub(crate) format: u32,
    pub(crate) files: Vec<File>,
    pub(crate) previous: Option<IndexReference>,
}

impl Manifest {
    /// Manifest of a resource's first registration.
    pub(crate) fn new(epoch: Epoch, holder: String) -> Self {
        Self {
            format: FORMAT,
            epoch: epoch.get(),
            holder,
            displaced: None,
            next_offset: None,
            sequence: 0,
            counter: 0,
            recent: Vec::new(),
            cleaned_below: 0,
            files: Vec::new(),
            index: None,
        }
    }

    pub(crate) fn row(&self) -> Result<FenceRow, SinkError> {
        Ok(FenceRow {
            epoch: Epoch::new(self.epoch).map_err(damaged)?,
            holder: self.holder.clone(),
            next_offset: self.next_offset.map(NextOffset::new).transpose().map_err(damaged)?,
            sequence: self.sequence,
        })
    }

    /// Notes a write.
    pub(crate) fn add_write(&mut self, attempt: u64, files: Vec<File>, next: NextOffset) {
        self.sequence += 1;
        self.next_offset = Some(next.get());
        self.recent.push(attempt);
        if self.recent.len() > RECENT_MAX {
            self.recent.remove(0);
        }
        self.files.extend(files);
    }

    /// Takes the older half of too many files out, for an index object.
    pub(crate) fn split_off(&mut self, files_max: usize) -> Option<Index> {
        if self.files.len() <= files_max {
            return None;
        }
        let older = self.files.len() - files_max / 2;
        let files = self.files.drain(..older).collect();
        Some(Index { format: FORMAT, files, previous: self.index.take() })
    }
}

impl Index {
    pub(crate) fn file_count(&self) -> u64 {
        self.files.len() as u64 + self.previous.as_ref().map_or(0, |previous| previous.files)
    }
}

pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>, SinkError> {
    serde_json::to_vec(value).map_err(damaged)
}

pub(crate) fn decode_manifest(bytes: &[u8]) -> Result<Manifest, SinkError> {
    let manifest: Manifest = decode(bytes)?;
    check(manifest.format)?;
    Ok(manifest)
}

pub(crate) fn decode_index(bytes: &[u8]) -> Result<Index, SinkError> {
    let index: Index = decode(bytes)?;
    check(index.format)?;
    Ok(index)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, SinkError> {
    serde_json::from_slice(bytes).map_err(damaged)
}

fn check(format: u32) -> Result<(), SinkError> {
    if format == FORMAT { Ok(()) } else { Err(damaged(format!("format {format}, not {FORMAT}"))) }
}

fn damaged(error: impl std::fmt::Display) -> SinkError {
    SinkError::Misconfigured(format!("the manifest is damaged or of a newer program: {error}"))
}

/// Where the objects of one resource are.
#[derive(Clone, Debug)]
pub(crate) struct Layout(String);

impl Layout {
    pub(crate) fn new(prefix: &str, resource: &str) -> Self {
        Self(if prefix.is_empty() { resource.to_owned() } else { format!("{prefix}/{resource}") })
    }

    pub(crate) fn manifest(&self) -> Path {
        Path::from(format!("{}/manifest.json", self.0))
    }

    pub(crate) fn numbered_manifests(&self) -> Path {
        Path::from(format!("{}/manifest", self.0))
    }

    pub(crate) fn numbered_manifest(&self, number: u64) -> Path {
        Path::from(format!("{}/manifest/{number:020}.json", self.0))
    }

    pub(crate) fn data(&self, epoch: Epoch, first: NextOffset, id: u64) -> Path {
        let (root, epoch, first) = (&self.0, epoch.get(), first.get());
        Path::from(format!("{root}/data/epoch-{epoch:016}/{first:019}-{id:016x}"))
    }

    pub(crate) fn index(&self, epoch: Epoch, id: u64) -> Path {
        Path::from(format!("{}/index/epoch-{:016}/{id:016x}.json", self.0, epoch.get()))
    }

    /// Folders whose objects are named under an epoch.
    pub(crate) fn by_epoch(&self) -> [Path; 2] {
        ["data", "index"].map(|folder| Path::from(format!("{}/{folder}", self.0)))
    }

    /// Path before all objects of `epoch` and after all lower ones.
    pub(crate) fn start_of(folder: &Path, epoch: u64) -> Path {
        Path::from(format!("{folder}/epoch-{epoch:016}"))
    }

    pub(crate) fn epoch_of(path: &Path) -> Option<u64> {
        path.parts().find_map(|part| part.as_ref().strip_prefix("epoch-")?.parse().ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(first: u64) -> File {
        File { path: format!("f{first}"), epoch: 1, first, next: first + 1, bytes: 3 }
    }

    #[test]
    fn manifest_stays_bounded_and_loses_no_file() {
        let mut manifest = Manifest::new(Epoch::FIRST, "ann".into());
        let mut listed = Vec::new();
        for first in 0..100 {
            manifest.add_write(first, vec![file(first)], NextOffset::new(first + 1).unwrap());
            if let Some(index) = manifest.split_off(10) {
                assert_eq!(index.file_count(), listed.len() as u64 + index.files.len() as u64);
                listed.extend(index.files.iter().map(|file| file.first));
                let files = index.file_count();
                manifest.index = Some(IndexReference { path: "i".into(), files });
            }
            assert!(manifest.files.len() <= 10 && manifest.recent.len() <= RECENT_MAX);
        }
        listed.extend(manifest.files.iter().map(|file| file.first));
        assert_eq!(listed, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn manifest_of_another_format_is_refused() {
        let manifest = Manifest { format: 2, ..Manifest::new(Epoch::FIRST, "ann".into()) };
        let answer = decode_manifest(&encode(&manifest).unwrap());
        assert!(matches!(answer, Err(SinkError::Misconfigured(_))), "{answer:?}");
    }

    #[test]
    fn epoch_is_in_the_path() {
        let layout = Layout::new("a", "g/t/0");
        let path = layout.data(Epoch::new(7).unwrap(), NextOffset::ZERO, 1);
        assert_eq!(Layout::epoch_of(&path), Some(7));
        assert!(path > Layout::start_of(&layout.by_epoch()[0], 7));
        assert!(path < Layout::start_of(&layout.by_epoch()[0], 8));
    }
}
