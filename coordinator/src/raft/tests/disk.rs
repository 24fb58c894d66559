//! What a node makes of a damaged disk.

use std::fs;
use std::path::PathBuf;

use openraft::storage::RaftLogReader as _;

use super::*;

/// A stopped single node that acknowledged `count` writes.
async fn written(count: usize) -> Cluster {
    let mut cluster = Cluster::of(1).await;
    for text in texts(count) {
        cluster.write(&text).await;
    }
    cluster.nodes[0].take().unwrap().shutdown().await;
    cluster
}

fn only_file(folder: PathBuf, extension: &str) -> PathBuf {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|found| found == extension));
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

fn flip(file: &std::path::Path, at: usize, bit: u8) {
    let mut content = fs::read(file).unwrap();
    content[at] ^= 1 << bit;
    fs::write(file, content).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_incomplete_tail_of_the_log_is_cut() {
    let mut cluster = written(5).await;
    let log = only_file(cluster.plan.settings[0].folder.join(LOG_FOLDER), "wal");
    // The beginning of a record whose rest never reached the disk.
    let mut content = fs::read(&log).unwrap();
    content.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0]);
    fs::write(&log, content).unwrap();
    cluster.restart(0).await;
    cluster.write("after").await;
    let mut wanted: Vec<Bytes> = texts(5).iter().map(|text| bytes(text)).collect();
    wanted.push(bytes("after"));
    assert_eq!(state(cluster.node(0)), wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_in_the_log_stops_the_node_and_names_the_file() {
    let mut cluster = written(5).await;
    let log = only_file(cluster.plan.settings[0].folder.join(LOG_FOLDER), "wal");
    let middle = fs::metadata(&log).unwrap().len() as usize / 2;
    flip(&log, middle, 3);
    let error = match cluster.plan.open(0).await {
        Ok(_) => panic!("the node started"),
        Err(error) => error.to_string(),
    };
    assert!(error.contains(log.to_str().unwrap()), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_flipped_bit_in_the_log_loses_an_entry_silently() {
    let cluster = written(2).await;
    let folder = cluster.plan.settings[0].folder.join(LOG_FOLDER);
    let copy = cluster.plan.root.path().join("copy");
    copy_folder(&folder, &copy);
    let entries = read_all(&copy).await.expect("an undamaged log opens");
    let size_bytes = fs::metadata(only_file(folder.clone(), "wal")).unwrap().len() as usize;
    let mut refused = 0;
    for at in 0..size_bytes {
        copy_folder(&folder, &copy);
        flip(&only_file(copy.clone(), "wal"), at, (at % 8) as u8);
        match read_all(&copy).await {
            Ok(found) => assert_eq!(found, entries, "bit {} of byte {at}", at % 8),
            Err(_) => refused += 1,
        }
    }
    assert!(refused >= size_bytes * 9 / 10, "{refused} of {size_bytes} were noticed");
}

async fn read_all(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut wal = Wal::open(folder, 1 << 20, Failure::default())?;
    let entries = wal.try_get_log_entries(..).await;
    let vote = wal.read_vote().await?;
    wal.close();
    let mut found: Vec<String> = entries?.iter().map(|entry| format!("{entry:?}")).collect();
    found.push(format!("{vote:?}"));
    Ok(found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_snapshot_stops_the_node_and_names_the_file() {
    let mut cluster = Cluster::of(1).await;
    cluster.write("before").await;
    cluster.node(0).write_snapshot().await;
    wait("a snapshot", || cluster.node(0).status().snapshot).await;
    cluster.nodes[0].take().unwrap().shutdown().await;
    let folder = cluster.plan.settings[0].folder.join(SNAPSHOT_FOLDER);
    let file = only_file(folder.clone(), "snapshot");
    let whole = fs::read(&file).unwrap();
    let store = snapshot::SnapshotStore::open(&folder).unwrap();
    assert_eq!(store.newest().unwrap().unwrap().snapshot.len(), 8);
    for at in 0..whole.len() {
        flip(&file, at, (at % 8) as u8);
        let error = store.newest().unwrap_err().to_string();
        assert!(error.contains(file.to_str().unwrap()), "{error}");
        fs::write(&file, &whole[..at]).unwrap();
        store.newest().unwrap_err();
        fs::write(&file, &whole).unwrap();
    }
    flip(&file, whole.len() / 2, 1);
    let error = match cluster.plan.open(0).await {
        Ok(_) => panic!("the node started"),
        Err(error) => error.to_string(),
    };
    assert!(error.contains(file.to_str().unwrap()), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_one_failed_write_nothing_is_acknowledged_any_more() {
    let cluster = Cluster::of(1).await;
    cluster.write("before").await;
    let node = cluster.node(0);
    let failure = &node.0.failure;
    let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
    failure.check::<()>("append entries", Err(full)).unwrap_err();
    let outcome = node.propose(bytes("after"), None).await;
    assert_eq!(outcome, Err(ProposeError::Unknown));
    let reason = timeout(PATIENCE, node.stopped()).await.unwrap();
    let StopReason::Failed(text) = reason else { panic!("{reason:?}") };
    assert!(text.starts_with("append entries: "), "{text}");
    assert_eq!(state(node), [bytes("before")]);
}
