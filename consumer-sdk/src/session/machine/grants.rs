//! Grants and their leases: what an assignment does to them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, Index, LeaseSettings, NextOffset, Partition, Tick, limits};
use tenure_proto::v1;

use super::{Granted, LeaseChange, Machine, Output};
use crate::session::event::{LostCause, Phase, Preparing, Progress, ReleaseReason};
use crate::session::wire::{self, Assigned, Assignment};

/// From how long on a grant's standing still is said: a heartbeat then names it in full.
const STILL_SAID: Duration = Duration::from_secs(5);

/// What the member holds and what it held.
#[derive(Debug, Default)]
pub(super) struct Grants {
    held: BTreeMap<Partition, Held>,
    /// No lease of a grant ends before; nothing: none is held.
    next_end: Option<Tick>,
    /// Highest epoch of each partition that ended here. None at or below it is taken again.
    ended: BTreeMap<Partition, Epoch>,
    /// Tokens of grants that are listed and not taken yet: the coordinator says each once per stream.
    tokens: BTreeMap<Partition, (Epoch, Arc<str>)>,
    /// What is to come, and whether it was said to be prepared.
    preparing: BTreeMap<Partition, bool>,
    /// Highest assignment version seen in this membership.
    version: Index,
    /// What a heartbeat names, shared by those that wait for an answer; nothing: it changed since the last one.
    named: Option<Named>,
    /// Version of the newest list that came down the present stream, while it is exactly what is held.
    complete: Option<Index>,
    /// End of the member's own lease; grants end no later.
    lease_ends_at: Option<Tick>,
    risk: Risk,
}

/// What was said of the member's own lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Risk {
    #[default]
    Nothing,
    /// That it is at risk.
    Said,
    /// It ended before anything could be said, in a process that slept.
    Missed,
}

/// The grants that a heartbeat named.
pub(super) type Named = Arc<[(Partition, Epoch)]>;

/// One grant that is held.
#[derive(Debug)]
struct Held {
    epoch: Epoch,
    ends_at: Tick,
    /// Once the grant is revoked: where its drain ends at the latest.
    drain_ends_at: Option<Tick>,
    phase: Phase,
    phase_since: Tick,
    position: NextOffset,
    end_offset: Option<NextOffset>,
    /// When it last moved, or had nothing to do.
    went_on_at: Tick,
    error: String,
}

fn millis(length: Duration) -> u64 {
    u64::try_from(length.as_millis()).unwrap_or(u64::MAX)
}

impl Grants {
    pub(super) const fn next_end(&self) -> Option<Tick> {
        self.next_end
    }

    fn find_next_end(&mut self) {
        self.next_end = self.held.values().map(|held| held.ends_at).min();
    }

    pub(super) fn begin_membership(&mut self) {
        self.version = Index(0);
        self.complete = None;
        self.lease_ends_at = None;
        self.risk = Risk::Nothing;
    }

    /// When the lease is at risk if nothing renews it; nothing once that was said.
    pub(super) fn risk_at(&self, lengths: &LeaseSettings) -> Option<Tick> {
        let ends_at = self.lease_ends_at.filter(|_| self.risk == Risk::Nothing)?;
        let ahead = lengths.lease_at_risk().as_nanos();
        Some(Tick(ends_at.0.saturating_sub(u64::try_from(ahead).unwrap_or(u64::MAX))))
    }

    pub(super) fn holds(&self, partition: Partition, epoch: Epoch) -> bool {
        self.held.get(&partition).is_some_and(|held| held.epoch == epoch)
    }

    pub(super) fn held(&self) -> Vec<(Partition, Epoch)> {
        self.held.iter().map(|(partition, held)| (*partition, held.epoch)).collect()
    }

    /// Notes how far a grant has come.
    pub(super) fn note_phase(
        &mut self,
        (partition, epoch): (Partition, Epoch),
        phase: Phase,
        position: NextOffset,
        error: String,
        now: Tick,
    ) {
        let Some(held) = self.held.get_mut(&partition).filter(|held| held.epoch == epoch) else {
            return;
        };
        if held.position != position || held.phase != phase {
            held.went_on_at = now;
        }
        if held.phase != phase {
            held.phase = phase;
            held.phase_since = now;
        }
        held.position = position;
        held.error = wire::error_text(error);
    }

    /// A new stream: nothing that came down another one is known to its node.
    pub(super) const fn begin_stream(&mut self) {
        self.complete = None;
    }

    fn insert(&mut self, partition: Partition, held: Held) {
        self.held.insert(partition, held);
        (self.named, self.complete) = (None, None);
    }

    /// What a heartbeat names now.
    pub(super) fn named(&mut self) -> Named {
        let held = &self.held;
        let list = || held.iter().map(|(partition, held)| (*partition, held.epoch)).collect();
        Arc::clone(self.named.get_or_insert_with(list))
    }

    /// What is held as the list that came down this stream, where that says it all.
    pub(super) fn as_listed(&self, now: Tick) -> Option<v1::HeldAsListed> {
        let runs = |held: &Held| {
            held.phase == Phase::Running
                && held.drain_ends_at.is_none()
                && held.error.is_empty()
                && now.since(held.went_on_at) < STILL_SAID
        };
        let version = self.complete.filter(|_| self.held.values().all(runs))?.0;
        let positions = self.held.values().map(|held| held.position.get()).collect();
        let lag = |held: &Held| {
            let end = held.end_offset?;
            Some(end.get().saturating_sub(held.position.get()).saturating_add(1))
        };
        let lags = match self.held.values().any(|held| held.end_offset.is_some()) {
            true => self.held.values().map(|held| lag(held).unwrap_or(0)).collect(),
            false => Vec::new(),
        };
        Some(v1::HeldAsListed { version, positions, lags })
    }

    /// Notes how a grant gets on.
    pub(super) fn note_progress(
        &mut self,
        (partition, epoch): (Partition, Epoch),
        progress: Progress,
        now: Tick,
    ) {
        let Some(held) = self.held.get_mut(&partition).filter(|held| held.epoch == epoch) else {
            return;
        };
        let Progress { position, end_offset, is_idle } = progress;
        if is_idle || held.position != position {
            held.went_on_at = now;
        }
        held.position = position;
        held.end_offset = end_offset;
    }

    /// Everything that the member believes to hold, for a heartbeat.
    pub(super) fn heartbeat(&self, sequence: u64, now: Tick) -> v1::Heartbeat {
        let held = self.held.iter().map(|(partition, held)| v1::HeldPartition {
            partition: Some(tenure_proto::convert::partition_to_wire(*partition)),
            epoch: held.epoch.get(),
            phase: wire::phase(held.phase),
            position: held.position.get(),
            phase_ms: millis(now.since(held.phase_since)),
            error: held.error.clone(),
            still_ms: match held.phase {
                Phase::Running => millis(now.since(held.went_on_at)),
                Phase::Registering | Phase::Verifying | Phase::Resuming | Phase::Draining => 0,
            },
            end_offset: held.end_offset.map(NextOffset::get),
        });
        v1::Heartbeat {
            sequence,
            held: held.collect(),
            assignment_version: self.version.0,
            takes_as_held: true,
            as_listed: None,
        }
    }

    /// Ends a grant here, for good.
    pub(super) fn end(&mut self, partition: Partition, epoch: Epoch, out: &mut Vec<Output>) {
        if self.held.get(&partition).is_some_and(|held| held.epoch == epoch) {
            self.held.remove(&partition);
            (self.named, self.complete) = (None, None);
        }
        self.note_end(partition, epoch);
        out.push(Output::Lease { partition, epoch, change: LeaseChange::Stopped });
    }

    fn note_end(&mut self, partition: Partition, epoch: Epoch) {
        let highest = self.ended.entry(partition).or_insert(epoch);
        *highest = epoch.max(*highest);
    }

    /// Whether `partition` is to come and was not said to be prepared before; it is from now on.
    pub(super) fn note_prepared(&mut self, partition: Partition) -> bool {
        self.preparing.get_mut(&partition).is_some_and(|said| !std::mem::replace(said, true))
    }

    /// Keeps what tokens came with an assignment, for those of its grants that are taken later.
    fn note_tokens(&mut self, listed: &mut BTreeMap<Partition, Assigned>) {
        let is_listed = |partition: &Partition, epoch: Epoch| {
            listed.get(partition).is_some_and(|assigned| assigned.epoch == epoch)
        };
        self.tokens.retain(|partition, (epoch, _)| is_listed(partition, *epoch));
        for (partition, assigned) in listed {
            if let Some(token) = assigned.token.take() {
                self.tokens.insert(*partition, (assigned.epoch, token));
            }
        }
    }

    fn token(&mut self, partition: Partition, epoch: Epoch) -> Option<Arc<str>> {
        let (_, token) = self.tokens.remove(&partition).filter(|(of, _)| *of == epoch)?;
        Some(token)
    }

    /// Forgets ended grants of partitions that are not listed any more, once there are very many.
    fn forget(&mut self, listed: &BTreeMap<Partition, Assigned>) {
        if self.ended.len() > limits::GROUP_PARTITIONS_MAX {
            self.ended.retain(|partition, _| listed.contains_key(partition));
        }
    }
}

/// End of a lease that was asked for at `sent`: the member stops first while clocks keep to the declared drift.
fn lease_end(sent: Tick, length: Duration, lengths: &LeaseSettings) -> Tick {
    sent.after(length.saturating_sub(lengths.clock_drift_max()))
}

impl Machine {
    /// Ends what has run out by `now`, and says so to the coordinator as soon as it can be reached.
    pub(super) fn expire_leases(&mut self, now: Tick, out: &mut Vec<Output>) {
        if self.grants.next_end.is_none_or(|next_end| now < next_end) {
            return;
        }
        let due = |held: &Held| held.ends_at <= now;
        let ran_out: Vec<_> = self
            .grants
            .held
            .iter()
            .filter(|(_, held)| due(held))
            .map(|(partition, held)| (*partition, held.epoch))
            .collect();
        for (partition, epoch) in &ran_out {
            self.lose(*partition, *epoch, LostCause::LeaseEnded, out);
        }
        self.acts.release(ran_out, ReleaseReason::LeaseLost);
        self.grants.find_next_end();
    }

    /// Says once that the lease is about to end, and once that it was renewed after that.
    pub(super) fn look_for_risk(&mut self, now: Tick, out: &mut Vec<Output>) {
        let Some(ends_at) = self.grants.lease_ends_at else { return };
        if self.grants.risk == Risk::Nothing {
            if self.grants.risk_at(&self.lengths).is_some_and(|risk_at| risk_at <= now) {
                self.grants.risk = if now < ends_at { Risk::Said } else { Risk::Missed };
                if self.grants.risk == Risk::Said {
                    out.push(Output::LeaseAtRisk { ends_at });
                }
            }
        } else if ends_at.since(now) > self.lengths.lease_at_risk()
            && std::mem::take(&mut self.grants.risk) == Risk::Said
        {
            out.push(Output::LeaseRenewed);
        }
    }

    pub(super) fn lose(
        &mut self,
        partition: Partition,
        epoch: Epoch,
        cause: LostCause,
        out: &mut Vec<Output>,
    ) {
        self.acts.forget_acquired(partition);
        self.grants.end(partition, epoch, out);
        out.push(Output::Lost { partition, epoch, cause });
    }

    pub(super) fn lose_all(&mut self, why: &str, out: &mut Vec<Output>) {
        for (partition, epoch) in self.grants.held() {
            self.lose(partition, epoch, LostCause::MembershipEnded(why.to_owned()), out);
        }
        for partition in std::mem::take(&mut self.grants.preparing).into_keys() {
            out.push(Output::PreparationEnded { partition });
        }
    }

    /// Takes over what is to come. What is listed as owned, or held already, does not count.
    fn prepare(
        &mut self,
        listed: Vec<wire::Preparing>,
        owned: &BTreeSet<Partition>,
        asked: Tick,
        out: &mut Vec<Output>,
    ) {
        let is_listed: BTreeSet<Partition> =
            listed.iter().map(|preparing| preparing.partition).collect();
        self.grants.preparing.retain(|partition, _| {
            if owned.contains(partition) {
                return false;
            }
            let stays = is_listed.contains(partition);
            if !stays {
                out.push(Output::PreparationEnded { partition: *partition });
            }
            stays
        });
        if self.leaving {
            return;
        }
        for preparing in listed {
            let wire::Preparing { partition, topic, home_initialised, next_offset, remaining } =
                preparing;
            if owned.contains(&partition) || self.grants.preparing.contains_key(&partition) {
                continue;
            }
            self.grants.preparing.insert(partition, false);
            let deadline = asked.after(remaining);
            let preparing = Preparing { topic, partition, home_initialised, next_offset, deadline };
            out.push(Output::Prepare(preparing));
        }
    }

    /// Takes an assignment. `sent`: when the message that it answers was sent; nothing for one that came by itself.
    pub(super) fn assigned(
        &mut self,
        assignment: Assignment,
        sent: Option<Tick>,
        now: Tick,
        out: &mut Vec<Output>,
    ) {
        if assignment.version < self.grants.version {
            return;
        }
        let version = assignment.version;
        self.grants.version = version;
        if let Some(sent) = sent {
            self.extend_own_lease(sent, out);
        }
        let is_in_order = assignment.partitions.is_sorted_by(|a, b| a.partition < b.partition);
        let mut listed = BTreeMap::<Partition, Assigned>::new();
        for assigned in assignment.partitions {
            let known = listed.get(&assigned.partition);
            if known.is_none_or(|known| known.epoch < assigned.epoch) {
                listed.insert(assigned.partition, assigned);
            }
        }
        self.grants.note_tokens(&mut listed);
        // Losses come before grants: two grants of one partition are never live together.
        for (partition, epoch) in self.grants.held() {
            if listed.get(&partition).is_none_or(|assigned| assigned.epoch != epoch) {
                self.lose(partition, epoch, LostCause::Gone, out);
            }
        }
        self.grants.forget(&listed);
        let owned: BTreeSet<Partition> = listed.keys().copied().collect();
        let mut unwanted = Vec::new();
        let mut is_complete = is_in_order;
        for assigned in listed.into_values() {
            let grant = (assigned.partition, assigned.epoch);
            is_complete &= assigned.drain_remaining.is_none();
            if self.grants.holds(assigned.partition, assigned.epoch) {
                self.keep(grant, assigned.drain_remaining, sent, now, out);
            } else if !self.take(&assigned, now, out) {
                unwanted.push(grant);
            }
        }
        // Losses went before, so whatever is held is listed.
        is_complete &= self.grants.held.len() == owned.len();
        self.grants.complete = is_complete.then_some(version);
        self.grants.find_next_end();
        self.prepare(assignment.preparing, &owned, sent.unwrap_or(now), out);
        // A leave ends them all.
        if !self.leaving {
            self.acts.release(unwanted, ReleaseReason::LeaseLost);
        }
    }

    /// The heartbeat sent at `sent` named exactly the newest assignment, which has this version: `named`.
    pub(super) fn confirmed(
        &mut self,
        version: Index,
        named: &Named,
        sent: Tick,
        now: Tick,
        out: &mut Vec<Output>,
    ) {
        if version < self.grants.version {
            return;
        }
        self.grants.version = version;
        self.extend_own_lease(sent, out);
        let is_held = self.grants.named.as_ref().is_some_and(|of_now| Arc::ptr_eq(of_now, named));
        if !is_held {
            let listed: BTreeSet<_> = named.iter().copied().collect();
            for (partition, epoch) in self.grants.held() {
                if !listed.contains(&(partition, epoch)) {
                    self.lose(partition, epoch, LostCause::Gone, out);
                }
            }
        }
        for (partition, epoch) in named.iter().copied() {
            // What ended here since is being released already.
            if self.grants.holds(partition, epoch) {
                self.keep((partition, epoch), None, Some(sent), now, out);
            }
        }
        self.grants.complete = is_held.then_some(version);
        self.grants.find_next_end();
        for partition in std::mem::take(&mut self.grants.preparing).into_keys() {
            out.push(Output::PreparationEnded { partition });
        }
    }

    fn extend_own_lease(&mut self, sent: Tick, out: &mut Vec<Output>) {
        let end = lease_end(sent, self.lengths.ttl(), &self.lengths);
        let end = self.grants.lease_ends_at.map_or(end, |known| known.max(end));
        self.grants.lease_ends_at = Some(end);
        out.push(Output::LeaseEnds { at: Some(end) });
    }

    /// Moves the lease of a grant that is listed.
    fn keep(
        &mut self,
        (partition, epoch): (Partition, Epoch),
        drain_remaining: Option<Duration>,
        sent: Option<Tick>,
        now: Tick,
        out: &mut Vec<Output>,
    ) {
        let Some(held) = self.grants.held.get_mut(&partition) else { return };
        if let Some(remaining) = drain_remaining {
            let drain_ends_at = lease_end(sent.unwrap_or(now), remaining, &self.lengths);
            if held.drain_ends_at.is_none() {
                out.push(Output::Revoked { partition, epoch, deadline: drain_ends_at });
            }
            held.drain_ends_at = Some(drain_ends_at);
        }
        let mut ends_at = held.ends_at;
        if let Some(sent) = sent {
            ends_at = ends_at.max(lease_end(sent, self.lengths.ttl(), &self.lengths));
        }
        if let Some(drain_ends_at) = held.drain_ends_at {
            ends_at = ends_at.min(drain_ends_at);
        }
        let change = match ends_at.cmp(&held.ends_at) {
            std::cmp::Ordering::Greater => LeaseChange::Extended(ends_at),
            std::cmp::Ordering::Less => LeaseChange::Shortened(ends_at),
            std::cmp::Ordering::Equal => return,
        };
        held.ends_at = ends_at;
        out.push(Output::Lease { partition, epoch, change });
    }

    /// Takes a new grant, or leaves it for an answer that makes the lease live. False: it must be released.
    fn take(&mut self, assigned: &Assigned, now: Tick, out: &mut Vec<Output>) -> bool {
        let (partition, epoch) = (assigned.partition, assigned.epoch);
        if self.grants.ended.get(&partition).is_some_and(|ended| epoch <= *ended) {
            return false;
        }
        if assigned.drain_remaining.is_some() {
            // Revoked before it was ever seen here.
            self.grants.note_end(partition, epoch);
            return false;
        }
        let Some(ends_at) = self.grants.lease_ends_at.filter(|ends_at| now < *ends_at) else {
            return true;
        };
        if self.leaving {
            return true;
        }
        let held = Held {
            epoch,
            ends_at,
            drain_ends_at: None,
            phase: Phase::Registering,
            phase_since: now,
            position: NextOffset::ZERO,
            end_offset: None,
            went_on_at: now,
            error: String::new(),
        };
        self.grants.insert(partition, held);
        out.push(Output::Granted(Granted {
            member: self.member.clone(),
            partition,
            topic: assigned.topic.clone(),
            epoch,
            handoff: assigned.handoff,
            home_initialised: assigned.home_initialised,
            token: self.grants.token(partition, epoch),
            ends_at,
        }));
        true
    }
}
