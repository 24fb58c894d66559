//! Peers that get the same load in the same run.
//!
//! They are fetched by their own ecosystem's tools into the folder of downloads, outside the tree, and started on
//! loopback with three nodes, as ours.

pub(super) mod etcd;
pub(super) mod kafka;

/// What a scenario may be compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// etcd, by the Go tools.
    Etcd,
    /// Apache Kafka, by Java; `tests/run` fetches the jars.
    Kafka,
}

impl std::str::FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "etcd" => Ok(Self::Etcd),
            "kafka" => Ok(Self::Kafka),
            other => Err(format!("no peer {other:?}: give etcd or kafka")),
        }
    }
}

/// What a peer did of fenced writes or offset commits.
#[derive(Clone, Debug)]
pub(super) struct PeerCommits {
    pub(super) version: String,
    /// Partitions in a second.
    pub(super) rate_per_s: f64,
    pub(super) p50_ms: f64,
    /// Partitions in a second where one transaction takes all partitions of a member, all or nothing.
    pub(super) batched_rate_per_s: Option<f64>,
}

/// What a peer did of single operations.
#[derive(Clone, Debug)]
pub(super) struct PeerBeats {
    pub(super) version: String,
    pub(super) rate_per_s: f64,
    pub(super) p50_ms: f64,
}
