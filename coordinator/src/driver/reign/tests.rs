mod lists;

use std::sync::Arc;

use tenure_core::command::{
    AcknowledgeAcquired, InstallTarget, JoinGroup, MovePartition, OperatorContext, SilentMember,
    TopicReport,
};
use tenure_core::{Command, Reply};
use tenure_model::{
    Epoch, GroupEpoch, GroupSettings, LeaseSettings, ManualClock, MemberEpoch, Partition,
    PartitionIndex, Timestamp, TopicId,
};
use tenure_proto::v1;
use tokio::sync::{mpsc, oneshot};

use super::super::TICK;
use super::super::leading::{Lane, Proposal};
use super::super::session::{Heartbeat, Open, Said, SessionId};
use super::*;
use crate::raft::{EntryContext, Machine as _};
use crate::settings::LeaseLengths;
use crate::soft::{Held, Phase};
use crate::stored::encode_batch;

const TTL_MS: u64 = 10_000;

struct Rig {
    machine: GroupMachine,
    clock: ManualClock,
    index: u64,
}

impl Rig {
    /// Ann owns the only partition, bob owns none.
    fn new() -> Self {
        Self::with_bob(false)
    }

    fn with_bob(prepares: bool) -> Self {
        Self::with(prepares, TTL_MS)
    }

    fn with(prepares: bool, ttl_ms: u64) -> Self {
        let clock = ManualClock::default();
        let machine = GroupMachine::new(Arc::new(clock.clone()));
        let mut rig = Self { machine, clock, index: 0 };
        for member in ["ann", "bob"] {
            rig.apply(Command::JoinGroup(JoinGroup {
                group: group(),
                member: member.parse().unwrap(),
                instance: None,
                topics: vec!["t".parse().unwrap()],
                settings: GroupSettings::default(),
                ttl_ms,
                heartbeat_interval_ms: LeaseSettings::for_ttl(ttl_ms).heartbeat_interval_ms,
                client: String::new(),
                partitions_max: None,
                report: vec![TopicReport {
                    topic: "t".parse().unwrap(),
                    topic_id: TopicId::from_bits(1),
                    partition_count: 1,
                }],
                rejoin: None,
                prepares: prepares && member == "bob",
                weight: 1,
            }));
        }
        let group_epoch = rig.machine.state().group(&group()).unwrap().epoch;
        assert!(group_epoch > GroupEpoch(0));
        rig.apply(Command::InstallTarget(InstallTarget {
            group: group(),
            group_epoch,
            target: vec![(partition(), "ann".parse().unwrap())],
            line_by_line: false,
        }));
        rig.apply(Command::AcknowledgeAcquired(AcknowledgeAcquired {
            group: group(),
            member: "ann".parse().unwrap(),
            partition: partition(),
            epoch: Epoch::FIRST,
            home_initialised: false,
        }));
        rig
    }

    fn apply(&mut self, command: Command) -> Vec<Event> {
        self.index += 1;
        let at = EntryContext { term: Term(1), index: Index(self.index) };
        let outcomes = self.machine.apply(at, &encode_batch(Timestamp(0), &[command])).unwrap();
        assert!(outcomes[0].result.is_ok(), "{:?}", outcomes[0].result);
        outcomes[0].events.clone()
    }

    /// Lets what is due at `now` be applied at once.
    fn work_off(&mut self, reign: &mut Reign, now: Tick) {
        for Proposal { lane, members, command } in reign.proposals(now) {
            self.index += 1;
            let at = EntryContext { term: Term(1), index: Index(self.index) };
            let batch = encode_batch(Timestamp(0), &[command]);
            let outcomes = self.machine.apply(at, &batch).unwrap();
            reign.follow(Index(self.index), outcomes[0].events.iter(), now);
            let outcome = Some(outcomes[0].result.as_ref());
            reign.proposed(lane, &members, outcome, self.machine.state(), now);
            reign.flush(self.machine.state(), now);
        }
    }

    fn follow(&mut self, reign: &mut Reign, command: Command, now: Tick) {
        let events = self.apply(command);
        reign.follow(Index(self.index), events.iter(), now);
        reign.flush(self.machine.state(), now);
    }

    fn begin(&self, now: Tick) -> Reign {
        let settings = NodeSettings {
            lease: LeaseLengths { ttl_ms: TTL_MS, ..LeaseLengths::default() },
            ..NodeSettings::default()
        };
        let address = "here:1".to_owned();
        let beats = Arc::new(Beats::new());
        let mut reign =
            Reign::begin(Term(1), &self.machine, Arc::new(settings), address, beats, now);
        reign.flush(self.machine.state(), now);
        reign
    }
}

fn group() -> GroupId {
    "g".parse().unwrap()
}

fn partition() -> Partition {
    Partition { topic_id: TopicId::from_bits(1), index: PartitionIndex::new(0).unwrap() }
}

fn member(name: &str) -> MemberRef {
    let member_epoch = MemberEpoch(if name == "ann" { 1 } else { 2 });
    MemberRef { group: group(), member: name.parse().unwrap(), member_epoch }
}

/// The first session of a member.
fn session(name: &str) -> SessionId {
    SessionId(if name == "ann" { 1 } else { 2 })
}

const fn at(ms: u64) -> Tick {
    Tick(ms * 1_000_000)
}

/// A session, and what came down it.
struct Ends {
    down: mpsc::Receiver<super::super::session::Down>,
    _ended: oneshot::Receiver<super::super::session::LastWordSaid>,
}

impl Ends {
    fn open(reign: &mut Reign, name: &str, receipt: Tick) -> Self {
        Self::open_as(reign, name, session(name), receipt)
    }

    fn open_as(reign: &mut Reign, name: &str, session: SessionId, receipt: Tick) -> Self {
        let (outbound, down) = mpsc::channel(16);
        let (ended, ends) = oneshot::channel();
        let open = Open {
            member: member(name),
            session,
            receipt,
            labels: Arc::default(),
            outbound,
            ended,
        };
        let (member, receipt, session) = Session::new(open);
        reign.open(member, receipt, session);
        Self { down, _ended: ends }
    }

    /// Kinds of what came since the last look.
    fn came(&mut self) -> Vec<Down> {
        let mut came = Vec::new();
        while let Ok(down) = self.down.try_recv() {
            came.push(down.unwrap().down.unwrap());
        }
        came
    }
}

fn beat(reign: &mut Reign, name: &str, sequence: u64, receipt: Tick) {
    let session = session(name);
    let said = Said::List(vec![]);
    reign.heartbeat(Heartbeat { session, receipt, sequence, said, takes_as_held: false });
}

fn running(partition: Partition, epoch: Epoch) -> Held {
    let phase = Phase::Running;
    Held {
        partition,
        epoch,
        phase,
        position: 0,
        phase_ms: 0,
        error: String::new(),
        still_ms: 0,
        end_offset: None,
    }
}

fn say(reign: &mut Reign, name: &str, said: Said, takes_as_held: bool) {
    let session = session(name);
    let receipt = at(1_000);
    reign.heartbeat(Heartbeat { session, receipt, sequence: 1, said, takes_as_held });
}

impl Ends {
    /// The last answer to a heartbeat: its version, and whether the list is left out.
    fn answer(&mut self) -> (u64, bool) {
        let came = self.came();
        let Some(Down::HeartbeatAnswer(answer)) = came.last() else { panic!("{came:?}") };
        match (&answer.assignment, answer.as_held) {
            (Some(assignment), 0) => (assignment.version, false),
            (None, version) if version > 0 => (version, true),
            _ => panic!("both or none: {answer:?}"),
        }
    }
}

fn confirm(reign: &mut Reign, rig: &Rig) {
    let waiting = reign.take_waiting();
    reign.answer(waiting, rig.machine.state());
}

/// A session that was told that it has joined.
fn joined(reign: &mut Reign, rig: &Rig, name: &str) -> Ends {
    let mut ends = Ends::open(reign, name, at(0));
    confirm(reign, rig);
    assert!(matches!(ends.came().as_slice(), [Down::Joined(_)]));
    ends
}

#[test]
fn next_leader_expires_a_silent_member_by_when_this_replica_first_saw_it() {
    let mut rig = Rig::new();
    rig.clock.advance(Duration::from_secs(100));
    let silent = SilentMember { member: member("ann"), silent_for_ms: 4_000 };
    rig.apply(Command::MarkMembersSilent { term: Term(1), members: vec![silent] });
    let reign = rig.begin(at(105_000));
    assert_eq!(reign.table.deadline(&member("ann")), Some(at(106_000)));
    assert_eq!(reign.table.deadline(&member("bob")), Some(at(115_000)), "a full ttl");
}

#[test]
fn heartbeat_waits_for_a_confirmation_that_began_after_its_receipt() {
    let rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut ann = Ends::open(&mut reign, "ann", at(0));
    confirm(&mut reign, &rig);
    assert!(matches!(ann.came().as_slice(), [Down::Joined(_)]));

    beat(&mut reign, "ann", 1, at(10));
    let under_way = reign.take_waiting();
    beat(&mut reign, "ann", 2, at(20));
    assert_eq!(ann.came(), []);
    reign.answer(under_way, rig.machine.state());
    let came = ann.came();
    assert!(matches!(
        came.as_slice(),
        [Down::HeartbeatAnswer(v1::HeartbeatAnswer { sequence: 1, .. })]
    ));
    // The confirmation is lost; a later heartbeat takes the place of the one before it.
    let lost = reign.take_waiting();
    beat(&mut reign, "ann", 3, at(30));
    reign.give_back(lost);
    confirm(&mut reign, &rig);
    let came = ann.came();
    assert!(matches!(
        came.as_slice(),
        [Down::HeartbeatAnswer(v1::HeartbeatAnswer { sequence: 3, .. })]
    ));
}

#[test]
fn silent_member_ends_within_one_look_after_its_ttl_whatever_that_is_l05() {
    for ttl_ms in [1_000, 10_000, 20_000, 30_000] {
        let mut rig = Rig::with(false, ttl_ms);
        let mut reign = rig.begin(at(0));
        let _ann = Ends::open(&mut reign, "ann", at(0));
        // Between two looks.
        let last = at(ttl_ms / 3 + 7);
        beat(&mut reign, "ann", 1, last);
        let mut now = last;
        let is_member = |rig: &Rig| {
            let group = rig.machine.state().group(&group()).unwrap();
            group.members.contains_key(&"ann".parse().unwrap())
        };
        while is_member(&rig) {
            now = now.after(TICK);
            rig.work_off(&mut reign, now);
        }
        let (ttl, lived) = (Duration::from_millis(ttl_ms), now.since(last));
        assert!((ttl..=ttl + TICK).contains(&lived), "ttl {ttl:?}: ended after {lived:?}");
    }
}

#[test]
fn expiring_member_hears_nothing_until_its_end_is_applied() {
    let mut rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut ann = joined(&mut reign, &rig, "ann");
    // Its heartbeat was received and waits while the deadline passes.
    reign.table.check(at(10_000));
    beat(&mut reign, "ann", 1, at(10_001));
    confirm(&mut reign, &rig);
    assert_eq!(ann.came(), []);
    let expire = Command::ExpireMembers { term: Term(1), members: vec![member("ann")] };
    rig.follow(&mut reign, expire, at(10_002));
    let came = ann.came();
    let [Down::Ended(ended)] = came.as_slice() else { panic!("{came:?}") };
    assert_eq!(ended.error.as_ref().unwrap().code, "MEMBER_GONE");
}

#[test]
fn silent_member_is_answered_once_the_log_says_that_it_was_heard() {
    let mut rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut ann = joined(&mut reign, &rig, "ann");
    reign.table.check(at(4_000));
    let members = reign.table.silence_to_log(at(4_000));
    rig.follow(&mut reign, Command::MarkMembersSilent { term: Term(1), members }, at(4_001));
    beat(&mut reign, "ann", 1, at(4_500));
    confirm(&mut reign, &rig);
    assert_eq!(ann.came(), []);
    let members = reign.table.heard_to_log();
    assert_eq!(members, [member("ann")]);
    rig.follow(&mut reign, Command::MarkMembersHeard { term: Term(1), members }, at(4_501));
    assert_eq!(ann.came(), [], "a confirmation has to begin after it");
    confirm(&mut reign, &rig);
    assert!(matches!(ann.came().as_slice(), [Down::HeartbeatAnswer(_)]));
}

fn silence(rig: &mut Rig, reign: &mut Reign, ms: u64) {
    reign.table.check(at(ms));
    let members = reign.table.silence_to_log(at(ms));
    assert_eq!(members.len(), 2);
    rig.follow(reign, Command::MarkMembersSilent { term: Term(1), members }, at(ms));
}

fn hear(rig: &mut Rig, reign: &mut Reign, ms: u64) {
    for name in ["ann", "bob"] {
        beat(reign, name, ms, at(ms));
    }
    let members = reign.table.heard_to_log();
    assert_eq!(members.len(), 2);
    rig.follow(reign, Command::MarkMembersHeard { term: Term(1), members }, at(ms));
}

/// The verdict of a proposal that came through for ann, heard of only now.
fn late_verdict(reign: &mut Reign, rig: &Rig, lane: Lane, ms: u64) {
    let reply = Reply::Verdicts(vec![Ok(())]);
    reign.proposed(lane, &[member("ann")], Some(Ok(&reply)), rig.machine.state(), at(ms));
}

#[test]
fn late_verdict_on_a_silence_does_not_undo_that_the_member_was_heard_since() {
    let mut rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let _ends = ["ann", "bob"].map(|name| Ends::open(&mut reign, name, at(0)));
    silence(&mut rig, &mut reign, 4_000);
    hear(&mut rig, &mut reign, 4_500);
    late_verdict(&mut reign, &rig, Lane::Silence, 4_600);
    reign.table.check(at(8_500));
    let silent = reign.table.silence_to_log(at(8_500));
    assert_eq!(silent.len(), 2, "the log has to hear of it again: {silent:?}");
}

#[test]
fn late_verdict_on_hearing_does_not_undo_a_silence_since() {
    let mut rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut ann = Ends::open(&mut reign, "ann", at(0));
    let _bob = Ends::open(&mut reign, "bob", at(0));
    confirm(&mut reign, &rig);
    ann.came();
    silence(&mut rig, &mut reign, 4_000);
    hear(&mut rig, &mut reign, 4_500);
    confirm(&mut reign, &rig);
    ann.came();
    silence(&mut rig, &mut reign, 8_500);
    late_verdict(&mut reign, &rig, Lane::Hear, 8_600);
    beat(&mut reign, "ann", 9_000, at(9_000));
    confirm(&mut reign, &rig);
    assert_eq!(ann.came(), [], "the log calls it silent: the next raft leader may expire it early");
}

#[test]
fn revoke_is_pushed_and_its_remaining_drain_counts_from_the_receipt_that_is_answered() {
    let mut rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut ann = joined(&mut reign, &rig, "ann");
    let mut bob = joined(&mut reign, &rig, "bob");
    let operator = OperatorContext {
        request: "r1".parse().unwrap(),
        reason: "test".to_owned(),
        actor: "test".to_owned(),
    };
    let to = "bob".parse().unwrap();
    let wish = MovePartition { operator, group: group(), partition: partition(), to };
    rig.follow(&mut reign, Command::MovePartition(wish), at(1_000));
    let remaining = |assignment: &v1::Assignment| {
        let assigned = &assignment.partitions[0];
        assert!(assigned.revoking);
        assigned.drain_remaining_ms
    };
    let came = ann.came();
    let [Down::Assignment(pushed)] = came.as_slice() else { panic!("{came:?}") };
    assert_eq!(remaining(pushed), 30_000);
    assert_eq!(bob.came(), [], "nothing of its own changed");
    beat(&mut reign, "ann", 1, at(3_000));
    confirm(&mut reign, &rig);
    let came = ann.came();
    let [Down::HeartbeatAnswer(answer)] = came.as_slice() else { panic!("{came:?}") };
    assert_eq!(remaining(answer.assignment.as_ref().unwrap()), 28_000);
}

#[test]
fn later_session_of_a_member_takes_the_place_of_the_earlier() {
    let rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut first = Ends::open(&mut reign, "ann", at(0));
    let mut second = Ends::open(&mut reign, "ann", at(1));
    confirm(&mut reign, &rig);
    assert_eq!(first.came(), []);
    assert!(first.down.is_closed());
    assert!(matches!(second.came().as_slice(), [Down::Joined(_)]));
}

#[test]
fn running_grant_that_heartbeats_leave_out_is_asked_for() {
    let rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let _ann = Ends::open(&mut reign, "ann", at(0));
    confirm(&mut reign, &rig);
    let asks = |reign: &mut Reign, ms| {
        let lane = Lane::TakeBackUnserved;
        reign.proposals(at(ms)).iter().any(|proposal| proposal.lane == lane)
    };
    let held = running(partition(), Epoch::FIRST);
    // Left out at 1 s, named at 3 s, left out from 5 s on: two intervals and the slack are 7 s.
    for (sequence, ms, held) in [
        (1, 1_000, vec![]),
        (2, 3_000, vec![held]),
        (3, 5_000, vec![]),
        (4, 8_000, vec![]),
        (5, 11_000, vec![]),
    ] {
        let (session, receipt) = (session("ann"), at(ms));
        let (said, takes_as_held) = (Said::List(held), false);
        reign.heartbeat(Heartbeat { session, receipt, sequence, said, takes_as_held });
        confirm(&mut reign, &rig);
    }
    assert!(!asks(&mut reign, 11_999));
    assert!(asks(&mut reign, 12_000));
}
