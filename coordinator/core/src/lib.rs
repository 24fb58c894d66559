//! Group state machine of Tenure.
//!
//! Every replica runs [`State::apply`] on the same commands in the same order and gets the same state, replies and
//! events. There is no IO, no clock, no random number and no map whose order differs between runs.
//! Reading order: [`command`], [`event`], [`state`], [`history`], `apply`, `decide`, [`level`], `evolve`, `reconcile`, [`queries`], `invariants`.

pub mod command;
pub mod event;
pub mod history;
pub mod level;
pub mod rejection;
pub mod reply;
pub mod state;

mod apply;
mod decide;
mod evolve;
mod invariants;
pub mod queries;
mod reconcile;

pub use command::{Command, Context};
pub use event::Event;
pub use queries::{Assigned, Assignment, Preparing};
pub use rejection::Rejection;
pub use reply::{Applied, Reply};
pub use state::State;

#[cfg(test)]
mod tests;
