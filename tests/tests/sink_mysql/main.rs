//! The MySQL sink on a real MariaDB, and the conformance kit against it.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

mod faults;
mod kit;
mod scene;
mod writes;
