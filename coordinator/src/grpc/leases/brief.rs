//! A session that lasts one call.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tenure_core::command::MemberRef;
use tenure_model::{Epoch, ErrorCode, Partition, Tick};
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down as DownKind;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tonic::Status;

use super::super::Services;
use super::super::refusal::Refusal;
use super::{Granted, granted};
use crate::driver::session::{Down, Heartbeat, Input, LastWordSaid, Open, Said, SessionId};
use crate::raft::ProposeError;
use crate::soft::{Held, Labels, Phase};

/// How long the raft leader may take to confirm that it leads.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// The member's session during one call. Dropped, it is closed; the membership stays.
pub(super) struct Brief {
    services: Services,
    member: MemberRef,
    id: SessionId,
    inbound: mpsc::Receiver<Down>,
    /// The driver says its last word down the stream as well.
    _ended: oneshot::Receiver<LastWordSaid>,
}

impl Brief {
    /// Opens the session, which renews the member's lease as of `receipt`, and waits until leadership was confirmed.
    pub(super) async fn open(
        services: &Services,
        member: MemberRef,
        receipt: Tick,
    ) -> Result<(Self, v1::Joined), Status> {
        let (outbound, inbound) = mpsc::channel(services.0.settings.queues.session_messages);
        let id = SessionId(services.0.sessions.fetch_add(1, Ordering::Relaxed));
        let (ended, end) = oneshot::channel();
        let open = Open {
            member: member.clone(),
            session: id,
            receipt,
            labels: Labels::default(),
            outbound,
            ended,
        };
        if !services.0.driver.tell(Input::Open(open)).await {
            return Err(Refusal::from(ProposeError::Stopped).into());
        }
        let mut brief = Self { services: services.clone(), member, id, inbound, _ended: end };
        let joined = brief.wait(|down| match down {
            DownKind::Joined(joined) => Some(joined),
            DownKind::HeartbeatAnswer(_)
            | DownKind::Assignment(_)
            | DownKind::ActAnswer(_)
            | DownKind::Ended(_) => None,
        });
        let joined = joined.await?;
        Ok((brief, joined))
    }

    /// Says that the partition runs under `epoch`; answers with the assignment.
    pub(super) async fn heartbeat(
        &mut self,
        partition: Partition,
        epoch: Epoch,
        receipt: Tick,
    ) -> Result<v1::Assignment, Status> {
        let held = Held {
            partition,
            epoch,
            phase: Phase::Running,
            position: 0,
            phase_ms: 0,
            error: String::new(),
            still_ms: 0,
            end_offset: None,
        };
        let heartbeat = Heartbeat {
            session: self.id,
            receipt,
            sequence: 1,
            said: Said::List(vec![held]),
            takes_as_held: false,
        };
        if !self.services.0.driver.tell(Input::Heartbeat(heartbeat)).await {
            return Err(Refusal::from(ProposeError::Stopped).into());
        }
        let answer = self.wait(|down| match down {
            DownKind::HeartbeatAnswer(answer) => Some(answer.assignment.unwrap_or_default()),
            DownKind::Joined(_)
            | DownKind::Assignment(_)
            | DownKind::ActAnswer(_)
            | DownKind::Ended(_) => None,
        });
        answer.await
    }

    /// Waits until an assignment has the partition for good.
    pub(super) async fn until_granted(
        &mut self,
        first: Option<v1::Assignment>,
        partition: Partition,
    ) -> Result<Granted, Status> {
        let has = |assignment: &v1::Assignment| {
            granted(assignment, partition).filter(|found| found.release_within_ms.is_none())
        };
        if let Some(found) = first.as_ref().and_then(has) {
            return Ok(found);
        }
        loop {
            let down = self.next().await?;
            let assignment = match down {
                DownKind::Assignment(assignment) => Some(assignment),
                DownKind::HeartbeatAnswer(answer) => answer.assignment,
                DownKind::Joined(joined) => joined.assignment,
                DownKind::ActAnswer(_) | DownKind::Ended(_) => None,
            };
            if let Some(found) = assignment.as_ref().and_then(has) {
                return Ok(found);
            }
        }
    }

    async fn wait<T>(&mut self, mut pick: impl FnMut(DownKind) -> Option<T>) -> Result<T, Status> {
        let picked = async {
            loop {
                if let Some(picked) = pick(self.next().await?) {
                    return Ok(picked);
                }
            }
        };
        match timeout(ANSWER_WAIT, picked).await {
            Ok(result) => result,
            Err(_elapsed) => Err(Refusal::not_leader(None).into()),
        }
    }

    /// The next message down; the end of the membership is an error.
    async fn next(&mut self) -> Result<DownKind, Status> {
        loop {
            let Some(message) = self.inbound.recv().await else {
                let message = "another call of the same holder took over: repeat this one";
                return Err(Refusal::new(ErrorCode::Overloaded, message).into());
            };
            match message?.down {
                Some(DownKind::Ended(ended)) => {
                    let message = ended
                        .error
                        .map_or_else(|| "the lease was released".to_owned(), |error| error.message);
                    return Err(Refusal::new(ErrorCode::MemberGone, message).into());
                }
                Some(down) => return Ok(down),
                None => {}
            }
        }
    }
}

impl Drop for Brief {
    fn drop(&mut self) {
        let (services, member, session) = (self.services.clone(), self.member.clone(), self.id);
        drop(tokio::spawn(async move {
            // The driver may have let go first, or ended.
            let _told =
                services.0.driver.tell(Input::Close { member, session, by_peer: false }).await;
        }));
    }
}
