//! Acts of the run loop: said until they are answered, over reconnects.

use std::collections::{BTreeMap, BTreeSet};

use tenure_model::{Epoch, ErrorCode, NextOffset, Partition, RetryClass, Tick, limits};
use tenure_proto::convert::partition_to_wire;
use tenure_proto::v1;

use super::{Act, Machine, Output, is_of_membership};
use crate::session::event::{EndCause, LostCause, Phase, ReleaseReason};
use crate::session::retry::Backoff;
use crate::session::wire;

/// Acts without a final answer, in the order in which they were made.
///
/// Bounded by what was assigned: one `Acquired` and one release for each grant, one report of topics, one leave.
#[derive(Debug)]
pub(super) struct Acts {
    waiting: BTreeMap<u64, Waiting>,
    /// Grants with a release among `waiting`.
    releasing: BTreeSet<(Partition, Epoch)>,
    next_request: u64,
    backoff: Backoff,
}

#[derive(Debug)]
struct Waiting {
    said: Said,
    /// Sent on the present stream.
    is_sent: bool,
    /// Not to be sent before.
    not_before: Option<Tick>,
}

#[derive(Clone, Debug)]
enum Said {
    Acquired { partition: Partition, epoch: Epoch, home_initialised: bool, resume: NextOffset },
    Release(Vec<Release>),
    Topics(Vec<v1::TopicReport>),
    Leave { releases: Vec<Release>, reason: String },
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
    pub(super) fn new(seed: u64) -> Self {
        Self {
            waiting: BTreeMap::new(),
            releasing: BTreeSet::new(),
            next_request: 1,
            backoff: Backoff::new(seed.rotate_left(32)),
        }
    }

    pub(super) fn next_retry(&self) -> Option<Tick> {
        self.waiting
            .values()
            .filter(|waiting| !waiting.is_sent)
            .filter_map(|waiting| waiting.not_before)
            .min()
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
        self.waiting.retain(
            |_, waiting| !matches!(&waiting.said, Said::Acquired { partition, .. } if *partition == of),
        );
    }

    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.releasing.clear();
    }

    /// A new stream: everything is said again.
    pub(super) fn unsend(&mut self) {
        for waiting in self.waiting.values_mut() {
            waiting.is_sent = false;
            waiting.not_before = None;
        }
    }

    fn push(&mut self, said: Said) {
        if let Said::Release(releases) = &said {
            self.releasing
                .extend(releases.iter().map(|release| (release.partition, release.epoch)));
        }
        let request = self.next_request;
        self.next_request += 1;
        self.waiting.insert(request, Waiting { said, is_sent: false, not_before: None });
    }

    fn remove(&mut self, request: u64) {
        if let Some(Waiting { said: Said::Release(releases), .. }) = self.waiting.remove(&request) {
            for release in releases {
                self.releasing.remove(&(release.partition, release.epoch));
            }
        }
    }

    /// The leave takes the releases along that have no answer yet: one message ends it all.
    fn push_leave(&mut self, held: Vec<(Partition, Epoch)>, reason: String) {
        let mut releases: Vec<Release> = Vec::new();
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
        if releases.len() > limits::REQUEST_PARTITIONS_MAX {
            // Too many for one message: the releases go ahead of the leave, which ends what they do not name.
            self.waiting.retain(|_, waiting| matches!(waiting.said, Said::Release(_)));
            releases.clear();
        } else {
            self.clear();
        }
        self.push(Said::Leave { releases, reason });
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
        Said::Release(releases) => {
            Up::Release(v1::Release { request, partitions: wired(releases) })
        }
        Said::Topics(topics) => {
            Up::ReportTopics(v1::ReportTopics { request, topics: topics.clone() })
        }
        Said::Leave { releases, reason } => {
            Up::Leave(v1::Leave { request, partitions: wired(releases), reason: reason.clone() })
        }
    };
    v1::SessionUp { up: Some(up) }
}

impl Machine {
    /// Says what is to be said on a live stream.
    pub(super) fn say(&mut self, now: Tick, out: &mut Vec<Output>) {
        for (request, waiting) in &mut self.acts.waiting {
            if !waiting.is_sent && waiting.not_before.is_none_or(|not_before| not_before <= now) {
                waiting.is_sent = true;
                waiting.not_before = None;
                out.push(Output::Send(to_wire(*request, &waiting.said)));
            }
        }
    }

    pub(super) fn act(&mut self, act: Act, now: Tick, out: &mut Vec<Output>) {
        match act {
            Act::ReportTopics { topics } => {
                self.acts.waiting.retain(|_, waiting| !matches!(waiting.said, Said::Topics(_)));
                self.acts.push(Said::Topics(topics.iter().map(wire::topic_report).collect()));
                self.topics = topics;
            }
            Act::Acquired { partition, epoch, home_initialised, resume } => {
                if self.grants.holds(partition, epoch) {
                    self.acts.forget_acquired(partition);
                    self.acts.push(Said::Acquired { partition, epoch, home_initialised, resume });
                    let grant = (partition, epoch);
                    self.grants.note_phase(grant, Phase::Running, resume, String::new(), now);
                }
            }
            Act::Phase { partition, epoch, phase, position, error } => {
                let error = error.unwrap_or_default();
                self.grants.note_phase((partition, epoch), phase, position, error, now);
            }
            Act::Release { partition, epoch, next_offset, reason, error } => {
                if self.grants.holds(partition, epoch) {
                    self.acts.forget_acquired(partition);
                    self.grants.end(partition, epoch, out);
                    let error = wire::error_text(error);
                    let release = Release { partition, epoch, next_offset, reason, error };
                    self.acts.push(Said::Release(vec![release]));
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
            self.acts.push_leave(held, reason);
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
            waiting.is_sent = false;
            waiting.not_before = Some(now.after(self.acts.backoff.pause()));
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
            Said::Acquired { .. } | Said::Release(_) | Said::Topics(_) | Said::Leave { .. } => {
                tracing::debug!(group = %self.settings.group, member = %self.member, error = %refused, "act refused");
            }
        }
    }
}

/// Whether the refusal of an `Acquired` says that the grant is not the current one.
fn ends_grant(code: ErrorCode) -> bool {
    [ErrorCode::Fenced, ErrorCode::NotOwned, ErrorCode::UnknownPartition].contains(&code)
}
