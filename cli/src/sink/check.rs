//! `tenure sink check`: which sink a URL means, and how long it may take.

use std::time::Duration;

use super::report::Report;
use super::{kafka, postgres, sqlite, usage};
use crate::Failure;
use crate::address::Ways;
use crate::args::SinkCheckArgs;

/// How the URL is given.
const URL: Ways = Ways { argument: "URL", file: "--url-file", variable: "TENURE_SINK_URL" };

/// A kind of sink that can be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Postgres,
    Mysql,
    Sqlite,
    Redis,
    Kafka,
    ObjectStore,
}

impl Kind {
    fn of(url: &str) -> Result<Self, Failure> {
        match url.split_once(':').map_or("", |(scheme, _)| scheme) {
            "postgres" | "postgresql" => Ok(Self::Postgres),
            "mysql" | "mariadb" => Ok(Self::Mysql),
            "sqlite" => Ok(Self::Sqlite),
            "redis" => Ok(Self::Redis),
            "kafka" => Ok(Self::Kafka),
            "s3" | "file" => Ok(Self::ObjectStore),
            "http" | "https" => Err(usage(
                "a service is checked by the conformance kit: docs/sinks.md, \"Showing that it holds\"".into(),
            )),
            _ => Err(usage(
                "give postgres://…, mysql://…, sqlite:PATH, redis://…, kafka://HOST:PORT/TOPIC, s3://BUCKET/PREFIX or \
                 file:FOLDER; `tenure sink check --help` has their forms"
                    .into(),
            )),
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::Mysql => "mysql",
            Self::Sqlite => "sqlite",
            Self::Redis => "redis",
            Self::Kafka => "kafka",
            Self::ObjectStore => "object-store",
        }
    }
}

/// Checks one sink and prints what was found.
pub(crate) async fn check(args: &SinkCheckArgs) -> Result<(), Failure> {
    let SinkCheckArgs { url, url_file, table, output, timeout_ms } = args;
    let url = URL.find(url.as_ref(), url_file.as_deref())?.ok_or_else(|| {
        usage(format!("name the sink by {}, {} FILE or {}", URL.argument, URL.file, URL.variable))
    })?;
    let url = url.expose();
    let kind = Kind::of(url)?;
    let mut report = Report::new(kind.as_str());
    let limit = Duration::from_millis(*timeout_ms);
    let work = Box::pin(perform(kind, &mut report, url, table));
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result?,
        Err(_elapsed) => {
            report.fail(
                "time",
                format!("not done within {timeout_ms} ms"),
                format!(
                    "give it more with --timeout-ms; what is named {}/… may be left and may be deleted",
                    super::trial::PREFIX
                ),
            );
        }
    }
    report.print(*output)
}

async fn perform(kind: Kind, report: &mut Report, url: &str, table: &str) -> Result<(), Failure> {
    match kind {
        Kind::Postgres => postgres::check(report, url, table).await,
        Kind::Sqlite => sqlite::check(report, url, table).await,
        Kind::Kafka => kafka::check(report, url).await,
        #[cfg(feature = "sink-mysql")]
        Kind::Mysql => super::mysql::check(report, url, table).await,
        #[cfg(not(feature = "sink-mysql"))]
        Kind::Mysql => Err(super::without_driver("MySQL and MariaDB", "sink-mysql")),
        #[cfg(feature = "sink-redis")]
        Kind::Redis => super::redis::check(report, url, table).await,
        #[cfg(not(feature = "sink-redis"))]
        Kind::Redis => Err(super::without_driver("Redis", "sink-redis")),
        #[cfg(feature = "sink-object-store")]
        Kind::ObjectStore => super::store::check(report, url).await,
        #[cfg(not(feature = "sink-object-store"))]
        Kind::ObjectStore => Err(super::without_driver("object stores", "sink-object-store")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheme_names_the_sink_and_an_unknown_one_is_wrong_usage() {
        assert_eq!(Kind::of("mariadb://h/d").ok(), Some(Kind::Mysql));
        assert_eq!(Kind::of("file:/data").ok(), Some(Kind::ObjectStore));
        for url in ["nonsense", "gopher://h", "http://h/"] {
            assert_eq!(Kind::of(url).unwrap_err().exit, crate::exit::USAGE, "{url}");
        }
    }
}
