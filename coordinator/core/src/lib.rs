//! Group state machine of Tenure.
//!
//! Every replica runs [`State::apply`] on the same commands in the same order and gets the same state, replies and
//! events. There is no IO, no clock, no random number and no map whose order differs between runs.
//! Reading order: [`command`], [`event`], [`state`], `decide`, `evolve`, `reconcile`.

pub mod command;
pub mod event;
pub mod rejection;
pub mod reply;
pub mod state;

pub use command::{Command, Context};
pub use event::Event;
pub use rejection::Rejection;
pub use reply::{Applied, Reply};
pub use state::State;
