//! Fenced object store sink: create-once files, and one manifest that is swung by a conditional put.
//!
//! The manifest holds the fence, the offset and the list of files; a file that it does not name is not there for a
//! reader. As the home of the offset this is exactly once. What it protects, what it cannot, the layout and every
//! failure: `docs/sinks/object-store.md`.
//!
//! ```
//! use std::sync::Arc;
//! use tenure_model::{Epoch, NextOffset};
//! use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified, conformance};
//! use tenure_sink_object_store::object_store::memory::InMemory;
//! use tenure_sink_object_store::{ObjectStoreSettings, ObjectStoreSink, Swing};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), SinkError> {
//! let store = Arc::new(InMemory::new());
//! let sink = ObjectStoreSink::new(store, Swing::Update, ObjectStoreSettings::default())?;
//!
//! // The SDK does this; here the grant comes from nobody.
//! let grant = conformance::grant("ann", 0, Epoch::FIRST);
//! let mut writer = sink.register(&grant).await?.writer;
//! let verified = Verified::without_coordinator(false);
//! let start = match writer.resume(&verified).await? {
//!     Some(next) => next,
//!     None => writer.initialise(NextOffset::ZERO).await?,
//! };
//!
//! let mut tx = writer.begin().await?;
//! tx.put("a record").await?;
//! tx.commit(NextOffset::new(start.get() + 1).expect("a small offset")).await?;
//!
//! let published = sink.reader().published(grant.resource.as_str()).await?.expect("registered");
//! assert_eq!(published.files.len(), 1);
//! # Ok(())
//! # }
//! ```

#![warn(missing_docs)]

mod clean;
mod error;
mod manifest;
mod probe;
mod reader;
mod settings;
mod sink;
mod swing;
mod writer;

pub use object_store;
pub use probe::prove_conditional_put;
pub use reader::{Published, PublishedFile, Reader};
pub use settings::ObjectStoreSettings;
pub use sink::ObjectStoreSink;
pub use swing::Swing;
pub use writer::{ObjectStoreWriter, ObjectTx};

/// Chooses ring as the TLS library of this process, unless one is chosen already. Call it before a client of an S3 API is
/// built: without a choice that panics.
#[cfg(feature = "s3")]
pub fn choose_tls() {
    // Refused where the program has chosen, and its choice stands.
    let _chosen = rustls::crypto::ring::default_provider().install_default();
}
