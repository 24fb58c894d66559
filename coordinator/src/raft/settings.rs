//! Settings of a raft node.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::types::{NodeAddresses, NodeId};

/// Settings of a raft node.
#[derive(Clone, Debug)]
pub struct RaftSettings {
    /// Id of this node. Never given to a second node.
    pub node: NodeId,
    /// Name of the cluster. Nodes of another cluster are refused.
    pub cluster: String,
    /// Folder that belongs to this node alone.
    pub folder: PathBuf,
    /// Where to listen for the other nodes.
    pub listen: SocketAddr,
    /// What the other nodes and members are told to connect to.
    pub addresses: NodeAddresses,
    /// What to do when `folder` is empty. Without meaning otherwise.
    pub start: Start,
    /// Times and sizes.
    pub tuning: RaftTuning,
}

/// What a node with an empty folder does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Refuses to start: an empty folder under a known node id would vote with an empty log.
    Existing,
    /// Founds a cluster of exactly these nodes, this one among them, once all of them have answered.
    Bootstrap {
        /// All founders. The same list on each of them.
        members: BTreeMap<NodeId, NodeAddresses>,
    },
    /// Waits to be added to the cluster of these nodes. Refused if one of them knows this id as a voter.
    Join {
        /// Some nodes of the cluster.
        peers: BTreeMap<NodeId, NodeAddresses>,
    },
}

/// Times and sizes of a raft node.
#[derive(Clone, Copy, Debug)]
pub struct RaftTuning {
    /// How often the raft leader is heard when idle. Default 100 ms.
    pub heartbeat_interval: Duration,
    /// Shortest time from the end of the raft leader's lease to an election. At least three heartbeats. Default 300 ms.
    pub election_timeout_min: Duration,
    /// Longest time from the end of the raft leader's lease to an election, and the lease itself. Default 600 ms.
    pub election_timeout_max: Duration,
    /// How long a proposal may take before its outcome is called unknown. Default 5 s.
    pub propose_timeout: Duration,
    /// Proposals under way at the same time; more are refused as overloaded. Default 1024.
    pub proposals_max: usize,
    /// How long sending one message of entries may take, at most 20 MiB. Default 10 s.
    pub append_timeout: Duration,
    /// How long sending and installing one snapshot may take. Default 60 s.
    pub snapshot_timeout: Duration,
    /// Size of the log on disk that triggers a snapshot, in bytes. Default 64 MiB.
    pub snapshot_wal_bytes: u64,
    /// Size of one log file, in bytes. Disk space is freed file by file. Default 16 MiB.
    pub wal_chunk_bytes: usize,
    /// Entries kept in the log although a snapshot has them, for followers that are a little behind. Default 1000.
    pub entries_kept: u64,
    /// HTTP/2 keepalive between nodes, on both ends: pause before a ping, and wait for its answer. Default 1 s.
    pub keepalive: Duration,
    /// How long connecting to another node may take. Default 1 s.
    pub connect_timeout: Duration,
}

impl Default for RaftTuning {
    fn default() -> Self {
        Self {
            heartbeat_interval: Duration::from_millis(100),
            election_timeout_min: Duration::from_millis(300),
            election_timeout_max: Duration::from_millis(600),
            propose_timeout: Duration::from_secs(5),
            proposals_max: 1024,
            append_timeout: Duration::from_secs(10),
            snapshot_timeout: Duration::from_secs(60),
            snapshot_wal_bytes: 64 * 1024 * 1024,
            wal_chunk_bytes: 16 * 1024 * 1024,
            entries_kept: 1000,
            keepalive: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(1),
        }
    }
}

/// Settings that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RaftSettingsError {
    /// The cluster has no name.
    #[error("the cluster has no name")]
    NoClusterName,
    /// The node id does not fit.
    #[error("node id {node} is above 2^63 - 1")]
    NodeIdTooLarge {
        /// What was given.
        node: NodeId,
    },
    /// An election may start before a few heartbeats were missed, or the range is empty.
    #[error(
        "election timeout {min:?} to {max:?} must be a range and at least three heartbeats of {heartbeat:?}"
    )]
    ElectionTooEarly {
        /// Shortest election timeout.
        min: Duration,
        /// Longest election timeout.
        max: Duration,
        /// Heartbeat interval.
        heartbeat: Duration,
    },
    /// This node is missing among the founders, or has other addresses there.
    #[error("node {node} with its addresses ({addresses}) is not among the nodes to bootstrap")]
    NotAFounder {
        /// This node.
        node: NodeId,
        /// Its addresses.
        addresses: NodeAddresses,
    },
    /// A size or count is zero.
    #[error("{setting} is 0")]
    Zero {
        /// Name of the setting.
        setting: &'static str,
    },
    /// The raft library refuses the times.
    #[error("{reason}")]
    Refused {
        /// In its words.
        reason: String,
    },
}

impl RaftSettings {
    /// Checks the settings against each other and makes the raft library's form of them.
    pub(crate) fn check(&self) -> Result<Arc<openraft::Config>, RaftSettingsError> {
        let tuning = &self.tuning;
        if self.cluster.is_empty() {
            return Err(RaftSettingsError::NoClusterName);
        }
        if self.node.0 >> 63 != 0 {
            return Err(RaftSettingsError::NodeIdTooLarge { node: self.node });
        }
        let (min, max) = (tuning.election_timeout_min, tuning.election_timeout_max);
        if min >= max || min < 3 * tuning.heartbeat_interval {
            return Err(RaftSettingsError::ElectionTooEarly {
                min,
                max,
                heartbeat: tuning.heartbeat_interval,
            });
        }
        let sizes = [
            ("proposals_max", tuning.proposals_max == 0),
            ("wal_chunk_bytes", tuning.wal_chunk_bytes == 0),
            ("heartbeat_interval", tuning.heartbeat_interval.as_millis() == 0),
        ];
        if let Some((setting, _)) = sizes.into_iter().find(|(_, zero)| *zero) {
            return Err(RaftSettingsError::Zero { setting });
        }
        if let Start::Bootstrap { members } = &self.start
            && members.get(&self.node) != Some(&self.addresses)
        {
            let (node, addresses) = (self.node, self.addresses.clone());
            return Err(RaftSettingsError::NotAFounder { node, addresses });
        }
        self.library_config()
    }

    fn library_config(&self) -> Result<Arc<openraft::Config>, RaftSettingsError> {
        let tuning = &self.tuning;
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let config = openraft::Config {
            cluster_name: self.cluster.clone(),
            heartbeat_interval: millis(tuning.heartbeat_interval),
            election_timeout_min: millis(tuning.election_timeout_min),
            election_timeout_max: millis(tuning.election_timeout_max),
            install_snapshot_timeout: millis(tuning.snapshot_timeout),
            // Snapshots are triggered by bytes, not by entries.
            snapshot_policy: openraft::SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: tuning.entries_kept,
            enable_pre_vote: Some(true),
            // A term is led by one run of one process: what a leader keeps in memory is keyed by the term.
            enable_leader_restore: Some(false),
            ..openraft::Config::default()
        };
        let checked = config.validate();
        checked
            .map(Arc::new)
            .map_err(|error| RaftSettingsError::Refused { reason: error.to_string() })
    }
}
