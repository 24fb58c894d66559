//! An object store as a sink.

use std::path::Path;
use std::sync::Arc;

use futures::TryStreamExt;
use tenure_sdk::sink::SinkError;
use tenure_sink_object_store::object_store::aws::AmazonS3Builder;
use tenure_sink_object_store::object_store::local::LocalFileSystem;
use tenure_sink_object_store::object_store::path::Path as ObjectPath;
use tenure_sink_object_store::object_store::{self, ObjectStore, ObjectStoreExt};
use tenure_sink_object_store::{
    ObjectStoreSettings, ObjectStoreSink, ObjectStoreWriter, Swing, choose_tls,
    prove_conditional_put,
};

use super::report::Report;
use super::{trial, usage};
use crate::Failure;

/// Races for one condition, of eight writers each.
const ROUNDS: u32 = 20;

/// A store that a URL means.
pub(super) struct Opened {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) swing: Swing,
    pub(super) prefix: String,
}

/// Makes the client; nothing is asked yet.
pub(super) fn open(url: &str) -> Result<Opened, Failure> {
    if let Some(folder) = url.strip_prefix("file:") {
        return open_folder(folder);
    }
    let rest = url.strip_prefix("s3://").unwrap_or_default();
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() {
        return Err(usage("give s3://BUCKET/PREFIX or file:FOLDER".into()));
    }
    choose_tls();
    let store = AmazonS3Builder::from_env().with_bucket_name(bucket).build().map_err(|error| {
        usage(format!(
            "{error}\nnext: give AWS_ENDPOINT, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; \
             AWS_ALLOW_HTTP=true for an endpoint without TLS"
        ))
    })?;
    Ok(Opened {
        store: Arc::new(store),
        swing: Swing::Update,
        prefix: or_default(prefix.trim_end_matches('/')),
    })
}

fn open_folder(folder: &str) -> Result<Opened, Failure> {
    let folder = Path::new(folder.trim_start_matches("//"));
    if !folder.is_dir() {
        return Err(usage(format!(
            "{} is no folder\nnext: give file:FOLDER, the folder that the sink was made with",
            folder.display()
        )));
    }
    let store = LocalFileSystem::new_with_prefix(folder)
        .map_err(|error| usage(format!("{}: {error}", folder.display())))?;
    let store = Arc::new(store.with_fsync(true));
    Ok(Opened { store, swing: Swing::Numbered, prefix: or_default("") })
}

fn or_default(prefix: &str) -> String {
    if prefix.is_empty() { ObjectStoreSettings::default().prefix } else { prefix.to_owned() }
}

pub(super) async fn check(report: &mut Report, url: &str) -> Result<(), Failure> {
    let Opened { store, swing, prefix } = open(url)?;
    if let Some(folder) = url.strip_prefix("file:") {
        super::sqlite::file_system(report, Path::new(folder.trim_start_matches("//")));
    }
    let trials = ObjectPath::from(format!("{prefix}/{}", trial::PREFIX));
    match objects(&store, &trials).await {
        Ok(left) if left.is_empty() => report.ok("connection", "the store lists its objects"),
        Ok(left) => report.warn(
            "connection",
            format!("{} objects of an earlier check", left.len()),
            format!("delete what is below {trials}"),
        ),
        Err(error) => {
            let next = "see the endpoint, the bucket, and that the key may list, get, put and delete objects";
            report.fail("connection", error.to_string(), next);
            return Ok(());
        }
    }
    conditional_put(report, &store, swing, trials.as_ref()).await;
    if report.has_failed() {
        report.skip("trial", "not before the above is mended");
    } else {
        try_out(report, &store, swing, &prefix).await;
    }
    Ok(())
}

/// Lets eight writers put at once, again and again: one that compares and writes in two steps lets two of them win.
async fn conditional_put(
    report: &mut Report,
    store: &Arc<dyn ObjectStore>,
    swing: Swing,
    below: &str,
) {
    const CHECK: &str = "conditional put";
    match prove_conditional_put(store, swing, below, ROUNDS).await {
        Ok(()) => report.ok(CHECK, format!("{ROUNDS} times eight at once, one winner each")),
        Err(error @ SinkError::Misconfigured(_)) => {
            report.fail(CHECK, error.to_string(), "this store is no fence: use another one");
        }
        Err(error) => {
            let next = "see that the key may put with conditions, and delete";
            report.fail(CHECK, error.to_string(), next);
        }
    }
}

async fn try_out(report: &mut Report, store: &Arc<dyn ObjectStore>, swing: Swing, prefix: &str) {
    let settings = ObjectStoreSettings { prefix: prefix.to_owned(), ..Default::default() };
    let sink = match ObjectStoreSink::new(Arc::clone(store), swing, settings) {
        Ok(sink) => sink,
        Err(error) => return report.fail("trial", error.to_string(), "give another prefix"),
    };
    let resource = trial::resource();
    let write = async |writer: &mut ObjectStoreWriter, next| -> Result<(), SinkError> {
        let mut tx = writer.begin().await?;
        tx.put("a file of tenure sink check").await?;
        tx.commit(next).await
    };
    trial::run(report, &sink, &resource, write).await;
    published(report, &sink, resource.as_str()).await;
    let folder = ObjectPath::from(format!("{prefix}/{resource}"));
    match remove(store, &folder).await {
        Ok(()) => report.ok("clean-up", "the trial's objects are gone"),
        Err(error) => {
            report.warn("clean-up", error.to_string(), format!("delete what is below {folder}"));
        }
    }
}

/// The stale owner has stored a file too: a reader must not be shown it.
async fn published(report: &mut Report, sink: &ObjectStoreSink, resource: &str) {
    let next = "do not use it: the manifest is not what was written last";
    match sink.reader().published(resource).await {
        Ok(found) => {
            let files = found.map_or(0, |found| found.files.len());
            report.hold("published files", files == 2, format!("{files} of 2"), next);
        }
        Err(error) => report.fail("published files", error.to_string(), next),
    }
}

async fn objects(
    store: &Arc<dyn ObjectStore>,
    folder: &ObjectPath,
) -> object_store::Result<Vec<ObjectPath>> {
    let found: Vec<_> = store.list(Some(folder)).try_collect().await?;
    Ok(found.into_iter().map(|object| object.location).collect())
}

async fn remove(store: &Arc<dyn ObjectStore>, folder: &ObjectPath) -> object_store::Result<()> {
    for path in objects(store, folder).await? {
        store.delete(&path).await?;
    }
    Ok(())
}
