//! The records of a snapshot: one header, each group followed by its own records, then the operations, then the
//! changes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use tenure_core::State;
use tenure_core::state::{
    Away, Committed, Group, Member, Operation, Ownership, PartitionState, Preparation, Silence,
    Topic, Trouble,
};
use tenure_model::{
    CommitSequence, FeatureLevel, GroupEpoch, GroupId, Index, MemberEpoch, MemberId, Partition,
    Timestamp,
};
use tenure_proto::stored as form;
use tenure_proto::stored::snapshot_record::Record as Form;

use super::history;
use super::pieces::{
    damaged, read_action, read_cause, read_epoch, read_group, read_move, read_name, read_offset,
    read_partition, read_settings, read_topic_id, read_topics, read_weight, write_action,
    write_cause, write_move, write_partition, write_settings, write_topic_id, write_topics,
    write_weight,
};
use super::{FORMAT, StoredError, check_level};

const WHAT: &str = "snapshot";

/// Writes the whole state.
#[must_use]
pub fn encode_snapshot(state: &State) -> Vec<u8> {
    let records = record_count(state);
    let mut body = Writer::default();
    // Not one of those that it counts.
    body.put(Form::Header(form::Header {
        format: FORMAT,
        epoch_counter: state.epoch_counter,
        applied: state.applied.0,
        now_unix_ms: state.now.0,
        records,
        changes_compacted: Some(state.changes.compacted.0),
        feature_level: write_level(state.level),
    }));
    write_records(&mut body, state);
    assert_eq!(body.records, records + 1, "a snapshot that cannot be read again is never written");
    body.bytes
}

/// How many records [`write_records`] makes.
fn record_count(state: &State) -> u64 {
    let of_groups = state
        .groups
        .values()
        .map(|group| 1 + group.members.len() + group.topics.len() + group.partitions.len());
    let all = of_groups.sum::<usize>() + state.operations.len() + state.changes.newest.len();
    all as u64
}

/// Where records go, one after the other.
pub(super) trait Records {
    fn put(&mut self, record: Form);
}

/// Everything in the state but what the header says.
pub(super) fn write_records(body: &mut impl Records, state: &State) {
    for (id, group) in &state.groups {
        write_group(body, id, group);
    }
    for operation in &state.operations {
        body.put(Form::Operation(write_operation(operation)));
    }
    for change in &state.changes.newest {
        body.put(Form::Change(history::write_change(change)));
    }
}

/// The first level is not written: snapshots of it are read by versions that know of no levels.
pub(super) const fn write_level(level: FeatureLevel) -> u32 {
    if level.0 > FeatureLevel::FIRST.0 { level.0 } else { 0 }
}

#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    records: u64,
}

impl Records for Writer {
    fn put(&mut self, record: Form) {
        form::SnapshotRecord { record: Some(record) }
            .encode_length_delimited(&mut self.bytes)
            .expect("a Vec grows as needed");
        self.records += 1;
    }
}

fn write_group(body: &mut impl Records, id: &GroupId, group: &Group) {
    body.put(Form::Group(form::Group {
        group: id.to_string(),
        settings: Some(write_settings(&group.settings)),
        epoch: group.epoch.0,
        target_epoch: group.target_epoch.0,
        tombstones: group.tombstones.iter().map(ToString::to_string).collect(),
    }));
    for (member_id, member) in &group.members {
        body.put(Form::Member(write_member(member_id, member)));
    }
    for (topic_id, topic) in &group.topics {
        body.put(Form::Topic(form::Topic {
            topic_id: write_topic_id(*topic_id),
            name: topic.name.to_string(),
            partition_count: topic.partition_count,
            initial_partition_count: topic.initial_partition_count,
            frozen_by: topic.frozen_by.map(write_topic_id),
        }));
    }
    for (partition, state) in &group.partitions {
        body.put(Form::Partition(write_partition_state(group, *partition, state)));
    }
}

fn write_member(id: &MemberId, member: &Member) -> form::Member {
    form::Member {
        member: id.to_string(),
        epoch: member.epoch.0,
        instance: member.instance.as_ref().map(ToString::to_string),
        topics: write_topics(&member.topics),
        ttl_ms: member.ttl_ms,
        heartbeat_interval_ms: member.heartbeat_interval_ms,
        client: member.client.clone(),
        partitions_max: member.partitions_max,
        draining: member.draining,
        joined_at_unix_ms: member.joined_at.0,
        assignment_version: member.assignment_version.0,
        silence_index: member.silent.map(|silence| silence.index.0),
        silent_for_ms: member.silent.map_or(0, |silence| silence.silent_for_ms),
        away_since: member.away.map(|away| away.since.0),
        returning_within_ms: member.away.map_or(0, |away| away.returning_within_ms),
        prepares: member.prepares,
        weight: write_weight(member.weight),
    }
}

fn write_partition_state(
    group: &Group,
    partition: Partition,
    state: &PartitionState,
) -> form::PartitionState {
    let (ownership, owner) = match &state.ownership {
        Ownership::Free => (0, String::new()),
        Ownership::Held { member, acquired: false } => (1, member.to_string()),
        Ownership::Held { member, acquired: true } => (2, member.to_string()),
        Ownership::Revoking { member } => (3, member.to_string()),
    };
    let name = |member: Option<&MemberId>| member.map_or_else(String::new, ToString::to_string);
    form::PartitionState {
        partition: Some(write_partition(partition)),
        ownership,
        owner,
        epoch: state.epoch.map_or(0, tenure_model::Epoch::get),
        committed: state.committed.as_ref().map(|committed| form::Committed {
            next_offset: committed.next_offset.get(),
            epoch: committed.epoch.get(),
            sequence: committed.sequence.0,
            metadata: committed.metadata.clone().into(),
            rewind: committed.rewind.as_ref().map_or_else(String::new, ToString::to_string),
        }),
        home_initialised: state.home_initialised,
        changed_at: state.changed_at.0,
        changed_unix_ms: state.changed_time.0,
        freed_by: write_cause(state.freed_by),
        trouble: state.trouble.as_ref().map(|trouble| form::Trouble {
            failures: trouble.failures,
            members: trouble.members.iter().map(ToString::to_string).collect(),
            error: trouble.error.clone(),
            held_back: trouble.held_back,
        }),
        target: name(group.target.get(&partition)),
        pin: name(group.pins.get(&partition)),
        granted_at: state.granted.revision.0,
        granted_unix_ms: state.granted.time.0,
        past: history::write_past(state.past.as_deref()),
        forgotten_at: state.forgotten().revision.0,
        forgotten_unix_ms: state.forgotten().time.0,
        preparing: name(state.preparation.as_ref().map(|preparation| &preparation.member)),
        preparation_ready: state.preparation.as_ref().is_some_and(|found| found.ready),
    }
}

fn write_operation(operation: &Operation) -> form::Operation {
    form::Operation {
        request: operation.request.to_string(),
        index: operation.index.0,
        time_unix_ms: operation.time.0,
        actor: operation.actor.clone(),
        reason: operation.reason.clone(),
        action: write_action(operation.action),
        group: operation.group.as_ref().map(ToString::to_string),
        group_epoch: operation.group_epoch.0,
        moves: operation.moves.iter().map(write_move).collect(),
    }
}

/// Reads a whole state.
///
/// # Errors
///
/// [`StoredError`] for damage, a cut, a newer format or a feature level that this build does not know.
pub fn decode_snapshot(bytes: &[u8]) -> Result<State, StoredError> {
    let mut rest = Bytes::copy_from_slice(bytes);
    let Form::Header(header) = next(&mut rest)? else {
        return Err(damaged(WHAT, "does not start with a header"));
    };
    if header.format != FORMAT {
        return Err(StoredError::Format { what: WHAT, found: header.format });
    }
    let level = FeatureLevel(header.feature_level.max(FeatureLevel::FIRST.0));
    check_level(WHAT, level)?;
    let mut state = State {
        level,
        epoch_counter: header.epoch_counter,
        applied: Index(header.applied),
        now: Timestamp(header.now_unix_ms),
        ..State::default()
    };
    // Without the field, the snapshot is of a version that remembered no changes.
    state.changes.compacted = Index(header.changes_compacted.unwrap_or(header.applied));
    let mut group: Option<Reading> = None;
    for _ in 0..header.records {
        read_record(&mut state, &mut group, next(&mut rest)?)?;
    }
    if !rest.is_empty() {
        return Err(damaged(WHAT, format!("{} bytes after the last record", rest.len())));
    }
    finish_group(&mut state, group);
    state.rebuild_derived();
    Ok(state)
}

fn next(rest: &mut Bytes) -> Result<Form, StoredError> {
    form::SnapshotRecord::decode_length_delimited(rest)
        .map_err(|error| damaged(WHAT, error))?
        .record
        .ok_or_else(|| damaged(WHAT, "has a record that this version does not know"))
}

/// A group whose records are being read.
struct Reading {
    id: GroupId,
    group: Group,
    /// Its members' ids, so that a million partitions share them.
    names: HashMap<String, MemberId>,
    /// In the order of the snapshot, which is that of the maps: made at once, those are full and quick to make.
    partitions: Vec<(Partition, PartitionState)>,
    target: Vec<(Partition, MemberId)>,
    owned: BTreeMap<MemberId, Vec<Partition>>,
}

impl Reading {
    fn new(form: &form::Group) -> Result<Self, StoredError> {
        Ok(Self {
            id: read_group(&form.group)?,
            group: read_group_record(form)?,
            names: HashMap::new(),
            partitions: Vec::new(),
            target: Vec::new(),
            owned: BTreeMap::new(),
        })
    }

    fn name(&self, what: &'static str, text: &str) -> Result<MemberId, StoredError> {
        self.names.get(text).map_or_else(|| read_name(what, text), |known| Ok(known.clone()))
    }
}

fn finish_group(state: &mut State, reading: Option<Reading>) {
    let Some(Reading { id, mut group, partitions, target, owned, .. }) = reading else { return };
    group.partitions = partitions.into_iter().collect();
    group.target = target.into_iter().collect();
    for (owner, partitions) in owned {
        if let Some(member) = group.members.get_mut(&owner) {
            member.owned = partitions.into_iter().collect();
        }
    }
    state.groups.insert(id, Arc::new(group));
}

fn read_record(
    state: &mut State,
    current: &mut Option<Reading>,
    record: Form,
) -> Result<(), StoredError> {
    if let Form::Group(form) = &record {
        finish_group(state, current.take());
        *current = Some(Reading::new(form)?);
        return Ok(());
    }
    if let Form::Operation(form) = &record {
        state.operations.push_back(read_operation(form)?);
        return Ok(());
    }
    if let Form::Change(form) = &record {
        state.changes.newest.push_back(history::read_change(form)?);
        return Ok(());
    }
    let reading = current.as_mut().ok_or_else(|| damaged(WHAT, "has a record before its group"))?;
    match record {
        Form::Member(form) => {
            let name: MemberId = read_name("member", &form.member)?;
            reading.group.members.insert(name.clone(), read_member(&form)?);
            reading.names.insert(form.member, name);
        }
        Form::Topic(form) => {
            let topic = Topic {
                name: read_name("topic", &form.name)?,
                partition_count: form.partition_count,
                initial_partition_count: form.initial_partition_count,
                frozen_by: form.frozen_by.as_deref().map(read_topic_id).transpose()?,
            };
            reading.group.topics.insert(read_topic_id(&form.topic_id)?, topic);
        }
        Form::Partition(form) => read_partition_record(reading, &form)?,
        Form::Header(_) => return Err(damaged(WHAT, "has a second header")),
        Form::Group(_) | Form::Operation(_) | Form::Change(_) => {
            return Err(damaged(WHAT, "has its records in disorder"));
        }
    }
    Ok(())
}

fn read_group_record(form: &form::Group) -> Result<Group, StoredError> {
    let tombstones = form.tombstones.iter().map(|text| read_name("member", text));
    Ok(Group {
        settings: read_settings(form.settings.as_ref())?,
        epoch: GroupEpoch(form.epoch),
        target_epoch: GroupEpoch(form.target_epoch),
        tombstones: tombstones.collect::<Result<_, _>>()?,
        ..Group::default()
    })
}

fn read_member(form: &form::Member) -> Result<Member, StoredError> {
    Ok(Member {
        epoch: MemberEpoch(form.epoch),
        instance: form
            .instance
            .as_deref()
            .map(|text| read_name("instance id", text))
            .transpose()?,
        topics: read_topics(&form.topics)?,
        ttl_ms: form.ttl_ms,
        heartbeat_interval_ms: form.heartbeat_interval_ms,
        client: form.client.clone(),
        partitions_max: form.partitions_max,
        draining: form.draining,
        joined_at: Timestamp(form.joined_at_unix_ms),
        assignment_version: Index(form.assignment_version),
        // Filled from the partitions that follow.
        owned: std::collections::BTreeSet::new(),
        silent: form
            .silence_index
            .map(|index| Silence { index: Index(index), silent_for_ms: form.silent_for_ms }),
        away: form.away_since.map(|since| Away {
            since: Index(since),
            returning_within_ms: form.returning_within_ms,
        }),
        prepares: form.prepares,
        weight: read_weight(form.weight),
    })
}

fn read_partition_record(
    reading: &mut Reading,
    form: &form::PartitionState,
) -> Result<(), StoredError> {
    let partition = read_partition(form.partition.as_ref())?;
    let owner = || reading.name("owner", &form.owner);
    let ownership = match form.ownership {
        0 => Ownership::Free,
        1 => Ownership::Held { member: owner()?, acquired: false },
        2 => Ownership::Held { member: owner()?, acquired: true },
        3 => Ownership::Revoking { member: owner()? },
        other => return Err(damaged(WHAT, format!("ownership {other} is not known"))),
    };
    if let Some(owner) = ownership.owner() {
        if let Some(owned) = reading.owned.get_mut(owner) {
            owned.push(partition);
        } else if reading.group.members.contains_key(owner) {
            reading.owned.insert(owner.clone(), vec![partition]);
        } else {
            return Err(damaged(WHAT, format!("owner {owner} is not a member")));
        }
    }
    if !form.target.is_empty() {
        reading.target.push((partition, reading.name("member", &form.target)?));
    }
    if !form.pin.is_empty() {
        let pinned = reading.name("member", &form.pin)?;
        reading.group.pins.insert(partition, pinned);
    }
    let state = PartitionState {
        ownership,
        epoch: if form.epoch == 0 { None } else { Some(read_epoch(form.epoch)?) },
        committed: form.committed.as_ref().map(read_committed).transpose()?,
        home_initialised: form.home_initialised,
        changed_at: Index(form.changed_at),
        changed_time: Timestamp(form.changed_unix_ms),
        freed_by: read_cause(form.freed_by)?,
        trouble: form.trouble.as_ref().map(read_trouble).transpose()?.map(Box::new),
        granted: history::read_granted(form),
        past: history::read_past(form)?,
        preparation: read_preparation(form)?.map(Box::new),
    };
    reading.partitions.push((partition, state));
    Ok(())
}

fn read_preparation(form: &form::PartitionState) -> Result<Option<Preparation>, StoredError> {
    if form.preparing.is_empty() {
        return Ok(None);
    }
    let member = read_name("member", &form.preparing)?;
    Ok(Some(Preparation { member, ready: form.preparation_ready }))
}

fn read_committed(form: &form::Committed) -> Result<Committed, StoredError> {
    Ok(Committed {
        next_offset: read_offset(form.next_offset)?,
        epoch: read_epoch(form.epoch)?,
        sequence: CommitSequence(form.sequence),
        metadata: form.metadata.to_vec(),
        rewind: match form.rewind.as_str() {
            "" => None,
            text => Some(read_name("request id", text)?),
        },
    })
}

fn read_trouble(form: &form::Trouble) -> Result<Trouble, StoredError> {
    let members = form.members.iter().map(|text| read_name("member", text));
    Ok(Trouble {
        failures: form.failures,
        members: members.collect::<Result<_, _>>()?,
        error: form.error.clone(),
        held_back: form.held_back,
    })
}

fn read_operation(form: &form::Operation) -> Result<Operation, StoredError> {
    Ok(Operation {
        request: read_name("request id", &form.request)?,
        index: Index(form.index),
        time: Timestamp(form.time_unix_ms),
        actor: form.actor.clone(),
        reason: form.reason.clone(),
        action: read_action(form.action)?,
        group: form.group.as_deref().map(read_group).transpose()?,
        group_epoch: GroupEpoch(form.group_epoch),
        moves: form.moves.iter().map(read_move).collect::<Result<_, _>>()?,
    })
}
