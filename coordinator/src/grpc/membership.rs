//! Service `Membership`: the session of one member.
//!
//! One task per session reads what the member sends. Heartbeats go to the driver, which answers them; acts become
//! commands, answered in the order in which they came.

use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesOrdered;
use tenure_core::command::{JoinGroup, MemberRef};
use tenure_core::{Command, Rejection, Reply};
use tenure_model::{ErrorCode, InstanceId, LeaseSettings, MemberId, Tick};
use tenure_proto::convert::Malformed;
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down as DownKind;
use tenure_proto::v1::session_up::Up;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::coded::coded;
use super::offsets::unexpected;
use super::refusal::Refusal;
use super::signing::{Holder, Signed};
use super::{Services, edge};
use crate::connection::PeerClosed;
use crate::driver::places::{Asker, Place};
use crate::driver::session::{Down, Heartbeat, Input, LastWordSaid, Open, SessionId};
use crate::raft::ProposeError;

/// How long a new stream may take to send its join.
const JOIN_WAIT: Duration = Duration::from_secs(10);

/// From the end of a session's stream to the end of its connection, where both have one cause.
const CLOSE_WAIT: Duration = Duration::from_millis(50);

/// How long the answers to acts are waited for after the driver let go of the session.
const LAST_ANSWERS_WAIT: Duration = Duration::from_secs(2);

type Outcome = Pin<Box<dyn Future<Output = Answered> + Send>>;

#[tonic::async_trait]
impl v1::membership_server::Membership for Services {
    type SessionStream = Signed<ReceiverStream<Down>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionUp>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (outbound, stream) = mpsc::channel(self.0.settings.queues.session_messages);
        let services = self.clone();
        // Absent where something else than a socket carries the call.
        let closed = request.extensions().get::<PeerClosed>().cloned().unwrap_or_default();
        let inbound = request.into_inner();
        let (holder, stream) = Signed::over(ReceiverStream::new(stream), &self.0.signer);
        tokio::spawn(async move {
            if let Err(status) = services.serve(inbound, &closed, &outbound, &holder).await {
                // A member that is gone needs no reason.
                drop(outbound.send(Err(status)).await);
            }
        });
        Ok(Response::new(stream))
    }
}

impl Services {
    /// Serves one session to its end; an error is the stream's last word.
    async fn serve(
        &self,
        mut inbound: Streaming<v1::SessionUp>,
        closed: &PeerClosed,
        outbound: &mpsc::Sender<Down>,
        holder: &Holder,
    ) -> Result<(), Status> {
        let (join, receipt) = self.read_join(&mut inbound).await?;
        let labels = edge::labels(&join.labels).map_err(Refusal::from)?;
        let member = self.join(&join).await?;
        // Before the driver sends anything: the stream signs for this member. A stream has one join.
        drop(holder.set((member.group.clone(), member.member.clone())));
        let id = SessionId(self.0.sessions.fetch_add(1, Ordering::Relaxed));
        let (ended, mut end) = oneshot::channel();
        let outbound_of_driver = outbound.clone();
        let open = Open {
            member: member.clone(),
            session: id,
            receipt,
            labels,
            outbound: outbound_of_driver,
            ended,
        };
        if !self.0.driver.tell(Input::Open(open)).await {
            return Err(Refusal::from(ProposeError::Stopped).into());
        }
        let acts = FuturesOrdered::new();
        let mut session = Session { services: self, member: member.clone(), id, outbound, acts };
        let served = session.run(&mut inbound, &mut end).await;
        // The driver may have let go first, or ended.
        let by_peer = closed.within(CLOSE_WAIT).await;
        let close = Input::Close { member, session: id, by_peer };
        let _told = self.0.driver.tell(close).await;
        served
    }

    async fn read_join(
        &self,
        inbound: &mut Streaming<v1::SessionUp>,
    ) -> Result<(v1::Join, Tick), Status> {
        let first = timeout(JOIN_WAIT, inbound.message()).await;
        let first = first.map_err(|_elapsed| no_join())?.map_err(|status| coded(&status))?;
        match first.and_then(|message| message.up) {
            Some(Up::Join(join)) => Ok((join, self.0.clock.now())),
            Some(
                Up::Heartbeat(_)
                | Up::Acquired(_)
                | Up::Prepared(_)
                | Up::Release(_)
                | Up::ReportTopics(_)
                | Up::Leave(_),
            )
            | None => Err(no_join()),
        }
    }

    async fn join(&self, wire: &v1::Join) -> Result<MemberRef, Status> {
        let defaults = LeaseSettings::from(self.0.settings.lease);
        let join = edge::join(wire, defaults).map_err(Refusal::from)?;
        self.at_leader().await?;
        self.check_place(&join).await?;
        let (group, member) = (join.group.clone(), join.member.clone());
        let proposed = self.0.proposer.propose(Command::JoinGroup(join)).await;
        let verdict = proposed.map_err(Refusal::from)?;
        match verdict.result() {
            Ok(Reply::Joined { member_epoch, .. }) => {
                Ok(MemberRef { group, member, member_epoch: *member_epoch })
            }
            Ok(Reply::Done | Reply::Verdicts(_) | Reply::Operated { .. }) => {
                Err(unexpected("join").into())
            }
            // Another process was faster: the next attempt asks for its place.
            Err(Rejection::InstanceInUse { instance, member }) => {
                Err(waits(instance, member, None).into())
            }
            Err(rejection) => Err(Refusal::from(rejection).into()),
        }
    }

    /// Refuses a join with the instance id of a live member: for good once that one is heard, until its lease ends
    /// otherwise.
    async fn check_place(&self, join: &JoinGroup) -> Result<(), Refusal> {
        let Some(instance) = &join.instance else { return Ok(()) };
        let old = self.0.raft.with_machine(|machine| {
            let group = machine.state().group(&join.group).ok()?;
            let (name, record) = group.instance(instance)?;
            (*name != join.member && record.away.is_none()).then(|| MemberRef {
                group: join.group.clone(),
                member: name.clone(),
                member_epoch: record.epoch,
            })
        });
        let Some(old) = old else { return Ok(()) };
        let name = old.member.clone();
        let asker = Asker { old, member: join.member.clone(), client: join.client.clone() };
        let (answer, answered) = oneshot::channel();
        if !self.0.driver.tell(Input::AskPlace { asker, answer }).await {
            return Err(ProposeError::Stopped.into());
        }
        match answered.await {
            Ok(Place::Waits { remaining }) => Err(waits(instance, &name, Some(remaining))),
            Ok(Place::Taken) => {
                Err(Rejection::InstanceInUse { instance: instance.clone(), member: name }.into())
            }
            Err(_leads_no_more) => Err(Refusal::not_leader(None)),
        }
    }
}

fn waits(instance: &InstanceId, member: &MemberId, remaining: Option<Duration>) -> Refusal {
    let end = remaining.map_or_else(String::new, |remaining| {
        format!(", in {} ms at the latest", remaining.as_millis())
    });
    Refusal::new(
        ErrorCode::InstanceWaits,
        format!(
            "instance id {instance} is that of member {member}, which is not heard: join again until its lease has ended{end}"
        ),
    )
}

fn no_join() -> Status {
    Refusal::new(ErrorCode::InvalidArgument, "a session starts with a join: send it first").into()
}

/// What became of one act.
struct Answered {
    request: u64,
    is_leave: bool,
    result: Result<(), Refusal>,
}

struct Session<'a> {
    services: &'a Services,
    member: MemberRef,
    id: SessionId,
    outbound: &'a mpsc::Sender<Down>,
    acts: FuturesOrdered<Outcome>,
}

/// Whether the session goes on.
enum Next {
    Message,
    End,
}

impl Session<'_> {
    async fn run(
        &mut self,
        inbound: &mut Streaming<v1::SessionUp>,
        end: &mut oneshot::Receiver<LastWordSaid>,
    ) -> Result<(), Status> {
        let acts_max = self.services.0.settings.queues.session_acts;
        loop {
            tokio::select! {
                ended = &mut *end => {
                    if ended.is_err() {
                        self.answer_the_rest().await;
                    }
                    return Ok(());
                }
                Some(answered) = self.acts.next(), if !self.acts.is_empty() => match self.answer(answered).await {
                    Next::Message => {}
                    Next::End => return Ok(()),
                },
                message = inbound.message(), if self.acts.len() < acts_max => {
                    match message.map_err(|status| coded(&status))? {
                        None => return Ok(()),
                        Some(message) => self.take(message).await?,
                    }
                }
            }
        }
    }

    /// The driver let go of the session without a last word: another session took over, or the member left.
    async fn answer_the_rest(&mut self) {
        let rest = async {
            while let Some(answered) = self.acts.next().await {
                if matches!(self.answer(answered).await, Next::End) {
                    break;
                }
            }
        };
        // Whoever gets no answer asks again.
        drop(timeout(LAST_ANSWERS_WAIT, rest).await);
    }

    async fn answer(&mut self, answered: Answered) -> Next {
        let Answered { request, is_leave, result } = answered;
        let has_left = is_leave && result.is_ok();
        let error = result.err().map(|refusal| refusal.to_wire());
        let answer = DownKind::ActAnswer(v1::ActAnswer { request, error });
        if !self.send(answer).await {
            return Next::End;
        }
        if has_left {
            self.send(DownKind::Ended(v1::Ended { error: None })).await;
            return Next::End;
        }
        Next::Message
    }

    async fn send(&mut self, down: DownKind) -> bool {
        self.outbound.send(Ok(v1::SessionDown { down: Some(down) })).await.is_ok()
    }

    async fn take(&mut self, message: v1::SessionUp) -> Result<(), Status> {
        let receipt = self.services.0.clock.now();
        match message.up {
            Some(Up::Heartbeat(beat)) => self.heartbeat(beat, receipt).await?,
            Some(Up::Acquired(wire)) => {
                let command = edge::acquired(&self.member, &wire).map(Command::AcknowledgeAcquired);
                self.act(wire.request, command);
            }
            Some(Up::Prepared(wire)) => {
                let command = edge::prepared(&self.member, &wire).map(Command::AcknowledgePrepared);
                if !wire.error.is_empty() {
                    let MemberRef { group, member, .. } = &self.member;
                    tracing::warn!(%group, %member, error = wire.error, "member could not prepare");
                }
                self.act(wire.request, command);
            }
            Some(Up::Release(wire)) => {
                let command = edge::release(&self.member, &wire).map(Command::ReleasePartitions);
                self.act(wire.request, command);
            }
            Some(Up::ReportTopics(wire)) => {
                let command = edge::report_topics(&self.member, &wire).map(Command::ReportTopics);
                self.act(wire.request, command);
            }
            Some(Up::Leave(wire)) => {
                let command = edge::leave(&self.member, &wire).map(Command::LeaveGroup);
                self.act(wire.request, command);
            }
            Some(Up::Join(_)) => {
                let message =
                    "the session has joined already: open another stream for another join";
                return Err(Refusal::new(ErrorCode::InvalidArgument, message).into());
            }
            None => {
                let message = "the message is empty, or of a later version: compare the versions";
                return Err(Refusal::new(ErrorCode::InvalidArgument, message).into());
            }
        }
        Ok(())
    }

    async fn heartbeat(&mut self, beat: v1::Heartbeat, receipt: Tick) -> Result<(), Status> {
        let (sequence, takes_as_held) = (beat.sequence, beat.takes_as_held);
        let said = edge::said(beat).map_err(Refusal::from)?;
        let session = self.id;
        let heartbeat = Heartbeat { session, receipt, sequence, said, takes_as_held };
        if self.services.0.driver.tell(Input::Heartbeat(heartbeat)).await {
            Ok(())
        } else {
            Err(Refusal::from(ProposeError::Stopped).into())
        }
    }

    /// Submits an act at once, in order, and answers it once it is applied.
    fn act(&mut self, request: u64, command: Result<Command, Malformed>) {
        let command = match command {
            Ok(command) => command,
            Err(malformed) => {
                let result = Err(Refusal::from(malformed));
                let answered = Answered { request, is_leave: false, result };
                self.acts.push_back(Box::pin(async move { answered }));
                return;
            }
        };
        let is_leave = matches!(command, Command::LeaveGroup(_));
        let submitted = self.services.0.proposer.submit(command);
        self.acts.push_back(Box::pin(async move {
            let outcome = match submitted {
                Ok(submitted) => submitted.outcome().await,
                Err(error) => Err(error),
            };
            let result = outcome
                .map_err(Refusal::from)
                .and_then(|verdict| judge(verdict.result(), is_leave));
            Answered { request, is_leave, result }
        }));
    }
}

/// The one answer to an act: its refusal as a whole, or the first of its parts that was refused.
pub fn judge(outcome: Result<&Reply, &Rejection>, is_leave: bool) -> Result<(), Refusal> {
    match outcome.map_err(Refusal::from)? {
        // The member has left, whatever became of single partitions.
        Reply::Verdicts(_) if is_leave => Ok(()),
        Reply::Verdicts(verdicts) => {
            let refused = verdicts.iter().find_map(|verdict| verdict.as_ref().err());
            refused.map_or(Ok(()), |rejection| Err(rejection.into()))
        }
        Reply::Done => Ok(()),
        Reply::Joined { .. } | Reply::Operated { .. } => Err(unexpected("act")),
    }
}
