//! A rolling restart of six members: who owns what before, between and after.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use tenure_proto::v1;
use tenure_sink_postgres::sql;
use tenure_tests::cluster::Cluster;
use tenure_tests::effects::EFFECTS;
use tenure_tests::feed::{Feed, Rate};
use tenure_tests::figures::tell;
use tenure_tests::process::Process;
use tenure_tests::servers::{unique_name, wait_until};

use crate::parts;

const MEMBERS: usize = 6;
const PARTITIONS: u16 = 24;
const TTL_MS: u64 = 10_000;
const STEP_MAX: Duration = Duration::from_secs(90);
const RATE: Rate = Rate { pause: Duration::from_millis(20), records: 1 };

/// How a member is ended before it comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Clean,
    Killed,
}

/// Owner by name and epoch of each partition.
type Owners = BTreeMap<u32, (String, u64)>;

struct Rig {
    cluster: Cluster,
    group: String,
    members: Vec<Process>,
}

impl Rig {
    /// All partitions, once each is at work.
    fn owners(&self, what: &str) -> Owners {
        let mut owners = Owners::new();
        let settled = wait_until(STEP_MAX, || {
            owners = self.look();
            owners.len() == usize::from(PARTITIONS)
        });
        let tails: Vec<String> = self.members.iter().map(Process::tail).collect();
        assert!(
            settled,
            "{what}: {owners:?}\n{}\n{}",
            tails.join("\n---\n"),
            self.cluster.output()
        );
        owners
    }

    /// Partitions that are held, at work, and where they should be.
    fn look(&self) -> Owners {
        let Ok(group) = self.cluster.describe(&self.group) else { return Owners::new() };
        let name_of = |id: &str| {
            let member = group.members.iter().find(|member| member.member == id);
            member.map_or_else(String::new, |member| member.client.clone())
        };
        let is_settled = |found: &&v1::PartitionInfo| {
            found.state() == v1::OwnershipState::Held
                && found.acquired
                && found.member == found.target_member
        };
        let settled = group.partitions.iter().filter(is_settled);
        let owners = settled.filter_map(|found| {
            let index = found.partition.as_ref()?.index;
            Some((index, (name_of(&found.member), found.epoch)))
        });
        // Nobody is missing: an absent member's partitions may be elsewhere for a while.
        if group.members.len() == MEMBERS { owners.collect() } else { Owners::new() }
    }

    /// How often each partition came to another process since `first`: the fewest and the most.
    fn moves(&self, first: &Owners) -> (usize, usize) {
        let group = self.cluster.describe(&self.group).unwrap();
        let moves = group.partitions.iter().filter_map(|found| {
            let partition = found.partition.as_ref()?;
            let (_, since) = &first[&partition.index];
            let grants = self.cluster.history(&self.group, partition).unwrap();
            let grants: Vec<_> = grants.iter().filter(|grant| grant.epoch >= *since).collect();
            Some(grants.windows(2).filter(|pair| pair[0].member != pair[1].member).count())
        });
        let moves: Vec<usize> = moves.collect();
        assert_eq!(moves.len(), usize::from(PARTITIONS));
        (*moves.iter().min().unwrap(), *moves.iter().max().unwrap())
    }
}

/// Restarts all members one by one; `check` compares before and after for the member with a name. Answers how it was
/// before the first restart, too.
fn roll(
    end: End,
    with_instances: bool,
    check: impl Fn(&str, &Owners, &Owners),
) -> Option<(Rig, Owners)> {
    let (postgres, kafka) = parts()?;
    let cluster = Cluster::start(1);
    let name = postgres.new_database();
    postgres.sql(&name, &format!("{}; {EFFECTS}", sql::MIGRATE));
    let url = postgres.url_of(&name, postgres.port());
    let topic = kafka.new_topic("rolling", PARTITIONS);
    let group = unique_name("rolling");
    let feed = Feed::start(kafka, &topic, PARTITIONS.into(), RATE);
    let addresses = cluster.addresses().join(",");
    let spawn = |slot: usize| {
        let name = format!("member-{slot}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_zombie-worker"));
        command.args(["--name", &name, "--group", &group, "--topic", &topic, "--postgres", &url]);
        command.args(["--kafka", kafka.bootstrap(), "--ttl-ms", &TTL_MS.to_string()]);
        command.args(["--coordinators", &addresses, "--offsets", "sink"]);
        if with_instances {
            command.args(["--instance", &name]);
        }
        Process::spawn(&name, &mut command)
    };
    let members = (0..MEMBERS).map(spawn).collect();
    let mut rig = Rig { cluster, group: group.clone(), members };
    let first = rig.owners("the first assignment");
    let mut before = first.clone();
    for slot in 0..MEMBERS {
        let member = &mut rig.members[slot];
        match end {
            End::Clean => {
                member.terminate();
                let ended = member.wait(STEP_MAX);
                assert!(ended.is_some_and(|status| status.success()), "{}", member.tail());
            }
            End::Killed => drop(member.kill()),
        }
        rig.members[slot] = spawn(slot);
        let after = rig.owners(&format!("member {slot} restarted"));
        check(&format!("member-{slot}"), &before, &after);
        before = after;
    }
    let _records = feed.end();
    Some((rig, first))
}

fn nobody_else_is_touched(end: End) {
    let check = |restarted: &str, before: &Owners, after: &Owners| {
        for (partition, (owner, epoch)) in before {
            let (owner_after, epoch_after) = &after[partition];
            assert_eq!(owner, owner_after, "partition {partition}, {restarted} was restarted");
            if owner != restarted {
                assert_eq!(epoch, epoch_after, "partition {partition} was taken and given again");
            }
        }
    };
    if roll(end, true, check).is_some() {
        tell(format_args!(
            "rolling restart of {MEMBERS} static members, {end:?}: no other partition moved"
        ));
    }
}

#[test]
fn clean_rolling_restart_of_static_members_moves_no_partition_of_the_others() {
    nobody_else_is_touched(End::Clean);
}

#[test]
fn rolling_restart_of_static_members_by_sigkill_moves_no_partition_of_the_others() {
    nobody_else_is_touched(End::Killed);
}

#[test]
fn rolling_restart_without_instance_ids_moves_each_partition_at_most_twice() {
    let Some((rig, first)) = roll(End::Clean, false, |_, _, _| {}) else { return };
    let (fewest, most) = rig.moves(&first);
    tell(format_args!(
        "rolling restart of {MEMBERS} members: a partition moved {fewest} to {most} times"
    ));
    // Each was owned by a process that was restarted.
    assert!(fewest >= 1, "a partition that has lost its owner did not move");
    assert!(most <= 2, "a partition moved {most} times");
}
