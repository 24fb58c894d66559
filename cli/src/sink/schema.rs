//! The fence table and the guard, as SQL to run.

use tenure_sink_postgres::sql as postgres;
use tenure_sink_sqlite::sql as sqlite;

use crate::args::{SinkSchemaArgs, SqlDialect};
use crate::output::line;
use crate::{Failure, exit};

/// Table name in the constants of the sinks.
const TABLE: &str = "tenure_fence";

/// `tenure_sink_mysql::sql::MIGRATE`, whose driver this program does not bring; a test compares the two.
const MYSQL: &str = "\
CREATE TABLE IF NOT EXISTS tenure_fence (
    resource    VARBINARY(1024) NOT NULL PRIMARY KEY,
    epoch       BIGINT          NOT NULL CHECK (epoch > 0),
    holder      VARBINARY(255)  NOT NULL,
    next_offset BIGINT          NULL CHECK (next_offset >= 0),
    sequence    BIGINT          NOT NULL DEFAULT 0,
    displaced   BIGINT          NULL
) ENGINE = InnoDB";

/// Prints the migrations of one sink.
pub(crate) fn print(args: &SinkSchemaArgs) -> Result<(), Failure> {
    let usage = |message: String| Failure { message, exit: exit::USAGE };
    let SinkSchemaArgs { dialect, table, guard } = args;
    let schemas = match dialect {
        SqlDialect::Postgres => 1,
        SqlDialect::Mysql | SqlDialect::Sqlite => 0,
    };
    check_name("--table", table, schemas).map_err(usage)?;
    if *dialect == SqlDialect::Postgres && table.contains(|c: char| c.is_ascii_uppercase()) {
        return Err(usage(format!("--table {table:?}: PostgreSQL's sink takes lower case only")));
    }
    let migrate = match dialect {
        SqlDialect::Postgres => postgres::MIGRATE,
        SqlDialect::Mysql => MYSQL,
        SqlDialect::Sqlite => sqlite::MIGRATE,
    };
    let mut text = format!("{};", migrate.replace(TABLE, table));
    if let Some(data) = guard {
        if *dialect != SqlDialect::Postgres {
            return Err(usage("--guard is for postgres; the other sinks have no guard".into()));
        }
        check_name("--guard", data, schemas).map_err(usage)?;
        text = format!("{text}\n\n{}", postgres::guard(table, data));
    }
    line(text);
    Ok(())
}

/// Takes `name`, with up to `dots` names of schemas before it.
fn check_name(flag: &str, name: &str, dots: usize) -> Result<(), String> {
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    if name.split('.').count() <= dots + 1 && name.split('.').all(is_word) {
        return Ok(());
    }
    let form = if dots == 0 { "`table`" } else { "`table` or `schema.table`" };
    Err(format!("{flag} {name:?} is not {form} of letters, digits and '_'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_more_than_a_name_are_refused() {
        for name in ["", "a.b.c", "a;b", "a b", "1a", "a.", "a\"b", "ä"] {
            assert!(check_name("--table", name, 1).is_err(), "{name}");
        }
        assert!(check_name("--table", "audit.fence_2", 1).is_ok());
        assert!(check_name("--table", "audit.fence_2", 0).is_err());
    }
}
