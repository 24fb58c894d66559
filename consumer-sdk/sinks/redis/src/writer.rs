//! Writes of one grant.

use std::sync::Arc;

use redis::{FromRedisValue, ScriptInvocation, Value};
use tenure_model::NextOffset;
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    FenceRow, FencedWriter, Resolved, Role, SinkError, Standing, Verified, look_up,
};

use crate::command::Command;
use crate::error::{classify, is_lost, refusal, transient};
use crate::row::{Stored, damage, epoch_text};
use crate::script::RedisScript;
use crate::sink::Shared;

/// Most commands of one write: a script stops the whole server while it runs.
pub(crate) const COMMANDS_MAX: usize = 10_000;

/// Writer of one grant.
#[derive(Debug)]
pub struct RedisWriter {
    shared: Arc<Shared>,
    grant: Grant,
    standing: Standing,
    doubt: Option<Doubt>,
}

/// A write that may still be on its way.
#[derive(Clone, Copy, Debug)]
struct Doubt {
    sequence: u64,
    attempt: u64,
}

impl RedisWriter {
    pub(crate) const fn new(shared: Arc<Shared>, grant: Grant, standing: Standing) -> Self {
        Self { shared, grant, standing, doubt: None }
    }

    /// Opens a write: reads the fence and compares epoch and offset. Nothing is held; the script compares again.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`], [`SinkError::Fenced`], [`SinkError::OffsetConflict`], [`SinkError::Unknown`] while an
    /// earlier write is not resolved, [`SinkError::FenceRegressed`] when the fence is below ours or gone,
    /// [`SinkError::Transient`] when the server is not reachable; any other.
    pub async fn begin(&mut self) -> Result<RedisTx<'_>, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let stored = self.shared.read(&self.grant.resource).await?;
        let stored = stored.map(Stored::whole).transpose()?;
        let attempt = stored.as_ref().map_or(0, |stored| stored.attempt);
        let row = self.admit(stored)?;
        Ok(RedisTx { writer: self, row, attempt, work: Work::Commands(Vec::new()) })
    }

    /// Key of one's own in the partition's slot: `{group/topic id/partition}:name`.
    #[must_use]
    pub fn key(&self, name: &str) -> String {
        format!("{}:{name}", Shared::tag(&self.grant.resource))
    }

    fn admit(&mut self, stored: Option<Stored>) -> Result<FenceRow, SinkError> {
        // The home's writer comes from a registration: a fence that is gone was there.
        if stored.is_none() && self.standing.role() == Role::Home {
            return Err(SinkError::FenceRegressed { ours: self.standing.epoch(), seen: None });
        }
        self.standing.admit(stored.map(|stored| stored.row))
    }

    /// What a script answered that did not write. Nothing is in doubt any more.
    fn refused(&mut self, row: &FenceRow, answer: Answer) -> SinkError {
        self.standing.refused(row);
        match answer {
            Answer::Written => SinkError::Misconfigured("the script is another one".into()),
            Answer::Refused(text) => refusal(text),
            Answer::Damaged(text) => damage(&text),
            Answer::Row(stored) => match self.admit(stored) {
                Err(error) => error,
                Ok(_) => transient("another writer of the same epoch was here: begin again"),
            },
        }
    }
}

impl FencedWriter for RedisWriter {
    async fn resume(&mut self, verified: &Verified) -> Result<Option<NextOffset>, SinkError> {
        self.standing.check()?;
        let stored = self.shared.read(&self.grant.resource).await?;
        let stored = stored.map(Stored::whole).transpose()?;
        self.standing.resume(stored.map(|stored| stored.row).as_ref(), verified)
    }

    /// An answer that was lost is [`SinkError::Unknown`]; repeat it.
    async fn initialise(&mut self, start: NextOffset) -> Result<NextOffset, SinkError> {
        self.standing.check()?;
        self.grant.lease.check()?;
        let Shared { settings, scripts, link } = &*self.shared;
        let mut lent = link.lend().await.map_err(classify)?;
        let mut call = scripts.initialise.key(self.shared.fence_key(&self.grant.resource));
        call.arg(epoch_text(self.standing.epoch())).arg(start.get());
        let value = match link.script(&mut lent, &call).await {
            Ok(value) => value,
            Err(error) if is_lost(&error) => return Err(SinkError::Unknown(Box::new(error))),
            Err(error) => return Err(classify(error)),
        };
        let stored = Stored::decode(value)?;
        if settings.wait_on_write {
            self.shared.copied(&mut lent).await?;
        }
        self.standing.initialised(stored.map(|stored| stored.row).as_ref())
    }

    /// Rules out that the write in doubt arrives later, and looks whether it has arrived.
    async fn resolve(&mut self) -> Result<Resolved, SinkError> {
        let Some(Doubt { sequence, attempt }) = self.doubt else {
            return self.standing.resolve(None);
        };
        let Shared { settings, scripts, link } = &*self.shared;
        let unknown = |error| SinkError::Unknown(Box::new(error));
        let mut lent = link.lend().await.map_err(unknown)?;
        let mut call = scripts.resolve.key(self.shared.fence_key(&self.grant.resource));
        call.arg(epoch_text(self.standing.epoch())).arg(sequence).arg(attempt + 1);
        let value = link.script(&mut lent, &call).await.map_err(unknown)?;
        let stored = Stored::decode(value)?.map(Stored::whole).transpose()?;
        if settings.wait_on_write {
            self.shared.copied(&mut lent).await?;
        }
        self.standing.resolve(stored.map(|stored| stored.row).as_ref())
    }

    async fn retire(self) -> Result<(), SinkError> {
        Ok(())
    }
}

/// Write of one grant. Nothing is sent before [`RedisTx::commit`]; dropped without it, nothing happens.
#[derive(Debug)]
pub struct RedisTx<'w> {
    writer: &'w mut RedisWriter,
    row: FenceRow,
    attempt: u64,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Commands(Vec<Command>),
    Script { script: RedisScript, keys: Vec<String>, arguments: Vec<Vec<u8>> },
}

/// What a script of a write answers.
#[derive(Debug)]
enum Answer {
    /// Data and offset are in.
    Written,
    /// Nothing is in: the fence is not as it was read.
    Row(Option<Stored>),
    /// Nothing is in: the data.
    Refused(String),
    /// Part of it is in.
    Damaged(String),
}

impl Answer {
    fn decode(value: Value) -> Result<Self, SinkError> {
        let differs = |error: &dyn std::fmt::Display| {
            SinkError::Misconfigured(format!("the script answers something else: {error}"))
        };
        let parts = Vec::<Value>::from_redis_value(value).map_err(|error| differs(&error))?;
        let mut parts = parts.into_iter();
        let mut next = || parts.next().unwrap_or(Value::Nil);
        let kind = String::from_redis_value(next()).map_err(|error| differs(&error))?;
        let found = next();
        let mut text = || Option::<String>::from_redis_value(next()).map(Option::unwrap_or_default);
        match kind.as_str() {
            "written" => Ok(Self::Written),
            "row" => Ok(Self::Row(Stored::decode(found)?)),
            "refused" => Ok(Self::Refused(text().map_err(|error| differs(&error))?)),
            "damaged" => Ok(Self::Damaged(text().map_err(|error| differs(&error))?)),
            other => Err(differs(&other)),
        }
    }
}

impl RedisTx<'_> {
    /// The first offset that is not in yet: records below it are a replay and are skipped.
    ///
    /// Nothing before the first commit, and nothing without fencing.
    #[must_use]
    pub fn applied(&self) -> Option<NextOffset> {
        self.writer.standing.applied(&self.row)
    }

    /// As [`RedisWriter::key`].
    #[must_use]
    pub fn key(&self, name: &str) -> String {
        self.writer.key(name)
    }

    /// Adds a command. All of them are looked at before the first is run.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a command or a key that the sink does not take, [`SinkError::Rejected`] for words
    /// that it does not.
    pub fn push(&mut self, command: Command) -> Result<(), SinkError> {
        command.check()?;
        self.check_key(command.key())?;
        match &mut self.work {
            Work::Commands(commands) if commands.len() < COMMANDS_MAX => {
                commands.push(command);
                Ok(())
            }
            Work::Commands(_) => Err(SinkError::Misconfigured(format!(
                "more than {COMMANDS_MAX} commands in one write: make it smaller"
            ))),
            Work::Script { .. } => Err(SinkError::Misconfigured(
                "the write has a script: commands are not added to it".into(),
            )),
        }
    }

    /// Does the writes by a script of one's own, instead of commands.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a key that the sink does not take, or when commands were added before.
    pub fn script(
        &mut self,
        script: &RedisScript,
        keys: Vec<String>,
        arguments: Vec<Vec<u8>>,
    ) -> Result<(), SinkError> {
        if !matches!(&self.work, Work::Commands(commands) if commands.is_empty()) {
            return Err(SinkError::Misconfigured(
                "the write has commands or a script already: it takes one of them".into(),
            ));
        }
        keys.iter().try_for_each(|key| self.check_key(key.as_bytes()))?;
        self.work = Work::Script { script: script.clone(), keys, arguments };
        Ok(())
    }

    fn check_key(&self, key: &[u8]) -> Result<(), SinkError> {
        let RedisWriter { shared, grant, .. } = &*self.writer;
        let text = || String::from_utf8_lossy(key).into_owned();
        if key == shared.fence_key(&grant.resource).as_bytes() {
            return Err(SinkError::Misconfigured(format!("key {:?} is the fence", text())));
        }
        let tag = Shared::tag(&grant.resource);
        if shared.settings.keys_without_tag || tag_of(key) == Some(tag.as_bytes()) {
            return Ok(());
        }
        Err(SinkError::Misconfigured(format!(
            "key {:?} is outside of the hash tag {tag}: name it by `key`, or allow keys_without_tag",
            text()
        )))
    }

    fn call(&self, target: NextOffset) -> Result<ScriptInvocation<'_>, SinkError> {
        let RedisWriter { shared, grant, standing, .. } = &*self.writer;
        let script = match &self.work {
            Work::Commands(_) => &shared.scripts.commands,
            Work::Script { script, .. } => script.under(shared.settings.fencing()),
        };
        let mut call = script.key(shared.fence_key(&grant.resource));
        call.arg(epoch_text(standing.epoch()))
            .arg(self.row.sequence)
            .arg(self.attempt)
            .arg(target.get())
            .arg(self.row.sequence + 1);
        match &self.work {
            Work::Commands(commands) => {
                for command in commands {
                    let checked = command.check()?;
                    call.key(command.key());
                    call.arg(checked.kind)
                        .arg(checked.left)
                        .arg(checked.check)
                        .arg(checked.words.len());
                    for word in checked.words {
                        call.arg(word.as_slice());
                    }
                }
            }
            Work::Script { keys, arguments, .. } => {
                for key in keys {
                    call.key(key);
                }
                for argument in arguments {
                    call.arg(argument.as_slice());
                }
            }
        }
        Ok(call)
    }

    /// Compares, writes and moves the offset to `next`, in one step. A lost answer is looked up on another connection.
    ///
    /// # Errors
    ///
    /// [`SinkError::LeaseEnded`]; [`SinkError::Fenced`], [`SinkError::FenceRegressed`]; [`SinkError::Unknown`] when a lost
    /// answer could not be looked up either, or too few replicas have the write; [`SinkError::Misconfigured`] when a
    /// script stopped half-way: the offset has not moved, and nobody writes to the partition until someone has looked;
    /// any other: nothing was written.
    pub async fn commit(self, next: NextOffset) -> Result<(), SinkError> {
        let target = self.writer.standing.target(&self.row, next)?;
        self.writer.grant.lease.check()?;
        let shared = Arc::clone(&self.writer.shared);
        let mut lent = shared.link.lend().await.map_err(classify)?;
        self.writer.standing.sent(&self.row, target);
        self.writer.doubt = Some(Doubt { sequence: self.row.sequence, attempt: self.attempt });
        let call = match self.call(target) {
            Ok(call) => call,
            Err(error) => {
                self.writer.standing.refused(&self.row);
                return Err(error);
            }
        };
        let answer = shared.link.script::<Value>(&mut lent, &call).await;
        drop(call);
        let Self { writer, row, .. } = self;
        match answer {
            Ok(value) => match Answer::decode(value)? {
                Answer::Written => {
                    if shared.settings.wait_on_write {
                        shared.copied(&mut lent).await?;
                    }
                    writer.standing.landed(target);
                    Ok(())
                }
                answer @ (Answer::Row(_) | Answer::Refused(_) | Answer::Damaged(_)) => {
                    Err(writer.refused(&row, answer))
                }
            },
            Err(error) if is_lost(&error) => {
                tracing::debug!(resource = %writer.grant.resource, %error, "answer lost, looking");
                look_up(writer, transient(error)).await
            }
            Err(error) => {
                writer.standing.refused(&row);
                Err(classify(error))
            }
        }
    }

    /// Gives the write up.
    pub fn roll_back(self) {}
}

/// The hash tag of a key, with its braces, as Redis finds it.
fn tag_of(key: &[u8]) -> Option<&[u8]> {
    let open = key.iter().position(|byte| *byte == b'{')?;
    let length = key[open..].iter().position(|byte| *byte == b'}')?;
    (length > 1).then(|| &key[open..=open + length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_tag_is_the_first_pair_of_braces() {
        for (key, tag) in [
            ("{a}:b", Some("{a}")),
            ("x{a}{b}", Some("{a}")),
            ("{}{a}", None),
            ("a", None),
            ("}{a", None),
        ] {
            assert_eq!(tag_of(key.as_bytes()), tag.map(str::as_bytes), "{key}");
        }
    }
}
