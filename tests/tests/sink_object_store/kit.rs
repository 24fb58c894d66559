//! The conformance kit against three stores, and against what is known to be wrong.

use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_object_store::object_store::memory::InMemory;
use tenure_sink_object_store::object_store::path::Path;
use tenure_sink_object_store::object_store::{ObjectStore, ObjectStoreExt};
use tenure_sink_object_store::{
    ObjectStoreSettings, ObjectStoreSink, ObjectStoreWriter, Swing, prove_conditional_put,
};
use tenure_tests::figures::tell;
use tenure_tests::servers::{S3Mock, require};
use tenure_tests::tier;

use crate::s3::{Puts, S3Server, client_of};

/// Longest request of the tests' clients.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

type Connect = Box<dyn Fn() -> (Arc<dyn ObjectStore>, Swing) + Send + Sync>;

pub(crate) struct Bucket {
    connect: Connect,
    settings: ObjectStoreSettings,
}

impl Bucket {
    pub(crate) fn in_memory(settings: ObjectStoreSettings) -> Self {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        Self { connect: Box::new(move || (Arc::clone(&store), Swing::Update)), settings }
    }

    pub(crate) fn s3(server: Arc<S3Server>, settings: ObjectStoreSettings) -> Self {
        Self { connect: Box::new(move || (server.client(PATIENCE), Swing::Update)), settings }
    }

    pub(crate) fn sink(&self) -> ObjectStoreSink {
        let (store, swing) = (self.connect)();
        ObjectStoreSink::new(store, swing, self.settings.clone()).unwrap()
    }
}

/// A row for each offset, one file each.
pub(crate) async fn write_rows(
    writer: &mut ObjectStoreWriter,
    rows: Rows,
    pauses: &Pauses,
) -> Result<(), SinkError> {
    let mut tx = writer.begin().await?;
    for offset in rows.offsets() {
        tx.put(format!("{offset} {}", rows.epoch.get())).await?;
        pauses.here().await;
    }
    tx.commit(rows.next).await
}

pub(crate) async fn read_rows(
    store: &dyn ObjectStore,
    sink: &ObjectStoreSink,
    resource: &str,
) -> Result<Vec<Row>, BoxError> {
    let mut rows = Vec::new();
    let Some(published) = sink.reader().published(resource).await? else { return Ok(rows) };
    for file in published.files {
        let content = store.get(&Path::parse(&file.path)?).await?.bytes().await?;
        let text = std::str::from_utf8(&content)?.to_owned();
        let (offset, epoch) = text.split_once(' ').ok_or("a row has two columns")?;
        let offset = NextOffset::new(offset.parse()?)?;
        rows.push(Row { offset, epoch: Epoch::new(epoch.parse()?)? });
    }
    rows.sort_by_key(|row| row.offset);
    Ok(rows)
}

impl Subject for Bucket {
    type Sink = ObjectStoreSink;

    async fn connect(&self) -> Result<ObjectStoreSink, SinkError> {
        Ok(self.sink())
    }

    async fn write(
        &self,
        writer: &mut ObjectStoreWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        write_rows(writer, rows, pauses).await
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        let (store, _) = (self.connect)();
        let resource = conformance::grant("reader", partition, Epoch::FIRST).resource;
        read_rows(store.as_ref(), &self.sink(), resource.as_str()).await
    }

    fn beside(&self, sink: &ObjectStoreSink, grant: &Grant) -> Option<ObjectStoreWriter> {
        Some(sink.writer(grant))
    }
}

fn options() -> Options {
    let handovers = u32::try_from(tier::Tier::current().repetitions(1_000)).unwrap();
    Options { handovers, ..Options::with_seed(tier::seed()) }
}

/// Small manifests, so that index objects are in play.
fn settings() -> ObjectStoreSettings {
    ObjectStoreSettings { files_max: 8, ..ObjectStoreSettings::default() }
}

async fn assert_conforms(subject: Bucket, options: Options) {
    let report = conformance::run(&Arc::new(subject), options).await;
    tell(&report);
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_conforms() {
    assert_conforms(Bucket::in_memory(settings()), options()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn local_folder_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let connect = move || {
        use tenure_sink_object_store::object_store::local::LocalFileSystem;
        let store = LocalFileSystem::new_with_prefix(&path).unwrap();
        (Arc::new(store) as Arc<dyn ObjectStore>, Swing::Numbered)
    };
    assert_conforms(Bucket { connect: Box::new(connect), settings: settings() }, options()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_conforms() {
    if !tier::has_time() {
        return;
    }
    let server = Arc::new(S3Server::start(Puts::Atomic).await);
    prove_conditional_put(&server.client(PATIENCE), Swing::Update, "probe", ROUNDS).await.unwrap();
    // A write is half a dozen requests, so an owner needs longer to get to one.
    let handover_interval_max = Duration::from_millis(150);
    let options = Options { handover_interval_max, ..options() };
    assert_conforms(Bucket::s3(server, settings()), options).await;
}

/// Races of eight writers for each condition; a server that compares and writes in two steps shows in the first few.
const ROUNDS: u32 = 50;

#[tokio::test(flavor = "multi_thread")]
async fn s3_server_of_the_tests_has_exactly_one_winner_of_eight() {
    let server = S3Server::start(Puts::Atomic).await;
    let rounds = u32::try_from(tier::Tier::current().repetitions(400)).unwrap();
    prove_conditional_put(&server.client(PATIENCE), Swing::Update, "probe", rounds).await.unwrap();
    tell(format_args!("{rounds} rounds of 8 creations and 8 updates, one winner each"));
}

#[tokio::test(flavor = "multi_thread")]
async fn s3s_fs_which_compares_and_writes_in_two_steps_is_caught() {
    let server = S3Server::start(Puts::TwoSteps).await;
    assert_is_no_fence("s3s-fs", server.client(PATIENCE)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_mock_which_compares_and_writes_in_two_steps_is_caught() {
    let started = tokio::task::spawn_blocking(S3Mock::start).await.unwrap();
    let Some(server) = require(started) else { return };
    assert_is_no_fence("S3Mock", client_of(server.port(), S3Mock::BUCKET, PATIENCE)).await;
}

async fn assert_is_no_fence(server: &str, store: Arc<dyn ObjectStore>) {
    let proof = prove_conditional_put(&store, Swing::Update, "probe", ROUNDS).await;
    tell(format_args!("{server}: {proof:?}"));
    assert!(matches!(proof, Err(SinkError::Misconfigured(_))), "{server}: {proof:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn local_folder_is_proven_for_numbered_manifests_and_refused_for_updates() {
    let folder = tempfile::tempdir().unwrap();
    use tenure_sink_object_store::object_store::local::LocalFileSystem;
    let store: Arc<dyn ObjectStore> =
        Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    prove_conditional_put(&store, Swing::Numbered, "probe", 20).await.unwrap();
    let proof = prove_conditional_put(&store, Swing::Update, "probe", 1).await;
    assert!(matches!(proof, Err(SinkError::Misconfigured(_))), "{proof:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kit_catches_the_put_without_condition() {
    for check in [
        Check::StaleWrite,
        Check::LateRegistration,
        Check::Retire,
        Check::Restart,
        Check::PausedHolder,
    ] {
        let settings = ObjectStoreSettings { dangerously_without_fencing: true, ..settings() };
        let subject = Arc::new(Bucket::in_memory(settings));
        let outcome = conformance::run_one(&subject, options(), check).await;
        tell(&outcome);
        assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
    }
}
