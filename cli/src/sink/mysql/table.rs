//! The fence table.

use tenure_sink_mysql::sqlx::mysql::MySqlRow;
use tenure_sink_mysql::sqlx::{self, MySqlConnection, Row as _};

use super::{Report, ask, literal};

const COLUMNS: [(&str, &str); 6] = [
    ("resource", "varbinary"),
    ("epoch", "bigint"),
    ("holder", "varbinary"),
    ("next_offset", "bigint"),
    ("sequence", "bigint"),
    ("displaced", "bigint"),
];

/// What there is under the name.
pub(super) struct Found {
    /// Nothing: no such table. Empty: a view.
    engine: Option<String>,
    /// `name type`.
    columns: Vec<String>,
    /// Columns of the primary key, with commas between.
    key: String,
    triggers: usize,
}

/// A text column; views of the schema give texts or bytes, by version.
fn text(row: &MySqlRow, index: usize) -> Result<String, sqlx::Error> {
    let bytes: Vec<u8> = row.try_get_unchecked(index)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

pub(super) async fn look(
    connection: &mut MySqlConnection,
    table: &str,
) -> Result<Found, sqlx::Error> {
    let name = literal(table);
    let tables = format!(
        "SELECT coalesce(engine, '') FROM information_schema.tables \
         WHERE table_schema = database() AND table_name = {name}"
    );
    let columns = format!(
        "SELECT concat(column_name, ' ', data_type), column_key FROM information_schema.columns \
         WHERE table_schema = database() AND table_name = {name} ORDER BY ordinal_position"
    );
    let triggers = format!(
        "SELECT trigger_name FROM information_schema.triggers \
         WHERE event_object_schema = database() AND event_object_table = {name}"
    );
    let engine = ask(connection, tables).await?.first().map(|row| text(row, 0)).transpose()?;
    let (mut has, mut key) = (Vec::new(), Vec::new());
    for row in ask(connection, columns).await? {
        let column = text(&row, 0)?.to_ascii_lowercase();
        if text(&row, 1)? == "PRI" {
            key.push(column.split(' ').next().unwrap_or_default().to_owned());
        }
        has.push(column);
    }
    let triggers = ask(connection, triggers).await?.len();
    Ok(Found { engine, columns: has, key: key.join(","), triggers })
}

impl Found {
    pub(super) fn add_to(&self, report: &mut Report, name: &str) {
        const CHECK: &str = "fence table";
        let Some(engine) = &self.engine else {
            let next = "sink.migrate(), or run what `tenure sink sql mysql` prints";
            return report.fail(CHECK, format!("{name} is not there"), next);
        };
        let missing: Vec<String> = COLUMNS
            .iter()
            .map(|(column, kind)| format!("{column} {kind}"))
            .filter(|column| !self.columns.contains(column))
            .collect();
        if !engine.eq_ignore_ascii_case("innodb") {
            let next =
                "an engine without transactions rolls nothing back: ALTER TABLE … ENGINE = InnoDB";
            report.fail(CHECK, format!("the engine of {name} is {engine:?}"), next);
        } else if !missing.is_empty() {
            let next =
                "another table of that name? give --table, or compare with `tenure sink sql mysql`";
            report.fail(CHECK, format!("{name} has no {}", missing.join(", ")), next);
        } else if self.key != "resource" {
            let next =
                "two rows for one resource would be two fences: make resource the primary key";
            report.fail(CHECK, format!("the primary key of {name} is {:?}", self.key), next);
        } else {
            report.ok(CHECK, format!("{name} has its columns, its key and its engine"));
        }
        if self.triggers > 0 {
            let next = "the fence is the sink's alone: remove them";
            report.warn("triggers", format!("{} on {name}", self.triggers), next);
        }
    }
}
