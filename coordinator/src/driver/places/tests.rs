use std::sync::Arc;

use tenure_core::Command;
use tenure_core::command::{JoinGroup, MemberRef};
use tenure_model::{
    GroupSettings, Index, ManualClock, MemberEpoch, SinkSetting, Takeover, Term, Timestamp,
};
use tokio::sync::{mpsc, oneshot};

use super::super::leading::Lane;
use super::super::session::{Down, Heartbeat, LastWordSaid, Open, Said, Session};
use super::*;
use crate::machine::GroupMachine;
use crate::raft::{EntryContext, Machine as _};
use crate::settings::NodeSettings;
use crate::soft::Beats;
use crate::stored::encode_batch;

const TTL_MS: u64 = 10_000;

/// Members of one group, with sessions of one raft leader.
struct Rig {
    machine: GroupMachine,
    reign: Reign,
    sessions: u64,
    open: Vec<(mpsc::Receiver<Down>, oneshot::Receiver<LastWordSaid>)>,
}

impl Rig {
    /// Members `m0`, `m1` and so on; the first has the instance id `x` if `is_static`.
    fn new(takeover: Takeover, member_count: usize, is_static: bool) -> Self {
        let mut machine = GroupMachine::new(Arc::new(ManualClock::default()));
        for member in 0..member_count {
            let sinks = vec![SinkSetting { name: "pg".to_owned(), enforces_epoch: true }];
            let join = Command::JoinGroup(JoinGroup {
                group: "g".parse().unwrap(),
                member: format!("m{member}").parse().unwrap(),
                instance: (is_static && member == 0).then(|| "x".parse().unwrap()),
                topics: vec!["t".parse().unwrap()],
                settings: GroupSettings { takeover, sinks, ..GroupSettings::default() },
                ttl_ms: TTL_MS,
                heartbeat_interval_ms: 3_000,
                client: String::new(),
                partitions_max: None,
                report: vec![],
                rejoin: None,
                prepares: false,
                weight: 1,
            });
            let index = Index(member as u64 + 1);
            let at = EntryContext { term: Term(1), index };
            let outcomes = machine.apply(at, &encode_batch(Timestamp(0), &[join])).unwrap();
            assert!(outcomes[0].result.is_ok(), "{:?}", outcomes[0].result);
        }
        let (settings, beats) = (Arc::new(NodeSettings::default()), Arc::new(Beats::new()));
        let address = "here:1".to_owned();
        let reign = Reign::begin(Term(1), &machine, settings, address, beats, at(0));
        let mut rig = Self { machine, reign, sessions: 0, open: Vec::new() };
        for member in 0..member_count {
            rig.open(member, at(0));
        }
        rig
    }

    fn open(&mut self, member: usize, now: Tick) -> SessionId {
        self.sessions += 1;
        let (outbound, down) = mpsc::channel(64);
        let (ended, ends) = oneshot::channel();
        let session = SessionId(self.sessions);
        let open = Open {
            member: named(member),
            session,
            receipt: now,
            labels: Arc::default(),
            outbound,
            ended,
        };
        let (member, receipt, session) = Session::new(open);
        let id = session.id;
        self.reign.open(member, receipt, session);
        self.open.push((down, ends));
        id
    }

    fn close(&mut self, member: usize, session: SessionId, now: Tick) {
        self.reign.closed_by_peer(&named(member), session, self.machine.state(), now);
    }

    fn ask(&mut self, asker: &str, now: Tick) -> Place {
        let (member, client) = (asker.parse().unwrap(), "host:1".to_owned());
        let asker = Asker { old: named(0), member, client };
        self.reign.ask_for_place(&asker, self.machine.state(), now)
    }

    fn deadline(&self, member: usize) -> Tick {
        self.reign.table.deadline(&named(member)).unwrap()
    }

    fn due(&mut self, now: Tick) -> Vec<Lane> {
        self.reign.proposals(now).into_iter().map(|proposal| proposal.lane).collect()
    }
}

fn named(member: usize) -> MemberRef {
    MemberRef {
        group: "g".parse().unwrap(),
        member: format!("m{member}").parse().unwrap(),
        member_epoch: MemberEpoch(member as u64 + 1),
    }
}

const fn at(ms: u64) -> Tick {
    Tick(ms * 1_000_000)
}

const fn waits(ms: u64) -> Place {
    Place::Waits { remaining: Duration::from_millis(ms) }
}

#[test]
fn closed_connection_ends_the_lease_after_the_grace_only_where_the_epoch_protects() {
    for (takeover, ends) in [(Takeover::Fence, at(1_250)), (Takeover::Lease, at(TTL_MS))] {
        let mut rig = Rig::new(takeover, 2, false);
        rig.close(0, SessionId(1), at(1_000));
        assert_eq!((rig.deadline(0), rig.deadline(1)), (ends, at(TTL_MS)));
        assert_eq!(rig.due(at(1_249)), []);
        let due = rig.due(at(1_250));
        assert_eq!(due == [Lane::Expire], takeover == Takeover::Fence, "{due:?}");
    }
}

#[test]
fn reconnect_within_the_grace_gives_the_lease_its_length_back() {
    let mut rig = Rig::new(Takeover::Fence, 2, false);
    rig.close(0, SessionId(1), at(1_000));
    let second = rig.open(0, at(1_200));
    assert_eq!(rig.deadline(0), at(1_200 + TTL_MS));
    // The end of the first connection is heard late: the second lives.
    rig.close(0, SessionId(1), at(1_300));
    assert_eq!(rig.deadline(0), at(1_200 + TTL_MS));
    rig.close(0, second, at(1_400));
    assert_eq!(rig.deadline(0), at(1_650));
}

#[test]
fn leases_are_cut_short_only_a_few_at_a_time() {
    let mut rig = Rig::new(Takeover::Fence, 12, false);
    for member in 0..12 {
        rig.close(member, SessionId(member as u64 + 1), at(1_000));
    }
    let short = (0..12).filter(|member| rig.deadline(*member) == at(1_250)).count();
    assert_eq!(short, 8);
    let again = rig.open(11, at(4_000));
    rig.close(11, again, at(4_100));
    assert_eq!(rig.deadline(11), at(4_350), "the window has passed");
}

#[test]
fn static_member_keeps_its_whole_lease_until_its_successor_asks() {
    let mut rig = Rig::new(Takeover::Fence, 2, true);
    rig.close(0, SessionId(1), at(1_000));
    assert_eq!(rig.deadline(0), at(TTL_MS));
    assert_eq!(rig.ask("new", at(1_100)), waits(150));
    assert_eq!(rig.due(at(1_250)), [Lane::Reserve]);
}

#[test]
fn successor_waits_while_nothing_is_heard_and_is_refused_once_something_is() {
    let mut rig = Rig::new(Takeover::Lease, 1, true);
    assert_eq!(rig.ask("new", at(1_000)), waits(9_000), "heard before it asked: says nothing");
    let beat = |sequence, receipt| {
        let session = SessionId(1);
        let (said, takes_as_held) = (Said::List(vec![]), false);
        Heartbeat { session, receipt, sequence, said, takes_as_held }
    };
    rig.reign.heartbeat(beat(1, at(2_000)));
    assert_eq!(rig.ask("new", at(2_100)), Place::Taken);
    assert_eq!(rig.ask("newer", at(2_200)), waits(9_800), "another process asks anew");
    rig.close(0, SessionId(1), at(3_000));
    assert_eq!(rig.ask("newer", at(3_100)), waits(8_900));
    assert_eq!(rig.ask("newer", at(11_000)), waits(1_000));
    assert_eq!(rig.due(at(11_999)), [Lane::Silence]);
    assert_eq!(rig.due(at(12_000)), [Lane::Reserve]);
}

#[test]
fn place_is_not_kept_for_a_process_that_stopped_asking() {
    let mut rig = Rig::new(Takeover::Lease, 1, true);
    rig.close(0, SessionId(1), at(1_000));
    assert_eq!(rig.ask("new", at(4_000)), waits(6_000));
    let due = rig.due(at(10_000));
    assert!(due.contains(&Lane::Expire) && !due.contains(&Lane::Reserve), "{due:?}");
}
