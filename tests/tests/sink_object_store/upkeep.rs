//! Files that are not published, files that are many, manifests that are old.

use std::sync::Arc;

use futures::TryStreamExt;
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::sink::conformance::{Pauses, Rows, grant};
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_object_store::object_store::local::LocalFileSystem;
use tenure_sink_object_store::object_store::memory::InMemory;
use tenure_sink_object_store::object_store::path::Path;
use tenure_sink_object_store::object_store::{ObjectStore, ObjectStoreExt};
use tenure_sink_object_store::{ObjectStoreSettings, ObjectStoreSink, ObjectStoreWriter, Swing};

use crate::kit::{read_rows, write_rows};

fn settings() -> ObjectStoreSettings {
    ObjectStoreSettings { files_max: 8, ..ObjectStoreSettings::default() }
}

fn epoch(value: u64) -> Epoch {
    Epoch::new(value).unwrap()
}

fn resource() -> String {
    grant("ann", 0, Epoch::FIRST).resource.to_string()
}

async fn acquire(sink: &ObjectStoreSink, value: u64) -> (ObjectStoreWriter, u64) {
    let grant = grant(&format!("owner-{value}"), 0, epoch(value));
    let mut writer = sink.register(&grant).await.unwrap().writer;
    let next = match writer.resume(&Verified::without_coordinator(false)).await.unwrap() {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await.unwrap(),
    };
    (writer, next.get())
}

async fn write(writer: &mut ObjectStoreWriter, value: u64, first: u64) -> Result<(), SinkError> {
    let next = NextOffset::new(first + 1).unwrap();
    let first = NextOffset::new(first).unwrap();
    let rows = Rows { partition: 0, epoch: epoch(value), first, next };
    write_rows(writer, rows, &Pauses::none()).await
}

async fn objects(store: &dyn ObjectStore, folder: &str) -> Vec<String> {
    let folder = Path::from(format!("tenure/{}/{folder}", resource()));
    let found: Vec<_> = store.list(Some(&folder)).try_collect().await.unwrap();
    found.into_iter().map(|object| object.location.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_files_are_deleted_and_published_ones_stay() {
    let store = Arc::new(InMemory::new());
    let sink = ObjectStoreSink::new(Arc::clone(&store) as _, Swing::Update, settings()).unwrap();
    let (mut old, _) = acquire(&sink, 1).await;
    for first in 0..20 {
        write(&mut old, 1, first).await.unwrap();
    }
    let mut open = old.begin().await.unwrap();
    open.put("never published").await.unwrap();
    let (mut new, resumed) = acquire(&sink, 2).await;
    assert_eq!(resumed, 20);
    assert_eq!(objects(store.as_ref(), "data").await.len(), 21);
    assert_eq!(new.clean().await.unwrap(), 1);
    assert_eq!(new.clean().await.unwrap(), 0);

    // The old owner does not know; what it stores after the clean-up is for the next one.
    open.put("too late").await.unwrap();
    let late = open.commit(NextOffset::new(21).unwrap()).await;
    assert!(matches!(late, Err(SinkError::Fenced { .. })), "{late:?}");
    write(&mut new, 2, 20).await.unwrap();
    let (mut next, _) = acquire(&sink, 3).await;
    assert_eq!(next.clean().await.unwrap(), 1);
    assert_eq!(objects(store.as_ref(), "data").await.len(), 21);
    assert_eq!(read_rows(store.as_ref(), &sink, &resource()).await.unwrap().len(), 21);
}

#[tokio::test(flavor = "multi_thread")]
async fn manifest_stays_small_and_readers_still_find_every_file() {
    let store = Arc::new(InMemory::new());
    let sink = ObjectStoreSink::new(Arc::clone(&store) as _, Swing::Update, settings()).unwrap();
    let (mut writer, _) = acquire(&sink, 1).await;
    let manifest = Path::from(format!("tenure/{}/manifest.json", resource()));
    let mut largest = 0;
    for first in 0..200 {
        write(&mut writer, 1, first).await.unwrap();
        largest = largest.max(store.head(&manifest).await.unwrap().size);
    }
    println!("largest manifest: {largest} bytes");
    assert!(largest < 4096, "the manifest grew to {largest} bytes");
    let published = sink.reader().published(&resource()).await.unwrap().unwrap();
    let firsts: Vec<u64> = published.files.iter().map(|file| file.first.get()).collect();
    assert_eq!(firsts, (0..200).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn file_without_a_commit_is_not_there_for_a_reader() {
    let sink = ObjectStoreSink::new(Arc::new(InMemory::new()), Swing::Update, settings()).unwrap();
    let (mut writer, _) = acquire(&sink, 1).await;
    let mut tx = writer.begin().await.unwrap();
    tx.put("not yet").await.unwrap();
    let published = sink.reader().published(&resource()).await.unwrap().unwrap();
    assert_eq!(published.files, []);
    tx.commit(NextOffset::new(1).unwrap()).await.unwrap();
    assert_eq!(sink.reader().published(&resource()).await.unwrap().unwrap().files.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_that_slept_through_the_removal_of_old_manifests_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let sink = ObjectStoreSink::local(folder.path(), settings()).unwrap();
    let (mut old, _) = acquire(&sink, 1).await;
    let sleeping = old.begin().await.unwrap();
    let (mut new, _) = acquire(&sink, 2).await;
    for first in 0..50 {
        write(&mut new, 2, first).await.unwrap();
    }
    let store = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
    let kept = objects(&store, "manifest").await.len();
    assert!(kept <= 40, "{kept} manifests are kept");
    let late = sleeping.commit(NextOffset::new(7).unwrap()).await;
    assert!(matches!(late, Err(SinkError::Fenced { .. })), "{late:?}");
    write(&mut new, 2, 50).await.unwrap();
    assert_eq!(read_rows(&store, &sink, &resource()).await.unwrap().len(), 51);
}

#[tokio::test(flavor = "multi_thread")]
async fn store_without_conditional_put_is_named_as_misconfigured() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    let sink = ObjectStoreSink::new(store, Swing::Update, settings()).unwrap();
    let mut writer = sink.register(&grant("ann", 0, epoch(1))).await.unwrap().writer;
    let started = writer.initialise(NextOffset::ZERO).await;
    assert!(matches!(started, Err(SinkError::Misconfigured(_))), "{started:?}");
}
