//! The fence table.

use tokio_postgres::Client;

use super::{Report, ask};

const COLUMNS: [(&str, &str); 6] = [
    ("resource", "text"),
    ("epoch", "bigint"),
    ("holder", "text"),
    ("next_offset", "bigint"),
    ("sequence", "bigint"),
    ("displaced", "bigint"),
];

const TABLE: &str = "\
SELECT c.relkind::text, c.relpersistence::text, c.relrowsecurity,
       has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
           AND has_table_privilege(c.oid, 'UPDATE'),
       (SELECT count(*) FROM pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal),
       EXISTS (SELECT 1 FROM pg_index i
               JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
               WHERE i.indrelid = c.oid AND i.indisunique AND i.indpred IS NULL
                 AND i.indnkeyatts = 1 AND a.attname = 'resource'),
       (SELECT coalesce(string_agg(a.attname || ' ' || format_type(a.atttypid, NULL), ','), '')
        FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_class c WHERE c.oid = to_regclass($1)";

/// Nothing: there is no such table.
pub(super) struct Found(Option<Table>);

struct Table {
    kind: String,
    persistence: String,
    row_security: bool,
    privileges: bool,
    triggers: i64,
    unique: bool,
    /// `name type`, one column after the other, with commas between.
    columns: String,
}

pub(super) async fn look(client: &Client, table: &str) -> Result<Found, tokio_postgres::Error> {
    let Some(row) = ask(client, TABLE, &[table]).await? else { return Ok(Found(None)) };
    Ok(Found(Some(Table {
        kind: row.try_get(0)?,
        persistence: row.try_get(1)?,
        row_security: row.try_get(2)?,
        privileges: row.try_get(3)?,
        triggers: row.try_get(4)?,
        unique: row.try_get(5)?,
        columns: row.try_get(6)?,
    })))
}

impl Found {
    pub(super) fn add_to(&self, report: &mut Report, name: &str) {
        const CHECK: &str = "fence table";
        let Some(table) = &self.0 else {
            let next = "sink.migrate(), or run what `tenure sink sql postgres` prints";
            return report.fail(CHECK, format!("{name} is not there"), next);
        };
        let has: Vec<&str> = table.columns.split(',').collect();
        let missing: Vec<String> = COLUMNS
            .iter()
            .map(|(column, kind)| format!("{column} {kind}"))
            .filter(|column| !has.contains(&column.as_str()))
            .collect();
        if table.kind != "r" || table.persistence != "p" {
            let next = "make it an ordinary, logged table: `tenure sink sql postgres`";
            report.fail(CHECK, format!("{name} is no ordinary, logged table"), next);
        } else if !missing.is_empty() {
            let next = "another table of that name? give --table, or compare with `tenure sink sql postgres`";
            report.fail(CHECK, format!("{name} has no {}", missing.join(", ")), next);
        } else if !table.unique {
            let next =
                "two rows for one resource would be two fences: make resource the primary key";
            report.fail(CHECK, format!("{name}.resource is not unique"), next);
        } else {
            report.ok(CHECK, format!("{name} has its columns and its key"));
        }
        let next = format!("GRANT SELECT, INSERT, UPDATE ON {name} TO the service's role");
        let found = if table.privileges { "select, insert, update" } else { "some are missing" };
        report.hold("rights", table.privileges, found, &next);
        if table.row_security {
            let next = "a row that the role cannot see is no fence: switch it off for this table";
            report.fail("row security", format!("on for {name}"), next);
        }
        if table.triggers > 0 {
            let next = "the fence is the sink's alone: remove them";
            report.warn("triggers", format!("{} on {name}", table.triggers), next);
        }
    }
}
