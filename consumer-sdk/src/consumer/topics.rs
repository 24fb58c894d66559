//! Looks the topics up and reports them.

use std::sync::Arc;
use std::time::Duration;

use tenure_model::TopicName;
use tokio::sync::Notify;

use super::link::Link;
use crate::source::RecordSource;

const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Reports the topics at once, whenever `joined` is told, and every `interval`; never ends.
///
/// A look-up that failed reports nothing: a failure is no absence.
pub(super) async fn report(
    source: Arc<dyn RecordSource>,
    link: Arc<dyn Link>,
    names: Vec<TopicName>,
    interval: Duration,
    joined: Arc<Notify>,
) {
    let mut pause = PAUSE_MIN;
    loop {
        let wait = match source.topics(&names).await {
            Ok(topics) => {
                let all_found = topics.len() == names.len();
                if !topics.is_empty() {
                    link.report_topics(topics);
                }
                // A topic that is about to be created is found soon after.
                if all_found {
                    pause = PAUSE_MIN;
                    interval
                } else {
                    next_pause(&mut pause, interval)
                }
            }
            Err(error) => {
                tracing::warn!(error = %error, "topics could not be looked up, trying again");
                next_pause(&mut pause, interval)
            }
        };
        // Told or due: both look up again.
        let _told = tokio::time::timeout(wait, joined.notified()).await;
    }
}

fn next_pause(pause: &mut Duration, interval: Duration) -> Duration {
    let current = (*pause).min(interval);
    *pause = (*pause * 2).min(interval);
    current
}
