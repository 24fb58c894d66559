//! The Redis sink on a real server and a real replica, and the conformance kit against it.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

mod faults;
mod kit;
mod replica;
mod scene;
mod writes;
