//! What a stale owner does once it is awake, and who says what to it.

use std::time::Duration;

use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_model::{CommitSequence, ErrorCode, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::session::{CallError, OffsetCommit, Refused};
use tenure_sdk::sink::{BoxError, FencedSink as _, FencedWriter as _, SinkError, Verified};
use tenure_sdk::source::{ReadAhead, Record, RecordSource as _};
use tenure_sink_postgres::{PostgresWriter, classify, sql, tokio_postgres};

use super::worker::Worker;
use super::{Answer, Judge, Line, OffsetHome, Point, What};

/// Longest wait for one late act.
const ACT_MAX: Duration = Duration::from_secs(10);

/// Late acts of one stop.
pub(super) struct Late<'a> {
    worker: &'a Worker,
    grant: &'a Grant,
    stop: u32,
    next: Option<NextOffset>,
}

struct Verdict {
    answer: Answer,
    current: Option<u64>,
    text: String,
}

impl<'a> Late<'a> {
    /// Stops the process here. Returns once it was woken.
    pub(super) fn stop(worker: &'a Worker, grant: &'a Grant, next: Option<NextOffset>) -> Self {
        let late = Self::stopped_from_outside(worker, grant, next);
        worker.stand_still(What::Stopping, grant, next);
        late
    }

    /// Counts a stop that comes from outside.
    pub(super) fn stopped_from_outside(
        worker: &'a Worker,
        grant: &'a Grant,
        next: Option<NextOffset>,
    ) -> Self {
        Self { worker, grant, stop: worker.count_stop(), next }
    }

    fn line(&self, what: What) -> Line {
        Line {
            stop: self.stop,
            partition: self.grant.partition.index.get(),
            epoch: self.grant.epoch.get(),
            next: self.next.map_or(0, NextOffset::get),
            ..Line::new(what)
        }
    }

    fn tell(&self, act: &str, judge: Option<Judge>, verdict: Verdict) {
        let Verdict { answer, current, text } = verdict;
        let line = self.line(What::Late);
        Line { act: act.to_owned(), judge, answer: Some(answer), current, text, ..line }.say();
    }

    pub(super) fn tell_sink(&self, act: &str, result: Result<(), SinkError>) {
        self.tell(act, Some(Judge::Database), of_sink(result));
    }

    /// Tells an answer that says nothing about a late act.
    pub(super) fn tell_unjudged(&self, act: &str, result: Result<(), SinkError>) {
        self.tell(act, None, of_sink(result));
    }

    fn tell_call<T>(&self, act: &str, result: Result<Vec<Result<T, Refused>>, CallError>) {
        self.tell(act, Some(Judge::Coordinator), of_call(result));
    }

    /// Goes on from inside an acquire, as if no answer mattered.
    pub(super) async fn go_on_acquiring(&self, point: Point) {
        let sink = &self.worker.sink;
        if point == Point::BeforeRegister {
            self.tell_sink("register", sink.register(self.grant).await.map(drop));
        }
        self.verify().await;
        let resumed = sink.writer(self.grant).resume(&Verified::without_coordinator(true)).await;
        let resume = resumed.as_ref().ok().copied().flatten();
        self.tell_sink("resume point", resumed.map(drop));
        let read = match resume {
            Some(resume) => self.read(resume).await,
            // Refused above: the write is tried all the same, with nothing to write.
            None => Ok((Vec::new(), self.next.unwrap_or(NextOffset::ZERO))),
        };
        match read {
            Ok((records, next)) => {
                let mut writer = sink.writer(self.grant);
                let written = self.worker.write(self.grant, &mut writer, &records, next).await;
                self.tell_sink("write", written);
                self.statement(next).await;
            }
            Err(error) => {
                let verdict =
                    Verdict { answer: Answer::Failed, current: None, text: error.to_string() };
                self.tell("read", None, verdict);
            }
        }
        self.line(What::Through).say();
    }

    /// Goes on from inside a handler: the records in hand are written, whatever was said before.
    pub(super) async fn go_on_writing(
        &self,
        writer: &mut PostgresWriter,
        records: &[Record],
        next: NextOffset,
    ) {
        let mut fresh;
        let writer = if self.worker.args.without_fencing {
            // Without the epoch a writer still minds its own commit in doubt; such code would begin anew.
            fresh = self.worker.sink.writer(self.grant);
            &mut fresh
        } else {
            writer
        };
        let written = self.worker.write(self.grant, writer, records, next).await;
        self.tell_sink("write", written);
        self.statement(next).await;
        if self.worker.args.offsets == OffsetHome::Sink {
            self.verify().await;
        }
        self.line(What::Through).say();
    }

    /// Commits an offset as code does that never asks whether it still owns the partition.
    pub(super) async fn commit_offset(&self, next: NextOffset) {
        let Grant { group, member, partition, epoch, .. } = self.grant;
        match (self.worker.args.offsets, &self.worker.table) {
            (OffsetHome::Table, Some(table)) => {
                let committed = table.writer(&self.grant.resource).commit(next).await;
                self.tell_sink("offset into the table", committed);
            }
            (OffsetHome::Sink | OffsetHome::Coordinator | OffsetHome::Table, _) => {
                let commit = OffsetCommit {
                    partition: *partition,
                    epoch: *epoch,
                    sequence: CommitSequence(u64::MAX >> 1),
                    next_offset: next,
                    metadata: Vec::new(),
                };
                let client = &self.worker.coordinator;
                let answer = client.commit(group, member, vec![commit], ACT_MAX).await;
                self.tell_call("offset commit", answer);
            }
        }
    }

    async fn verify(&self) {
        let Grant { group, member, partition, epoch, .. } = self.grant;
        let client = &self.worker.coordinator;
        let answer = client.verify(group, member, &[(*partition, *epoch)], ACT_MAX).await;
        self.tell_call("verify", answer);
    }

    /// Sends the sink's own statement under the old epoch, without the look at the row before it.
    async fn statement(&self, next: NextOffset) {
        if self.worker.args.without_fencing {
            return;
        }
        let verdict = match tokio::time::timeout(ACT_MAX, self.move_offset(next)).await {
            Ok(Ok(0)) => {
                let text = "rows touched: 0".to_owned();
                Verdict { answer: Answer::NoRow, current: None, text }
            }
            Ok(Ok(_)) => Verdict { answer: Answer::Accepted, current: None, text: String::new() },
            Ok(Err(error)) => of_sink(Err(error)),
            Err(elapsed) => {
                Verdict { answer: Answer::Failed, current: None, text: elapsed.to_string() }
            }
        };
        self.tell("statement", Some(Judge::Database), verdict);
    }

    async fn move_offset(&self, next: NextOffset) -> Result<u64, SinkError> {
        let mut client =
            self.worker.sink.pool().get().await.map_err(|error| SinkError::Transient {
                retry_after: None,
                source: Box::new(error),
            })?;
        let tx = client.transaction().await.map_err(classify)?;
        let resource = self.grant.resource.as_str();
        let epoch = self.grant.epoch.get();
        let bounds = [resource.to_owned(), epoch.to_string(), "5000".into(), "5000".into()];
        let [named, given, statement, idle] = &bounds;
        tx.execute(sql::BOUND, &[named, given, statement, idle]).await.map_err(classify)?;
        let row = tx.query_one(sql::READ, &[&resource]).await.map_err(classify)?;
        let sequence: i64 = row.try_get("sequence").map_err(classify)?;
        let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
            [&resource, &epoch.cast_signed(), &sequence, &next.signed()];
        let rows = tx.execute(sql::MOVE, &parameters).await.map_err(classify)?;
        tx.commit().await.map_err(classify)?;
        Ok(rows)
    }

    /// Reads what is next in the partition, by a source of its own.
    async fn read(&self, from: NextOffset) -> Result<(Vec<Record>, NextOffset), BoxError> {
        let source = KafkaSource::new(KafkaSettings::new(self.worker.args.kafka.as_str()))?;
        let Grant { topic, partition, .. } = self.grant;
        let mut stream = source.open(topic, *partition, from, ReadAhead::default()).await?;
        let fetched = tokio::time::timeout(ACT_MAX, stream.recv()).await?;
        let records = fetched.ok_or("the source ended")?.into_records()?;
        source.shutdown(ACT_MAX).await;
        let next = records.last().map_or(from, Record::next);
        Ok((records, next))
    }
}

fn of_sink(result: Result<(), SinkError>) -> Verdict {
    let (answer, current) = match &result {
        Ok(()) => (Answer::Accepted, None),
        Err(SinkError::Fenced { seen, .. }) => (Answer::Fenced, seen.map(|epoch| epoch.get())),
        Err(SinkError::Transient { source, .. }) if was_ended(&**source) => (Answer::Ended, None),
        Err(
            SinkError::Transient { .. }
            | SinkError::LeaseEnded(_)
            | SinkError::OffsetConflict { .. }
            | SinkError::Unknown(_)
            | SinkError::Rejected(_)
            | SinkError::Misconfigured(_)
            | SinkError::FenceRegressed { .. },
        ) => (Answer::Failed, None),
    };
    Verdict { answer, current, text: result.err().map_or_else(String::new, |e| e.to_string()) }
}

/// Whether the server ended the transaction for the pause in it, and with it the connection.
fn was_ended(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    error.downcast_ref::<tokio_postgres::Error>().is_some_and(|error| {
        error.is_closed() || error.code().is_some_and(|code| code.code() == "25P03")
    })
}

fn of_call<T>(result: Result<Vec<Result<T, Refused>>, CallError>) -> Verdict {
    let refused = match result {
        Ok(verdicts) => match verdicts.into_iter().next() {
            Some(Ok(_)) => {
                return Verdict { answer: Answer::Accepted, current: None, text: String::new() };
            }
            Some(Err(refused)) => refused,
            None => {
                let text = "the answer has no verdict".to_owned();
                return Verdict { answer: Answer::Failed, current: None, text };
            }
        },
        Err(CallError::Refused(refused)) => refused,
        Err(error @ CallError::Unknown { .. }) => {
            return Verdict { answer: Answer::Failed, current: None, text: error.to_string() };
        }
    };
    let fenced = refused.code == ErrorCode::Fenced;
    let answer = if fenced { Answer::Fenced } else { Answer::Failed };
    let current = refused.current_epoch.map(|epoch| epoch.get());
    Verdict { answer, current, text: refused.to_string() }
}
