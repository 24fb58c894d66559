//! The worker's everyday: copies records, and stands still at its point while it does.

use std::time::Duration;

use tenure_model::NextOffset;
use tenure_sdk::consumer::{Batch, Input};
use tenure_sdk::grant::Grant;
use tenure_sdk::offsets::OffsetWriter;
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sdk::source::Record;
use tenure_sink_postgres::{PgTx, PostgresWriter, classify};

use super::late::Late;
use super::offset_table::OffsetTableWriter;
use super::worker::Worker;
use super::{Point, What};

const INSERT: &str = "\
INSERT INTO effects (part, at_offset, epoch, worker, payload)
SELECT $1, u.at_offset, $2, $3, u.payload
FROM unnest($4::bigint[], $5::text[]) WITH ORDINALITY AS u (at_offset, payload, place)
ORDER BY u.place";

const CHARGE: &str = "\
WITH asked AS (INSERT INTO attempts SELECT unnest($1::text[]) RETURNING key)
INSERT INTO charges SELECT key FROM asked ON CONFLICT DO NOTHING";

/// Where the offset goes that belongs to a batch.
pub(super) enum Offsets {
    /// It went with the data.
    InData,
    /// To the coordinator.
    Coordinator(OffsetWriter),
    /// Into a table without a fence.
    Table(OffsetTableWriter),
}

impl Offsets {
    async fn commit(&mut self, next: NextOffset) -> Result<(), BoxError> {
        match self {
            Self::InData => Ok(()),
            Self::Coordinator(offsets) => {
                offsets.commit(next).await?;
                Ok(())
            }
            Self::Table(offsets) => Ok(offsets.commit(next).await?),
        }
    }
}

/// What a handler has in hand.
pub(super) struct Hands {
    pub(super) grant: Grant,
    pub(super) input: Input,
    pub(super) writer: PostgresWriter,
    pub(super) offsets: Offsets,
}

impl Worker {
    /// Runs for one owned partition.
    pub(super) async fn own(&self, mut hands: Hands) -> Result<(), BoxError> {
        // Not always at the first batch of a grant.
        let mut before_stop = self.stops_made() % 3;
        loop {
            let Some(batch) = hands.input.next_batch(&self.limits()).await else { return Ok(()) };
            if self.args.point.is_none() {
                tokio::time::sleep(Duration::from_millis(self.args.hold_ms)).await;
                self.copy(&mut hands, &batch).await?;
                continue;
            }
            let turn = self.turn.lock().await;
            let point = self.point_in_handler().filter(|_| before_stop == 0);
            before_stop = before_stop.saturating_sub(1);
            let Some(point) = point else {
                self.copy(&mut hands, &batch).await?;
                continue;
            };
            self.copy_late(&mut hands, &batch, point).await?;
            drop(turn);
            // The session learns of the loss by itself; until then the partition counts as served.
            hands.input.ended().await;
            return Ok(());
        }
    }

    async fn copy(&self, hands: &mut Hands, batch: &Batch) -> Result<(), BoxError> {
        self.write(&hands.grant, &mut hands.writer, batch.records(), batch.next()).await?;
        hands.offsets.commit(batch.next()).await
    }

    /// Writes records and moves the sink's offset in one transaction.
    pub(super) async fn write(
        &self,
        grant: &Grant,
        writer: &mut PostgresWriter,
        records: &[Record],
        next: NextOffset,
    ) -> Result<(), SinkError> {
        if self.args.charges {
            self.charge(records).await?;
        }
        let tx = writer.begin().await?;
        self.insert(&tx, grant, records).await?;
        tx.commit(next).await
    }

    /// An effect outside of the fenced transaction: only its keys keep it from happening twice.
    async fn charge(&self, records: &[Record]) -> Result<(), SinkError> {
        let keys: Vec<String> = records.iter().map(Record::idempotency_key).collect();
        let client = self.sink.pool().get().await;
        let client = client
            .map_err(|error| SinkError::Transient { retry_after: None, source: error.into() })?;
        client.execute(CHARGE, &[&keys]).await.map_err(classify)?;
        Ok(())
    }

    async fn insert(
        &self,
        tx: &PgTx<'_>,
        grant: &Grant,
        records: &[Record],
    ) -> Result<(), SinkError> {
        // With the offset beside the data, what an earlier owner wrote and did not get to commit is not written again.
        let applied = tx.applied().filter(|_| !self.args.replays);
        let (mut offsets, mut payloads) = (Vec::new(), Vec::new());
        for record in records {
            if applied.is_none_or(|applied| record.offset >= applied) {
                let value = record.value.as_deref().unwrap_or_default();
                offsets.push(record.offset.signed());
                payloads.push(String::from_utf8_lossy(value).into_owned());
            }
        }
        let part = i32::try_from(grant.partition.index.get()).expect("fewer than 2^31 partitions");
        let epoch = grant.epoch.get().cast_signed();
        let statement = tx.prepare(INSERT).await?;
        tx.execute(&statement, &[&part, &epoch, &self.args.name, &offsets, &payloads]).await?;
        Ok(())
    }

    /// Copies a batch, is stopped in the middle of it, and goes on with exactly the next act.
    async fn copy_late(
        &self,
        hands: &mut Hands,
        batch: &Batch,
        point: Point,
    ) -> Result<(), BoxError> {
        let Hands { grant, input, writer, offsets } = hands;
        let (records, next) = (batch.records(), batch.next());
        match point {
            Point::BeforeRegister | Point::BeforeVerify | Point::BeforeResume => {}
            Point::AfterBegin => {
                let tx = writer.begin().await?;
                let late = Late::stop(self, grant, Some(next));
                let result = match self.insert(&tx, grant, records).await {
                    Ok(()) => tx.commit(next).await,
                    Err(error) => Err(error),
                };
                late.tell_sink("data and commit", result);
                late.go_on_writing(writer, records, next).await;
            }
            Point::AfterData => {
                let tx = writer.begin().await?;
                self.insert(&tx, grant, records).await?;
                let late = Late::stop(self, grant, Some(next));
                late.tell_sink("commit", tx.commit(next).await);
                late.go_on_writing(writer, records, next).await;
            }
            Point::CommitUnanswered => {
                let Some(in_hand) = input.next_batch(&self.limits()).await else {
                    self.write(grant, writer, records, next).await?;
                    return offsets.commit(next).await;
                };
                self.stand_still(What::Arming, grant, Some(in_hand.next()));
                let late = Late::stopped_from_outside(self, grant, Some(in_hand.next()));
                // Its answer is held back; the commit itself is older than the stop.
                let answer = self.write(grant, writer, records, next).await;
                late.tell_unjudged("answer to the commit", answer);
                late.go_on_writing(writer, in_hand.records(), in_hand.next()).await;
            }
            Point::BeforeOffsetCommit => {
                self.write(grant, writer, records, next).await?;
                let late = Late::stop(self, grant, Some(next));
                late.commit_offset(next).await;
                late.go_on_writing(writer, records, next).await;
            }
        }
        Ok(())
    }
}
