//! Printing: tables for people, JSON for programs.

use std::io::{self, Write as _};

/// Writes one line to standard output. A closed pipe ends the printing quietly.
pub(crate) fn line(text: impl std::fmt::Display) {
    if let Err(error) = writeln!(io::stdout().lock(), "{text}") {
        tracing::debug!(%error, "standard output is closed");
    }
}

/// Writes one line to standard error.
pub(crate) fn complain(text: impl std::fmt::Display) {
    if let Err(error) = writeln!(io::stderr().lock(), "{text}") {
        tracing::debug!(%error, "standard error is closed");
    }
}

/// Rows under headings, columns as wide as their widest cell.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(headings: &[&str]) -> Self {
        Self { rows: vec![headings.iter().map(|heading| (*heading).to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
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

/// A cell that may be absent.
pub(crate) fn optional<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
