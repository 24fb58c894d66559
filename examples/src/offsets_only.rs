//! Offsets at the coordinator, effects wherever: at least once.
//!
//! An effect that must not happen twice keeps the record's idempotency key, as the name of the file does here.

mod common;

use std::error::Error;
use std::fs;

use common::{Setup, stop_when_asked};
use tenure_sdk::consumer::{Backoff, ErrorPolicy, Then};
use tenure_sdk::source::Record;
use tenure_sdk::{Limits, Owned};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let setup = Setup::new()?;
    let consumer = setup
        .consumer("offsets-only")?
        .on_error(ErrorPolicy::retry(5, Backoff::default()).then(Then::Park))
        .build()?;
    stop_when_asked(consumer.stopper())?;
    let folder = setup.data.join("effects");
    fs::create_dir_all(&folder)?;
    let effect = move |record: &Record| {
        let name = record.idempotency_key().replace('/', "-");
        // The same record again is the same file again.
        fs::write(folder.join(name), record.value.as_deref().unwrap_or_default())
    };
    let effect = std::sync::Arc::new(effect);
    consumer
        .run(move |owned: Owned<_>| {
            let effect = effect.clone();
            async move {
                let (mut input, mut offsets) = owned.split();
                while let Some(batch) = input.next_batch(&Limits::DEFAULT).await {
                    for record in &batch {
                        effect(record)?;
                        // Committed behind the handler's back.
                        offsets.done(record);
                    }
                }
                Ok(())
            }
        })
        .await?;
    Ok(())
}
