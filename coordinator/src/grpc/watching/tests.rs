use std::sync::{Arc, Mutex};

use tenure_core::State;
use tenure_core::history::{Change, Moment, What};
use tenure_model::Timestamp;
use tenure_proto::error_of_status;
use tokio_stream::StreamExt as _;

use super::*;

/// A state that the test changes, and one watch of it.
struct Rig {
    state: Arc<Mutex<State>>,
    news: watch::Sender<Index>,
    closing: watch::Sender<bool>,
    stream: WatchStream,
}

fn rig(from: u64, lengths: Lengths) -> Rig {
    let state = Arc::new(Mutex::new(State { applied: Index(9), ..State::default() }));
    let (news, told) = watch::channel(Index(0));
    let (closing, closed) = watch::channel(false);
    let (queue, stream) = mpsc::channel(WATCH_QUEUE_MAX);
    let watch = Watch { queue, news: told, closing: closed, lengths, _permit: None };
    let shared = Arc::clone(&state);
    let read = move |cursor: Cursor| page(&shared.lock().unwrap(), cursor, None);
    tokio::spawn(watch.run(read, Cursor { revision: Index(from), position: 0 }));
    Rig { state, news, closing, stream: ReceiverStream::new(stream) }
}

impl Rig {
    fn expire(&self, revision: u64) {
        let mut state = self.state.lock().unwrap();
        state.applied = Index(revision);
        state.changes.newest.push_back(Change {
            at: Moment { revision: Index(revision), time: Timestamp(0) },
            position: 0,
            group: None,
            what: What::MemberExpired { member: "m".parse().unwrap() },
        });
        drop(state);
        self.news.send_replace(Index(revision));
    }

    fn forget(&self, until: u64) {
        let mut state = self.state.lock().unwrap();
        (state.applied, state.changes.compacted) = (Index(until), Index(until));
    }

    async fn next(&mut self) -> String {
        match self.stream.next().await {
            None => "end".to_owned(),
            Some(Err(status)) => error_of_status(&status).code,
            Some(Ok(response)) => match response.message.unwrap() {
                Message::Revision(part) => format!("revision {}", part.revision),
                Message::Progress(progress) => format!("progress {}", progress.revision),
                Message::Compacted(compacted) => format!("compacted {}", compacted.list_from),
            },
        }
    }
}

const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(20);

#[tokio::test]
async fn watch_starts_with_progress_and_goes_on_with_each_change() {
    let mut rig = rig(10, Lengths { progress: LONG, stall: LONG });
    assert_eq!(rig.next().await, "progress 9");
    rig.expire(12);
    assert_eq!(rig.next().await, "revision 12");
    rig.expire(13);
    rig.expire(15);
    assert_eq!((rig.next().await, rig.next().await).0, "revision 13");
    rig.closing.send_replace(true);
    assert_eq!(rig.next().await, "SHUTTING_DOWN");
    assert_eq!(rig.next().await, "end");
}

#[tokio::test]
async fn progress_is_told_at_once_when_everything_was_sent() {
    let mut rig = rig(4, Lengths { progress: LONG, stall: LONG });
    rig.expire(11);
    assert_eq!(rig.next().await, "progress 3");
    assert_eq!(rig.next().await, "revision 11");
    assert_eq!(rig.next().await, "progress 11");
}

#[tokio::test]
async fn idle_watch_tells_its_progress_again_and_again() {
    let mut rig = rig(4, Lengths { progress: SHORT, stall: LONG });
    assert_eq!(rig.next().await, "progress 3");
    assert_eq!(rig.next().await, "progress 9");
    assert_eq!(rig.next().await, "progress 9");
    rig.state.lock().unwrap().applied = Index(11);
    while rig.next().await != "progress 11" {}
}

#[tokio::test]
async fn node_that_is_behind_the_watcher_says_so_and_waits() {
    let mut rig = rig(20, Lengths { progress: LONG, stall: LONG });
    assert_eq!(rig.next().await, "progress 9");
    for revision in [12, 19, 20, 21] {
        rig.expire(revision);
    }
    assert_eq!((rig.next().await, rig.next().await).0, "revision 20");
}

#[tokio::test]
async fn forgotten_changes_end_the_watch_with_the_revision_to_list_from() {
    let mut rig = rig(10, Lengths { progress: LONG, stall: LONG });
    assert_eq!(rig.next().await, "progress 9");
    rig.forget(40);
    rig.news.send_replace(Index(40));
    assert_eq!(rig.next().await, "compacted 40");
    assert_eq!(rig.next().await, "COMPACTED");
    assert_eq!(rig.next().await, "end");
}

#[tokio::test]
async fn watcher_that_does_not_read_is_cut_and_told_so_after_what_was_queued() {
    let mut rig = rig(10, Lengths { progress: LONG, stall: SHORT });
    for revision in 10..100 {
        rig.expire(revision);
    }
    tokio::time::timeout(LONG, async {
        while !rig.stream.as_ref().is_closed() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(rig.next().await, "progress 9");
    let mut seen = 0;
    let last = loop {
        let next = rig.next().await;
        if !next.starts_with("revision") {
            break next;
        }
        assert_eq!(next, format!("revision {}", 10 + seen), "in order and without gaps");
        seen += 1;
    };
    assert_eq!((last.as_str(), seen), ("SLOW_WATCHER", WATCH_QUEUE_MAX as u64 - 2));
    assert_eq!(rig.next().await, "end");
}

#[tokio::test]
async fn watch_ends_when_nobody_reads_any_more() {
    let mut rig = rig(10, Lengths { progress: LONG, stall: LONG });
    assert_eq!(rig.next().await, "progress 9");

    drop(std::mem::replace(&mut rig.stream, ReceiverStream::new(mpsc::channel(1).1)));
    rig.news.closed().await;
}
