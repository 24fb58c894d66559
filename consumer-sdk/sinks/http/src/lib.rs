//! Fencing for services that are reached over HTTP and gRPC.
//!
//! The **client** stamps each request with the resource and the epoch of its grant; the **receiving service** compares
//! them in the transaction of the request's effect. What it protects, what it cannot, and every failure:
//! `docs/sinks/http.md`; the headers: `docs/protocol.md`.
//!
//! | Side | What it uses |
//! |---|---|
//! | member, beside its home | [`StampLayer`] over any client of `http` requests (hyper, tonic), or [`HttpSink::writer`] |
//! | member, the service as the home of the offset | [`HttpSink`] |
//! | service | [`FenceLayer`], and [`Claim::admit`] in each handler, with the handler's own transaction |

#![warn(missing_docs)]

pub mod headers;
mod refusal;

#[cfg(feature = "server")]
mod claim;
#[cfg(feature = "server")]
mod fence;
#[cfg(feature = "server")]
mod layer;
#[cfg(feature = "server")]
mod memory;
#[cfg(feature = "postgres")]
mod postgres;

#[cfg(feature = "client")]
mod answer;
#[cfg(feature = "client")]
mod settings;
#[cfg(feature = "client")]
mod sink;
#[cfg(feature = "client")]
mod stamp;
#[cfg(feature = "client")]
mod transport;
#[cfg(feature = "client")]
mod writer;

pub use refusal::Refusal;

#[cfg(feature = "server")]
pub use claim::{Admitted, Claim, Receiver, Tokens};
#[cfg(feature = "server")]
pub use fence::{Answer, Change, ChangeKind, Fence, FenceStore, Found, Raised};
#[cfg(feature = "server")]
pub use layer::{FenceLayer, FenceService};
#[cfg(feature = "server")]
pub use memory::{MemoryFences, MemoryTransaction};
#[cfg(feature = "postgres")]
pub use postgres::{MIGRATE, PostgresFences};

#[cfg(feature = "client")]
pub use answer::refusal_to_error;
#[cfg(feature = "client")]
pub use settings::HttpSettings;
#[cfg(feature = "client")]
pub use sink::HttpSink;
#[cfg(feature = "client")]
pub use stamp::{IdempotencyKey, StampLayer, StampService};
#[cfg(feature = "client")]
pub use transport::{HyperTransport, Transport, TransportError};
#[cfg(feature = "client")]
pub use writer::HttpWriter;
