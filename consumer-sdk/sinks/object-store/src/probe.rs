//! Shows whether a store honours conditions, also under several writers at once.

use std::sync::Arc;

use futures::future::join_all;
use object_store::path::Path;
use object_store::{
    Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion,
};
use tenure_sdk::sink::SinkError;

use crate::error::classify;
use crate::swing::Swing;

const WRITERS: u32 = 8;

/// Lets eight writers put at once under one condition, `rounds` times for each kind of put that `swing` uses, below
/// `prefix`, and holds that exactly one wins each time. Removes what it put.
///
/// A store that compares and writes in two steps passes a single writer's check and is no fence.
///
/// # Errors
///
/// [`SinkError::Misconfigured`] when a round has no winner or more than one; any other when the store does not answer.
pub async fn prove_conditional_put(
    store: &Arc<dyn ObjectStore>,
    swing: Swing,
    prefix: &str,
    rounds: u32,
) -> Result<(), SinkError> {
    for round in 0..rounds {
        let path = Path::from(format!("{prefix}/probe-{:016x}", rand::random::<u64>()));
        let outcome = one_round(store, swing, &path).await;
        match store.delete(&path).await {
            Ok(()) | Err(Error::NotFound { .. }) => {}
            Err(error) => return Err(classify(error)),
        }
        if let Err((kind, winners)) = outcome? {
            return Err(SinkError::Misconfigured(format!(
                "conditional put is not atomic here: {winners} of {WRITERS} writers won one {kind} (round {round})"
            )));
        }
    }
    Ok(())
}

type Round = Result<(), (&'static str, u32)>;

async fn one_round(
    store: &Arc<dyn ObjectStore>,
    swing: Swing,
    path: &Path,
) -> Result<Round, SinkError> {
    let winners = race(store, path, &PutMode::Create).await?;
    if winners != 1 {
        return Ok(Err(("create", winners)));
    }
    if swing == Swing::Update {
        let meta = store.head(path).await.map_err(classify)?;
        let tag = UpdateVersion { e_tag: meta.e_tag, version: meta.version };
        let winners = race(store, path, &PutMode::Update(tag)).await?;
        if winners != 1 {
            return Ok(Err(("update", winners)));
        }
    }
    Ok(Ok(()))
}

async fn race(store: &Arc<dyn ObjectStore>, path: &Path, mode: &PutMode) -> Result<u32, SinkError> {
    let puts = (0..WRITERS).map(|writer| {
        let payload = PutPayload::from(format!("{writer} {:016x}", rand::random::<u64>()));
        let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
        let (store, path) = (Arc::clone(store), path.clone());
        tokio::spawn(async move { store.put_opts(&path, payload, options).await })
    });
    let mut winners = 0;
    for answer in join_all(puts).await {
        match answer.map_err(|error| SinkError::Misconfigured(error.to_string()))? {
            Ok(_) => winners += 1,
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {}
            Err(error) => return Err(classify(error)),
        }
    }
    Ok(winners)
}
