//! Where work that blocks is done: on threads of its own, but for a simulation, whose time stands still meanwhile.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

static IN_PLACE: AtomicBool = AtomicBool::new(false);

/// From now on every node of this process blocks where it is: what it does is then a function of its inputs alone.
/// For simulations; not an interface.
#[doc(hidden)]
pub fn block_in_place() {
    IN_PLACE.store(true, Ordering::Relaxed);
}

pub(crate) fn is_in_place() -> bool {
    IN_PLACE.load(Ordering::Relaxed)
}

/// Runs what blocks, or takes long, away from the runtime's threads. Fails when it panics.
pub(crate) async fn off_thread<T: Send + 'static>(
    action: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    if is_in_place() {
        return Ok(action());
    }
    tokio::task::spawn_blocking(action).await.map_err(io::Error::other)
}
