//! A SQLite file as a sink.

use std::path::Path;

use rusqlite::{Connection, OpenFlags};
use tenure_sdk::sink::SinkError;
use tenure_sink_sqlite::{SqliteSettings, SqliteSink, SqliteWriter};

use super::report::Report;
use super::trial;
use crate::{Failure, exit};

const COLUMNS: [&str; 6] = ["resource", "epoch", "holder", "next_offset", "sequence", "displaced"];

/// File systems on which SQLite's locks are not to be trusted: NFS, SMB, CIFS, SMB2.
const NETWORK: [i128; 4] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42];

/// File systems that may be network ones underneath: FUSE, 9P.
const PERHAPS_NETWORK: [i128; 2] = [0x6573_5546, 0x0102_1997];

pub(super) async fn check(report: &mut Report, url: &str, table: &str) -> Result<(), Failure> {
    let path = url.trim_start_matches("sqlite:").trim_start_matches("//");
    if path.is_empty() || path.starts_with(":memory:") {
        return Err(Failure {
            message: "give the path of a file, as in sqlite:/var/lib/billing/data.db".into(),
            exit: exit::USAGE,
        });
    }
    let path = Path::new(path);
    if !path.is_file() {
        report.fail(
            "file",
            format!("{} is not there", path.display()),
            "the sink makes it at its first start; check it then",
        );
        return Ok(());
    }
    file_system(report, path);
    let looked = look(path, table);
    let found = match looked {
        Ok(found) => found,
        Err(error) => {
            report.fail("file", error.to_string(), "give a SQLite file that this user may read");
            return Ok(());
        }
    };
    report.ok("file", format!("SQLite {}", rusqlite::version()));
    found.add_to(report, table);
    if report.has_failed() {
        report.skip("trial", "not before the above is mended");
    } else if found.journal_mode != "wal" {
        report.skip("trial", "opening the file as a sink would change it to WAL mode");
    } else {
        try_out(report, path, table).await;
    }
    Ok(())
}

/// Looks at what the folder lies on.
pub(super) fn file_system(report: &mut Report, path: &Path) {
    match rustix::fs::statfs(path) {
        Ok(found) => {
            // The field's type differs between machines; where it has 32 bits, some are negative.
            let kind = i128::from(found.f_type) & 0xffff_ffff;
            if NETWORK.contains(&kind) {
                let next = "move the file to a local disk: locks of a network file system may lie";
                report.fail("file system", format!("network ({kind:#x})"), next);
            } else if PERHAPS_NETWORK.contains(&kind) {
                let next = "make sure that it is a local disk";
                report.warn("file system", format!("may be a network one ({kind:#x})"), next);
            } else {
                report.ok("file system", "local");
            }
        }
        Err(error) => report.skip("file system", format!("not told: {error}")),
    }
}

struct Found {
    journal_mode: String,
    columns: Vec<String>,
    triggers: i64,
}

/// Looks without changing anything: the sink itself would switch the file to WAL mode.
fn look(path: &Path, table: &str) -> rusqlite::Result<Found> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    let journal_mode = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0))?;
    let mut statement = connection.prepare("SELECT name FROM pragma_table_info(?1)")?;
    let columns = statement.query_map([table], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let triggers = connection.query_row(
        "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ?1",
        [table],
        |row| row.get(0),
    )?;
    Ok(Found { journal_mode, columns, triggers })
}

impl Found {
    fn add_to(&self, report: &mut Report, table: &str) {
        match self.journal_mode.as_str() {
            "wal" => report.ok("journal", "WAL"),
            other => report.warn(
                "journal",
                format!("{other}, no sink has opened the file yet"),
                "nothing: the sink switches the file to WAL when it opens it",
            ),
        }
        let missing: Vec<&str> =
            COLUMNS.into_iter().filter(|name| !self.columns.iter().any(|c| c == name)).collect();
        if self.columns.is_empty() {
            report.fail(
                "fence table",
                format!("{table} is not there"),
                "sink.migrate(), or `tenure sink sql sqlite`",
            );
        } else if !missing.is_empty() {
            report.fail(
                "fence table",
                format!("{table} has no {}", missing.join(", ")),
                "another table of that name? give --table, or add the columns of `tenure sink sql sqlite`",
            );
        } else {
            report.ok("fence table", format!("{table} has its columns"));
        }
        if self.triggers > 0 {
            report.warn(
                "triggers",
                format!("{} on {table}", self.triggers),
                "the fence is the sink's alone: remove them",
            );
        }
    }
}

async fn try_out(report: &mut Report, path: &Path, table: &str) {
    let settings = SqliteSettings { table: table.to_owned(), ..Default::default() };
    let sink = match SqliteSink::open(path, settings).await {
        Ok(sink) => sink,
        Err(error) => {
            report.fail(
                "trial",
                error.to_string(),
                "let this user write to the file and its folder",
            );
            return;
        }
    };
    let resource = trial::resource();
    let write = async |writer: &mut SqliteWriter, next| -> Result<(), SinkError> {
        writer.begin().await?.commit(next).await
    };
    trial::run(report, &sink, &resource, write).await;
    let delete = format!("DELETE FROM {table} WHERE resource = ?1");
    let name = resource.to_string();
    match sink.with_connection(move |connection| connection.execute(&delete, [&name])).await {
        Ok(_rows) => report.ok("clean-up", "the trial's row is gone"),
        Err(error) => report.warn(
            "clean-up",
            error.to_string(),
            format!("delete the row {resource} from {table}"),
        ),
    }
}
