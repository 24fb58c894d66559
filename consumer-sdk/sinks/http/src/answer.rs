//! What an answer means to the writer.

use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, RETRY_AFTER};
use http::{Response, StatusCode};
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::sink::{BoxError, SinkError};

use crate::headers;

/// Longest pause that a service may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Fence as the service tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) epoch: Epoch,
    pub(crate) next_offset: Option<NextOffset>,
    pub(crate) sequence: u64,
    pub(crate) displaced: Option<Epoch>,
}

impl Told {
    pub(crate) fn read(map: &HeaderMap) -> Result<Self, SinkError> {
        let odd = |error: headers::Malformed| SinkError::Misconfigured(format!("answer: {error}"));
        let absent = |name| SinkError::Misconfigured(format!("answer: no header {name}"));
        let epoch = headers::epoch(map, &headers::CURRENT_EPOCH).map_err(odd)?;
        let sequence = headers::number(map, &headers::SEQUENCE).map_err(odd)?;
        Ok(Self {
            epoch: epoch.ok_or_else(|| absent(headers::CURRENT_EPOCH))?,
            next_offset: headers::offset(map, &headers::NEXT_OFFSET).map_err(odd)?,
            sequence: sequence.ok_or_else(|| absent(headers::SEQUENCE))?,
            displaced: headers::epoch(map, &headers::DISPLACED_EPOCH).map_err(odd)?,
        })
    }
}

/// What a refusal by a fence means, from the headers of an answer or the metadata of a gRPC status. Nothing when no fence
/// refused: the answer is the service's own.
///
/// `expected` is where the writer believes the offset to be, if the service is its home.
#[must_use]
pub fn refusal_to_error(
    map: &HeaderMap,
    ours: Epoch,
    expected: Option<NextOffset>,
) -> Option<SinkError> {
    let word = map.get(headers::REFUSAL)?.to_str().unwrap_or_default();
    let current = headers::epoch(map, &headers::CURRENT_EPOCH).ok().flatten();
    let said = || -> BoxError { format!("the service says {word}").into() };
    Some(match word {
        "stale" => SinkError::Fenced { ours, seen: current },
        "unregistered" => match current {
            Some(_) => SinkError::FenceRegressed { ours, seen: current },
            None => SinkError::Misconfigured(
                "no fence at the service: the grant is not registered, or its table was emptied"
                    .into(),
            ),
        },
        "absent" => SinkError::FenceRegressed { ours, seen: None },
        "offset-conflict" => {
            match (expected, headers::offset(map, &headers::NEXT_OFFSET).ok().flatten()) {
                (Some(expected), Some(found)) => SinkError::OffsetConflict { expected, found },
                (_, None) => SinkError::Misconfigured("the offset at the home is gone".into()),
                (None, Some(_)) => SinkError::Misconfigured(
                    "the service compares offsets and is not the home: no offset was sent".into(),
                ),
            }
        }
        "unavailable" => SinkError::Transient { retry_after: retry_after(map), source: said() },
        "in-doubt" => SinkError::Unknown(said()),
        // What a later version may say: what happened is not known.
        _ if !matches!(word, "missing" | "malformed" | "token" | "unchecked") => {
            SinkError::Unknown(said())
        }
        _ => SinkError::Misconfigured(format!(
            "the service refuses the request as {word:?}: see docs/protocol.md"
        )),
    })
}

/// Whether the service admitted the request; else what that means.
pub(crate) fn check(
    answer: Response<Bytes>,
    ours: Epoch,
    expected: Option<NextOffset>,
) -> Result<Response<Bytes>, SinkError> {
    let map = answer.headers();
    if let Some(error) = refusal_to_error(map, ours, expected) {
        return Err(error);
    }
    let status = answer.status();
    if status.is_success() {
        return match headers::epoch(map, &headers::EPOCH) {
            Ok(Some(compared)) if compared == ours => Ok(answer),
            Ok(_) | Err(_) => Err(SinkError::Misconfigured(
                "the service answered without comparing the epoch: its effects are not fenced"
                    .into(),
            )),
        };
    }
    Err(own_error(&answer, ours, expected))
}

/// A status that does not come from the layer: the service's own, that of something in between, or that of a service
/// which keeps the convention by other means.
fn own_error(answer: &Response<Bytes>, ours: Epoch, expected: Option<NextOffset>) -> SinkError {
    let (map, status) = (answer.headers(), answer.status());
    let current = headers::epoch(map, &headers::CURRENT_EPOCH).ok().flatten();
    let found = headers::offset(map, &headers::NEXT_OFFSET).ok().flatten();
    let said = || -> BoxError {
        let body: String = String::from_utf8_lossy(answer.body()).chars().take(200).collect();
        format!("{status}: {body}").into()
    };
    match (status, current, expected, found) {
        (StatusCode::PRECONDITION_FAILED, Some(_), ..) => SinkError::Fenced { ours, seen: current },
        (StatusCode::CONFLICT, _, Some(expected), Some(found)) => {
            SinkError::OffsetConflict { expected, found }
        }
        (StatusCode::TOO_MANY_REQUESTS, ..) => {
            SinkError::Transient { retry_after: retry_after(map), source: said() }
        }
        (
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::PRECONDITION_REQUIRED,
            ..,
        ) => SinkError::Misconfigured(said().to_string()),
        (StatusCode::REQUEST_TIMEOUT, ..) => SinkError::Unknown(said()),
        _ if status.is_client_error() => SinkError::Rejected(said()),
        _ if status.is_server_error() => SinkError::Unknown(said()),
        _ => SinkError::Misconfigured(said().to_string()),
    }
}

fn retry_after(map: &HeaderMap) -> Option<Duration> {
    let seconds = headers::number(map, &RETRY_AFTER).ok()??;
    Some(Duration::from_secs(seconds).min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use http::header::HeaderName;
    use tenure_model::NextOffset;

    use super::*;
    use crate::Refusal;

    fn ours() -> Epoch {
        Epoch::new(5).unwrap()
    }

    fn judge(status: u16, map: &[(HeaderName, &str)]) -> String {
        let mut answer = Response::new(Bytes::new());
        *answer.status_mut() = StatusCode::from_u16(status).unwrap();
        for (name, value) in map {
            answer.headers_mut().insert(name, value.parse().unwrap());
        }
        match check(answer, ours(), NextOffset::new(7).ok()) {
            Ok(_) => "ok".into(),
            Err(error) => {
                let text = format!("{error:?}");
                text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
            }
        }
    }

    #[test]
    fn success_counts_only_with_the_epoch_that_was_compared() {
        assert_eq!(judge(200, &[(headers::EPOCH, "5")]), "ok");
        assert_eq!(judge(200, &[(headers::EPOCH, "6")]), "Misconfigured");
        assert_eq!(judge(204, &[]), "Misconfigured");
    }

    #[test]
    fn statuses_of_other_parties_are_told_from_the_fences() {
        assert_eq!(judge(412, &[(headers::CURRENT_EPOCH, "6")]), "Fenced");
        assert_eq!(judge(412, &[]), "Rejected");
        assert_eq!(judge(409, &[(headers::NEXT_OFFSET, "9")]), "OffsetConflict");
        assert_eq!(judge(409, &[]), "Rejected");
        assert_eq!(judge(429, &[(RETRY_AFTER, "3")]), "Transient");
        assert_eq!(judge(422, &[]), "Rejected");
        assert_eq!(judge(404, &[]), "Misconfigured");
        for unknown in [408, 500, 502, 503, 504] {
            assert_eq!(judge(unknown, &[]), "Unknown", "{unknown}");
        }
    }

    #[test]
    fn each_refusal_is_understood_on_the_other_side() {
        let current = Epoch::new(6).unwrap();
        let rows = [
            (Refusal::Missing { header: headers::EPOCH }, "Misconfigured"),
            (Refusal::Malformed { header: headers::EPOCH }, "Misconfigured"),
            (Refusal::Token { why: String::new() }, "Misconfigured"),
            (Refusal::Unregistered { given: ours(), current: None }, "Misconfigured"),
            (
                Refusal::Unregistered { given: ours(), current: Epoch::new(4).ok() },
                "FenceRegressed",
            ),
            (Refusal::Stale { given: ours(), current }, "Fenced"),
            (
                Refusal::OffsetConflict { found: NextOffset::new(9).ok(), sequence: 1 },
                "OffsetConflict",
            ),
            (Refusal::Absent, "FenceRegressed"),
            (Refusal::unavailable("x"), "Transient"),
            (Refusal::in_doubt("x"), "Unknown"),
            (Refusal::Unchecked, "Misconfigured"),
        ];
        for (refusal, expected) in rows {
            for is_grpc in [false, true] {
                let map = refusal.to_response::<()>(is_grpc).headers().clone();
                let error = refusal_to_error(&map, ours(), NextOffset::new(7).ok()).unwrap();
                let text = format!("{error:?}");
                assert!(text.starts_with(expected), "{refusal:?}: {text}");
            }
        }
    }
}
