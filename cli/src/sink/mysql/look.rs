//! What the server says of itself.

use std::collections::BTreeMap;

use tenure_sink_mysql::sqlx::{self, MySqlConnection, Row as _};

use super::{Report, ask, words};

const VARIABLES: &str = "\
SHOW VARIABLES WHERE Variable_name IN ('version', 'read_only', 'super_read_only', 'log_bin', 'sync_binlog',
    'binlog_format', 'innodb_flush_log_at_trx_commit', 'transaction_isolation', 'tx_isolation', 'wsrep_on',
    'group_replication_group_name')";

/// The server's variables. One that it does not know is empty.
pub(super) struct Server(BTreeMap<String, String>);

impl Server {
    pub(super) async fn look(connection: &mut MySqlConnection) -> Result<Self, sqlx::Error> {
        let rows = ask(connection, VARIABLES.into()).await?;
        let pairs = rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
        Ok(Self(pairs.collect::<Result<_, sqlx::Error>>()?))
    }

    fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn is_on(&self, name: &str) -> bool {
        matches!(self.get(name), "ON" | "1")
    }

    fn is_mariadb(&self) -> bool {
        self.get("version").to_ascii_lowercase().contains("mariadb")
    }

    /// The variable that bounds a pause inside a transaction.
    pub(super) fn idle_bound(&self) -> &'static str {
        if self.is_mariadb() { "idle_transaction_timeout" } else { "wait_timeout" }
    }

    pub(super) fn add_to(&self, report: &mut Report) {
        let version = self.get("version");
        if self.is_mariadb() {
            report.ok("connection", format!("MariaDB {version}"));
        } else {
            let next = "the sink is proven on MariaDB: run the conformance kit against this server";
            report.warn("connection", format!("MySQL {version}"), next);
        }
        let read_only = self.is_on("read_only") || self.is_on("super_read_only");
        let found = if read_only { "the server is read-only, as a replica is" } else { "yes" };
        report.hold("writable", !read_only, found, "connect to the primary");
        self.isolation(report);
        self.durable(report);
        if self.is_on("wsrep_on") || !self.get("group_replication_group_name").is_empty() {
            let next = "not tested: a write may fail at its commit; send all members to one node";
            report.warn("cluster", "Galera or Group Replication", next);
        } else {
            report.ok("cluster", "none");
        }
    }

    fn isolation(&self, report: &mut Report) {
        let default = match self.get("transaction_isolation") {
            "" => self.get("tx_isolation"),
            default => default,
        };
        let by_statement = self.is_on("log_bin") && self.get("binlog_format") == "STATEMENT";
        let found = if by_statement {
            "binlog_format is STATEMENT, which refuses writes under read committed".into()
        } else {
            format!("default {default}; the sink asks for read committed itself")
        };
        report.hold("isolation", !by_statement, found, "set binlog_format to ROW or MIXED");
    }

    fn durable(&self, report: &mut Report) {
        let next = "a power cut may lose a registration and let an old owner in again: set it to 1";
        let (log, binlog) = (self.get("innodb_flush_log_at_trx_commit"), self.get("sync_binlog"));
        if log != "1" {
            report.warn("durable", format!("innodb_flush_log_at_trx_commit is {log}"), next);
        } else if self.is_on("log_bin") && binlog != "1" {
            report.warn("durable", format!("sync_binlog is {binlog}"), next);
        } else {
            report.ok("durable", "each commit is synced");
        }
    }
}

/// Whether the server copies from another one, or is copied from.
pub(super) async fn replication(report: &mut Report, connection: &mut MySqlConnection) {
    match ask(connection, "SHOW REPLICA STATUS".into()).await {
        Ok(rows) if rows.is_empty() => report.ok("primary", "copies from no other server"),
        Ok(_) => report.warn(
            "primary",
            "it copies from another server",
            "connect to the primary, unless this is one of two that are never written at once",
        ),
        Err(error) => report.skip("primary", format!("not told: {}", words(&error))),
    }
    let dumps = "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'";
    match ask(connection, dumps.into()).await {
        Ok(rows) if rows.is_empty() => report.ok("replicas", "none that is connected and shown"),
        Ok(rows) => report.warn(
            "replicas",
            rows.len().to_string(),
            "one that is promoted while behind has the old epochs: replicate semi-synchronously",
        ),
        Err(error) => report.skip("replicas", format!("not told: {}", words(&error))),
    }
}
