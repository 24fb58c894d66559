//! A watcher that follows over any number of connections: one that never stays, or one that stays while it can.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tenure_proto::v1;
use tenure_proto::v1::ownership_client::OwnershipClient;
use tenure_proto::v1::watch_response::Message;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::Streaming;
use tonic::transport::Endpoint;

use crate::changes::Told;
use crate::rig::{Addresses, PATIENCE};

/// How long a watcher stays at one node; half of the times it leaves sooner, maybe in the middle of a revision.
pub(crate) const BRIEFLY: Duration = Duration::from_millis(200);

/// It leaves when the node does.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(3_600);

pub(crate) struct Watcher {
    pub(crate) group: Option<&'static str>,
    pub(crate) stay: Duration,
    /// The last revision that there will be, once it is known.
    last: watch::Sender<Option<u64>>,
    task: JoinHandle<Seen>,
}

#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) changes: Vec<Told>,
    pub(crate) connections: usize,
    /// Revisions that a stream broke in the middle of.
    pub(crate) resumed_within: usize,
    /// Everything up to here was seen whole.
    whole: u64,
}

impl Watcher {
    pub(crate) fn start(
        addresses: Addresses,
        group: Option<&'static str>,
        stay: Duration,
        seed: u64,
    ) -> Self {
        let (last, known) = watch::channel(None);
        let task = tokio::spawn(async move {
            let mut seen = Seen::default();
            let mut random = StdRng::seed_from_u64(seed);
            while known.borrow().is_none_or(|last| seen.whole < last) {
                sleep(Duration::from_millis(random.random_range(0..20))).await;
                let address = {
                    let addresses = addresses.lock().unwrap();
                    addresses[random.random_range(0..addresses.len())]
                };
                let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
                let end = Instant::now() + stay;
                let Ok(Ok(channel)) = timeout_at(end, endpoint.connect()).await else { continue };
                let request = v1::WatchRequest {
                    group: group.unwrap_or_default().to_owned(),
                    from_revision: seen.whole + 1,
                };
                let mut client = OwnershipClient::new(channel);
                let Ok(Ok(answer)) = timeout_at(end, client.watch(request)).await else { continue };
                seen.connections += 1;
                let leaves_sooner = stay == BRIEFLY && random.random_bool(0.5);
                let messages = if leaves_sooner { random.random_range(1..6) } else { usize::MAX };
                let is_over = |whole| known.borrow().is_some_and(|last| whole >= last);
                seen.follow(answer.into_inner(), end, messages, is_over).await;
            }
            seen
        });
        Self { group, stay, last, task }
    }

    pub(crate) async fn finish(self, last: u64) -> Seen {
        self.last.send_replace(Some(last));
        timeout(PATIENCE, self.task).await.expect("the last revision is seen").unwrap()
    }
}

impl Seen {
    async fn follow(
        &mut self,
        mut stream: Streaming<v1::WatchResponse>,
        end: Instant,
        messages: usize,
        is_over: impl Fn(u64) -> bool,
    ) {
        let mut is_within = false;
        for _ in 0..messages {
            let Ok(Ok(Some(response))) = timeout_at(end, stream.message()).await else { break };
            match response.message.unwrap() {
                Message::Progress(progress) => {
                    assert!(!is_within, "progress comes between revisions");
                    self.whole = self.whole.max(progress.revision);
                }
                Message::Revision(part) => {
                    assert!(part.revision > self.whole, "{} again", part.revision);
                    for change in &part.changes {
                        let told = Told::of(part.revision, change);
                        // The start of a revision that was seen in part comes again.
                        let known = self.changes.last().map(|last| (last.revision, last.position));
                        if known < Some((told.revision, told.position)) {
                            self.changes.push(told);
                        }
                    }
                    is_within = !part.last_of_revision;
                    if part.last_of_revision {
                        self.whole = part.revision;
                    }
                }
                Message::Compacted(compacted) => panic!("nothing is forgotten yet: {compacted:?}"),
            }
            if is_over(self.whole) {
                break;
            }
        }
        self.resumed_within += usize::from(is_within);
    }
}
