//! Which folders may start.

use std::fs;

use super::*;

fn refused(outcome: Result<RaftNode<Toy>, OpenError>) -> String {
    match outcome {
        Ok(_) => panic!("the node started"),
        Err(error) => error.to_string(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voter_whose_folder_was_wiped_does_not_start() {
    let mut cluster = Cluster::of(3).await;
    cluster.write("before").await;
    cluster.agree_on(1).await;
    let wiped = (cluster.leader().await + 1) % 3;
    let node = NodeId(wiped as u64 + 1);
    cluster.kill(wiped).await;
    fs::remove_dir_all(&cluster.plan.settings[wiped].folder).unwrap();

    // Bootstrap is still in its settings, as it was when the cluster was founded.
    let Start::Bootstrap { members } = cluster.plan.settings[wiped].start.clone() else {
        panic!("tests bootstrap");
    };
    let error = refused(cluster.plan.open(wiped).await);
    assert!(error.contains("remove it as voter, rejoin under a new id"), "{error}");

    cluster.plan.settings[wiped].start = Start::Join { peers: members };
    let error = refused(cluster.plan.open(wiped).await);
    assert!(error.contains("knows it as a voter: remove it as voter"), "{error}");

    fs::remove_dir_all(&cluster.plan.settings[wiped].folder).unwrap();
    cluster.plan.settings[wiped].start = Start::Existing;
    let error = refused(cluster.plan.open(wiped).await);
    assert!(error.starts_with(&format!("node {node} has an empty folder")), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_founder_that_starts_last_or_again_is_let_in() {
    let mut plan = Plan::new(2).await;
    let (first_settings, first_listener) =
        (plan.settings[0].clone(), plan.listeners[0].take().unwrap());
    let first = tokio::spawn(RaftNode::open_on(first_listener, first_settings, Toy::default()));
    // The second gets as far as its incarnation, and is stopped before it founds anything.
    let mut identity = identity::Identity::fresh("toys", NodeId(2), identity::Stage::Forming);
    identity.incarnation = "00ff".to_owned();
    identity::IdentityFile::new(&plan.settings[1].folder).write(&identity).unwrap();
    let second = plan.open(1).await.unwrap();
    let cluster = Cluster { plan, nodes: vec![Some(first.await.unwrap().unwrap()), Some(second)] };
    cluster.write("together").await;
    cluster.agree_on(1).await;
    let file = fs::read_to_string(cluster.plan.settings[0].folder.join("identity.toml")).unwrap();
    assert!(file.contains("2 = \"00ff\""), "{file}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn founders_with_different_lists_of_members_do_not_start() {
    let mut plan = Plan::new(2).await;
    if let Start::Bootstrap { members } = &mut plan.settings[0].start {
        let other =
            NodeAddresses { raft_address: "127.0.0.1:1".to_owned(), ..NodeAddresses::default() };
        members.insert(NodeId(3), other);
    }
    let (settings, listener) = (plan.settings[0].clone(), plan.listeners[0].take().unwrap());
    // Whoever hears the other first refuses, and the other then waits for it in vain.
    let outcome = tokio::select! {
        outcome = RaftNode::open_on(listener, settings, Toy::default()) => outcome,
        outcome = plan.open(1) => outcome,
    };
    let error = refused(outcome);
    assert!(error.contains("to be bootstrapped with other members"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_of_another_node_or_cluster_is_refused() {
    let mut cluster = Cluster::of(1).await;
    cluster.write("before").await;
    cluster.kill(0).await;
    let right = cluster.plan.settings[0].clone();

    cluster.plan.settings[0].cluster = "others".to_owned();
    let error = refused(cluster.plan.open(0).await);
    assert!(error.contains("belongs to cluster \"toys\", not \"others\""), "{error}");

    cluster.plan.settings[0] = right.clone();
    cluster.plan.settings[0].node = NodeId(7);
    cluster.plan.settings[0].start = Start::Existing;
    let error = refused(cluster.plan.open(0).await);
    assert!(error.contains("belongs to node 1, not 7"), "{error}");

    cluster.plan.settings[0] = right.clone();
    fs::remove_file(right.folder.join("identity.toml")).unwrap();
    let error = refused(cluster.plan.open(0).await);
    assert!(error.contains("has data of a node but no identity.toml"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_lost_only_its_log_does_not_start() {
    let mut cluster = Cluster::of(1).await;
    cluster.write("before").await;
    cluster.kill(0).await;
    fs::remove_dir_all(cluster.plan.settings[0].folder.join(LOG_FOLDER)).unwrap();
    let error = refused(cluster.plan.open(0).await);
    assert!(error.contains("had a log and has none now"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_of_another_cluster_or_for_another_node_are_refused() {
    let cluster = Cluster::of(1).await;
    let settings = &cluster.plan.settings[0];
    let address = &settings.addresses.raft_address;
    let network =
        |settings: &RaftSettings| network::Network::new(wire::Wire::new(settings), settings.tuning);

    let asked = network(settings).identify(NodeId(1), address).await.unwrap();
    assert_eq!(asked.stage, identity::Stage::Founded);
    let status = network(settings).identify(NodeId(2), address).await.unwrap_err();
    assert_eq!(status.message(), "packet is for node 2, this is node 1");
    let mut other = settings.clone();
    other.cluster = "others".to_owned();
    let status = network(&other).identify(NodeId(1), address).await.unwrap_err();
    assert_eq!(status.message(), "packet is for cluster \"others\", node 1 is in \"toys\"");
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let check = |change: &dyn Fn(&mut RaftSettings)| {
        let mut settings = RaftSettings {
            node: NodeId(1),
            cluster: "toys".to_owned(),
            folder: "unused".into(),
            listen: "127.0.0.1:0".parse().unwrap(),
            addresses: NodeAddresses::default(),
            start: Start::Existing,
            tuning: RaftTuning::default(),
        };
        change(&mut settings);
        settings.check().map(drop)
    };
    assert_eq!(check(&|_| {}), Ok(()));
    assert_eq!(check(&|settings| settings.cluster.clear()), Err(RaftSettingsError::NoClusterName));
    assert_eq!(
        check(&|settings| settings.node = NodeId(u64::MAX)),
        Err(RaftSettingsError::NodeIdTooLarge { node: NodeId(u64::MAX) })
    );
    let early = check(&|settings| settings.tuning.heartbeat_interval = Duration::from_millis(400));
    assert!(matches!(early, Err(RaftSettingsError::ElectionTooEarly { .. })), "{early:?}");
    let zero = check(&|settings| settings.tuning.proposals_max = 0);
    assert_eq!(zero, Err(RaftSettingsError::Zero { setting: "proposals_max" }));
    let stranger =
        check(&|settings| settings.start = Start::Bootstrap { members: BTreeMap::new() });
    assert!(matches!(stranger, Err(RaftSettingsError::NotAFounder { .. })), "{stranger:?}");
}
