//! Fenced sinks on the real thing.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

mod external;
mod kit;
mod known_bad;
mod postgres;
mod sqlx;
