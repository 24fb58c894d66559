//! Acts of the run loop: said until they are answered, over reconnects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tenure_model::{Epoch, ErrorCode, NextOffset, Partition, RetryClass, Tick, limits};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::v1;

use super::{Act, Machine, Output, is_of_membership};
use crate::session::event::{EndCause, LostCause, Phase, ReleaseReason};
use crate::session::retry::Backoff;
use crate::session::wire;

/// Acts without a final answer, in the order in which they were made.
///
/// Bounded by what was assigned: one `Prepared`, one `Acquired` and one release for each grant, one report of topics,
/// one leave.
#[derive(Debug)]
pub(super) struct Acts {
    waiting: BTreeMap<u64, Waiting>,
    /// Those of `waiting` that were not sent on the present stream.
    unsent: BTreeSet<u64>,
    /// Grants with a release among `waiting`.
    releasing: BTreeSet<(Partition, Epoch)>,
    /// Partitions with an `Acquired` among `waiting`, and its request.
    acquired: BTreeMap<Partition, u64>,
    /// Releases that the leave takes along, of a member that will return.
    kept: Vec<Release>,
    next_request: u64,
    backoff: Backoff,
}

#[derive(Debug)]
struct Waiting {
    said: Said,
    /// Not to be sent before.
    not_before: Option<Tick>,
}

#[derive(Clone, Debug)]
enum Said {
    Acquired { partition: Partition, epoch: Epoch, home_initialised: bool, resume: NextOffset },
    Prepared { partition: Partition, error: String },
    Release(Vec<Release>),
    Topics(Vec<v1::TopicReport>),
    Leave { releases: Vec<Release>, reason: String, returning_within: Option<Duration> },
}

#[derive(Clone, Debug)]
struct Release {
    partition: Partition,
    epoch: Epoch,
    next_offset: Option<NextOffset>,
    reason: ReleaseReason,
    error: String,
}

impl Release {
    fn to_wire(&self) -> v1::Released {
        v1::Released {
            partition: Some(partition_to_wire(self.partition)),
            epoch: self.epoch.get(),
            next_offset: self.next_offset.map(NextOffset::get),
            reason: wire::release_reason(self.reason),
            error: self.error.clone(),
        }
    }
}

impl Acts {
    pub(super) fn new(seed: u64, ttl: Duration) -> Self {
        Self {
            waiting: BTreeMap::new(),
            unsent: BTreeSet::new(),
            releasing: BTreeSet::new(),
            acquired: BTreeMap::new(),
            kept: Vec::new(),
            next_request: 1,
            backoff: Backoff::for_ttl(seed.rotate_left(32), ttl),
        }
    }

    pub(super) fn next_retry(&self) -> Option<Tick> {
        self.unsent.iter().filter_map(|request| self.waiting.get(request)?.not_before).min()
    }

    /// Releases grants that ended without the run loop's word; those on their way already are left alone.
    pub(super) fn release(&mut self, grants: Vec<(Partition, Epoch)>, reason: ReleaseReason) {
        let fresh: Vec<_> = grants
            .into_iter()
            .filter(|grant| !self.releasing.contains(grant))
            .map(|(partition, epoch)| Release {
                partition,
                epoch,
                next_offset: None,
                reason,
                error: String::new(),
            })
            .collect();
        for part in fresh.chunks(limits::REQUEST_PARTITIONS_MAX) {
            self.push(Said::Release(part.to_vec()));
        }
    }

    pub(super) fn forget_acquired(&mut self, of: Partition) {
        if let Some(request) = self.acquired.get(&of) {
            self.remove(*request);
        }
    }

    fn forget_topics(&mut self) {
        let is_topics = |waiting: &Waiting| matches!(waiting.said, Said::Topics(_));
        let known = self.waiting.iter().find(|(_, waiting)| is_topics(waiting));
        if let Some(request) = known.map(|(request, _)| *request) {
            self.remove(request);
        }
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.unsent.clear();
        self.releasing.clear();
        self.acquired.clear();
        self.kept.clear();
    }

    /// Keeps a release for the leave: said before, the partition would go elsewhere.
    fn keep_for_leave(&mut self, release: Release) {
        self.releasing.insert((release.partition, release.epoch));
        self.kept.push(release);
    }

    /// What is kept for the leave, as a heartbeat says it: it is still this member's.
    pub(super) fn kept_for_leave(&self) -> impl Iterator<Item = v1::HeldPartition> {
        self.kept.iter().map(|release| v1::HeldPartition {
            partition: Some(partition_to_wire(release.partition)),
            epoch: release.epoch.get(),
            phase: wire::phase(Phase::Draining),
            position: release.next_offset.map_or(0, NextOffset::get),
            ..v1::HeldPartition::default()
        })
    }

    /// A new stream: everything is said again.
    pub(super) fn unsend(&mut self) {
        for waiting in self.waiting.values_mut() {
            waiting.not_before = None;
        }
        self.unsent = self.waiting.keys().copied().collect();
    }

    fn push(&mut self, said: Said) {
        let request = self.next_request;
        self.next_request += 1;
        match &said {
            Said::Release(releases) => self
                .releasing
                .extend(releases.iter().map(|release| (release.partition, release.epoch))),
            Said::Acquired { partition, .. } => {
                self.acquired.insert(*partition, request);
            }
            Said::Prepared { .. } | Said::Topics(_) | Said::Leave { .. } => {}
        }
        self.waiting.insert(request, Waiting { said, not_before: None });
        self.unsent.insert(request);
    }

    fn remove(&mut self, request: u64) {
        self.unsent.remove(&request);
        match self.waiting.remove(&request).map(|waiting| waiting.said) {
            Some(Said::Release(releases)) => {
                for release in releases {
                    self.releasing.remove(&(release.partition, release.epoch));
                }
            }
            Some(Said::Acquired { partition, .. }) => {
                self.acquired.remove(&partition);
            }
            Some(Said::Prepared { .. } | Said::Topics(_) | Said::Leave { .. }) | None => {}
        }
    }

    /// Takes what is to be said now.
    fn take_due(&mut self, now: Tick) -> Vec<v1::SessionUp> {
        let is_due = |request: &u64| {
            let not_before = self.waiting.get(request).and_then(|waiting| waiting.not_before);
            not_before.is_none_or(|not_before| not_before <= now)
        };
        let due: Vec<u64> = self.unsent.iter().copied().filter(is_due).collect();
        let mut ups = Vec::with_capacity(due.len());
        for request in due {
            self.unsent.remove(&request);
            if let Some(waiting) = self.waiting.get_mut(&request) {
                waiting.not_before = None;
                ups.push(to_wire(request, &waiting.said));
            }
        }
        ups
    }

    /// The leave takes the releases along that have no answer yet: one message ends it all.
    fn push_leave(
        &mut self,
        held: Vec<(Partition, Epoch)>,
        reason: String,
        returning_within: Option<Duration>,
    ) {
        let mut releases = std::mem::take(&mut self.kept);
        for waiting in self.waiting.values() {
            if let Said::Release(unanswered) = &waiting.said {
                releases.extend(unanswered.iter().cloned());
            }
        }
        releases.extend(held.into_iter().map(|(partition, epoch)| Release {
            partition,
            epoch,
            next_offset: None,
            reason: ReleaseReason::Shutdown,
            error: String::new(),
        }));
        if returning_within.is_some() {
            // A release that goes ahead would give the partition to another: what does not fit is freed by the leave
            // at the offset that is committed.
            releases.truncate(limits::REQUEST_PARTITIONS_MAX);
            self.clear();
        } else if releases.len() > limits::REQUEST_PARTITIONS_MAX {
            // Too many for one message: the releases go ahead of the leave, which ends what they do not name.
            releases.clear();
        } else {
            self.clear();
        }
        self.push(Said::Leave { releases, reason, returning_within });
    }
}

fn to_wire(request: u64, said: &Said) -> v1::SessionUp {
    use v1::session_up::Up;
    let wired = |releases: &[Release]| releases.iter().map(Release::to_wire).collect();
    let up = match said {
        Said::Acquired { partition, epoch, home_initialised, resume } => {
            Up::Acquired(v1::Acquired {
                request,
                partition: Some(partition_to_wire(*partition)),
                epoch: epoch.get(),
                home_initialised: *home_initialised,
                resume: resume.get(),
            })
        }
        Said::Prepared { partition, error } => Up::Prepared(v1::Prepared {
            request,
            partition: Some(partition_to_wire(*partition)),
            error: error.clone(),
        }),
        Said::Release(releases) => {
            Up::Release(v1::Release { request, partitions: wired(releases) })
        }
        Said::Topics(topics) => {
            Up::ReportTopics(v1::ReportTopics { request, topics: topics.clone() })
        }
        Said::Leave { releases, reason, returning_within } => Up::Leave(v1::Leave {
            request,
            partitions: wired(releases),
            reason: reason.clone(),
            returning_within_ms: returning_within
                .map_or(0, |length| u64::try_from(length.as_millis()).unwrap_or(u64::MAX)),
        }),
    };
    v1::SessionUp { up: Some(up) }
}

impl Machine {
    /// Says what is to be said on a live stream.
    pub(super) fn say(&mut self, now: Tick, out: &mut Vec<Output>) {
        out.extend(self.acts.take_due(now).into_iter().map(Output::Send));
    }

    pub(super) fn act(&mut self, act: Act, now: Tick, out: &mut Vec<Output>) {
        match act {
            Act::ReportTopics { topics } => {
                self.acts.forget_topics();
                self.acts.push(Said::Topics(topics.iter().map(wire::topic_report).collect()));
                self.topics = topics;
            }
            Act::Subscribe { topics } => self.subscribe(topics, now, out),
            Act::Acquired { partition, epoch, home_initialised, resume } => {
                if self.grants.holds(partition, epoch) {
                    self.acts.forget_acquired(partition);
                    self.acts.push(Said::Acquired { partition, epoch, home_initialised, resume });
                    let grant = (partition, epoch);
                    self.grants.note_phase(grant, Phase::Running, resume, String::new(), now);
                }
            }
            Act::Prepared { partition, error } => {
                if self.grants.note_prepared(partition) {
                    let error = wire::error_text(error.unwrap_or_default());
                    self.acts.push(Said::Prepared { partition, error });
                }
            }
            Act::Phase { partition, epoch, phase, position, error } => {
                let error = error.unwrap_or_default();
                self.grants.note_phase((partition, epoch), phase, position, error, now);
            }
            Act::Progress { partition, epoch, progress } => {
                self.grants.note_progress((partition, epoch), progress, now);
            }
            Act::Release { partition, epoch, next_offset, reason, error } => {
                if self.grants.holds(partition, epoch) {
                    self.acts.forget_acquired(partition);
                    self.grants.end(partition, epoch, out);
                    let error = wire::error_text(error);
                    let release = Release { partition, epoch, next_offset, reason, error };
                    if reason == ReleaseReason::Shutdown && self.settings.returning_within.is_some()
                    {
                        self.acts.keep_for_leave(release);
                    } else {
                        self.acts.push(Said::Release(vec![release]));
                    }
                }
            }
            Act::Leave { reason } => self.leave(reason, out),
        }
    }

    fn leave(&mut self, reason: String, out: &mut Vec<Output>) {
        if self.leaving {
            return;
        }
        self.leaving = true;
        let held = self.grants.held();
        self.lose_all("the member leaves", out);
        if self.join_sent {
            self.acts.push_leave(held, reason, self.settings.returning_within);
        } else {
            self.close(EndCause::Left, out);
        }
    }

    pub(super) fn act_answered(
        &mut self,
        answer: &v1::ActAnswer,
        now: Tick,
        out: &mut Vec<Output>,
    ) {
        let Some(waiting) = self.acts.waiting.get_mut(&answer.request) else { return };
        let said = waiting.said.clone();
        let Some(error) = &answer.error else {
            self.acts.backoff.reset();
            self.acts.remove(answer.request);
            if matches!(said, Said::Leave { .. }) {
                self.close(EndCause::Left, out);
            }
            return;
        };
        let refused = wire::refused(error);
        if refused.code.retry_class() != RetryClass::Never {
            // Nothing happened, or it does no harm twice: the act is said again.
            waiting.not_before = Some(now.after(self.acts.backoff.pause()));
            self.acts.unsent.insert(answer.request);
            return;
        }
        self.acts.remove(answer.request);
        if is_of_membership(refused.code) || matches!(said, Said::Leave { .. }) {
            return self.end_membership(refused, now, out);
        }
        match said {
            Said::Acquired { partition, epoch, .. } if ends_grant(refused.code) => {
                if self.grants.holds(partition, epoch) {
                    let cause = LostCause::Fenced { current: refused.current_epoch };
                    self.lose(partition, epoch, cause, out);
                }
            }
            // A release that is refused has nothing left to release.
            Said::Acquired { .. }
            | Said::Prepared { .. }
            | Said::Release(_)
            | Said::Topics(_)
            | Said::Leave { .. } => {
                tracing::debug!(group = %self.settings.group, member = %self.member, error = %refused, "act refused");
            }
        }
    }
}

/// Whether the refusal of an `Acquired` says that the grant is not the current one.
fn ends_grant(code: ErrorCode) -> bool {
    [ErrorCode::Fenced, ErrorCode::NotOwned, ErrorCode::UnknownPartition].contains(&code)
}
