//! Who a data folder belongs to.
//!
//! The file is written before anything else in the folder, and says which node of which cluster it is for. It also
//! carries the folder's *incarnation*, drawn at random: by it the other nodes tell this folder from an empty one
//! that was put in its place (see `founding`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::snapshot::sync_folder;
use super::types::NodeId;

const FORMAT: u32 = 1;
const FILE: &str = "identity.toml";

/// How far the folder has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Stage {
    /// Waiting for the other founders. No entry, no vote; may start over.
    Forming,
    /// Every founder's incarnation is known. May vote; the log may still be empty.
    Founded,
    /// Allowed to join a running cluster. The log may still be empty.
    Joining,
    /// Has a log. An empty one would mean that it was lost.
    Established,
}

/// Content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Identity {
    format: u32,
    pub(crate) cluster: String,
    pub(crate) node: NodeId,
    /// Random, 32 hexadecimal digits.
    pub(crate) incarnation: String,
    pub(crate) stage: Stage,
    /// Incarnations of the nodes that founded the cluster; empty before, and in nodes that joined later.
    #[serde(default)]
    pub(crate) founders: BTreeMap<String, String>,
}

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The folder belongs to another cluster.
    #[error("{} belongs to cluster {found:?}, not {wanted:?}: use another folder", file.display())]
    OtherCluster {
        /// The identity file.
        file: PathBuf,
        /// Its cluster.
        found: String,
        /// The cluster in the settings.
        wanted: String,
    },
    /// The folder belongs to another node.
    #[error("{} belongs to node {found}, not {wanted}: use another folder", file.display())]
    OtherNode {
        /// The identity file.
        file: PathBuf,
        /// Its node.
        found: NodeId,
        /// The node in the settings.
        wanted: NodeId,
    },
    /// The file was written by a later version, or is damaged.
    #[error("{} cannot be read: {reason}", file.display())]
    Unreadable {
        /// The identity file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The folder has data but no identity file.
    #[error("{} has data of a node but no {FILE}: restore that file, or remove this node as voter and rejoin under a new id", folder.display())]
    Missing {
        /// The data folder.
        folder: PathBuf,
    },
    /// The folder cannot be read or written.
    #[error("{}: {source}", folder.display())]
    Io {
        /// The data folder.
        folder: PathBuf,
        /// What failed.
        source: io::Error,
    },
}

/// The identity file of one folder.
#[derive(Clone, Debug)]
pub(crate) struct IdentityFile {
    folder: PathBuf,
}

impl IdentityFile {
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Reads the file and compares it with the settings; nothing when the folder is empty.
    pub(crate) fn read(
        &self,
        cluster: &str,
        node: NodeId,
    ) -> Result<Option<Identity>, IdentityError> {
        let file = self.folder.join(FILE);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return if self.has_data().map_err(|source| self.io(source))? {
                    Err(IdentityError::Missing { folder: self.folder.clone() })
                } else {
                    Ok(None)
                };
            }
            Err(source) => return Err(self.io(source)),
        };
        let identity: Identity = match toml::from_str(&text) {
            Ok(identity) => identity,
            Err(error) => {
                return Err(IdentityError::Unreadable { file, reason: error.to_string() });
            }
        };
        if identity.format != FORMAT {
            let reason = format!("it has format {}, this version knows {FORMAT}", identity.format);
            return Err(IdentityError::Unreadable { file, reason });
        }
        if identity.cluster != cluster {
            return Err(IdentityError::OtherCluster {
                file,
                found: identity.cluster,
                wanted: cluster.to_owned(),
            });
        }
        if identity.node != node {
            return Err(IdentityError::OtherNode { file, found: identity.node, wanted: node });
        }
        Ok(Some(identity))
    }

    /// Writes the identity so that it is there after a power cut.
    pub(crate) fn write(&self, identity: &Identity) -> Result<(), IdentityError> {
        let text = toml::to_string(identity).map_err(io::Error::other);
        let written = text.and_then(|text| {
            fs::create_dir_all(&self.folder)?;
            let temporary = self.folder.join("identity.tmp");
            let mut file = File::create(&temporary)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, self.folder.join(FILE))?;
            sync_folder(&self.folder)
        });
        written.map_err(|source| self.io(source))
    }

    fn has_data(&self) -> io::Result<bool> {
        for part in [super::LOG_FOLDER, super::SNAPSHOT_FOLDER] {
            match fs::read_dir(self.folder.join(part)) {
                Ok(mut entries) => {
                    if entries.next().is_some() {
                        return Ok(true);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    fn io(&self, source: io::Error) -> IdentityError {
        IdentityError::Io { folder: self.folder.clone(), source }
    }
}

impl Identity {
    /// Identity of a folder that was empty until now.
    pub(crate) fn fresh(cluster: &str, node: NodeId, stage: Stage) -> Self {
        Self {
            format: FORMAT,
            cluster: cluster.to_owned(),
            node,
            incarnation: format!("{:032x}", rand::random::<u128>()),
            stage,
            founders: BTreeMap::new(),
        }
    }
}
