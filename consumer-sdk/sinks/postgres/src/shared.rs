//! What a sink and its writers share.

use deadpool_postgres::Pool;

use crate::settings::PostgresSettings;
use crate::sql::Statements;

/// One pool, and what is asked through it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: PostgresSettings,
    pub(crate) statements: Statements,
    pub(crate) pool: Pool,
}
