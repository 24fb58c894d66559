//! Streams of changes.
//!
//! A watch reads the history in the replicated state: it is woken by news, looks from where it stands, and sends what
//! is there. Nothing can be missed between two looks, a snapshot that replaces the state is no event of its own, and
//! a watcher that reads slowly costs a cursor and a short queue.

use std::time::Duration;

use tenure_core::history::Forgotten;
use tenure_model::limits::WATCH_QUEUE_MAX;
use tenure_model::{ErrorCode, GroupId, Index};
use tenure_proto::v1;
use tenure_proto::v1::watch_response::Message;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::Services;
use super::refusal::Refusal;
use crate::past::{Cursor, Page, page};
use crate::raft::ProposeError;

pub(super) type WatchStream = ReceiverStream<Result<v1::WatchResponse, Status>>;

/// Lengths of a watch.
#[derive(Clone, Copy)]
struct Lengths {
    /// Between two words of progress.
    progress: Duration,
    /// How long a message may wait for room in the queue.
    stall: Duration,
}

const LENGTHS: Lengths =
    Lengths { progress: Duration::from_secs(3), stall: Duration::from_secs(10) };

impl Services {
    /// Starts a watch; `from` is the first revision wanted, 0 for what comes next.
    pub(super) async fn open_watch(
        &self,
        group: Option<GroupId>,
        from: Index,
    ) -> Result<WatchStream, Refusal> {
        let permit = self.0.watches.clone().try_acquire_owned().map_err(|_full| {
            Refusal::new(
                ErrorCode::Overloaded,
                "this node has as many watches as it takes: go to another one, or close some",
            )
        })?;
        self.catch_up_if_leader().await?;
        // A revision that never comes would be waited for without a word.
        self.reach(Index(from.0.saturating_sub(1))).await?;
        let applied = self.0.raft.with_machine(|machine| machine.state().applied);
        let start = if from == Index(0) { Index(applied.0 + 1) } else { from };
        let (queue, stream) = mpsc::channel(WATCH_QUEUE_MAX);
        let services = self.clone();
        let news = self.0.raft.with_machine(|machine| machine.newest_change());
        let closing = self.0.closing.clone();
        let read = move |cursor: Cursor| {
            services.0.raft.with_machine(|machine| page(machine.state(), cursor, group.as_ref()))
        };
        let watch = Watch { queue, news, closing, lengths: LENGTHS, _permit: Some(permit) };
        tokio::spawn(watch.run(read, Cursor { revision: start, position: 0 }));
        Ok(ReceiverStream::new(stream))
    }
}

/// The sending side of one watch.
struct Watch {
    queue: mpsc::Sender<Result<v1::WatchResponse, Status>>,
    /// Wakes when there may be more changes.
    news: watch::Receiver<Index>,
    closing: watch::Receiver<bool>,
    lengths: Lengths,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Why a watch ends.
enum End {
    /// Nobody reads any more.
    Gone,
    Refused(Refusal),
}

impl Watch {
    async fn run(mut self, read: impl Fn(Cursor) -> Result<Page, Forgotten>, start: Cursor) {
        // Kept for the last word, which must find room in a full queue.
        let Ok(last_word) = self.queue.clone().reserve_owned().await else { return };
        match self.serve(read, start).await {
            End::Gone => {}
            End::Refused(refusal) => {
                last_word.send(Err(refusal.into()));
            }
        }
    }

    async fn serve(
        &mut self,
        read: impl Fn(Cursor) -> Result<Page, Forgotten>,
        mut cursor: Cursor,
    ) -> End {
        let mut progress_due = None;
        loop {
            // Before the look, so that news which come after it wake the next one.
            self.news.mark_unchanged();
            let page = match read(cursor) {
                Ok(page) => page,
                Err(forgotten) => return self.compacted(forgotten).await,
            };
            if progress_due.is_none() {
                // What was before the first revision wanted counts as sent, as far as this node has it.
                let revision = Index(cursor.revision.0 - 1).min(page.applied);
                if let Err(end) = self.progress(revision, &mut progress_due).await {
                    return end;
                }
                // Said again as soon as this node has nothing more, or a watcher of little that never stays long
                // would never get on.
                if revision < page.applied {
                    progress_due = Some(Instant::now());
                }
            }
            cursor = page.next;
            for revision in page.revisions {
                if let Err(end) = self.send(Message::Revision(revision)).await {
                    return end;
                }
            }
            if !page.is_last {
                continue;
            }
            let due = progress_due.unwrap_or_else(Instant::now);
            if due <= Instant::now()
                && let Err(end) = self.progress(page.applied, &mut progress_due).await
            {
                return end;
            }
            tokio::select! {
                closing = self.closing.wait_for(|closing| *closing) => {
                    // A sender that is gone means the same as its word.
                    drop(closing);
                    return End::Refused(ProposeError::Stopped.into());
                }
                () = self.queue.closed() => return End::Gone,
                news = self.news.changed() => if news.is_err() {
                    return End::Refused(ProposeError::Stopped.into());
                },
                () = sleep_until(due) => {}
            }
        }
    }

    async fn progress(&self, revision: Index, due: &mut Option<Instant>) -> Result<(), End> {
        *due = Some(Instant::now() + self.lengths.progress);
        self.send(Message::Progress(v1::Progress { revision: revision.0 })).await
    }

    async fn compacted(&self, forgotten: Forgotten) -> End {
        let list_from = forgotten.before.revision.0;
        match self.send(Message::Compacted(v1::Compacted { list_from })).await {
            Ok(()) => End::Refused(Refusal::forgotten(forgotten)),
            Err(end) => end,
        }
    }

    async fn send(&self, message: Message) -> Result<(), End> {
        let response = v1::WatchResponse { message: Some(message) };
        let mut closing = self.closing.clone();
        tokio::select! {
            sent = timeout(self.lengths.stall, self.queue.send(Ok(response))) => match sent {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_gone)) => Err(End::Gone),
                Err(_elapsed) => Err(End::Refused(self.too_slow())),
            },
            closing = closing.wait_for(|closing| *closing) => {
                drop(closing);
                Err(End::Refused(ProposeError::Stopped.into()))
            }
        }
    }

    fn too_slow(&self) -> Refusal {
        let problem = format!(
            "{WATCH_QUEUE_MAX} messages waited for {} ms without being read: resume after the last \
             revision that was seen whole",
            self.lengths.stall.as_millis()
        );
        Refusal::new(ErrorCode::SlowWatcher, problem)
    }
}

#[cfg(test)]
mod tests;
