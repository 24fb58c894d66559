//! Looks the topics up and reports them; finds those of a pattern.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use regex::Regex;
use tenure_model::TopicName;
use tenure_model::limits::SUBSCRIPTION_TOPICS_MAX;
use tokio::sync::Notify;

use super::link::Link;
use crate::source::{RecordSource, SourceError};

const PAUSE_MIN: Duration = Duration::from_millis(100);

/// The topics that a consumer reads: those that it names, and those that its pattern matches as they appear.
///
/// A topic that vanished stays in it: a look-up never takes anything away.
#[derive(Debug)]
pub(crate) struct Subscription {
    pattern: Option<Regex>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    names: BTreeSet<TopicName>,
    /// Found after the first look.
    late: BTreeSet<TopicName>,
    has_looked: bool,
}

impl Subscription {
    pub(crate) fn new(names: Vec<TopicName>, pattern: Option<Regex>) -> Self {
        let state = State { names: names.into_iter().collect(), ..State::default() };
        Self { pattern, state: Mutex::new(state) }
    }

    pub(crate) fn names(&self) -> Vec<TopicName> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.names.iter().cloned().collect()
    }

    /// Whether the pattern found the topic only after the consumer had begun: it is read from its first record,
    /// whatever the reset policy says.
    pub(super) fn is_late(&self, topic: &TopicName) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).late.contains(topic)
    }

    /// Looks for more topics; whether there are.
    pub(super) async fn look(&self, source: &dyn RecordSource) -> Result<bool, SourceError> {
        let Some(pattern) = &self.pattern else { return Ok(false) };
        let found = source.topic_names().await?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { names, late, has_looked } = &mut *state;
        let before = names.len();
        for topic in found.into_iter().filter(|topic| pattern.is_match(topic.as_str())) {
            if names.contains(&topic) {
                continue;
            }
            if names.len() >= SUBSCRIPTION_TOPICS_MAX {
                tracing::warn!(
                    %topic, limit = SUBSCRIPTION_TOPICS_MAX,
                    "the pattern matches more topics than a subscription may have: this one is left out"
                );
                continue;
            }
            if *has_looked {
                tracing::info!(%topic, "the pattern matches a topic that has appeared");
                late.insert(topic.clone());
            }
            names.insert(topic);
        }
        *has_looked = true;
        Ok(names.len() > before)
    }

    /// Waits until there is a topic to read.
    pub(super) async fn first(&self, source: &dyn RecordSource, interval: Duration) {
        let mut pause = PAUSE_MIN;
        loop {
            match self.look(source).await {
                Ok(_) if !self.names().is_empty() => return,
                Ok(_) => tracing::debug!("no topic matches the pattern yet"),
                Err(error) => tracing::warn!(%error, "topics could not be listed, trying again"),
            }
            tokio::time::sleep(next_pause(&mut pause, interval)).await;
        }
    }
}

/// Reports the topics at once, whenever `joined` is told, and every `interval`; never ends.
///
/// A look-up that failed reports nothing: a failure is no absence.
pub(super) async fn report(
    source: Arc<dyn RecordSource>,
    link: Arc<dyn Link>,
    subscription: Arc<Subscription>,
    interval: Duration,
    joined: Arc<Notify>,
) {
    let mut pause = PAUSE_MIN;
    loop {
        match subscription.look(&*source).await {
            Ok(true) => link.subscribe(subscription.names()),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "topics could not be listed, trying again"),
        }
        let names = subscription.names();
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
