//! Names of the headers, and the numbers in them.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use tenure_model::{Epoch, NextOffset};

/// Name of the fence: `group/topic id/partition`, or a name of one's own of letters, digits and `._:-/`.
pub const RESOURCE: HeaderName = HeaderName::from_static("ownership-resource");
/// Epoch of the writer, decimal. Also in every answer to an admitted request.
pub const EPOCH: HeaderName = HeaderName::from_static("ownership-epoch");
/// Signed grant token; see `tenure-token`.
pub const TOKEN: HeaderName = HeaderName::from_static("ownership-token");
/// Member that registers.
pub const HOLDER: HeaderName = HeaderName::from_static("ownership-holder");
/// `topic id/partition/offset` of one record. Never with the epoch in it: the next owner's replay must have the same.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Where the offset must be for the write to count, decimal.
pub const EXPECTED_OFFSET: HeaderName = HeaderName::from_static("ownership-expected-offset");
/// Where the write moves the offset to; in answers about a fence, where it is.
pub const NEXT_OFFSET: HeaderName = HeaderName::from_static("ownership-next-offset");
/// Number of writes that are in, as the writer knows it.
pub const SEQUENCE: HeaderName = HeaderName::from_static("ownership-sequence");
/// In answers: the epoch that the fence has.
pub const CURRENT_EPOCH: HeaderName = HeaderName::from_static("ownership-current-epoch");
/// In answers to a registration: the epoch that it replaced.
pub const DISPLACED_EPOCH: HeaderName = HeaderName::from_static("ownership-displaced-epoch");
/// In answers: why the fence refused, a word; see [`Refusal`](crate::Refusal).
pub const REFUSAL: HeaderName = HeaderName::from_static("ownership-refusal");
/// In answers: `true` when the effect was there already and the kept answer was given.
pub const REPLAYED: HeaderName = HeaderName::from_static("ownership-replayed");

/// Path before the resource in the registration calls.
pub const FENCES_PATH: &str = "/fences/";

/// Longest resource or key, in bytes.
pub const VALUE_BYTES_MAX: usize = 1024;

/// A header that is there and is not what it must be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("header {0} is malformed")]
pub struct Malformed(pub HeaderName);

pub(crate) fn text<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'h str>, Malformed> {
    let malformed = || Malformed(name.clone());
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    // Two of them: a proxy and the writer disagree, and nobody can say which counts.
    if values.next().is_some() || value.is_empty() || value.len() > VALUE_BYTES_MAX {
        return Err(malformed());
    }
    value.to_str().map(Some).map_err(|_not_ascii| malformed())
}

/// A decimal number without a sign.
pub(crate) fn number(headers: &HeaderMap, name: &HeaderName) -> Result<Option<u64>, Malformed> {
    let Some(text) = text(headers, name)? else { return Ok(None) };
    let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_decimal);
    number.map(Some).ok_or_else(|| Malformed(name.clone()))
}

pub(crate) fn epoch(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Epoch>, Malformed> {
    let epoch = number(headers, name)?.map(Epoch::new).transpose();
    epoch.map_err(|_out_of_range| Malformed(name.clone()))
}

pub(crate) fn offset(
    headers: &HeaderMap,
    name: &HeaderName,
) -> Result<Option<NextOffset>, Malformed> {
    let offset = number(headers, name)?.map(NextOffset::new).transpose();
    offset.map_err(|_out_of_range| Malformed(name.clone()))
}

/// Whether a text may name a fence: words of letters, digits and `._:-` between slashes, as the SDK takes them, so that a
/// path carries it as it is.
#[cfg(feature = "server")]
pub(crate) fn is_resource(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
    let is_word = |word: &str| !matches!(word, "" | "." | "..") && word.bytes().all(fits);
    text.len() <= VALUE_BYTES_MAX && text.split('/').all(is_word)
}

pub(crate) fn put(headers: &mut HeaderMap, name: &HeaderName, number: u64) {
    headers.insert(name, HeaderValue::from(number));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(EPOCH, HeaderValue::from_static(value))])
    }

    #[test]
    fn epoch_is_a_plain_decimal_in_range() {
        assert_eq!(epoch(&one("7"), &EPOCH), Ok(Epoch::new(7).ok()));
        assert_eq!(epoch(&HeaderMap::new(), &EPOCH), Ok(None));
        for odd in ["", "0", "+7", "-7", "7 ", "0x7", "9007199254740992", "99999999999999999999"] {
            assert_eq!(epoch(&one(odd), &EPOCH), Err(Malformed(EPOCH)), "{odd:?}");
        }
    }

    #[test]
    fn header_that_is_there_twice_is_refused() {
        let mut headers = one("7");
        headers.append(EPOCH, HeaderValue::from_static("8"));
        assert_eq!(epoch(&headers, &EPOCH), Err(Malformed(EPOCH)));
    }
}
