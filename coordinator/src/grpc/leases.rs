//! Service `Leases`: named resources by single calls.
//!
//! A resource is a topic of one partition, and a holder is a member that wants only it, so that plans, leases, epochs
//! and fail-over are those of every other group. A call that renews opens the member's session for as long as it takes.

mod brief;
mod edge;

use std::time::Duration;

use tenure_core::command::{AcknowledgeAcquired, LeaveGroup, MemberRef, Release, ReleaseReason};
use tenure_core::state::Ownership;
use tenure_core::{Command, Reply};
use tenure_model::{Epoch, ErrorCode, Partition};
use tenure_proto::{convert, v1};
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use super::Services;
use super::membership::judge;
use super::offsets::unexpected;
use super::refusal::Refusal;
use brief::Brief;
use edge::Named;

/// An assigned partition as the wire has it.
struct Granted {
    epoch: u64,
    release_within_ms: Option<u64>,
}

#[tonic::async_trait]
impl v1::leases_server::Leases for Services {
    async fn acquire(
        &self,
        request: Request<v1::AcquireRequest>,
    ) -> Result<Response<v1::AcquireResponse>, Status> {
        let receipt = self.0.clock.now();
        let wire = request.get_ref();
        let (named, join) = edge::acquire(wire, self.0.settings.lease).map_err(Refusal::from)?;
        self.at_leader().await?;
        let proposed = self.0.proposer.propose(Command::JoinGroup(join)).await;
        let verdict = proposed.map_err(Refusal::from)?;
        let member_epoch = match verdict.result().map_err(Refusal::from)? {
            Reply::Joined { member_epoch, .. } => *member_epoch,
            Reply::Done | Reply::Verdicts(_) | Reply::Operated { .. } => {
                return Err(unexpected("acquire").into());
            }
        };
        let (mut brief, joined) = Brief::open(self, named.member(member_epoch), receipt).await?;
        let half = joined.ttl_ms / 2;
        let wait = if wire.wait_ms == 0 { half } else { wire.wait_ms.min(half) };
        let first = joined.assignment.clone();
        let granted = brief.until_granted(first, named.partition);
        let Ok(granted) = timeout(Duration::from_millis(wait), granted).await else {
            let owner = self.owner(&named);
            return Ok(Response::new(v1::AcquireResponse { lease: None, owner }));
        };
        let epoch = self.acknowledge(&named, granted?).await?;
        let lease = named.lease(member_epoch, epoch, &joined);
        Ok(Response::new(v1::AcquireResponse { lease: Some(lease), owner: String::new() }))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewResponse>, Status> {
        let receipt = self.0.clock.now();
        let (named, member_epoch, epoch) = edge::renew(request.get_ref()).map_err(Refusal::from)?;
        self.at_leader().await?;
        let (mut brief, joined) = Brief::open(self, named.member(member_epoch), receipt).await?;
        let answered = brief.heartbeat(named.partition, epoch, receipt).await?;
        match granted(&answered, named.partition) {
            Some(found) if found.epoch == epoch.get() => Ok(Response::new(v1::RenewResponse {
                lease: Some(named.lease(member_epoch, epoch, &joined)),
                release_within_ms: found.release_within_ms,
            })),
            // Why it is not: the state says it by the epoch's name.
            Some(_) | None => {
                self.check(&named, epoch)?;
                Err(changing().into())
            }
        }
    }

    async fn verify_lease(
        &self,
        request: Request<v1::VerifyLeaseRequest>,
    ) -> Result<Response<v1::VerifyLeaseResponse>, Status> {
        let (named, epoch) = edge::verify(request.get_ref()).map_err(Refusal::from)?;
        self.at_leader().await?;
        let index = self.linearize().await?;
        self.check(&named, epoch)?;
        Ok(Response::new(v1::VerifyLeaseResponse { index: index.0 }))
    }

    async fn release_lease(
        &self,
        request: Request<v1::ReleaseLeaseRequest>,
    ) -> Result<Response<v1::ReleaseLeaseResponse>, Status> {
        let (named, epoch) = edge::release(request.get_ref()).map_err(Refusal::from)?;
        self.at_leader().await?;
        let released = epoch.map(|epoch| Release {
            partition: named.partition,
            epoch,
            next_offset: None,
            reason: ReleaseReason::Shutdown,
            error: String::new(),
        });
        let leave = Command::LeaveGroup(LeaveGroup {
            group: named.group.clone(),
            member: named.holder.clone(),
            partitions: released.into_iter().collect(),
            reason: "lease released".to_owned(),
            returning_within_ms: None,
        });
        let verdict = self.0.proposer.propose(leave).await.map_err(Refusal::from)?;
        match judge(verdict.result(), true) {
            // Released before: the first answer was lost, or the lease ran out.
            Err(refusal) if refusal.code == ErrorCode::MemberGone => {}
            result => result?,
        }
        Ok(Response::new(v1::ReleaseLeaseResponse {}))
    }
}

impl Services {
    /// The holder runs from the grant on: there is nothing that it would register first.
    async fn acknowledge(&self, named: &Named, granted: Granted) -> Result<Epoch, Refusal> {
        let epoch = convert::epoch("epoch", granted.epoch)?;
        let acquired = AcknowledgeAcquired {
            group: named.group.clone(),
            member: named.holder.clone(),
            partition: named.partition,
            epoch,
            home_initialised: false,
        };
        let proposed = self.0.proposer.propose(Command::AcknowledgeAcquired(acquired)).await;
        judge(proposed?.result(), false)?;
        Ok(epoch)
    }

    /// Refuses by the current epoch's name what is not the current lease.
    fn check(&self, named: &Named, epoch: Epoch) -> Result<(), Refusal> {
        let Named { group, holder, partition, .. } = named;
        self.0.raft.with_machine(|machine| {
            machine.state().check_owner(group, holder, *partition, epoch)?;
            Ok(())
        })
    }

    /// Who has the resource, as far as this node knows.
    fn owner(&self, named: &Named) -> String {
        self.0.raft.with_machine(|machine| {
            let group = machine.state().group(&named.group).ok();
            match group.and_then(|group| group.partitions.get(&named.partition)) {
                Some(found) => match &found.ownership {
                    Ownership::Held { member, .. } | Ownership::Revoking { member } => {
                        member.to_string()
                    }
                    Ownership::Free => String::new(),
                },
                None => String::new(),
            }
        })
    }
}

/// The line of one partition in an assignment.
fn granted(assignment: &v1::Assignment, partition: Partition) -> Option<Granted> {
    let wire = convert::partition_to_wire(partition);
    let line = assignment.partitions.iter().find(|line| line.partition.as_ref() == Some(&wire))?;
    let release_within_ms = line.revoking.then_some(line.drain_remaining_ms);
    Some(Granted { epoch: line.epoch, release_within_ms })
}

fn changing() -> Refusal {
    Refusal::new(ErrorCode::Overloaded, "the lease changed while it was looked at: renew again")
}

/// The membership of a holder.
impl Named {
    fn member(&self, member_epoch: tenure_model::MemberEpoch) -> MemberRef {
        MemberRef { group: self.group.clone(), member: self.holder.clone(), member_epoch }
    }

    fn lease(
        &self,
        member_epoch: tenure_model::MemberEpoch,
        epoch: Epoch,
        joined: &v1::Joined,
    ) -> v1::Lease {
        v1::Lease {
            group: self.group.to_string(),
            resource: self.resource.to_string(),
            holder: self.holder.to_string(),
            member_epoch: member_epoch.0,
            epoch: epoch.get(),
            valid_ms: joined.ttl_ms.saturating_sub(joined.clock_drift_max_ms),
            renew_every_ms: joined.heartbeat_interval_ms,
            // As tenure_sdk::grant::Resource::of_partition has it.
            fence: format!("{}/{}/{}", self.group, self.partition.topic_id, self.partition.index),
        }
    }
}
