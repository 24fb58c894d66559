//! Settings of a session.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{
    Clock, GroupId, GroupSettings, InstanceId, LabelName, LeaseSettings, MemberId, TopicName,
};

use crate::lease::{BootClock, LeaseCheck};

/// Settings of a session.
#[derive(Clone)]
pub struct SessionConfig {
    /// `host:port` of any coordinator nodes; the raft leader is found from there. Names are resolved again at each
    /// reconnect.
    pub coordinators: Vec<String>,
    /// Group to join.
    pub group: GroupId,
    /// Id of this member; never one that was used before. Default: picked at random.
    pub member: Option<MemberId>,
    /// Makes the member static. Default: none.
    pub instance: Option<InstanceId>,
    /// Static members only: leaves with the promise that a process with the same instance id joins again within this
    /// time, 1 ms to one hour; its partitions are kept for it. Default: leaves for good.
    pub returning_within: Option<Duration>,
    /// Topics to read, 1 to 1000.
    pub topics: Vec<TopicName>,
    /// What all members of the group agree on.
    pub settings: GroupSettings,
    /// Wanted lengths of the lease; the coordinator answers with what counts. Default: ttl 10 s, heartbeat 3 s.
    pub lease: LeaseSettings,
    /// Largest number of partitions that this member takes. Default: no cap.
    pub partitions_max: Option<u32>,
    /// What people and tools tell members by, such as `rack`: shown, and used for nothing else. At most 16. Default: none.
    pub labels: BTreeMap<LabelName, String>,
    /// For people: host and process. Default: host name and process id.
    pub client: String,
    /// Whether writes consult the local lease. Default [`LeaseCheck::On`].
    pub lease_check: LeaseCheck,
    /// Whether a membership that expired is followed by a new one, under a new member id. Default true.
    pub rejoin: bool,
    /// Whether the member prepares for partitions before it gets them: moves to it wait for that. Default false.
    pub prepares: bool,
    /// Share of partitions relative to other members, 1 to 20: one of weight 2 gets twice as many as one of weight 1.
    /// Default 1.
    pub weight: u32,
    /// Clock that leases are counted on. Default [`BootClock`].
    pub clock: Arc<dyn Clock>,
}

impl SessionConfig {
    /// Settings with the defaults named at each field.
    #[must_use]
    pub fn new(coordinators: Vec<String>, group: GroupId, topics: Vec<TopicName>) -> Self {
        Self {
            coordinators,
            group,
            member: None,
            instance: None,
            returning_within: None,
            topics,
            settings: GroupSettings::default(),
            lease: LeaseSettings::default(),
            partitions_max: None,
            labels: BTreeMap::new(),
            client: client_name(),
            lease_check: LeaseCheck::On,
            rejoin: true,
            prepares: false,
            weight: 1,
            clock: Arc::new(BootClock),
        }
    }
}

impl std::fmt::Debug for SessionConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionConfig")
            .field("coordinators", &self.coordinators)
            .field("group", &self.group)
            .field("member", &self.member)
            .field("instance", &self.instance)
            .field("returning_within", &self.returning_within)
            .field("topics", &self.topics)
            .field("settings", &self.settings)
            .field("lease", &self.lease)
            .field("partitions_max", &self.partitions_max)
            .field("labels", &self.labels)
            .field("client", &self.client)
            .field("lease_check", &self.lease_check)
            .field("rejoin", &self.rejoin)
            .finish_non_exhaustive()
    }
}

fn client_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let host = if host.is_empty() { "unknown-host" } else { host };
    format!("{host}:{}", std::process::id())
}
