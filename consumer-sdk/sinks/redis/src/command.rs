//! Commands of a write, checked before anything is sent: a script that fails half-way is not rolled back.

use tenure_sdk::sink::SinkError;

/// Longest command, in words: Lua takes no more from a table at once.
const COMMAND_WORDS_MAX: usize = 1_000;

/// What the key must hold, and what else the script looks at.
#[derive(Clone, Copy, Debug)]
struct Form {
    name: &'static str,
    /// Type of the key, as `TYPE` says it; `any` for commands that take every type.
    kind: &'static str,
    /// Type that the key has after it; `same` if that does not change.
    left: &'static str,
    /// `number`: the value is a whole number; `field`: the value of the hash's field is; else empty.
    check: &'static str,
    words: fn(&[Vec<u8>]) -> bool,
}

#[rustfmt::skip]
const FORMS: &[Form] = &[
    Form { name: "SET", kind: "any", left: "string", check: "", words: is_set },
    Form { name: "DEL", kind: "any", left: "none", check: "", words: |words| words.len() == 2 },
    Form { name: "PEXPIRE", kind: "any", left: "same", check: "", words: |words| words.len() == 3 && is_small(&words[2]) },
    Form { name: "APPEND", kind: "string", left: "string", check: "", words: |words| words.len() == 3 },
    Form { name: "INCRBY", kind: "string", left: "string", check: "number", words: |words| words.len() == 3 && is_small(&words[2]) },
    Form { name: "HSET", kind: "hash", left: "hash", check: "", words: |words| words.len() >= 4 && words.len().is_multiple_of(2) },
    Form { name: "HDEL", kind: "hash", left: "hash", check: "", words: |words| words.len() >= 3 },
    Form { name: "HINCRBY", kind: "hash", left: "hash", check: "field", words: |words| words.len() == 4 && is_small(&words[3]) },
    Form { name: "LPUSH", kind: "list", left: "list", check: "", words: |words| words.len() >= 3 },
    Form { name: "RPUSH", kind: "list", left: "list", check: "", words: |words| words.len() >= 3 },
    Form { name: "SADD", kind: "set", left: "set", check: "", words: |words| words.len() >= 3 },
    Form { name: "SREM", kind: "set", left: "set", check: "", words: |words| words.len() >= 3 },
    Form { name: "ZADD", kind: "zset", left: "zset", check: "", words: is_zadd },
    Form { name: "ZREM", kind: "zset", left: "zset", check: "", words: |words| words.len() >= 3 },
    Form { name: "XADD", kind: "stream", left: "stream", check: "", words: |words| words.len() >= 5 && !words.len().is_multiple_of(2) && words[2] == b"*" },
];

/// One write, such as `Command::new("SET").arg(key).arg(value)`.
///
/// `SET key value [PX ms]`, `DEL key`, `PEXPIRE key ms`, `APPEND`, `INCRBY`, `HSET`, `HDEL`, `HINCRBY`, `LPUSH`, `RPUSH`,
/// `SADD`, `SREM`, `ZADD key score member …`, `ZREM` and `XADD key * field value …`. For anything else there is
/// [`RedisScript`](crate::RedisScript).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    words: Vec<Vec<u8>>,
}

impl Command {
    /// Begins with the name, in capitals.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { words: vec![name.as_bytes().to_vec()] }
    }

    /// Adds a word; the first one is the key.
    #[must_use]
    pub fn arg(mut self, word: impl AsRef<[u8]>) -> Self {
        self.words.push(word.as_ref().to_vec());
        self
    }

    pub(crate) fn key(&self) -> &[u8] {
        self.words.get(1).map_or(&[], Vec::as_slice)
    }

    /// Refuses what could fail when other commands of the same write are already in.
    pub(crate) fn check(&self) -> Result<Checked<'_>, SinkError> {
        let name = String::from_utf8_lossy(&self.words[0]);
        let form = FORMS.iter().find(|form| form.name == name).ok_or_else(|| {
            SinkError::Misconfigured(format!("{name} is no command of this sink: use a script"))
        })?;
        if self.words.len() > COMMAND_WORDS_MAX || !(form.words)(&self.words) {
            return Err(SinkError::Rejected(
                format!("{name} with these {} words is not taken", self.words.len()).into(),
            ));
        }
        Ok(Checked { kind: form.kind, left: form.left, check: form.check, words: &self.words })
    }
}

/// A command with what the script looks at.
#[derive(Debug)]
pub(crate) struct Checked<'c> {
    pub(crate) kind: &'static str,
    pub(crate) left: &'static str,
    pub(crate) check: &'static str,
    pub(crate) words: &'c [Vec<u8>],
}

fn is_set(words: &[Vec<u8>]) -> bool {
    match words.len() {
        3 => true,
        5 => words[3] == b"PX" && is_small(&words[4]) && words[4][0] != b'-' && words[4] != b"0",
        _ => false,
    }
}

fn is_zadd(words: &[Vec<u8>]) -> bool {
    let is_score = |word: &Vec<u8>| {
        std::str::from_utf8(word).is_ok_and(|text| text.parse::<f64>().is_ok_and(f64::is_finite))
    };
    words.len() >= 4
        && words.len().is_multiple_of(2)
        && words.iter().skip(2).step_by(2).all(is_score)
}

/// A whole number of up to 14 digits: as many additions as a write takes do not carry out of 64 bits.
fn is_small(word: &[u8]) -> bool {
    let digits = word.strip_prefix(b"-").unwrap_or(word);
    let leads_with_zero = digits.len() > 1 && digits[0] == b'0';
    (1..=14).contains(&digits.len())
        && digits.iter().all(u8::is_ascii_digit)
        && !leads_with_zero
        && word != b"-0"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(text: &str) -> Command {
        let mut words = text.split(' ');
        let name = words.next().unwrap();
        words.fold(Command::new(name), Command::arg)
    }

    #[test]
    fn what_could_fail_half_way_is_refused_before() {
        for (text, taken) in [
            ("SET k v", true),
            ("SET k v PX 5", true),
            ("SET k v PX 0", false),
            ("SET k v NX", false),
            ("INCRBY k 5", true),
            ("INCRBY k 1.5", false),
            ("INCRBY k 9223372036854775807", false),
            ("HSET k f v", true),
            ("HSET k f", false),
            ("ZADD k 1.5 m", true),
            ("ZADD k NX m", false),
            ("XADD k * f v", true),
            ("XADD k 5-1 f v", false),
            ("EVAL k", false),
            ("FLUSHALL", false),
        ] {
            assert_eq!(command(text).check().is_ok(), taken, "{text}");
        }
    }
}
