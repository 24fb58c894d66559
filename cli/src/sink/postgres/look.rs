//! What the server says of itself.

use tokio_postgres::Client;

use super::{Report, ask};

const SERVER: &str = "\
SELECT current_setting('server_version'), pg_is_in_recovery(),
       current_setting('default_transaction_read_only') = 'on',
       current_setting('default_transaction_isolation'),
       current_setting('fsync') = 'on',
       current_setting('synchronous_commit'),
       current_setting('synchronous_standby_names') <> '',
       (SELECT count(*) FROM pg_stat_replication)";

pub(super) async fn server(
    report: &mut Report,
    client: &Client,
) -> Result<(), tokio_postgres::Error> {
    let Some(row) = ask(client, SERVER, &[]).await? else { return Ok(()) };
    let version: String = row.try_get(0)?;
    let (replica, read_only): (bool, bool) = (row.try_get(1)?, row.try_get(2)?);
    let isolation: String = row.try_get(3)?;
    let (fsync, synchronous_commit): (bool, String) = (row.try_get(4)?, row.try_get(5)?);
    let (synchronous, replicas): (bool, i64) = (row.try_get(6)?, row.try_get(7)?);

    report.ok("connection", format!("PostgreSQL {version}"));
    report.hold(
        "primary",
        !replica,
        if replica { "a replica" } else { "yes" },
        "connect to the primary",
    );
    if read_only {
        let next =
            "the sink's transactions ask for READ WRITE all the same; find out who set it, and why";
        report.warn("writable", "default_transaction_read_only is on", next);
    } else {
        report.ok("writable", "yes");
    }
    report.ok("isolation", format!("default {isolation}; the sink asks for read committed itself"));
    if fsync {
        report.ok("durable", durable(&synchronous_commit));
    } else {
        let next =
            "a power cut may lose a registration and let an old owner in again: switch fsync on";
        report.warn("durable", "fsync is off", next);
    }
    if replicas > 0 && !synchronous {
        let next = "one that is promoted while behind has the old epochs: replicate synchronously";
        report.warn("replicas", format!("{replicas}, none synchronous"), next);
    } else {
        let kind = if synchronous { "synchronous replication" } else { "none that is connected" };
        report.ok("replicas", kind);
    }
    Ok(())
}

fn durable(synchronous_commit: &str) -> String {
    match synchronous_commit {
        "off" => "synchronous_commit is off; the sink makes registrations durable itself".into(),
        other => format!("synchronous_commit is {other}"),
    }
}
