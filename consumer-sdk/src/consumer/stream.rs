//! A consumer as a stream of events, for frameworks that run the work themselves.

use std::fmt;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::lifecycle::{Lifecycle, LifecycleEvents};
use super::{Consumer, ConsumerError, Handler, Input, Owned, Stopped, Stopper};
use crate::grant::Grant;
use crate::sink::{BoxError, FencedSink};

/// One thing that a framework learns of its consumer.
#[derive(Debug)]
pub enum Ownership<S: FencedSink> {
    /// A partition is acquired: work on it, and give it back through [`Finish::finish`] once its input has ended.
    Work(Box<Work<S>>),
    /// Something happened.
    Happened(Lifecycle),
    /// The consumer has ended; the last item.
    Ended(Result<Stopped, ConsumerError>),
}

/// An acquired partition in the hands of a framework.
///
/// What a handler's return is to [`Consumer::run`], [`Finish::finish`] is here: deadlines, error policy and all. Dropped
/// without it, the partition is given back as after an error.
pub struct Work<S: FencedSink> {
    owned: Owned<S>,
    finished: oneshot::Sender<Result<(), BoxError>>,
}

impl<S: FencedSink> fmt::Debug for Work<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("owned", &self.owned).finish_non_exhaustive()
    }
}

impl<S: FencedSink> Work<S> {
    /// The grant that it is done under.
    #[must_use]
    pub const fn grant(&self) -> &Grant {
        self.owned.grant()
    }

    /// The records, the writer, and what ends the work.
    #[must_use]
    pub fn split(self) -> (Input, S::Writer, Finish) {
        let (input, writer) = self.owned.split();
        (input, writer, Finish { finished: self.finished })
    }
}

/// Ends the work on one partition.
#[derive(Debug)]
pub struct Finish {
    finished: oneshot::Sender<Result<(), BoxError>>,
}

impl Finish {
    /// Says how the work ended. Nothing may be written under the grant after this.
    pub fn finish(self, result: Result<(), BoxError>) {
        // Aborted already, because it came after its deadline.
        let _in_time = self.finished.send(result);
    }
}

/// Events of one consumer. Dropped, it ends the consumer as a crash would, except that it leaves the group.
pub struct OwnershipStream<S: FencedSink> {
    work: mpsc::UnboundedReceiver<Work<S>>,
    happened: Option<LifecycleEvents>,
    run: JoinHandle<Result<Stopped, ConsumerError>>,
    stopper: Stopper,
    has_ended: bool,
}

impl<S: FencedSink> fmt::Debug for OwnershipStream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnershipStream").field("happened", &self.happened).finish_non_exhaustive()
    }
}

impl<S: FencedSink> Drop for OwnershipStream<S> {
    fn drop(&mut self) {
        self.run.abort();
    }
}

impl<S: FencedSink> Consumer<S> {
    /// Joins the group and hands everything out as events, instead of running a handler for each partition. Within a
    /// tokio runtime.
    #[must_use]
    pub fn into_stream(self) -> OwnershipStream<S> {
        self.into_stream_by(|consumer, handler| {
            tokio::spawn(consumer.run(move |owned| handler(owned)))
        })
    }

    /// As [`Consumer::into_stream`], run by somebody else.
    pub(crate) fn into_stream_by(
        self,
        run: impl FnOnce(Self, Handler<S>) -> JoinHandle<Result<Stopped, ConsumerError>>,
    ) -> OwnershipStream<S> {
        let (stopper, happened) = (self.stopper(), Some(self.lifecycle()));
        let (works, work) = mpsc::unbounded_channel();
        let run = run(self, handing_out(works));
        OwnershipStream { work, happened, run, stopper, has_ended: false }
    }
}

/// Handler that hands each partition out and waits for it to be finished.
fn handing_out<S: FencedSink>(works: mpsc::UnboundedSender<Work<S>>) -> Handler<S> {
    Arc::new(move |owned| {
        let (finished, end) = oneshot::channel();
        let taken = works.send(Work { owned, finished }).is_ok();
        Box::pin(async move {
            if !taken {
                return Err("nobody takes the partition any more".into());
            }
            end.await.unwrap_or_else(|_dropped| Err("the work was dropped unfinished".into()))
        })
    })
}

impl<S: FencedSink> OwnershipStream<S> {
    /// Starts a shutdown, as [`Consumer::stopper`]; events go on until [`Ownership::Ended`].
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Waits for the next event; nothing after [`Ownership::Ended`]. Cancel-safe.
    pub async fn next(&mut self) -> Option<Ownership<S>> {
        if self.has_ended {
            return None;
        }
        loop {
            tokio::select! {
                biased;
                happened = next_of(&mut self.happened) => match happened {
                    Some(happened) => return Some(Ownership::Happened(happened)),
                    None => self.happened = None,
                },
                Some(work) = self.work.recv() => return Some(Ownership::Work(Box::new(work))),
                ended = &mut self.run => {
                    self.has_ended = true;
                    return Some(Ownership::Ended(ended.unwrap_or(Err(ConsumerError::SessionGone))));
                }
            }
        }
    }
}

async fn next_of(events: &mut Option<LifecycleEvents>) -> Option<Lifecycle> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}
