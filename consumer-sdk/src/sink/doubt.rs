//! What a caller is told about a write whose answer was lost.

use std::time::Duration;

use super::{FencedWriter, Resolved, SinkError};

/// Looks before the question goes back to the caller.
const LOOKS: u32 = 3;
/// Pause between two of them.
const PAUSE: Duration = Duration::from_millis(200);

/// Looks up the write that is in doubt, again while that stays unknown. `failure` is what the write itself came to.
///
/// # Errors
///
/// `failure` when the write certainly is not in; [`SinkError::Unknown`] when it could not be looked up either; any other
/// as [`FencedWriter::resolve`].
pub async fn look_up<W: FencedWriter>(writer: &mut W, failure: SinkError) -> Result<(), SinkError> {
    let mut left = LOOKS;
    loop {
        left -= 1;
        match writer.resolve().await {
            Ok(Resolved::Applied(_)) => return Ok(()),
            Ok(Resolved::NotApplied(_)) => return Err(failure),
            Err(SinkError::Unknown(_)) if left > 0 => tokio::time::sleep(PAUSE).await,
            Err(error) => return Err(error),
        }
    }
}
