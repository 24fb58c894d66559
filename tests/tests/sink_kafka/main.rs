//! The Kafka sink on a real broker.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

mod faults;
mod kit;
mod late;
mod scene;
