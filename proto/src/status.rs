//! Errors on the wire: the one place where a code becomes a gRPC status, and back.

use tenure_model::ErrorCode;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use crate::v1;

/// Metadata key that carries the stable code of a refused call.
pub const CODE_METADATA_KEY: &str = "tenure-error-code";

/// Metadata key that carries the raft leader's client address of a call refused with `NOT_LEADER`.
pub const LEADER_METADATA_KEY: &str = "tenure-leader-address";

const fn grpc_code(code: ErrorCode) -> Code {
    match code {
        ErrorCode::Fenced
        | ErrorCode::NotOwned
        | ErrorCode::MemberGone
        | ErrorCode::StaleMember
        | ErrorCode::InstanceInUse
        | ErrorCode::InstanceWaits
        | ErrorCode::SettingsConflict
        | ErrorCode::OffsetRegressed
        | ErrorCode::StaleCommit
        | ErrorCode::WrongHome
        | ErrorCode::HomeInitialised
        | ErrorCode::StaleTarget
        | ErrorCode::StaleTerm
        | ErrorCode::NothingToDo
        | ErrorCode::Compacted => Code::FailedPrecondition,
        ErrorCode::UnknownGroup | ErrorCode::UnknownMember | ErrorCode::UnknownPartition => {
            Code::NotFound
        }
        ErrorCode::LimitReached
        | ErrorCode::EpochExhausted
        | ErrorCode::TooLarge
        | ErrorCode::SlowWatcher => Code::ResourceExhausted,
        ErrorCode::InvalidArgument => Code::InvalidArgument,
        ErrorCode::Unsupported => Code::Unimplemented,
        ErrorCode::NotLeader
        | ErrorCode::NoLeader
        | ErrorCode::Overloaded
        | ErrorCode::ShuttingDown => Code::Unavailable,
        ErrorCode::Unknown => Code::DeadlineExceeded,
        ErrorCode::Internal => Code::Internal,
    }
}

/// Makes the status of a refused call. The code and the raft leader's address travel as metadata.
#[must_use]
pub fn status_of_error(code: ErrorCode, message: &str, leader_address: &str) -> Status {
    let mut status = Status::new(grpc_code(code), message);
    let metadata = status.metadata_mut();
    metadata.insert(CODE_METADATA_KEY, MetadataValue::from_static(code.as_str()));
    if let Ok(value) = MetadataValue::try_from(leader_address)
        && !leader_address.is_empty()
    {
        metadata.insert(LEADER_METADATA_KEY, value);
    }
    status
}

/// Reads a status back. A status that carries no code (the transport's own) is `UNKNOWN`: the call may or may not
/// have happened.
#[must_use]
pub fn error_of_status(status: &Status) -> v1::Error {
    let text = |key| status.metadata().get(key).and_then(|value| value.to_str().ok()).unwrap_or("");
    let code = ErrorCode::parse(text(CODE_METADATA_KEY)).unwrap_or_else(|| match status.code() {
        Code::Unimplemented => ErrorCode::Unsupported,
        Code::InvalidArgument => ErrorCode::InvalidArgument,
        // The transport refuses a message above the limit with this one.
        Code::OutOfRange => ErrorCode::TooLarge,
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss
        | Code::Unauthenticated => ErrorCode::Unknown,
    });
    v1::Error {
        code: code.as_str().to_owned(),
        message: status.message().to_owned(),
        current_epoch: 0,
        leader_address: text(LEADER_METADATA_KEY).to_owned(),
    }
}
