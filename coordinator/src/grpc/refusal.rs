//! The no of a call: from every error of this node to the stable code, the message and the address that go out.

use tenure_core::Rejection;
use tenure_core::history::{Forgotten, Moment};
use tenure_model::ErrorCode;
use tenure_proto::convert::Malformed;
use tenure_proto::{status_of_error, v1};
use tonic::Status;

use crate::raft::{ChangeError, LinearizeError, ProposeError, TransferError};

/// Why a call, or one part of it, was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: ErrorCode,
    pub message: String,
    /// `FENCED` only; 0: none.
    current_epoch: u64,
    /// `NOT_LEADER` only; empty: not known.
    leader_address: String,
}

impl Refusal {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { code, message, current_epoch: 0, leader_address: String::new() }
    }

    /// Another node leads, or none.
    pub fn not_leader(address: Option<&str>) -> Self {
        match address {
            Some(address) => Self {
                leader_address: address.to_owned(),
                ..Self::new(
                    ErrorCode::NotLeader,
                    format!("this node is not the raft leader: go to {address}"),
                )
            },
            None => Self::new(
                ErrorCode::NoLeader,
                "there is no raft leader at the moment: try again shortly",
            ),
        }
    }

    /// The past that was asked for is not remembered.
    pub(crate) fn forgotten(forgotten: Forgotten) -> Self {
        let Moment { revision, .. } = forgotten.before;
        Self::new(
            ErrorCode::Compacted,
            format!(
                "what was before revision {revision} is forgotten: list the present, and watch from there"
            ),
        )
    }

    fn stopped() -> Self {
        Self::new(ErrorCode::ShuttingDown, "this node is shutting down: go to another one")
    }

    pub fn to_wire(&self) -> v1::Error {
        v1::Error {
            code: self.code.as_str().to_owned(),
            message: self.message.clone(),
            current_epoch: self.current_epoch,
            leader_address: self.leader_address.clone(),
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        status_of_error(refusal.code, &refusal.message, &refusal.leader_address)
    }
}

impl From<&Rejection> for Refusal {
    fn from(rejection: &Rejection) -> Self {
        let current_epoch = rejection.current_epoch().map_or(0, tenure_model::Epoch::get);
        Self { current_epoch, ..Self::new(rejection.code(), rejection.to_string()) }
    }
}

impl From<Rejection> for Refusal {
    fn from(rejection: Rejection) -> Self {
        Self::from(&rejection)
    }
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Self {
        Self::new(malformed.code, malformed.to_string())
    }
}

impl From<ProposeError> for Refusal {
    fn from(error: ProposeError) -> Self {
        match error {
            ProposeError::NotLeader { leader } => Self::not_leader(leader.as_deref()),
            ProposeError::NoLeader => Self::not_leader(None),
            ProposeError::Overloaded => Self::new(
                ErrorCode::Overloaded,
                "too many commands wait on this node: try again after a pause",
            ),
            ProposeError::TooLarge { .. } => {
                Self::new(ErrorCode::TooLarge, format!("{error}: send it in parts"))
            }
            ProposeError::Unknown => Self::new(
                ErrorCode::Unknown,
                "no quorum answered in time, it may or may not have happened: read back before repeating it",
            ),
            ProposeError::Stopped => Self::stopped(),
        }
    }
}

impl From<LinearizeError> for Refusal {
    fn from(error: LinearizeError) -> Self {
        match error {
            LinearizeError::NotLeader { leader } => Self::not_leader(leader.as_deref()),
            LinearizeError::NoLeader => Self::not_leader(None),
            LinearizeError::TimedOut => Self::new(
                ErrorCode::NoLeader,
                "no quorum confirmed the raft leader in time: try again shortly",
            ),
            LinearizeError::Stopped => Self::stopped(),
        }
    }
}

impl From<ChangeError> for Refusal {
    fn from(error: ChangeError) -> Self {
        match error {
            ChangeError::NotLeader { leader } => Self::not_leader(leader.as_deref()),
            ChangeError::NoLeader => Self::not_leader(None),
            ChangeError::UnknownNode { .. } | ChangeError::LastVoter { .. } => {
                Self::new(ErrorCode::InvalidArgument, error.to_string())
            }
            ChangeError::AddressTaken { .. } => {
                Self::new(ErrorCode::InvalidArgument, format!("raft_address: {error}"))
            }
            ChangeError::Busy | ChangeError::Behind { .. } | ChangeError::NoQuorumAfter { .. } => {
                Self::new(ErrorCode::Overloaded, format!("{error}: try again after a pause"))
            }
            ChangeError::Unknown => Self::new(
                ErrorCode::Unknown,
                "the change was not confirmed in time: repeat it, or look at the cluster first",
            ),
            ChangeError::Stopped => Self::stopped(),
        }
    }
}

impl From<TransferError> for Refusal {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::NotLeader => Self::not_leader(None),
            TransferError::NoTarget => {
                Self::new(ErrorCode::InvalidArgument, format!("to: {error}"))
            }
            TransferError::Busy => {
                Self::new(ErrorCode::Overloaded, format!("{error}: try again after a pause"))
            }
            TransferError::TimedOut => {
                Self::new(ErrorCode::Unknown, format!("{error}: look at the cluster"))
            }
            TransferError::Stopped => Self::stopped(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_carries_the_address_and_a_lost_answer_is_unknown() {
        let to = ProposeError::NotLeader { leader: Some("b:2".to_owned()) };
        let status = Status::from(Refusal::from(to));
        let error = tenure_proto::error_of_status(&status);
        assert_eq!((error.code.as_str(), error.leader_address.as_str()), ("NOT_LEADER", "b:2"));
        assert_eq!(Refusal::from(ProposeError::Unknown).code, ErrorCode::Unknown);
        assert_eq!(Refusal::from(LinearizeError::TimedOut).code, ErrorCode::NoLeader);
        let nobody = ProposeError::NotLeader { leader: None };
        assert_eq!(Refusal::from(nobody).code, ErrorCode::NoLeader);
    }
}
