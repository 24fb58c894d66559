//! A Redis or Valkey server as a sink.

use std::collections::BTreeMap;

use tenure_sdk::grant::Resource;
use tenure_sdk::sink::SinkError;
use tenure_sink_redis::redis::aio::MultiplexedConnection;
use tenure_sink_redis::redis::{self, Client, RedisError};
use tenure_sink_redis::{RedisSettings, RedisSink, RedisWriter};

use super::report::Report;
use super::{trial, usage};
use crate::Failure;

/// What INFO says.
struct Info(BTreeMap<String, String>);

impl Info {
    fn parse(text: &str) -> Self {
        let pairs = text.lines().filter_map(|line| line.trim_end().split_once(':'));
        Self(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }
}

pub(super) async fn check(report: &mut Report, url: &str, fence: &str) -> Result<(), Failure> {
    let client = Client::open(url).map_err(|error| {
        usage(format!("the URL: {error}\nnext: give redis://USER:PASSWORD@HOST:PORT"))
    })?;
    let asked = async {
        let mut connection = client.get_multiplexed_async_connection().await?;
        let info: String = redis::cmd("INFO").query_async(&mut connection).await?;
        Ok::<_, RedisError>((connection, Info::parse(&info)))
    };
    let (mut connection, info) = match asked.await {
        Ok(asked) => asked,
        Err(error) => {
            let next = "see that it runs, takes connections without TLS from here, knows the user, and lets it run INFO";
            report.fail("connection", error.to_string(), next);
            return Ok(());
        }
    };
    server(report, &info);
    durable(report, &mut connection, &info).await;
    if report.has_failed() {
        report.skip("trial", "not before the above is mended");
    } else {
        try_out(report, &client, &mut connection, fence).await;
    }
    Ok(())
}

fn server(report: &mut Report, info: &Info) {
    let version = match info.get("valkey_version") {
        "" => format!("Redis {}", info.get("redis_version")),
        valkey => format!("Valkey {valkey}"),
    };
    report.ok("connection", version);
    let role = info.get("role");
    let found = if role == "master" { "yes" } else { "a replica" };
    report.hold("primary", role == "master", found, "connect to the primary");
    let cluster = info.get("cluster_enabled") == "1";
    let found = if cluster { "part of a cluster" } else { "one server" };
    report.hold(
        "cluster",
        !cluster,
        found,
        "this sink speaks to one server: give one that is alone",
    );
    let policy = info.get("maxmemory_policy");
    report.hold(
        "eviction",
        policy == "noeviction" || policy.starts_with("volatile-"),
        format!("maxmemory-policy is {policy}"),
        "it may drop the fence: set noeviction or a volatile policy",
    );
    match info.get("connected_slaves") {
        "0" | "" => report.ok("replicas", "none that is connected"),
        count => report.warn(
            "replicas",
            format!("{count}, written to after the answer"),
            "one that is promoted while behind has the old epochs: set replicas_min, which narrows that",
        ),
    }
}

/// Whether a restart keeps what was answered.
async fn durable(report: &mut Report, connection: &mut MultiplexedConnection, info: &Info) {
    const CHECK: &str = "durable";
    const NEXT: &str = "a restart may lose a registration and let an old owner in again: \
                        set appendonly yes and appendfsync always";
    if info.get("aof_enabled") != "1" {
        return report.warn(CHECK, "no append-only file", NEXT);
    }
    let mut ask = redis::cmd("CONFIG");
    ask.arg("GET").arg("appendfsync");
    match ask.query_async::<Vec<String>>(connection).await {
        Ok(pair) => match pair.get(1).map(String::as_str) {
            Some("always") => report.ok(CHECK, "appendfsync is always"),
            other => {
                report.warn(CHECK, format!("appendfsync is {}", other.unwrap_or("not set")), NEXT)
            }
        },
        // Managed servers forbid CONFIG.
        Err(error) => {
            report.skip(CHECK, format!("an append-only file; how often it is synced: {error}"))
        }
    }
}

async fn try_out(
    report: &mut Report,
    client: &Client,
    connection: &mut MultiplexedConnection,
    fence: &str,
) {
    let settings = RedisSettings { fence: fence.to_owned(), ..Default::default() };
    let sink = match RedisSink::connect(client.get_connection_info().clone(), settings).await {
        Ok(sink) => sink,
        Err(error) => return report.fail("trial", error.to_string(), "see the message"),
    };
    let resource = trial::resource();
    let write = async |writer: &mut RedisWriter, next| -> Result<(), SinkError> {
        writer.begin().await?.commit(next).await
    };
    trial::run(report, &sink, &resource, write).await;
    let key = key(&resource, fence);
    let deleted = redis::cmd("DEL").arg(&key).query_async::<u32>(connection).await;
    match deleted {
        Ok(_) => report.ok("clean-up", "the trial's key is gone"),
        Err(error) => report.warn("clean-up", error.to_string(), format!("delete the key {key}")),
    }
}

fn key(resource: &Resource, fence: &str) -> String {
    format!("{{{resource}}}:{fence}")
}
