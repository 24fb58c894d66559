//! Offsets whose home is the coordinator.

use super::check;

#[test]
fn member_that_kept_its_partition_commits_though_the_group_changed_kip_1251() {
    check(
        "
        join ann sees t=2 -> group g created; ann joined; t has 2; group epoch 1; member epoch 1, ttl 10000
        target 0=ann 1=ann -> target for 1; 0 to ann at e1; 1 to ann at e2
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        join cat -> cat joined; group epoch 3; member epoch 4, ttl 10000
        commit ann 0@e1#1:41 -> 0 = 41
        target 0=ann 1=bob -> target for 3; 1 asked back from ann
        commit ann 0@e1#2:42 -> 0 = 42
        ",
    );
}

#[test]
fn owner_that_is_to_stop_commits_until_the_cut_over() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        join bob -> bob joined; group epoch 2; member epoch 3, ttl 10000
        target 0=bob -> target for 2; 0 asked back from ann
        commit ann 0@e1#1:41 -> 0 = 41
        release ann 0@e1:43 -> 0 = 43; 0 e1 of ann free: released; 0 to bob at e2
        commit ann 0@e1#2:44 -> no: partition 0 is fenced: given e1, current is e2: stop writing to it
        commit bob 0@e2#1:44 -> 0 = 44
        ",
    );
}

#[test]
fn late_commit_of_a_former_owner_is_fenced_e03() {
    check(
        "
        join ann sees t=3 -> group g created; ann joined; t has 3; group epoch 1; member epoch 1, ttl 10000
        target 2=ann -> target for 1; 2 to ann at e1
        commit ann 2@e1#1:1 -> 2 = 1
        join bob -> bob joined; group epoch 2; member epoch 4, ttl 10000
        target 2=bob -> target for 2; 2 asked back from ann
        drained 2@e1 -> 2 e1 of ann free: drain deadline; 2 to bob at e2
        acquired bob 2 e2 -> 2 runs at bob
        commit bob 2@e2#1:3 -> 2 = 3
        commit ann 2@e1#2:2 -> no: partition 2 is fenced: given e1, current is e2: stop writing to it
        commit bob 2@e2#2:4 -> 2 = 4
        ",
    );
}

#[test]
fn what_an_earlier_epoch_left_never_hides_a_commit_of_this_one_e04() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#90:56 -> 0 = 56
        release ann 0@e1 lost -> 0 e1 of ann free: released; 0 to ann at e2
        commit ann 0@e2#1:56 -> 0 = 56
        commit ann 0@e2#2:57 -> 0 = 57
        commit ann 0@e1#91:58 -> no: partition 0 is fenced: given e1, current is e2: stop writing to it
        ",
    );
}

#[test]
fn commit_of_a_member_that_is_gone_names_the_epoch_that_is_current() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann -> target for 2; 0 to ann at e1
        expire ann -> 0 e1 of ann free: expired; ann expired; group epoch 3
        commit ann 0@e1#1:1 -> no: partition 0 is not owned by ann: wait for a grant
        target 0=bob -> target for 3; 0 to bob at e2
        commit ann 0@e1#1:1 -> no: partition 0 is fenced: given e1, current is e2: stop writing to it
        ",
    );
}

#[test]
fn one_refused_partition_never_fails_its_neighbours() {
    check(
        "
        join ann sees t=4 -> group g created; ann joined; t has 4; group epoch 1; member epoch 1, ttl 10000
        join bob -> bob joined; group epoch 2; member epoch 2, ttl 10000
        target 0=ann 1=bob 2=ann -> target for 2; 0 to ann at e1; 1 to bob at e2; 2 to ann at e3
        commit ann 0@e1#1:10 1@e2#1:10 2@e9#1:10 3@e3#1:10 9@e1#1:10 2@e3#1:11 -> 0 = 10; 2 = 11; no: partition 1 is not owned by ann: wait for a grant; no: partition 2 is not owned by ann: wait for a grant; no: partition 3 is not owned by ann: wait for a grant; no: partition 9 is not known to group g: a member that reads its topic reports it
        ",
    );
}

#[test]
fn repeated_commit_is_accepted_and_changes_nothing() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#1:10 -> 0 = 10
        commit ann 0@e1#1:10 -> ok
        commit ann 0@e1#1:11 -> no: commit 1 of partition 0 is older than commit 1 of the same grant: nothing to do, sequences rise within a grant
        commit ann 0@e1#2:10 -> 0 = 10
        ",
    );
}

#[test]
fn later_commit_that_arrives_first_wins() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#2:20 -> 0 = 20
        commit ann 0@e1#1:10 -> no: commit 1 of partition 0 is older than commit 2 of the same grant: nothing to do, sequences rise within a grant
        ",
    );
}

#[test]
fn offset_never_moves_back() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#1:10 -> 0 = 10
        commit ann 0@e1#2:9 -> no: offset 9 of partition 0 is below the committed 10: use an offset reset to go back
        release ann 0@e1:5 -> 0 e1 of ann free: released; 0 to ann at e2
        commit ann 0@e2#1:9 -> no: offset 9 of partition 0 is below the committed 10: use an offset reset to go back
        commit ann 0@e2#1:10 -> 0 = 10
        ",
    );
}

#[test]
fn partition_named_twice_in_one_request_is_decided_in_order() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#1:10 0@e1#2:11 0@e1#2:11 0@e1#1:12 0@e1#3:9 -> 0 = 10; 0 = 11; no: commit 1 of partition 0 is older than commit 2 of the same grant: nothing to do, sequences rise within a grant; no: offset 9 of partition 0 is below the committed 11: use an offset reset to go back
        ",
    );
}

#[test]
fn commit_goes_to_the_group_s_home_only() {
    check(
        "
        join ann home sink sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#1:10 -> no: offsets of group g live in sink: commit them there
        release ann 0@e1:10 lost -> 0 e1 of ann free: released; 0 to ann at e2
        show ann -> version 4; 0 e2
        acquired ann 0 e2 home -> 0 runs at ann
        show ann -> version 4; 0 e2 initialised
        ",
    );
}

#[test]
fn too_much_metadata_is_refused_for_its_partition_alone() {
    let note = "x".repeat(4097);
    let mut run = super::Run::default();
    run.line("join ann sees t=2");
    run.line("target 0=ann 1=ann");
    let answer = run.line(&format!("commit ann 0@e1#1:10:{note} 1@e2#1:10:{}", &note[1..]));
    assert_eq!(answer, "1 = 10; no: bytes in the metadata: 4097: the limit is 4096");
}

#[test]
fn commit_to_an_unknown_group_is_refused() {
    check("commit ann 0@e1#1:10 -> no: group g does not exist: list the groups, or join it first");
}

#[test]
fn offset_moves_back_by_name_only_and_each_name_once() {
    check(
        "
        join ann sees t=1 -> group g created; ann joined; t has 1; group epoch 1; member epoch 1, ttl 10000
        target 0=ann -> target for 1; 0 to ann at e1
        commit ann 0@e1#1:42 -> 0 = 42
        commit ann 0@e1#2:7 -> no: offset 7 of partition 0 is below the committed 42: use an offset reset to go back
        rewind r1 ann 0@e1#2:7 -> 0 = 7
        commit ann 0@e1#3:9 -> 0 = 9
        rewind r1 ann 0@e1#4:7 -> ok
        rewind r2 ann 0@e1#3:7 -> no: commit 3 of partition 0 is older than commit 3 of the same grant: nothing to do, sequences rise within a grant
        rewind r2 bob 0@e1#4:7 -> no: partition 0 is not owned by bob: wait for a grant
        rewind r2 ann 0@e1#4:8 -> 0 = 8
        ",
    );
}
