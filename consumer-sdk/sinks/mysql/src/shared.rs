//! What a sink and its writers share.

use sqlx::MySqlPool;

use crate::settings::{Flavour, MysqlSettings};
use crate::sql::Statements;

/// One pool, and what is asked through it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: MysqlSettings,
    pub(crate) statements: Statements,
    /// Never [`Flavour::Detect`].
    pub(crate) flavour: Flavour,
    pub(crate) pool: MySqlPool,
}
