//! The fence as it is stored.

use redis::{FromRedisValue, RedisError, Value};
use tenure_model::Epoch;
use tenure_sdk::sink::{FenceRow, SinkError, epoch_from_column};

use crate::script::FIELDS;

/// Epoch as the fence stores it: text that compares as the number does.
pub(crate) fn epoch_text(epoch: Epoch) -> String {
    format!("{:020}", epoch.get())
}

/// The fence hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) row: FenceRow,
    pub(crate) displaced: Option<Epoch>,
    /// Writes of a lower attempt are refused, at the same sequence.
    pub(crate) attempt: u64,
    /// Set by a write that stopped half-way.
    pub(crate) damaged: Option<String>,
}

impl Stored {
    /// Nothing: there is no fence.
    pub(crate) fn decode(value: Value) -> Result<Option<Self>, SinkError> {
        let fields = Vec::<Option<String>>::from_redis_value(value)
            .map_err(|error| differs(&RedisError::from(error).to_string()))?;
        let mut fields = <[Option<String>; FIELDS.len()]>::try_from(fields)
            .map_err(|fields| differs(&format!("{} fields", fields.len())))?;
        let [epoch, holder, next_offset, sequence, displaced, attempt, damaged] = &mut fields;
        let Some(epoch) = epoch.take() else { return Ok(None) };
        let row = FenceRow::from_columns(
            number(&epoch)?,
            holder.take().unwrap_or_default(),
            next_offset.take().as_deref().map(number).transpose()?,
            number(sequence.as_deref().unwrap_or("0"))?,
        )?;
        let displaced =
            displaced.take().map(|text| epoch_from_column(number(&text)?)).transpose()?;
        let attempt = number(attempt.as_deref().unwrap_or("0"))?;
        let attempt = u64::try_from(attempt).map_err(|error| differs(&error.to_string()))?;
        Ok(Some(Self { row, displaced, attempt, damaged: damaged.take() }))
    }

    /// Refuses a fence whose last write stopped half-way.
    pub(crate) fn whole(self) -> Result<Self, SinkError> {
        match &self.damaged {
            None => Ok(self),
            Some(text) => Err(damage(text)),
        }
    }
}

/// A write stopped half-way: nobody goes on by itself.
pub(crate) fn damage(text: &str) -> SinkError {
    SinkError::Misconfigured(format!(
        "a write stopped half-way and the offset has not moved: {text}; mend the data, then HDEL the fence's field \
         `damaged`"
    ))
}

fn number(text: &str) -> Result<i64, SinkError> {
    text.parse().map_err(|error| differs(&format!("{text:?}: {error}")))
}

fn differs(what: &str) -> SinkError {
    SinkError::Misconfigured(format!("the fence key holds something else: {what}"))
}
