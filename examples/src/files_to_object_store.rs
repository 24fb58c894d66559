//! Records gathered into files, published together with the offset.
//!
//! The store is a folder; with S3 only the two lines that make the sink differ.

mod common;

use std::error::Error;
use std::time::Duration;

use common::{Setup, stop_when_asked};
use tenure_sdk::{Limits, Owned};
use tenure_sink_object_store::{ObjectStoreSettings, ObjectStoreSink};

/// A file holds what comes within ten seconds, up to 16 MiB.
const FILE: Limits =
    Limits { records: 100_000, bytes: 16 * 1024 * 1024, wait: Duration::from_secs(10) };

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let setup = Setup::new()?;
    let settings = ObjectStoreSettings::default();
    let sink = ObjectStoreSink::local(setup.data.join("store"), settings)?;
    let consumer = setup.consumer("files")?.home(sink).build()?;
    stop_when_asked(consumer.stopper())?;
    consumer
        .run(|owned: Owned<ObjectStoreSink>| async move {
            let (mut input, mut out) = owned.split();
            while let Some(batch) = input.next_batch(&FILE).await {
                let mut lines = Vec::new();
                for record in &batch {
                    lines.extend_from_slice(record.value.as_deref().unwrap_or_default());
                    lines.push(b'\n');
                }
                let mut tx = out.begin().await?;
                tx.put(lines).await?;
                // Until here no reader sees the file.
                tx.commit(batch.next()).await?;
            }
            Ok(())
        })
        .await?;
    Ok(())
}
