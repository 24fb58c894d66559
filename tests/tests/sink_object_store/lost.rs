//! Answers that are lost between the store and the writer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::sink::conformance::{Pauses, Row, Rows, grant};
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_object_store::object_store::ObjectStore;
use tenure_sink_object_store::{ObjectStoreSettings, ObjectStoreSink, ObjectStoreWriter, Swing};

use crate::kit::{PATIENCE, read_rows, write_rows};
use crate::s3::{Puts, S3Server};

struct Scene {
    server: S3Server,
    store: Arc<dyn ObjectStore>,
    sink: ObjectStoreSink,
    writer: ObjectStoreWriter,
}

impl Scene {
    async fn new(timeout: Duration) -> Self {
        let server = S3Server::start(Puts::Atomic).await;
        let store = server.client(timeout);
        let settings = ObjectStoreSettings::default();
        let sink = ObjectStoreSink::new(Arc::clone(&store), Swing::Update, settings).unwrap();
        let mut writer = sink.register(&grant("ann", 0, Epoch::FIRST)).await.unwrap().writer;
        let verified = Verified::without_coordinator(false);
        assert_eq!(writer.resume(&verified).await.unwrap(), None);
        writer.initialise(NextOffset::ZERO).await.unwrap();
        Self { server, store, sink, writer }
    }

    async fn write(&mut self, first: u64) -> Result<(), SinkError> {
        let (first, next) = (offset(first), offset(first + 1));
        let rows = Rows { partition: 0, epoch: Epoch::FIRST, first, next };
        write_rows(&mut self.writer, rows, &Pauses::none()).await
    }

    async fn assert_rows(&self, count: u64) {
        let resource = grant("ann", 0, Epoch::FIRST).resource;
        let found = read_rows(self.store.as_ref(), &self.sink, resource.as_str()).await.unwrap();
        let expected: Vec<Row> =
            (0..count).map(|at| Row { offset: offset(at), epoch: Epoch::FIRST }).collect();
        assert_eq!(found, expected);
    }
}

fn offset(value: u64) -> NextOffset {
    NextOffset::new(value).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_repetition_of_a_put_that_landed_counts_as_landed() {
    let mut scene = Scene::new(PATIENCE).await;
    for first in 0..5 {
        scene.server.faults.answers_lost.store(1, Ordering::SeqCst);
        scene.write(first).await.unwrap();
        assert_eq!(scene.server.faults.answers_lost.load(Ordering::SeqCst), 0, "nothing was lost");
    }
    scene.assert_rows(5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn put_that_is_on_its_way_cannot_land_after_it_was_given_up() {
    let mut scene = Scene::new(Duration::from_secs(1)).await;
    scene.write(0).await.unwrap();
    scene.server.faults.hold.store(true, Ordering::SeqCst);
    let given_up = scene.write(1).await;
    assert!(matches!(given_up, Err(SinkError::Transient { .. })), "{given_up:?}");
    scene.assert_rows(1).await;

    scene.server.faults.release.notify_one();
    scene.server.faults.released.notified().await;
    scene.assert_rows(1).await;
    scene.write(1).await.unwrap();
    scene.write(2).await.unwrap();
    scene.assert_rows(3).await;
}
