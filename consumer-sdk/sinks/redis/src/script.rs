//! The Lua scripts. `KEYS[1]` is the fence key, a hash.
//!
//! Epochs are compared as text of twenty digits: a number of Lua is a double. Offsets are only ever compared for being
//! the same text, and are computed outside.

use redis::Script;
use tenure_sdk::sink::Fencing;

/// Fields of the fence, in the order in which they are read.
pub(crate) const FIELDS: [&str; 7] =
    ["epoch", "holder", "next_offset", "sequence", "displaced", "attempt", "damaged"];

const ROW: &str = "\
local F = KEYS[1]
local function row()
  return redis.call('HMGET', F, 'epoch', 'holder', 'next_offset', 'sequence', 'displaced', 'attempt', 'damaged')
end
";

/// Raises the fence: epoch, holder. Answers the row as it was. The key never expires. A repeated registration writes
/// too, so that `WAIT` after it waits for something.
const REGISTER: &str = "\
local found = row()
if not found[1] then
  redis.call('HSET', F, 'epoch', ARGV[1], 'holder', ARGV[2], 'sequence', '0', 'attempt', '0')
elseif found[1] < ARGV[1] then
  redis.call('HSET', F, 'epoch', ARGV[1], 'holder', ARGV[2], 'displaced', found[1])
elseif found[1] == ARGV[1] and found[2] == ARGV[2] then
  redis.call('HSET', F, 'holder', ARGV[2])
end
redis.call('PERSIST', F)
return found
";

const REGISTER_WITHOUT_FENCING: &str = "\
local found = row()
if not found[1] then
  redis.call('HSET', F, 'epoch', ARGV[1], 'holder', ARGV[2], 'sequence', '0', 'attempt', '0')
end
return found
";

/// Sets the first offset, once, under the epoch: epoch, offset. Answers the row as it is then.
const INITIALISE: &str = "\
if redis.call('HGET', F, 'epoch') == ARGV[1] then
  redis.call('HSETNX', F, 'next_offset', ARGV[2])
end
return row()
";

const INITIALISE_WITHOUT_FENCING: &str = "\
redis.call('HSETNX', F, 'next_offset', ARGV[2])
return row()
";

/// Rules out a write in doubt that has not arrived yet: epoch, its sequence, the first attempt that may still write.
/// Answers the row. Writes in any case under the epoch, so that `WAIT` after it waits for something.
const RESOLVE: &str = "\
local found = row()
if found[1] == ARGV[1] then
  if found[4] == ARGV[2] and tonumber(found[6]) < tonumber(ARGV[3]) then
    redis.call('HSET', F, 'attempt', ARGV[3])
  else
    redis.call('HSET', F, 'epoch', ARGV[1])
  end
end
return found
";

/// Compares: epoch, sequence as read, attempt, new offset, new sequence; the payload begins at `ARGV[6]`.
const COMPARE: &str = "\
local found = row()
if found[7] then return {'damaged', found, found[7]} end
if found[1] ~= ARGV[1] or found[4] ~= ARGV[2] or tonumber(found[6]) > tonumber(ARGV[3]) then
  return {'row', found}
end
";

const COMPARE_NOTHING: &str = "local found = row()\n";

/// Answers what must be said when a write stopped half-way: nothing can be taken back, so nobody goes on until someone
/// has looked.
const DAMAGED: &str = "\
local function damaged(text)
  redis.call('HSET', F, 'damaged', text)
  return {'damaged', found, text}
end
";

/// The payload as commands: for each the type that its key must have, the type that it leaves, its check, how many words,
/// the words. All are looked at, as they will find the keys, before the first is run.
const COMMANDS: &str = "\
local commands, kinds, loose, at = {}, {}, {}, 6
while at <= #ARGV do
  local wanted, left, check, count = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local words = {unpack(ARGV, at + 4, at + 3 + count)}
  local key = words[2]
  local kind = kinds[key] or redis.call('TYPE', key).ok
  if wanted ~= 'any' and kind ~= 'none' and kind ~= wanted then
    return {'refused', found, words[1] .. ': the key holds a ' .. kind}
  end
  if check ~= '' and loose[key] then
    return {'refused', found, words[1] .. ': another command of this write sets the key'}
  end
  local number = false
  if check == 'number' and kind ~= 'none' then number = redis.call('GET', key) end
  if check == 'field' and kind ~= 'none' then number = redis.call('HGET', key, words[3]) end
  if number and not (#number <= 18 and string.find(number, '^%-?%d+$')) then
    return {'refused', found, words[1] .. ': the value is not a whole number of up to 18 digits'}
  end
  if check == '' then loose[key] = true end
  if left == 'same' then kinds[key] = kind else kinds[key] = left end
  commands[#commands + 1] = words
  at = at + 4 + count
end
for done, words in ipairs(commands) do
  local reply = redis.pcall(unpack(words))
  if type(reply) == 'table' and reply.err then
    if done == 1 then return {'refused', found, reply.err} end
    return damaged('command ' .. done .. ' of ' .. #commands .. ' failed after the others were in: ' .. reply.err)
  end
end
";

/// The payload as the arguments of a body of the caller's.
const BODY_BEFORE: &str = "\
local function body(KEYS, ARGV)
";

const BODY_AFTER: &str = "
end
local keys, arguments = {}, {}
for i = 2, #KEYS do keys[#keys + 1] = KEYS[i] end
for i = 6, #ARGV do arguments[#arguments + 1] = ARGV[i] end
local ran, said = pcall(body, keys, arguments)
if not ran then
  if type(said) == 'table' then said = said.err end
  return damaged('the script failed on its way: ' .. tostring(said))
end
if type(said) == 'string' then return {'refused', found, said} end
";

const MOVE: &str = "\
redis.call('HSET', F, 'next_offset', ARGV[4], 'sequence', ARGV[5])
return {'written', found}
";

const MOVE_WITHOUT_FENCING: &str = "\
redis.call('HSET', F, 'next_offset', ARGV[4])
redis.call('HINCRBY', F, 'sequence', 1)
return {'written', found}
";

/// The sink's own scripts.
#[derive(Debug)]
pub(crate) struct Scripts {
    pub(crate) register: Script,
    pub(crate) initialise: Script,
    pub(crate) resolve: Script,
    pub(crate) commands: Script,
}

impl Scripts {
    pub(crate) fn new(fencing: Fencing) -> Self {
        let over = |text: &str| Script::new(&format!("{ROW}{text}"));
        let (register, initialise) = match fencing {
            Fencing::On => (REGISTER, INITIALISE),
            Fencing::Off => (REGISTER_WITHOUT_FENCING, INITIALISE_WITHOUT_FENCING),
        };
        Self {
            register: over(register),
            initialise: over(initialise),
            resolve: over(RESOLVE),
            commands: write_with(COMMANDS, fencing),
        }
    }
}

fn write_with(payload: &str, fencing: Fencing) -> Script {
    let (compare, moving) = match fencing {
        Fencing::On => (COMPARE, MOVE),
        Fencing::Off => (COMPARE_NOTHING, MOVE_WITHOUT_FENCING),
    };
    Script::new(&format!("{ROW}{compare}{DAMAGED}{payload}{moving}"))
}

/// Lua of the caller's that does the writes of a transaction, after the comparison and in the same step.
///
/// The body is a function of `KEYS` and `ARGV`, both as given to [`RedisTx::script`](crate::RedisTx::script). It returns
/// nothing, or before its first write a text: then nothing is written and the text is the error. An error that it raises
/// leaves what it has written and stops the partition, because Redis takes nothing back: look first, then write.
#[derive(Clone, Debug)]
pub struct RedisScript {
    fenced: Script,
    unfenced: Script,
}

impl RedisScript {
    /// Makes a script of a body, such as `redis.call('SET', KEYS[1], ARGV[1])`.
    #[must_use]
    pub fn new(body: &str) -> Self {
        let payload = format!("{BODY_BEFORE}{body}{BODY_AFTER}");
        Self {
            fenced: write_with(&payload, Fencing::On),
            unfenced: write_with(&payload, Fencing::Off),
        }
    }

    pub(crate) const fn under(&self, fencing: Fencing) -> &Script {
        match fencing {
            Fencing::On => &self.fenced,
            Fencing::Off => &self.unfenced,
        }
    }
}
