//! Pins, drained members, caps, weights and restarts.

use super::*;

#[test]
fn pin_holds_and_the_rest_balances_around_it() {
    let target = check(
        "
        topic t 4
        member a t
        member b t
        owns a t/0..2
        owns b t/2..4
        pin t/0 b
        ",
        "loads 2 2; moved 2",
    );
    assert_eq!(target[&partition("t", 0)], member("b"));
}

#[test]
fn pin_to_a_member_that_cannot_take_it_is_ignored() {
    for who in ["b t draining", "b other", "c t"] {
        let script = format!("topic t 2\nmember a t\nmember {who}\nowns a t/0..2\npin t/0 b");
        let target = plan(&input(&script));
        assert_ne!(target[&partition("t", 0)], member("b"), "{who}");
    }
}

#[test]
fn partition_leaves_a_member_that_it_avoids_and_stays_when_there_is_no_other() {
    let target = check(
        "
        topic t 2
        member a t
        member b t
        owns a t/0
        owns b t/1
        avoid t/0 a
        ",
        "loads 1 1; moved 2",
    );
    assert_eq!(target[&partition("t", 0)], member("b"));
    check("topic t 2\nmember a t\nowns a t/0..2\navoid t/0 a", "loads 2; moved 0");
    check(
        "topic t 2\nmember a t\nmember b t cap 1\nowns a t/0\nowns b t/1\navoid t/0 a\navoid t/1 a",
        "loads 1 1; moved 0",
    );
}

#[test]
fn full_member_passes_on_what_others_can_take() {
    let target = check(
        "
        topic only-a 1
        topic both 2
        member a only-a,both cap 1
        member b both
        owns a both/0
        owns b both/1
        ",
        "loads 1 2; moved 1",
    );
    assert_eq!(target[&partition("only-a", 0)], member("a"));
}

#[test]
fn gap_closes_through_a_member_between() {
    check(
        "
        topic t 2
        topic u 1
        member a t
        member b t,u
        member c u
        owns a t/0..2
        owns b u/0
        ",
        "loads 1 1 1; moved 2",
    );
}

#[test]
fn what_moves_anyway_moves_before_what_is_owned() {
    check(
        "
        topic k 1
        topic l 1
        topic u 2
        topic v 5
        topic m 1
        topic x 2
        member a k,l,u,m
        member b k,l,m,x
        member c u,v
        owns a m/0
        owns b x/0..2
        owns c v/0..5
        ",
        "loads 4 3 5; moved 0",
    );
    check(
        "
        topic m 3
        topic u 2
        topic v 5
        topic x 3
        member a m,u
        member b m,x
        member c u,v
        owns a m/0
        owns b x/0..3
        owns c v/0..5
        ",
        "loads 4 4 5; moved 0",
    );
}

#[test]
fn loads_follow_weights_as_near_as_whole_partitions_can() {
    check("topic t 12\nmember a t weight 2\nmember b t", "loads 8 4; moved 0");
    check(
        "topic t 12\nmember a t weight 3\nmember b t weight 2\nmember c t",
        "loads 6 4 2; moved 0",
    );
    check("topic t 1\nmember a t\nmember b t weight 20", "loads 0 1; moved 0");
    // From even loads, no more moves than it takes.
    check(
        "
        topic t 12
        member a t weight 2
        member b t
        owns a t/0..6
        owns b t/6..12
        ",
        "loads 8 4; moved 2",
    );
    check("topic t 12\nmember a t weight 2 cap 5\nmember b t", "loads 5 7; moved 0");
}

#[test]
fn no_move_brings_weighted_loads_nearer_to_their_shares() {
    for count in [1, 5, 17, 40] {
        for weights in [[1, 1, 1], [1, 2, 3], [5, 1, 20], [7, 7, 2]] {
            let [a, b, c] = weights;
            let text = format!(
                "topic t {count}\nmember a t weight {a}\nmember b t weight {b}\nmember c t weight {c}"
            );
            let input = input(&text);
            let target = plan(&input);
            let loads: Vec<u64> =
                loads(&input, &target).into_iter().map(|load| load as u64).collect();
            assert_eq!(loads.iter().sum::<u64>(), count);
            for from in 0..3 {
                for to in (0..3).filter(|to| *to != from && loads[from] > 0) {
                    let relief = (2 * loads[from] - 1) * weights[to];
                    let growth = (2 * loads[to] + 1) * weights[from];
                    assert!(relief <= growth, "{loads:?} for {weights:?}");
                }
            }
        }
    }
}

/// Restarts six members one after the other, each under a new name, and counts how often a partition moved at most.
fn moves_of_a_rolling_restart(knows_since: bool) -> usize {
    let mut now = input("topic a 24");
    let join = |input: &mut Input, name: String| {
        let topics = BTreeSet::from([TopicName::new("a").unwrap()]);
        let new = Member { topics, partitions_max: None, weight: 1, draining: false };
        input.members.insert(member(&name), new);
    };
    (0..6).for_each(|slot| join(&mut now, format!("old-{slot}")));
    now.current = plan(&now);
    let mut counts: BTreeMap<Partition, usize> = BTreeMap::new();
    let mut clock = 0;
    let mut replan = |now: &mut Input| {
        let next = plan(now);
        for (partition, to) in &next {
            if now.current.get(partition) != Some(to) {
                clock += 1;
                if knows_since {
                    now.since.insert(*partition, clock);
                }
                *counts.entry(*partition).or_default() += 1;
            }
        }
        now.current = next;
        counts.values().copied().max().unwrap_or(0)
    };
    let mut most = 0;
    for slot in 0..6 {
        now.members.remove(&member(&format!("old-{slot}")));
        replan(&mut now);
        join(&mut now, format!("new-{slot}"));
        most = replan(&mut now);
    }
    most
}

#[test]
fn rolling_restart_moves_a_partition_at_most_twice() {
    assert_eq!(moves_of_a_rolling_restart(true), 2);
    assert!(moves_of_a_rolling_restart(false) > 2, "the order of what moves makes the difference");
}
