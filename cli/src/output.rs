//! Printing: tables for people, JSON for programs.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write as _};

use serde_json::Value;

/// Writes one line to standard output. A closed pipe ends the printing quietly.
pub(crate) fn line(text: impl std::fmt::Display) {
    if let Err(error) = writeln!(io::stdout().lock(), "{text}") {
        tracing::debug!(%error, "standard output is closed");
    }
}

/// Writes one line to standard output at once; false when nobody reads it any more.
pub(crate) fn try_line(text: impl std::fmt::Display) -> bool {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).is_ok()
}

/// Writes one line to standard error.
pub(crate) fn complain(text: impl std::fmt::Display) {
    if let Err(error) = writeln!(io::stderr().lock(), "{text}") {
        tracing::debug!(%error, "standard error is closed");
    }
}

/// Writes one line of JSON to standard output. What a terminal would act on is written as escapes, which stand for the
/// same text.
pub(crate) fn json_line(value: &Value) {
    line(json_text(value));
}

/// The text that [`json_line`] writes.
pub(crate) fn json_text(value: &Value) -> String {
    let text = value.to_string();
    if !text.contains(is_acted_on) {
        return text;
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        if is_acted_on(char) {
            // Only strings can hold one: the rest of JSON is of ASCII.
            for unit in char.encode_utf16(&mut [0; 2]) {
                write!(safe, "\\u{unit:04x}").expect("a String takes any text");
            }
        } else {
            safe.push(char);
        }
    }
    safe
}

/// A text from outside as it may stand on a terminal, on one line.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    if !text.contains(is_acted_on) {
        return Cow::Borrowed(text);
    }
    let escape = |char: char| -> String {
        if is_acted_on(char) { char.escape_default().collect() } else { char.into() }
    };
    Cow::Owned(text.chars().map(escape).collect())
}

/// Whether a terminal would not show the character, but do something: move, colour, turn the direction of writing.
const fn is_acted_on(char: char) -> bool {
    matches!(char,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e007f}')
}

/// Rows under headings, columns as wide as their widest cell. What cells hold is [`shown`].
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(|heading| (*heading).to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells.iter().map(|cell| shown(cell).into_owned()).collect());
    }

    pub(crate) fn print(&self) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}", width = *width))
                .collect();
            line(cells.join("  ").trim_end());
        }
    }
}

/// A cell that may be empty.
pub(crate) fn or_dash(text: impl ToString) -> String {
    let text = text.to_string();
    if text.is_empty() { "-".to_owned() } else { text }
}

/// A time in UTC, to the millisecond.
pub(crate) fn time(unix_ms: u64) -> String {
    let (days, in_day) = (unix_ms / 86_400_000, unix_ms % 86_400_000);
    // Civil calendar in eras of 400 years that start on the first of March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (seconds, ms) = (in_day / 1_000, in_day % 1_000);
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// A cell that may be absent.
pub(crate) fn optional<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{json_text, shown, time};

    #[test]
    fn what_a_terminal_would_act_on_is_written_out_and_stays_the_same_json() {
        let odd = "a\u{1b}[2Jb\nc\u{9b}31m\u{202e}d\u{200b}\u{e0041}\u{7f}\0";
        let text = shown(odd);
        let want = "a\\u{1b}[2Jb\\nc\\u{9b}31m\\u{202e}d\\u{200b}\\u{e0041}\\u{7f}\\u{0}";
        assert_eq!(text, want);
        assert_eq!(shown("größer: 漢字 \\ \"x\""), "größer: 漢字 \\ \"x\"");
        let value = json!({ "metadata": odd, "plain": "größer 漢字" });
        let text = json_text(&value);
        assert!(text.contains("\\udb40\\udc41") && text.contains("größer 漢字"), "{text}");
        assert!(!text.contains(|char: char| char.is_control() || char == '\u{202e}'), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn time_is_utc_over_leap_days_and_centuries() {
        for (unix_ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199_000, "2024-02-29T23:59:59.000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(time(unix_ms), text);
        }
    }
}
