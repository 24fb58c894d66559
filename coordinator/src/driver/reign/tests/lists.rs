//! Lists that are told in full, and those that an answer leaves out.

use super::*;

/// Ann's list as it is, and its version.
fn list(rig: &Rig) -> (Vec<Held>, u64) {
    let assignment = rig.machine.state().assignment(&group(), &"ann".parse().unwrap()).unwrap();
    let held = assignment.partitions.iter();
    let held = held.map(|assigned| running(assigned.partition, assigned.epoch)).collect();
    (held, assignment.version.0)
}

/// What a heartbeat says beside a list of one running partition, whether it takes an answer without a list, and
/// whether it gets one.
fn cases(held: &[Held], version: u64) -> Vec<(&'static str, Said, bool, bool)> {
    let other = Partition { index: PartitionIndex::new(1).unwrap(), ..partition() };
    let later = Epoch::new(2).unwrap();
    let list = |grants: &[(Partition, Epoch)]| {
        Said::List(grants.iter().map(|(partition, epoch)| running(*partition, *epoch)).collect())
    };
    let as_listed = |version, positions| {
        let lags = vec![];
        Said::AsListed { version: Index(version), positions, lags }
    };
    let here = (partition(), Epoch::FIRST);
    vec![
        ("exactly it", Said::List(held.to_vec()), true, true),
        ("of an older version", Said::List(held.to_vec()), false, false),
        ("nothing", list(&[]), true, false),
        ("another epoch", list(&[(partition(), later)]), true, false),
        ("another partition", list(&[(other, Epoch::FIRST)]), true, false),
        ("one more", list(&[here, (other, later)]), true, false),
        ("the list in short", as_listed(version, vec![7]), true, true),
        ("another list in short", as_listed(version - 1, vec![8]), true, false),
        ("a longer list in short", as_listed(version, vec![8, 9]), true, false),
    ]
}

/// Whether a list is left out for what a heartbeat says.
type Comparison<'a> = &'a dyn Fn(&Said, bool) -> bool;

/// The first case in which the list is left out and must not be, or the other way round.
fn first_wrong(
    held: &[Held],
    version: u64,
    mut is_left_out: impl FnMut(Said, bool) -> bool,
) -> Option<&'static str> {
    let mut cases = cases(held, version).into_iter();
    let wrong = cases.find(|(_, said, takes, wanted)| is_left_out(said.clone(), *takes) != *wanted);
    wrong.map(|(what, ..)| what)
}

#[test]
fn list_is_left_out_for_exactly_what_the_heartbeat_named_and_for_nothing_else() {
    let rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut ann = joined(&mut reign, &rig, "ann");
    let (held, version) = list(&rig);
    let wrong = first_wrong(&held, version, |said, takes_as_held| {
        say(&mut reign, "ann", said, takes_as_held);
        confirm(&mut reign, &rig);
        let (of_answer, is_left_out) = ann.answer();
        assert_eq!(of_answer, version);
        is_left_out
    });
    assert_eq!(wrong, None);
    let beat = reign.beats.get(&(group(), "ann".parse().unwrap())).unwrap();
    let beat = beat.lock();
    let known: Vec<_> = beat.held.iter().map(|held| (held.epoch, held.position)).collect();
    assert_eq!(known, [(Epoch::FIRST, 7)], "what was said in short, and understood");
}

#[test]
fn every_weaker_comparison_of_lists_is_noticed() {
    let (held, version) = list(&Rig::new());
    let count = |said: &Said| match said {
        Said::List(held) => held.len(),
        Said::AsListed { positions, .. } => positions.len(),
    };
    let of_version = |said: &Said| match said {
        Said::List(_) => true,
        Said::AsListed { version: given, .. } => given.0 == version,
    };
    let epochs = |said: &Said| match said {
        Said::List(found) => {
            found.iter().map(|held| held.epoch).eq(held.iter().map(|held| held.epoch))
        }
        Said::AsListed { positions, .. } => positions.len() == held.len(),
    };
    let weaker: [(&str, Comparison<'_>); 4] = [
        ("another epoch", &|said, takes| takes && count(said) == held.len() && of_version(said)),
        ("nothing", &|said, takes| takes && of_version(said)),
        ("another partition", &|said, takes| takes && epochs(said) && of_version(said)),
        ("of an older version", &|said, _| *said == Said::List(held.clone())),
    ];
    for (missed, weaker) in weaker {
        let wrong = first_wrong(&held, version, |said, takes| weaker(&said, takes));
        assert_eq!(wrong, Some(missed));
    }
}

#[test]
fn list_that_changes_before_the_answer_is_told_in_full() {
    let mut rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let mut ann = joined(&mut reign, &rig, "ann");
    let (held, before) = list(&rig);
    say(&mut reign, "ann", Said::List(held.clone()), true);
    let operator = OperatorContext {
        request: "r1".parse().unwrap(),
        reason: "test".to_owned(),
        actor: "test".to_owned(),
    };
    let to = "bob".parse().unwrap();
    let wish = MovePartition { operator, group: group(), partition: partition(), to };
    rig.follow(&mut reign, Command::MovePartition(wish), at(1_000));
    confirm(&mut reign, &rig);
    let (version, is_left_out) = ann.answer();
    assert!(version > before && !is_left_out, "revoked meanwhile");
    // The same partitions under the same epochs, one of them revoked: what remains of the drain is told each time.
    say(&mut reign, "ann", Said::List(held), true);
    confirm(&mut reign, &rig);
    assert_eq!(ann.answer(), (version, false));
}

#[test]
fn list_with_something_to_prepare_for_is_told_in_full() {
    let mut rig = Rig::with_bob(true);
    let mut reign = rig.begin(at(0));
    let mut bob = joined(&mut reign, &rig, "bob");
    say(&mut reign, "bob", Said::List(vec![]), true);
    confirm(&mut reign, &rig);
    assert!(bob.answer().1, "it owns nothing and says so");
    let operator = OperatorContext {
        request: "r1".parse().unwrap(),
        reason: "test".to_owned(),
        actor: "test".to_owned(),
    };
    let to = "bob".parse().unwrap();
    let wish = MovePartition { operator, group: group(), partition: partition(), to };
    rig.follow(&mut reign, Command::MovePartition(wish), at(1_000));
    for _ in 0..2 {
        say(&mut reign, "bob", Said::List(vec![]), true);
        confirm(&mut reign, &rig);
        assert!(!bob.answer().1, "it is to prepare");
    }
}

#[test]
fn heartbeat_of_an_earlier_session_is_not_answered_on_a_later_one() {
    let rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let _first = joined(&mut reign, &rig, "ann");
    say(&mut reign, "ann", Said::List(list(&rig).0), true);
    let lost = reign.take_waiting();
    let mut later = Ends::open_as(&mut reign, "ann", SessionId(3), at(2_000));
    reign.give_back(lost);
    confirm(&mut reign, &rig);
    assert!(matches!(later.came().as_slice(), [Down::Joined(_)]), "nothing but the join");
}

#[test]
fn join_is_not_answered_by_a_confirmation_that_an_earlier_session_waited_for() {
    let rig = Rig::new();
    let mut reign = rig.begin(at(0));
    let _first = Ends::open(&mut reign, "ann", at(0));
    let under_way = reign.take_waiting();
    let mut later = Ends::open_as(&mut reign, "ann", SessionId(3), at(2_000));
    reign.answer(under_way, rig.machine.state());
    assert_eq!(later.came(), [], "that confirmation began before its join came");
    confirm(&mut reign, &rig);
    assert!(matches!(later.came().as_slice(), [Down::Joined(_)]));
}

#[test]
fn heartbeat_names_its_grants_in_one_form_and_only_offsets_that_can_be() {
    let said = |held: usize, positions: Vec<u64>| {
        let beat = v1::Heartbeat {
            held: vec![v1::HeldPartition::default(); held],
            as_listed: Some(v1::HeldAsListed { version: 5, positions, lags: vec![] }),
            ..v1::Heartbeat::default()
        };
        crate::grpc::edge::said(beat).map_err(|malformed| malformed.to_string())
    };
    let short =
        Said::AsListed { version: Index(5), positions: vec![1, u64::MAX >> 1], lags: vec![] };
    assert_eq!(said(0, vec![1, u64::MAX >> 1]), Ok(short));
    let both = said(1, vec![1]).unwrap_err();
    assert_eq!(both, "heartbeat.as_listed: stands beside heartbeat.held: give one of them");
    let offset = said(0, vec![u64::MAX]).unwrap_err();
    assert!(offset.starts_with("heartbeat.as_listed.positions: "), "{offset}");
    let many = said(0, vec![1; tenure_model::limits::REQUEST_PARTITIONS_MAX + 1]).unwrap_err();
    assert!(many.contains("at most 10000 are allowed"), "{many}");
}
