//! `tenure sink files`: what a reader of an object store may trust.

use std::time::Duration;

use serde_json::{Value, json};
use tenure_sink_object_store::{Published, PublishedFile, Reader};

use super::store::{self, Opened};
use crate::args::{Output, SinkFilesArgs};
use crate::output::{Table, json_line};
use crate::{Failure, exit};

/// Prints the published files of one resource.
pub(super) async fn files(args: &SinkFilesArgs) -> Result<(), Failure> {
    let SinkFilesArgs { url, resource, from, output, timeout_ms } = args;
    let failed = |message: String| Failure { message, exit: exit::FAILED };
    let Opened { store, swing, prefix } = store::open(url)?;
    let reader = Reader::new(store, swing, &prefix);
    let limit = Duration::from_millis(*timeout_ms);
    let found = match tokio::time::timeout(limit, Box::pin(reader.published(resource))).await {
        Ok(found) => found.map_err(|error| failed(error.to_string()))?,
        Err(_elapsed) => {
            return Err(failed(format!(
                "not read within {timeout_ms} ms\nnext: give it more with --timeout-ms"
            )));
        }
    };
    let Some(mut published) = found else {
        return Err(failed(format!(
            "{resource} was never registered below {prefix:?}\n\
             next: give GROUP/TOPIC-ID/PARTITION, and the sink's prefix in the URL"
        )));
    };
    published.files.retain(|file| file.next.get() > *from);
    match output {
        Output::Json => json_line(&to_json(&published)),
        Output::Table => print(&published.files),
    }
    Ok(())
}

fn to_json(published: &Published) -> Value {
    let files: Vec<Value> = published
        .files
        .iter()
        .map(|file| {
            json!({
                "path": file.path,
                "epoch": file.epoch.get(),
                "first_offset": file.first.get(),
                "next_offset": file.next.get(),
                "bytes": file.bytes,
            })
        })
        .collect();
    json!({
        "epoch": published.epoch.get(),
        "next_offset": published.next_offset.map(|next| next.get()),
        "files": files,
    })
}

fn print(files: &[PublishedFile]) {
    let mut table = Table::new(&["FIRST", "NEXT", "EPOCH", "BYTES", "PATH"]);
    for file in files {
        table.row(vec![
            file.first.to_string(),
            file.next.to_string(),
            file.epoch.to_string(),
            file.bytes.to_string(),
            file.path.clone(),
        ]);
    }
    table.print();
}
