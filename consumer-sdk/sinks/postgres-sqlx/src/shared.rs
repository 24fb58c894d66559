//! What a sink and its writers share.

use sqlx::PgPool;
use tenure_sink_postgres::PostgresSettings;
use tenure_sink_postgres::sql::Statements;

/// One pool, and what is asked through it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: PostgresSettings,
    pub(crate) statements: Statements,
    pub(crate) pool: PgPool,
}
