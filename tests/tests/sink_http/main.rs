//! Fencing over HTTP and gRPC: a real service over a socket, with its fences in a real PostgreSQL.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy exempts only test functions, and figures are printed"
)]

mod fencing;
mod grpc;
mod kit;
mod service;
mod tokens;
