//! Figures of a run, for the log of one that passes as well.

use std::fmt::Display;
use std::io::Write;

/// Prints what a test has measured, past the capture of its output, below the test's name.
pub fn tell(figures: impl Display) {
    let thread = std::thread::current();
    let text = figures.to_string();
    let lines: Vec<String> = text.lines().map(|line| format!("  {line}\n")).collect();
    // One write, so that lines of several tests do not mix.
    let text = format!("\n{}:\n{}", thread.name().unwrap_or("unnamed"), lines.concat());
    std::io::stderr().write_all(text.as_bytes()).expect("stderr takes the figures");
}
