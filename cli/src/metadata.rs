//! The metadata that services put beside committed offsets.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tenure_model::limits::METADATA_BYTES_MAX;
use tenure_proto::v1;
use tonic::transport::Channel;

use crate::Failure;
use crate::operate::{Cluster, call};

type Offsets = v1::offsets_client::OffsetsClient<Channel>;

/// Partitions asked for at once: an answer stays below a megabyte whatever they hold.
const ASKED_MAX: usize = (1 << 19) / METADATA_BYTES_MAX;

/// Most characters of it in a table.
const CELL_CHARS_MAX: usize = 40;

/// Metadata by topic id and index; none where there is no more than an offset.
#[derive(Default)]
pub(crate) struct Metadata(BTreeMap<(String, u32), Vec<u8>>);

impl Metadata {
    /// Reads that of every partition with an offset at the coordinator.
    pub(crate) async fn read(
        cluster: &Cluster,
        group: &str,
        partitions: &[v1::PartitionInfo],
    ) -> Result<Self, Failure> {
        let committed = partitions.iter().filter(|info| info.committed.is_some());
        let asked: Vec<_> = committed.filter_map(|info| info.partition.clone()).collect();
        let mut found = BTreeMap::new();
        for partitions in asked.chunks(ASKED_MAX) {
            let request =
                v1::FetchRequest { group: group.to_owned(), partitions: partitions.to_vec() };
            let response = call!(cluster, Offsets, fetch, request)?;
            for offset in response.offsets {
                if let Some(partition) = offset.partition
                    && !offset.metadata.is_empty()
                {
                    found.insert((partition.topic_id, partition.index), offset.metadata);
                }
            }
        }
        Ok(Self(found))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn of(&self, info: &v1::PartitionInfo) -> Option<&[u8]> {
        let partition = info.partition.as_ref()?;
        self.0.get(&(partition.topic_id.clone(), partition.index)).map(Vec::as_slice)
    }

    /// Adds it to a partition, whole: as text, or in hexadecimal where it is none.
    pub(crate) fn add_json(&self, info: &v1::PartitionInfo, to: &mut Value) {
        let metadata = self.of(info);
        to["metadata"] = json!(metadata.and_then(|bytes| std::str::from_utf8(bytes).ok()));
        if let Some(bytes) = metadata.filter(|bytes| std::str::from_utf8(bytes).is_err()) {
            to["metadata_hex"] = json!(hexadecimal(bytes));
        }
    }

    /// Its beginning, for a table.
    pub(crate) fn cell(&self, info: &v1::PartitionInfo) -> String {
        let Some(bytes) = self.of(info) else { return "-".to_owned() };
        let text = std::str::from_utf8(bytes)
            .map_or_else(|_| format!("0x{}", hexadecimal(bytes)), str::to_owned);
        if text.chars().count() <= CELL_CHARS_MAX {
            return text;
        }
        let start: String = text.chars().take(CELL_CHARS_MAX).collect();
        format!("{start}… ({} bytes)", bytes.len())
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bytes: &[u8], cell: &str, json: &Value) {
        let partition = v1::Partition { topic_id: "t".into(), index: 7 };
        let info = v1::PartitionInfo { partition: Some(partition), ..Default::default() };
        let metadata = Metadata(BTreeMap::from([(("t".to_owned(), 7), bytes.to_vec())]));
        assert_eq!(metadata.cell(&info), cell);
        let mut found = json!({});
        metadata.add_json(&info, &mut found);
        assert_eq!(found, *json);
    }

    #[test]
    fn metadata_is_whole_for_programs_and_short_for_people() {
        check(b"day 4", "day 4", &json!({ "metadata": "day 4" }));
        let long = "ü".repeat(2_000);
        let cell = format!("{}… (4000 bytes)", "ü".repeat(40));
        check(long.as_bytes(), &cell, &json!({ "metadata": long }));
        let json = json!({ "metadata": null, "metadata_hex": "00ff" });
        check(&[0, 255], "0x00ff", &json);
        let none = v1::PartitionInfo::default();
        assert_eq!(Metadata::default().cell(&none), "-");
    }
}
