//! The object store sink in memory, in a local folder, and over the S3 API.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

mod kit;
mod lost;
mod program;
mod s3;
mod upkeep;
