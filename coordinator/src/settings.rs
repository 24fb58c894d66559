//! Settings of a node: read from a file, overridden by the caller, refused when they contradict each other.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tenure_model::limits::NAME_BYTES_MAX;
use tenure_model::{GroupId, LeaseSettings};

/// Most that a settings file may ask for as a length, in milliseconds (one day).
const LENGTH_MS_MAX: u64 = 86_400_000;

/// Settings of one coordinator node.
///
/// The file is TOML with the names below; an unknown name is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NodeSettings {
    /// Id of this node, 1 to 2^63 − 1; never given to a second node. Default 1.
    pub node: u64,
    /// Name of the cluster; nodes of another one are refused. Default `tenure`.
    pub cluster: String,
    /// Folder that belongs to this node alone. Default `tenure-data`.
    pub data_dir: PathBuf,
    /// Where to listen for members and operators. Port 0 takes a free one. Default `127.0.0.1:7400`.
    pub client_listen: SocketAddr,
    /// What members and operators are told to connect to, as `host:port`. Default: `client_listen`.
    pub client_advertised: Option<String>,
    /// Where to listen for the other nodes. Port 0 takes a free one. Default `127.0.0.1:7401`.
    pub raft_listen: SocketAddr,
    /// What the other nodes are told to connect to, as `host:port`. Default: `raft_listen`.
    pub raft_advertised: Option<String>,
    /// File with the key that this node signs grants with; `tenure signing-key FILE` makes one. Each node may have its
    /// own. Default: none, and grants are not signed.
    pub signing_key_file: Option<PathBuf>,
    /// The nodes of the cluster, this one among them. Default: this one alone.
    pub peers: Vec<Peer>,
    /// What to do while the data folder is empty. Default `existing`.
    pub start: StartMode,
    /// Lengths for members that name none, and the drift that all must keep.
    pub lease: LeaseLengths,
    /// How long things may take before the raft leader acts.
    pub deadlines: Deadlines,
    /// Times between the nodes.
    pub raft: RaftLengths,
    /// Sizes of what waits.
    pub queues: Queues,
}

/// One node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Its id.
    pub node: u64,
    /// Where the other nodes reach it, as `host:port`.
    pub raft_address: String,
    /// Where members and operators reach it, as `host:port`.
    pub client_address: String,
}

/// What a node with an empty data folder does. Without meaning once it has data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartMode {
    /// Refuses to start: it would vote with an empty log.
    #[default]
    Existing,
    /// Founds a cluster of exactly the peers.
    Bootstrap,
    /// Waits to be added to the peers' cluster.
    Join,
}

/// See [`LeaseSettings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeaseLengths {
    /// How long a member keeps its partitions after its last heartbeat, in milliseconds. Default 10000.
    pub ttl_ms: u64,
    /// How often a member heartbeats, in milliseconds; at most a third of `ttl_ms`. Default 3000.
    pub heartbeat_interval_ms: u64,
    /// How far two clocks may drift apart during one ttl, in milliseconds. Default 500.
    pub clock_drift_max_ms: u64,
}

/// Lengths on the raft leader's clock, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Deadlines {
    /// From revoke until the partition is taken back. At least ttl + drift; raised to that for members with a
    /// longer ttl in groups with `takeover = lease`. Default 30000.
    pub drain_deadline_ms: u64,
    /// From grant until the member must run. Default 30000.
    pub acquire_deadline_ms: u64,
    /// How long a move waits for a next owner that prepares. Default 30000.
    pub prepare_deadline_ms: u64,
    /// How long a group must be quiet before it is planned. Default 300.
    pub settle_ms: u64,
    /// Longest wait for a quiet group, from its first change. Default 3000.
    pub settle_max_ms: u64,
    /// How long after a missed heartbeat interval a member is logged as silent. Default 1000.
    pub silence_slack_ms: u64,
    /// In groups with `takeover = fence`: how long a member may take to come back after its connection was closed by
    /// its end, before its lease ends. Static members keep their whole ttl. Default 250.
    pub fence_grace_ms: u64,
    /// How many leases may be cut short like that within one `vanished_window_ms`; further ones keep their length.
    /// 0: none. Default 8.
    pub fence_grace_most: u64,
    /// Back-off after the first failed acquire of a partition; doubles with each one in a row. Default 1000.
    pub hold_ms: u64,
    /// Longest back-off. Default 60000.
    pub hold_max_ms: u64,
    /// Expiry pauses when more than this share of all members vanish within one window, in percent.
    /// 100: never. Default 50.
    pub vanished_share_percent: u64,
    /// How many members must vanish before the share counts. Default 5.
    pub vanished_least: u64,
    /// Length of that window. Default 3000.
    pub vanished_window_ms: u64,
    /// Length of that pause. Default 10000.
    pub vanished_pause_ms: u64,
    /// After how long a partition that is owned and stands still counts as not advancing. Default 30000.
    pub not_advancing_ms: u64,
}

/// Times between the nodes, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RaftLengths {
    /// How often an idle raft leader is heard. Default 100.
    pub heartbeat_interval_ms: u64,
    /// Shortest time from the end of the raft leader's lease to an election; at least three heartbeats. Default 300.
    pub election_timeout_min_ms: u64,
    /// Longest time from the end of the raft leader's lease to an election, and the lease itself: counted from the last
    /// heartbeat, a raft leader that is gone is replaced after this and `election_timeout_min_ms` at the earliest, and
    /// after twice this at the latest unless votes are split. Default 600.
    pub election_timeout_max_ms: u64,
    /// How long a proposal or a linearizable read may take before its outcome is called unknown. Default 5000.
    pub propose_timeout_ms: u64,
    /// How often the nodes compare their states; costs each of them about as much as a snapshot. Default 300000.
    pub digest_interval_ms: u64,
    /// Size of the log on disk at which a snapshot is written, in MiB, at most [`SNAPSHOT_LOG_MIB_MAX`]. Default 64.
    pub snapshot_log_mib: u64,
}

/// Largest `raft.snapshot_log_mib`: a node that starts reads its log from the newest snapshot on.
pub const SNAPSHOT_LOG_MIB_MAX: u64 = 65_536;

/// Sizes of what waits in a node. More is refused as `OVERLOADED`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Queues {
    /// Commands that wait for an entry. Default 16384.
    pub commands: usize,
    /// Messages that wait for one member to read them; a member that lets more pile up loses its session. Default 256.
    pub session_messages: usize,
    /// Acts of one member under way. Default 128.
    pub session_acts: usize,
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            node: 1,
            cluster: "tenure".to_owned(),
            data_dir: PathBuf::from("tenure-data"),
            client_listen: SocketAddr::from(([127, 0, 0, 1], 7400)),
            client_advertised: None,
            raft_listen: SocketAddr::from(([127, 0, 0, 1], 7401)),
            raft_advertised: None,
            signing_key_file: None,
            peers: Vec::new(),
            start: StartMode::default(),
            lease: LeaseLengths::default(),
            deadlines: Deadlines::default(),
            raft: RaftLengths::default(),
            queues: Queues::default(),
        }
    }
}

impl Default for LeaseLengths {
    fn default() -> Self {
        let LeaseSettings { ttl_ms, heartbeat_interval_ms, clock_drift_max_ms } =
            LeaseSettings::default();
        Self { ttl_ms, heartbeat_interval_ms, clock_drift_max_ms }
    }
}

impl From<LeaseLengths> for LeaseSettings {
    fn from(lengths: LeaseLengths) -> Self {
        let LeaseLengths { ttl_ms, heartbeat_interval_ms, clock_drift_max_ms } = lengths;
        Self { ttl_ms, heartbeat_interval_ms, clock_drift_max_ms }
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            drain_deadline_ms: 30_000,
            acquire_deadline_ms: 30_000,
            prepare_deadline_ms: 30_000,
            settle_ms: 300,
            settle_max_ms: 3_000,
            silence_slack_ms: 1_000,
            fence_grace_ms: 250,
            fence_grace_most: 8,
            hold_ms: 1_000,
            hold_max_ms: 60_000,
            vanished_share_percent: 50,
            vanished_least: 5,
            vanished_window_ms: 3_000,
            vanished_pause_ms: 10_000,
            not_advancing_ms: 30_000,
        }
    }
}

impl Default for RaftLengths {
    fn default() -> Self {
        Self {
            heartbeat_interval_ms: 100,
            election_timeout_min_ms: 300,
            election_timeout_max_ms: 600,
            propose_timeout_ms: 5_000,
            digest_interval_ms: 300_000,
            snapshot_log_mib: 64,
        }
    }
}

impl Default for Queues {
    fn default() -> Self {
        Self { commands: 16_384, session_messages: 256, session_acts: 128 }
    }
}

/// Why settings are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeSettingsError {
    /// The text is not TOML, or has an unknown or malformed name.
    #[error("settings cannot be read: {0}")]
    Unreadable(String),
    /// A value is out of range.
    #[error("{setting} is {given}: {allowed}")]
    Range {
        /// Name of the setting.
        setting: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// Two settings contradict each other.
    #[error("{0}")]
    Contradiction(String),
    /// The lease lengths contradict each other, or the drain deadline.
    #[error("lease: {0}")]
    Lease(#[from] tenure_model::SettingsError),
}

impl NodeSettings {
    /// A single node on free ports of the loopback address that founds its own cluster.
    ///
    /// The caller sets `data_dir`.
    #[must_use]
    pub fn dev() -> Self {
        Self {
            client_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            raft_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            start: StartMode::Bootstrap,
            raft: RaftLengths {
                heartbeat_interval_ms: 100,
                election_timeout_min_ms: 300,
                election_timeout_max_ms: 600,
                ..RaftLengths::default()
            },
            ..Self::default()
        }
    }

    /// Reads the text of a settings file. Call [`NodeSettings::validate`] once overrides are in.
    ///
    /// # Errors
    ///
    /// [`NodeSettingsError::Unreadable`] with the place.
    pub fn from_toml(text: &str) -> Result<Self, NodeSettingsError> {
        toml::from_str(text).map_err(|error| NodeSettingsError::Unreadable(error.to_string()))
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    ///
    /// The first contradiction or value out of range, by name.
    pub fn validate(&self) -> Result<(), NodeSettingsError> {
        self.check_identity()?;
        self.check_lengths()?;
        let lease = LeaseSettings::from(self.lease).validate()?;
        let least_ms = lease.ttl_ms.saturating_add(lease.clock_drift_max_ms);
        let drain_ms = self.deadlines.drain_deadline_ms;
        if drain_ms < least_ms {
            return Err(tenure_model::SettingsError::DrainTooShort { drain_ms, least_ms }.into());
        }
        self.check_peers()
    }

    fn check_identity(&self) -> Result<(), NodeSettingsError> {
        if self.node == 0 || self.node > i64::MAX as u64 {
            return Err(range("node", self.node, "use 1 to 2^63 − 1"));
        }
        if GroupId::new(&self.cluster).is_err() {
            let allowed =
                format!("use 1 to {NAME_BYTES_MAX} letters, digits, '.', '_', '-' and ':'");
            return Err(range("cluster", format!("{:?}", self.cluster), allowed));
        }
        if self.data_dir.as_os_str().is_empty() {
            return Err(range(
                "data_dir",
                "empty",
                "name a folder that belongs to this node alone",
            ));
        }
        Ok(())
    }

    fn check_lengths(&self) -> Result<(), NodeSettingsError> {
        let Deadlines { settle_ms, settle_max_ms, hold_ms, hold_max_ms, .. } = self.deadlines;
        let lengths = [
            ("deadlines.drain_deadline_ms", self.deadlines.drain_deadline_ms),
            ("deadlines.acquire_deadline_ms", self.deadlines.acquire_deadline_ms),
            ("deadlines.prepare_deadline_ms", self.deadlines.prepare_deadline_ms),
            ("deadlines.settle_ms", settle_ms),
            ("deadlines.settle_max_ms", settle_max_ms),
            ("deadlines.silence_slack_ms", self.deadlines.silence_slack_ms),
            ("deadlines.fence_grace_ms", self.deadlines.fence_grace_ms),
            ("deadlines.hold_ms", hold_ms),
            ("deadlines.hold_max_ms", hold_max_ms),
            ("deadlines.vanished_window_ms", self.deadlines.vanished_window_ms),
            ("deadlines.vanished_pause_ms", self.deadlines.vanished_pause_ms),
            ("deadlines.not_advancing_ms", self.deadlines.not_advancing_ms),
            ("raft.heartbeat_interval_ms", self.raft.heartbeat_interval_ms),
            ("raft.election_timeout_min_ms", self.raft.election_timeout_min_ms),
            ("raft.election_timeout_max_ms", self.raft.election_timeout_max_ms),
            ("raft.propose_timeout_ms", self.raft.propose_timeout_ms),
            ("raft.digest_interval_ms", self.raft.digest_interval_ms),
            ("queues.commands", self.queues.commands as u64),
            ("queues.session_messages", self.queues.session_messages as u64),
            ("queues.session_acts", self.queues.session_acts as u64),
        ];
        for (setting, given) in lengths {
            if !(1..=LENGTH_MS_MAX).contains(&given) {
                return Err(range(setting, given, format!("use 1 to {LENGTH_MS_MAX}")));
            }
        }
        let log_mib = self.raft.snapshot_log_mib;
        if !(1..=SNAPSHOT_LOG_MIB_MAX).contains(&log_mib) {
            let allowed = format!("use 1 to {SNAPSHOT_LOG_MIB_MAX}");
            return Err(range("raft.snapshot_log_mib", log_mib, allowed));
        }
        if self.deadlines.vanished_share_percent > 100 {
            let given = self.deadlines.vanished_share_percent;
            return Err(range("deadlines.vanished_share_percent", given, "use 0 to 100"));
        }
        let contradiction = if settle_ms > settle_max_ms {
            format!(
                "deadlines.settle_ms {settle_ms} is above deadlines.settle_max_ms {settle_max_ms}"
            )
        } else if hold_ms > hold_max_ms {
            format!("deadlines.hold_ms {hold_ms} is above deadlines.hold_max_ms {hold_max_ms}")
        } else {
            return self.check_elections();
        };
        Err(NodeSettingsError::Contradiction(contradiction))
    }

    fn check_elections(&self) -> Result<(), NodeSettingsError> {
        let RaftLengths { heartbeat_interval_ms: beat, election_timeout_min_ms: min, .. } =
            self.raft;
        let max = self.raft.election_timeout_max_ms;
        let contradiction = if min < beat.saturating_mul(3) {
            format!(
                "raft.election_timeout_min_ms {min} is below three times \
                 raft.heartbeat_interval_ms {beat}: raise it to {}",
                beat.saturating_mul(3)
            )
        } else if max <= min {
            format!(
                "raft.election_timeout_max_ms {max} is not above raft.election_timeout_min_ms {min}"
            )
        } else {
            return Ok(());
        };
        Err(NodeSettingsError::Contradiction(contradiction))
    }

    fn check_peers(&self) -> Result<(), NodeSettingsError> {
        let problem = |text: String| Err(NodeSettingsError::Contradiction(text));
        let mut nodes = BTreeSet::new();
        for peer in &self.peers {
            if !nodes.insert(peer.node) {
                return problem(format!("peers name node {} twice", peer.node));
            }
            for (name, address) in
                [("raft_address", &peer.raft_address), ("client_address", &peer.client_address)]
            {
                if !is_address(address) {
                    return problem(format!(
                        "{name} of peer {} is {address:?}: use host:port",
                        peer.node
                    ));
                }
            }
        }
        for (name, address) in [
            ("client_advertised", &self.client_advertised),
            ("raft_advertised", &self.raft_advertised),
        ] {
            if let Some(address) = address
                && !is_address(address)
            {
                return problem(format!("{name} is {address:?}: use host:port"));
            }
        }
        self.check_own_peer(&nodes)
    }

    /// This node's line among the peers must say what this node advertises.
    fn check_own_peer(&self, nodes: &BTreeSet<u64>) -> Result<(), NodeSettingsError> {
        let problem = |text: String| Err(NodeSettingsError::Contradiction(text));
        if !nodes.is_empty() && !nodes.contains(&self.node) && self.start != StartMode::Join {
            return problem(format!("peers do not name this node, {}", self.node));
        }
        if nodes.is_empty() && self.start == StartMode::Join {
            return problem("start is join, but no peers are named".to_owned());
        }
        let Some(own) = self.peers.iter().find(|peer| peer.node == self.node) else {
            return Ok(());
        };
        let pairs = [
            ("client_advertised", &self.client_advertised, &own.client_address),
            ("raft_advertised", &self.raft_advertised, &own.raft_address),
        ];
        for (name, advertised, listed) in pairs {
            if let Some(advertised) = advertised
                && advertised != listed
            {
                return problem(format!("{name} is {advertised}, but the peers say {listed}"));
            }
        }
        Ok(())
    }
}

fn range(
    setting: &'static str,
    given: impl std::fmt::Display,
    allowed: impl Into<String>,
) -> NodeSettingsError {
    NodeSettingsError::Range { setting, given: given.to_string(), allowed: allowed.into() }
}

pub(crate) fn is_address(text: &str) -> bool {
    let is_of_host = |character: char| {
        character.is_ascii_alphanumeric()
            || matches!(character, '.' | '-' | '_' | ':' | '[' | ']' | '%')
    };
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_host = !host.is_empty() && host.chars().all(is_of_host);
        is_host && port.parse::<u16>().is_ok_and(|port| port != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut NodeSettings), want: &str) {
        let mut settings = NodeSettings::default();
        change(&mut settings);
        assert_eq!(settings.validate().unwrap_err().to_string(), want);
    }

    #[test]
    fn size_of_the_log_has_bounds() {
        for given in [0, SNAPSHOT_LOG_MIB_MAX + 1] {
            let want = format!("raft.snapshot_log_mib is {given}: use 1 to 65536");
            refused(|settings| settings.raft.snapshot_log_mib = given, &want);
        }
    }

    #[test]
    fn defaults_and_dev_settings_are_accepted() {
        assert_eq!(NodeSettings::default().validate(), Ok(()));
        assert_eq!(NodeSettings::dev().validate(), Ok(()));
        assert_eq!(NodeSettings::from_toml(""), Ok(NodeSettings::default()));
    }

    #[test]
    fn unknown_names_are_refused() {
        let error = NodeSettings::from_toml("nodes = 1").unwrap_err().to_string();
        assert!(error.contains("unknown field `nodes`"), "{error}");
        let error = NodeSettings::from_toml("[lease]\nttl = 5").unwrap_err().to_string();
        assert!(error.contains("unknown field `ttl`"), "{error}");
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        refused(|s| s.node = 0, "node is 0: use 1 to 2^63 − 1");
        refused(
            |s| s.lease.heartbeat_interval_ms = 4_000,
            "lease: heartbeat_interval_ms is 4000, more than a third of ttl_ms 10000: \
             lower it to 3333 or raise ttl_ms",
        );
        refused(
            |s| s.deadlines.drain_deadline_ms = 10_499,
            "lease: drain_deadline_ms is 10499, below ttl_ms + clock_drift_max_ms = 10500: \
             raise it, or use takeover = fence",
        );
        refused(
            |s| s.deadlines.settle_ms = 3_001,
            "deadlines.settle_ms 3001 is above deadlines.settle_max_ms 3000",
        );
        refused(
            |s| s.raft.heartbeat_interval_ms = 400,
            "raft.election_timeout_min_ms 300 is below three times \
             raft.heartbeat_interval_ms 400: raise it to 1200",
        );
        refused(
            |s| s.deadlines.acquire_deadline_ms = u64::MAX,
            "deadlines.acquire_deadline_ms is 18446744073709551615: use 1 to 86400000",
        );
        refused(
            |s| s.client_advertised = Some("nowhere".to_owned()),
            "client_advertised is \"nowhere\": use host:port",
        );
        refused(|s| s.start = StartMode::Join, "start is join, but no peers are named");
    }

    #[test]
    fn peers_must_name_this_node_once_and_as_it_is_advertised() {
        let peer =
            |node| Peer { node, raft_address: "a:1".to_owned(), client_address: "a:2".to_owned() };
        refused(|s| s.peers = vec![peer(2)], "peers do not name this node, 1");
        refused(|s| s.peers = vec![peer(1), peer(1)], "peers name node 1 twice");
        refused(
            |s| {
                s.peers = vec![peer(1)];
                s.client_advertised = Some("b:2".to_owned());
            },
            "client_advertised is b:2, but the peers say a:2",
        );
    }
}
