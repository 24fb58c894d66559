//! What a fence answers when it refuses, on the wire of both sides.

use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use tenure_model::{Epoch, NextOffset};

use crate::headers;

/// Why a request was not admitted. Nothing was written, except where it says otherwise.
///
/// | Refusal | Word | HTTP | gRPC |
/// |---|---|---|---|
/// | `Missing` | `missing` | 428 | `FAILED_PRECONDITION` |
/// | `Malformed` | `malformed` | 400 | `INVALID_ARGUMENT` |
/// | `Token` | `token` | 403 | `PERMISSION_DENIED` |
/// | `Unregistered` | `unregistered` | 428 | `FAILED_PRECONDITION` |
/// | `Stale` | `stale` | 412 | `FAILED_PRECONDITION` |
/// | `OffsetConflict` | `offset-conflict` | 409 | `ABORTED` |
/// | `Absent` | `absent` | 404 | `NOT_FOUND` |
/// | `Unavailable` | `unavailable` | 503 | `UNAVAILABLE` |
/// | `InDoubt` | `in-doubt` | 500 | `UNKNOWN` |
/// | `Unchecked` | `unchecked` | 500 | `INTERNAL` |
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A protected request without a stamp.
    #[error("header {header} is missing: writes here carry a resource and an epoch")]
    Missing {
        /// The header.
        header: HeaderName,
    },
    /// A header that is not what it must be.
    #[error("header {header} is malformed")]
    Malformed {
        /// The header.
        header: HeaderName,
    },
    /// The token is absent where one is demanded, or is not believed.
    #[error("token: {why}")]
    Token {
        /// For people.
        why: String,
    },
    /// The epoch is not registered: the fence is absent or below it.
    #[error("epoch {given} is not registered here: register it first")]
    Unregistered {
        /// Epoch of the request.
        given: Epoch,
        /// Epoch of the fence.
        current: Option<Epoch>,
    },
    /// A newer epoch is registered.
    #[error("fenced: given {given}, current is {current}: stop writing")]
    Stale {
        /// Epoch of the request.
        given: Epoch,
        /// Epoch of the fence.
        current: Epoch,
    },
    /// The offset or the sequence is not the expected one, under the same epoch.
    #[error("offset conflict: the offset is not the expected one")]
    OffsetConflict {
        /// Where the offset is.
        found: Option<NextOffset>,
        /// Writes that are in.
        sequence: u64,
    },
    /// No such fence.
    #[error("there is no such fence")]
    Absent,
    /// The store could not answer; certainly nothing was written.
    #[error("failed for now, nothing was written: {why}")]
    Unavailable {
        /// For people; not sent.
        why: String,
        /// Pause that the service asks for.
        retry_after: Option<Duration>,
    },
    /// The store could not say whether it was written.
    #[error("outcome unknown: {why}")]
    InDoubt {
        /// For people; not sent.
        why: String,
    },
    /// The handler answered success without asking the fence: a fault of the service. The effect is there, unfenced.
    #[error("the service did not check the epoch")]
    Unchecked,
}

impl From<headers::Malformed> for Refusal {
    fn from(malformed: headers::Malformed) -> Self {
        Self::Malformed { header: malformed.0 }
    }
}

impl Refusal {
    /// The store failed before anything was written.
    pub fn unavailable(why: impl std::fmt::Display) -> Self {
        Self::Unavailable { why: why.to_string(), retry_after: None }
    }

    /// The store failed, and whether anything was written is not known.
    pub fn in_doubt(why: impl std::fmt::Display) -> Self {
        Self::InDoubt { why: why.to_string() }
    }

    /// Word in the header `Ownership-Refusal`. Part of the protocol: never renamed, never reused.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "missing",
            Self::Malformed { .. } => "malformed",
            Self::Token { .. } => "token",
            Self::Unregistered { .. } => "unregistered",
            Self::Stale { .. } => "stale",
            Self::OffsetConflict { .. } => "offset-conflict",
            Self::Absent => "absent",
            Self::Unavailable { .. } => "unavailable",
            Self::InDoubt { .. } => "in-doubt",
            Self::Unchecked => "unchecked",
        }
    }

    /// HTTP status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Missing { .. } | Self::Unregistered { .. } => StatusCode::PRECONDITION_REQUIRED,
            Self::Malformed { .. } => StatusCode::BAD_REQUEST,
            Self::Token { .. } => StatusCode::FORBIDDEN,
            Self::Stale { .. } => StatusCode::PRECONDITION_FAILED,
            Self::OffsetConflict { .. } => StatusCode::CONFLICT,
            Self::Absent => StatusCode::NOT_FOUND,
            Self::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::InDoubt { .. } | Self::Unchecked => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Code of a gRPC status.
    #[must_use]
    pub const fn grpc_code(&self) -> i32 {
        match self {
            Self::InDoubt { .. } => 2,
            Self::Malformed { .. } => 3,
            Self::Absent => 5,
            Self::Token { .. } => 7,
            Self::Missing { .. } | Self::Unregistered { .. } | Self::Stale { .. } => 9,
            Self::OffsetConflict { .. } => 10,
            Self::Unchecked => 13,
            Self::Unavailable { .. } => 14,
        }
    }

    /// The refusal as headers of an answer, or as metadata of a gRPC status.
    #[must_use]
    pub fn to_headers(&self) -> HeaderMap {
        let mut map = HeaderMap::new();
        map.insert(headers::REFUSAL, HeaderValue::from_static(self.as_str()));
        match self {
            Self::Unregistered { given, current } => {
                headers::put(&mut map, &headers::EPOCH, given.get());
                if let Some(current) = current {
                    headers::put(&mut map, &headers::CURRENT_EPOCH, current.get());
                }
            }
            Self::Stale { given, current } => {
                headers::put(&mut map, &headers::EPOCH, given.get());
                headers::put(&mut map, &headers::CURRENT_EPOCH, current.get());
            }
            Self::OffsetConflict { found, sequence } => {
                if let Some(found) = found {
                    headers::put(&mut map, &headers::NEXT_OFFSET, found.get());
                }
                headers::put(&mut map, &headers::SEQUENCE, *sequence);
            }
            Self::Unavailable { retry_after: Some(pause), .. } => {
                let seconds = pause.as_secs() + u64::from(pause.subsec_nanos() > 0);
                headers::put(&mut map, &RETRY_AFTER, seconds);
            }
            Self::Missing { .. }
            | Self::Malformed { .. }
            | Self::Token { .. }
            | Self::Absent
            | Self::Unavailable { retry_after: None, .. }
            | Self::InDoubt { .. }
            | Self::Unchecked => {}
        }
        map
    }

    /// Answer with an empty body: for gRPC a status without messages, else the HTTP status.
    #[must_use]
    pub fn to_response<B: Default>(&self, is_grpc: bool) -> http::Response<B> {
        let mut response = http::Response::new(B::default());
        *response.headers_mut() = self.to_headers();
        if is_grpc {
            let code = HeaderValue::from(self.grpc_code());
            response.headers_mut().insert("grpc-status", code);
            let message = HeaderValue::from_static(self.as_str());
            response.headers_mut().insert("grpc-message", message);
            let form = HeaderValue::from_static("application/grpc");
            response.headers_mut().insert(http::header::CONTENT_TYPE, form);
        } else {
            *response.status_mut() = self.status();
        }
        response
    }
}

#[cfg(feature = "tonic")]
impl From<Refusal> for tonic::Status {
    fn from(refusal: Refusal) -> Self {
        let metadata = tonic::metadata::MetadataMap::from_headers(refusal.to_headers());
        let code = tonic::Code::from_i32(refusal.grpc_code());
        Self::with_metadata(code, refusal.as_str(), metadata)
    }
}
