//! Members: the SDK's session driver and its offsets client, on a host of their own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{
    CommitSequence, GroupId, LeaseSettings, MemberId, NextOffset, Partition, TopicId, TopicName,
};
use tenure_sdk::grant::Grant;
use tenure_sdk::session::{
    CallError, CoordinatorClient, OffsetCommit, ReleaseReason, Session, SessionConfig,
    SessionEvent, SessionHandle,
};
use tenure_sdk::source::TopicInfo;
use tokio::sync::mpsc::UnboundedReceiver;

use super::line::dial;
use super::shared::{Shared, SimClock};

pub(super) const GROUP: &str = "g";
pub(super) const TOPIC: &str = "orders";

/// Longest wait for one call.
const CALL: Duration = Duration::from_secs(5);

/// Pause between two commits.
const PAUSE: Duration = Duration::from_millis(100);

/// What all members have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) partitions: u32,
    pub(super) ttl_ms: u64,
}

pub(super) fn group() -> GroupId {
    GROUP.parse().expect("a name")
}

/// Runs the member on `host` until the run ends.
pub(super) async fn run(
    shared: Arc<Shared>,
    host: String,
    coordinators: Vec<String>,
    shape: Shape,
) -> turmoil::Result {
    let topic: TopicName = TOPIC.parse().expect("a name");
    let mut config = SessionConfig::new(coordinators, group(), vec![topic.clone()]);
    config.member = Some(host.parse().expect("a name"));
    config.lease = LeaseSettings::for_ttl(shape.ttl_ms);
    config.clock = Arc::new(SimClock(Arc::clone(&shared)));
    config.client = host.clone();
    let (handle, events, session) = Session::prepare(config, dial(&shared, &host));
    tokio::task::spawn_local(session);
    let topic_id = TopicId::of_name(&topic);
    handle.report_topics(vec![TopicInfo { topic, topic_id, partition_count: shape.partitions }]);
    let client = handle.coordinator();
    shared.told().members.entry(host.clone()).or_default();
    let next = BTreeMap::new();
    Member { shared, host, handle, events, client, next, sequence: 0 }.work().await;
    Ok(())
}

struct Member {
    shared: Arc<Shared>,
    host: String,
    handle: SessionHandle,
    events: UnboundedReceiver<SessionEvent>,
    client: CoordinatorClient,
    /// Next offset to commit of each grant that runs.
    next: BTreeMap<Partition, (Grant, u64)>,
    sequence: u64,
}

impl Member {
    async fn work(mut self) {
        loop {
            while let Ok(event) = self.events.try_recv() {
                self.take(event).await;
            }
            let ended = self.events.is_closed() && self.events.is_empty();
            if ended {
                return;
            }
            self.commit().await;
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn say(&self, what: &str) {
        self.shared.say(&format!("{} {what}", self.host));
    }

    fn seat(&self, change: impl FnOnce(&mut super::shared::Seat)) {
        change(self.shared.told().members.entry(self.host.clone()).or_default());
    }

    async fn take(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Joined { member_epoch } => {
                self.say(&format!("joined as {}", member_epoch.0));
                self.seat(|seat| seat.memberships.push(member_epoch.0));
            }
            SessionEvent::Prepare(_)
            | SessionEvent::PreparationEnded { .. }
            | SessionEvent::LeaseAtRisk { .. }
            | SessionEvent::LeaseRenewed => {}
            SessionEvent::Granted(grant) => self.acquire(grant).await,
            SessionEvent::Revoked { partition, epoch, .. } => {
                self.say(&format!("{} e{} revoked", partition.index, epoch.get()));
                let next = self.next.remove(&partition);
                self.seat(|seat| drop(seat.held.remove(&partition)));
                let next = next.and_then(|(_, next)| NextOffset::new(next).ok());
                let reason = ReleaseReason::Revoked;
                self.handle.release(partition, epoch, next, reason, String::new());
            }
            SessionEvent::Lost { partition, epoch, cause } => {
                self.say(&format!("{} e{} lost: {cause:?}", partition.index, epoch.get()));
                self.next.remove(&partition);
                self.seat(|seat| {
                    seat.held.remove(&partition);
                    seat.losses += 1;
                });
            }
            SessionEvent::Ended { cause } => {
                self.shared.fail(&format!("{} ended: {cause:?}", self.host));
            }
        }
    }

    /// Verifies and resumes. There is no sink: the coordinator is the home.
    async fn acquire(&mut self, grant: Grant) {
        let (partition, epoch) = (grant.partition, grant.epoch.get());
        let member = grant.member.clone();
        self.say(&format!("{} e{epoch} granted", partition.index));
        let before = self.shared.told().granted.insert((partition, epoch), member.clone());
        if let Some(before) = before {
            self.shared.fail(&format!("{partition} e{epoch} went to {before} and {member}"));
        }
        self.seat(|seat| drop(seat.held.insert(partition, grant.clone())));
        let known = self.shared.told().acknowledged.get(&partition).copied().unwrap_or(0);
        let verified = self.verify(&member, &grant).await;
        match verified {
            Ok(resume) => {
                if resume < known {
                    self.shared.fail(&format!(
                        "{partition} resumes at {resume}, {known} was acknowledged"
                    ));
                }
                self.say(&format!("{} e{epoch} resumes at {resume}", partition.index));
                let offset = NextOffset::new(resume).expect("as the coordinator said");
                self.handle.acquired(partition, grant.epoch, true, offset);
                self.next.insert(partition, (grant, resume));
            }
            Err(error) => {
                self.say(&format!("{} e{epoch} not verified: {error}", partition.index));
                self.seat(|seat| drop(seat.held.remove(&partition)));
                let reason = ReleaseReason::AcquireFailed;
                self.handle.release(partition, grant.epoch, None, reason, error);
            }
        }
    }

    async fn verify(&self, member: &MemberId, grant: &Grant) -> Result<u64, String> {
        let named = [(grant.partition, grant.epoch)];
        let verdicts = self.client.verify(&group(), member, &named, CALL).await;
        let verdict = verdicts.map_err(|error| error.to_string())?.remove(0);
        let verified = verdict.map_err(|refused| refused.to_string())?;
        Ok(verified.next_offset.map_or(0, NextOffset::get))
    }

    /// Commits the next offset of all grants whose lease is live, by one request.
    async fn commit(&mut self) {
        let held = self.next.values_mut().filter(|(grant, _)| grant.lease.is_live());
        self.sequence += 1;
        let sequence = CommitSequence(self.sequence);
        let mut member = None;
        let mut commits = Vec::new();
        for (grant, next) in held {
            *next += 1;
            member = Some(grant.member.clone());
            commits.push(OffsetCommit {
                partition: grant.partition,
                epoch: grant.epoch,
                sequence,
                next_offset: NextOffset::new(*next).expect("a small offset"),
                metadata: Vec::new(),
            });
        }
        let Some(member) = member else { return };
        let answer = self.client.commit(&group(), &member, commits.clone(), CALL).await;
        let now = self.shared.now();
        match answer {
            Ok(verdicts) => {
                self.say(&format!("commit {} answered", self.sequence));
                let mut told = self.shared.told();
                told.acknowledged_at.push(now);
                for (commit, verdict) in commits.iter().zip(verdicts) {
                    let (partition, next) = (commit.partition, commit.next_offset.get());
                    match verdict {
                        Ok(()) => {
                            let known = told.acknowledged.entry(partition).or_default();
                            *known = next.max(*known);
                        }
                        Err(_refused) => {
                            told.members.entry(self.host.clone()).or_default().refused += 1;
                        }
                    }
                }
            }
            Err(CallError::Refused(refused)) => {
                self.say(&format!("commit {} refused: {refused}", self.sequence));
                self.seat(|seat| seat.refused += 1);
            }
            Err(error @ CallError::Unknown { .. }) => {
                self.say(&format!("commit {}: {error}", self.sequence));
            }
        }
    }
}
