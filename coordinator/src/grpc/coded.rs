//! Gives the transport's own refusals a stable code: a message above the limit, or one that cannot be read.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use tenure_model::ErrorCode;
use tenure_model::limits::REQUEST_BYTES_MAX;
use tenure_proto::{CODE_METADATA_KEY, status_of_error};
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::{Code, Status};

/// A service whose refusals all carry a code.
#[derive(Clone, Debug)]
pub(crate) struct Coded<S>(pub(crate) S);

impl<S: NamedService> NamedService for Coded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Coded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move { answer.await.map(with_code) })
    }
}

fn with_code(response: Response<Body>) -> Response<Body> {
    match Status::from_header_map(response.headers()) {
        Some(status) if status.code() != Code::Ok => coded(&status).into_http(),
        Some(_) | None => response,
    }
}

/// The transport's status with a code of ours; one that has a code stays as it is.
pub(crate) fn coded(status: &Status) -> Status {
    if status.metadata().contains_key(CODE_METADATA_KEY) {
        return status.clone();
    }
    match status.code() {
        Code::OutOfRange => status_of_error(
            ErrorCode::TooLarge,
            &format!("the request is larger than {REQUEST_BYTES_MAX} bytes: send it in parts"),
            "",
        ),
        // The transport says so of a body that is not the message it should be.
        Code::Internal | Code::InvalidArgument => status_of_error(
            ErrorCode::InvalidArgument,
            &format!(
                "the request cannot be read ({}): compare the versions of client and coordinator",
                status.message()
            ),
            "",
        ),
        Code::Unimplemented => status_of_error(
            ErrorCode::Unsupported,
            "this version does not know the method: compare the versions of client and coordinator",
            "",
        ),
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
        | Code::Unavailable
        | Code::DataLoss
        | Code::Unauthenticated => status.clone(),
    }
}
