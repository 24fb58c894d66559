//! The streams of sessions, up and down, as a member's process and the network have them.

use tenure_model::{Epoch, MemberId};
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tenure_sdk::session::machine::Input;

use super::super::control::Protection;
use super::super::invariants::Fact;
use super::super::network::Host;
use super::super::world::{Event, World};

impl World {
    pub(super) fn send_of(&mut self, member: usize, up: v1::SessionUp) {
        let now = self.now;
        let found = &mut self.members[member];
        match &up.up {
            Some(Up::Join(join)) => {
                // A membership that ended is followed by one under another id.
                found.id = MemberId::new(&join.member).expect("the machine's own name");
                found.sent_at.insert(0, now);
            }
            Some(Up::Heartbeat(beat)) => {
                found.sent_at.insert(beat.sequence, now);
            }
            Some(Up::Release(release)) => {
                let lost = i32::from(v1::ReleaseReason::LeaseLost);
                if self.plan.without == Some(Protection::LeaseFromSend)
                    && release.partitions.iter().any(|line| line.reason == lost)
                {
                    // It would not say so before its own, later end.
                    let (boot, shift) = (found.boot, found.lease_shift);
                    let late = u64::try_from(shift.as_nanos()).unwrap_or(0) + 5_000_000;
                    if let Some(stream) = found.stream {
                        self.after(late, Event::SendLate { member, boot, stream, up });
                    }
                    return;
                }
                let lines = release.partitions.iter().filter_map(|line| {
                    let partition =
                        tenure_proto::convert::partition("", line.partition.as_ref()).ok()?;
                    Some((partition, Epoch::new(line.epoch).ok()?, line.next_offset?))
                });
                found.finals.insert(release.request, lines.collect());
            }
            Some(Up::Acquired(_) | Up::Prepared(_) | Up::ReportTopics(_) | Up::Leave(_)) | None => {
            }
        }
        if let Some(stream) = found.stream {
            self.send_up(stream, Some(up));
        }
    }

    /// In a control run, a release that was held back.
    pub fn send_late(&mut self, member: usize, boot: u64, stream: u64, up: v1::SessionUp) {
        if self.is_of_member(member, boot) && self.members[member].stream == Some(stream) {
            self.send_up(stream, Some(up));
        }
    }

    fn send_up(&mut self, number: u64, up: Option<v1::SessionUp>) {
        let Some(stream) = self.network.streams.get_mut(&number) else { return };
        let (from, to) = (Host::Member(stream.member), Host::Node(stream.node));
        stream.up.push_back(up);
        let before = stream.up_at;
        let delay = self.network.delay(from, to, &mut self.rng);
        let at = (self.now + delay).max(before + 1);
        if let Some(stream) = self.network.streams.get_mut(&number) {
            stream.up_at = at;
        }
        self.at(at, Event::Up { stream: number });
    }

    /// The member gives a stream up: what is on its way may still arrive at the node.
    pub fn give_up(&mut self, number: u64) {
        if let Some(stream) = self.network.streams.get_mut(&number) {
            stream.is_given_up = true;
        }
        self.send_up(number, None);
    }

    /// The stream ends by itself: both ends are told.
    pub fn break_stream(&mut self, number: u64) {
        self.end_stream(number, None);
        self.send_up(number, None);
    }

    /// A node sends a message down.
    pub fn send_down(&mut self, number: u64, down: v1::SessionDown) {
        self.push_down(number, Ok(down));
    }

    /// A node ends a stream, with a word or without.
    pub fn end_stream(&mut self, number: u64, error: Option<v1::Error>) {
        self.push_down(number, Err(error));
        if let Some(stream) = self.network.streams.get_mut(&number) {
            stream.is_over = true;
        }
    }

    fn push_down(&mut self, number: u64, down: Result<v1::SessionDown, Option<v1::Error>>) {
        let Some(stream) = self.network.streams.get_mut(&number) else { return };
        if stream.is_over {
            return;
        }
        let (from, to) = (Host::Node(stream.node), Host::Member(stream.member));
        stream.down.push_back(down);
        let before = stream.down_at;
        let delay = self.network.delay(from, to, &mut self.rng);
        let at = (self.now + delay).max(before + 1);
        if let Some(stream) = self.network.streams.get_mut(&number) {
            stream.down_at = at;
        }
        self.at(at, Event::Down { stream: number });
    }

    /// A message of a stream arrives at its member.
    pub fn down(&mut self, number: u64) {
        let Some(stream) = self.network.streams.get(&number) else { return };
        let (node, member, boot) = (stream.node, stream.member, stream.member_boot);
        if self.network.is_cut(Host::Node(node), Host::Member(member)) {
            self.after(50_000_000, Event::Down { stream: number });
            return;
        }
        let Some(stream) = self.network.streams.get_mut(&number) else { return };
        let Some(message) = stream.down.pop_front() else { return };
        let is_last = message.is_err();
        let is_taken = !stream.is_given_up
            && self.is_of_member(member, boot)
            && self.members[member].stream == Some(number);
        if is_last {
            self.network.streams.remove(&number);
        }
        if !is_taken {
            return;
        }
        match message {
            Ok(down) if self.loses_answer(member, &down) => {
                self.give_up(number);
                self.members[member].stream = None;
                self.feed(member, Input::Disconnected { error: None });
            }
            Ok(down) => self.received(member, down),
            Err(error) => {
                self.members[member].stream = None;
                self.feed(member, Input::Disconnected { error });
            }
        }
    }

    fn received(&mut self, member: usize, down: v1::SessionDown) {
        let answers = match &down.down {
            Some(Down::Joined(_)) => Some(0),
            Some(Down::HeartbeatAnswer(answer)) => Some(answer.sequence),
            Some(Down::ActAnswer(answer)) => {
                let finals = self.members[member].finals.remove(&answer.request);
                if answer.error.is_none() {
                    for (partition, epoch, next) in finals.into_iter().flatten() {
                        self.fact(&Fact::Acknowledged { partition, epoch, next });
                    }
                }
                None
            }
            Some(Down::Assignment(_) | Down::Ended(_)) | None => None,
        };
        let sent_at = answers.and_then(|question| self.members[member].sent_at.get(&question));
        if let Some(sent_at) = sent_at.copied() {
            let id = self.members[member].id.clone();
            self.fact(&Fact::HeartbeatAnswered { member: &id, sent_at });
            if self.plan.without == Some(Protection::LeaseFromSend) {
                let clock = self.members[member].clock;
                let shift = clock.show(self.now).since(clock.show(sent_at));
                self.members[member].lease_shift = shift;
            }
        }
        self.feed(member, Input::Received(down));
    }
}
