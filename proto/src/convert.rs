//! The edge: from wire shapes to the model, and back.

use tenure_model::{
    Epoch, ErrorCode, GroupSettings, Home, NextOffset, Partition, PartitionIndex, SinkSetting,
    Takeover, TopicId, limits,
};

use crate::v1;

/// A field from outside that is malformed. Always `INVALID_ARGUMENT`, or `TOO_LARGE` for a count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Malformed {
    /// Path of the field, as in the `.proto` file.
    pub field: &'static str,
    /// What is wrong with it and what is allowed.
    pub problem: String,
    /// `INVALID_ARGUMENT` or `TOO_LARGE`.
    pub code: ErrorCode,
}

impl Malformed {
    /// A malformed value.
    #[must_use]
    pub fn new(field: &'static str, problem: impl std::fmt::Display) -> Self {
        Self { field, problem: problem.to_string(), code: ErrorCode::InvalidArgument }
    }

    /// Too many or too much.
    #[must_use]
    pub fn too_large(field: &'static str, found: usize, max: usize) -> Self {
        let problem = format!("has {found}, at most {max} are allowed: send less, or in parts");
        Self { field, problem, code: ErrorCode::TooLarge }
    }
}

/// Refuses more than `max` of something.
///
/// # Errors
///
/// `TOO_LARGE` with the field, the count found and the limit.
pub fn at_most(field: &'static str, found: usize, max: usize) -> Result<(), Malformed> {
    if found > max { Err(Malformed::too_large(field, found, max)) } else { Ok(()) }
}

/// Reads a name.
///
/// # Errors
///
/// `INVALID_ARGUMENT` with the field and what is wrong.
pub fn name<T>(field: &'static str, text: &str) -> Result<T, Malformed>
where
    T: std::str::FromStr,
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error| Malformed::new(field, error))
}

/// Reads an epoch.
///
/// # Errors
///
/// `INVALID_ARGUMENT` outside 1 to 2^53 − 1.
pub fn epoch(field: &'static str, value: u64) -> Result<Epoch, Malformed> {
    Epoch::new(value).map_err(|error| Malformed::new(field, error))
}

/// Reads an offset.
///
/// # Errors
///
/// `INVALID_ARGUMENT` above 2^63 − 1.
pub fn next_offset(field: &'static str, value: u64) -> Result<NextOffset, Malformed> {
    NextOffset::new(value).map_err(|error| Malformed::new(field, error))
}

/// Reads a partition.
///
/// # Errors
///
/// `INVALID_ARGUMENT` when it is absent, its topic id is no id or its index is out of range.
pub fn partition(
    field: &'static str,
    wire: Option<&v1::Partition>,
) -> Result<Partition, Malformed> {
    let wire = wire.ok_or_else(|| Malformed::new(field, "is missing"))?;
    let topic_id = TopicId::parse(&wire.topic_id).map_err(|error| Malformed::new(field, error))?;
    let index = PartitionIndex::new(wire.index).ok_or_else(|| {
        let max = limits::TOPIC_PARTITIONS_MAX - 1;
        Malformed::new(field, format!("index {} is outside 0 to {max}", wire.index))
    })?;
    Ok(Partition { topic_id, index })
}

/// Writes a partition.
#[must_use]
pub fn partition_to_wire(partition: Partition) -> v1::Partition {
    v1::Partition { topic_id: partition.topic_id.to_string(), index: partition.index.get() }
}

/// Reads and checks group settings; absent ones are the defaults.
///
/// # Errors
///
/// `INVALID_ARGUMENT` for an unknown value or a contradiction.
pub fn group_settings(
    field: &'static str,
    wire: Option<&v1::GroupSettings>,
) -> Result<GroupSettings, Malformed> {
    let Some(wire) = wire else { return Ok(GroupSettings::default()) };
    let home = match v1::Home::try_from(wire.home) {
        Ok(v1::Home::Unspecified | v1::Home::Coordinator) => Home::Coordinator,
        Ok(v1::Home::Sink) => Home::Sink,
        Ok(v1::Home::KafkaTransaction) => Home::KafkaTransaction,
        Err(_) => return Err(Malformed::new(field, format!("home {} is not known", wire.home))),
    };
    let takeover = match v1::Takeover::try_from(wire.takeover) {
        Ok(v1::Takeover::Unspecified | v1::Takeover::Lease) => Takeover::Lease,
        Ok(v1::Takeover::Fence) => Takeover::Fence,
        Err(_) => {
            return Err(Malformed::new(field, format!("takeover {} is not known", wire.takeover)));
        }
    };
    at_most(field, wire.sinks.len(), limits::SINKS_MAX)?;
    let sinks = wire
        .sinks
        .iter()
        .map(|sink| SinkSetting { name: sink.name.clone(), enforces_epoch: sink.enforces_epoch })
        .collect();
    GroupSettings { home, takeover, sinks }.validate().map_err(|error| Malformed::new(field, error))
}

/// Writes group settings.
#[must_use]
pub fn group_settings_to_wire(settings: &GroupSettings) -> v1::GroupSettings {
    let home = match settings.home {
        Home::Coordinator => v1::Home::Coordinator,
        Home::Sink => v1::Home::Sink,
        Home::KafkaTransaction => v1::Home::KafkaTransaction,
    };
    let takeover = match settings.takeover {
        Takeover::Lease => v1::Takeover::Lease,
        Takeover::Fence => v1::Takeover::Fence,
    };
    v1::GroupSettings {
        home: home.into(),
        takeover: takeover.into(),
        sinks: settings
            .sinks
            .iter()
            .map(|sink| v1::Sink { name: sink.name.clone(), enforces_epoch: sink.enforces_epoch })
            .collect(),
    }
}
