//! `tenure sink check`: which sink a URL means, and how long it may take.

use std::time::Duration;

use super::report::Report;
use super::{postgres, sqlite};
use crate::args::SinkCheckArgs;
use crate::{Failure, exit};

/// Sinks that a URL may mean and this program has no driver of.
const WITHOUT_DRIVER: [(&str, &str); 7] = [
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
    ("redis", "redis"),
    ("rediss", "redis"),
    ("kafka", "kafka"),
    ("s3", "object store"),
    ("http", "http"),
];

/// Checks one database and prints what was found.
pub(crate) async fn check(args: &SinkCheckArgs) -> Result<(), Failure> {
    let SinkCheckArgs { url, table, output, timeout_ms } = args;
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let name = match scheme {
        "postgres" | "postgresql" => "postgres",
        "sqlite" => "sqlite",
        other => return Err(unknown(other)),
    };
    let mut report = Report::new(name);
    let limit = Duration::from_millis(*timeout_ms);
    let work = async {
        match name {
            "postgres" => postgres::check(&mut report, url, table).await,
            _ => sqlite::check(&mut report, url, table).await,
        }
    };
    match tokio::time::timeout(limit, Box::pin(work)).await {
        Ok(result) => result?,
        Err(_elapsed) => {
            report.fail(
                "time",
                format!("not done within {timeout_ms} ms"),
                format!(
                    "give it more with --timeout-ms; rows named {}/… may be left and may be deleted",
                    super::trial::PREFIX
                ),
            );
        }
    }
    report.print(*output)
}

fn unknown(scheme: &str) -> Failure {
    let known = WITHOUT_DRIVER.iter().find(|(known, _)| *known == scheme);
    let message = match known {
        Some((_, sink)) => format!(
            "this build has no {sink} driver, so it cannot check {scheme}: URLs\n\
             next: the conformance kit checks every sink, docs/sinks.md, \"Showing that it holds\""
        ),
        None => "give postgres://USER@HOST/DATABASE or sqlite:PATH".to_owned(),
    };
    Failure { message, exit: exit::USAGE }
}
