//! What changes, as it changes, and what was.

use std::time::Duration;

use serde_json::{Value, json};
use tenure_model::{ErrorCode, RetryClass};
use tenure_proto::v1::history_request::At;
use tenure_proto::v1::watch_response::Message;
use tenure_proto::{error_of_status, v1};
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;
use tonic::transport::Endpoint;

use crate::args::{HistoryArgs, Output, WatchArgs};
use crate::operate::{Cluster, Ownership, call, find_partition, partition_name};
use crate::output::{Table, json_line, json_text, line, or_dash, shown, time, try_line};
use crate::{Failure, exit};

/// A node says something every 3 s: after this long without a word the stream is dead.
const SILENCE: Duration = Duration::from_secs(10);

/// Between two nodes that are tried.
const PAUSE: Duration = Duration::from_millis(200);

/// Follows the changes over any number of connections.
struct Follower {
    group: String,
    output: Output,
    /// First revision that was not seen whole; 0: whatever comes.
    from: u64,
    /// Newest change that was printed.
    last: Option<(u64, u32)>,
    heard: Instant,
}

/// Why a stream is over.
enum Over {
    /// Go on at another node.
    Broken(String),
    /// Nobody reads the output any more.
    Unread,
    Failed(Failure),
}

pub(crate) async fn watch(args: &WatchArgs) -> Result<(), Failure> {
    let mut follower = Follower {
        group: args.group.clone().unwrap_or_default(),
        output: args.query.output,
        from: args.from,
        last: None,
        heard: Instant::now(),
    };
    let patience = Duration::from_millis(args.query.timeout_ms);
    for address in args.query.coordinators.iter().cycle() {
        let problem = match follower.follow(address, patience).await {
            Over::Broken(problem) => problem,
            Over::Unread => return Ok(()),
            Over::Failed(failure) => return Err(failure),
        };
        tracing::debug!(address, problem, "a watch broke");
        if follower.heard.elapsed() >= patience.max(SILENCE) {
            let resume = match follower.from {
                0 => String::new(),
                from => format!("; go on with --from {from}"),
            };
            return Err(Failure {
                message: format!(
                    "no node answers; the last one tried, {address}: {problem}\n\
                     next: check that {} are client addresses of running nodes{resume}",
                    args.query.coordinators.join(", ")
                ),
                exit: exit::FAILED,
            });
        }
        sleep(PAUSE).await;
    }
    Err(Failure { message: "no coordinator is named".to_owned(), exit: exit::USAGE })
}

impl Follower {
    /// Watches at one node until the stream is over.
    async fn follow(&mut self, address: &str, patience: Duration) -> Over {
        let endpoint = match Endpoint::from_shared(format!("http://{address}")) {
            Ok(endpoint) => endpoint.connect_timeout(patience),
            Err(error) => {
                let message = format!("{address:?} is not an address: {error}");
                return Over::Failed(Failure { message, exit: exit::USAGE });
            }
        };
        let channel = match endpoint.connect().await {
            Ok(channel) => channel,
            Err(error) => return Over::Broken(error.to_string()),
        };
        let request = v1::WatchRequest { group: self.group.clone(), from_revision: self.from };
        let opened = timeout(patience, async { Ownership::new(channel).watch(request).await });
        let mut stream = match opened.await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return over(&status),
            Err(_elapsed) => return Over::Broken("no answer in time".to_owned()),
        };
        loop {
            let message = match timeout(SILENCE, stream.message()).await {
                Ok(Ok(Some(response))) => response.message,
                Ok(Ok(None)) => return Over::Broken("the stream ended".to_owned()),
                Ok(Err(status)) => return over(&status),
                Err(_elapsed) => return Over::Broken("not a word in 10 s".to_owned()),
            };
            self.heard = Instant::now();
            if let Some(message) = message
                && let Err(over) = self.take(message)
            {
                return over;
            }
        }
    }

    fn take(&mut self, message: Message) -> Result<(), Over> {
        match message {
            Message::Progress(progress) => {
                // A node that is behind says less than is known already.
                let is_news = self.from <= progress.revision;
                self.from = self.from.max(progress.revision + 1);
                if is_news && self.output == Output::Json {
                    return self.print(json_text(&json!({ "progress": progress.revision })));
                }
                Ok(())
            }
            Message::Revision(part) => {
                for change in &part.changes {
                    let at = (part.revision, change.position);
                    if self.last >= Some(at) {
                        continue;
                    }
                    match self.output {
                        Output::Json => self.print(json_text(&change_json(&part, change)))?,
                        Output::Table => self.print(shown(&change_text(&part, change)))?,
                    }
                    self.last = Some(at);
                }
                self.from = part.revision + u64::from(part.last_of_revision);
                Ok(())
            }
            Message::Compacted(compacted) => Err(Over::Failed(self.compacted(compacted.list_from))),
        }
    }

    fn compacted(&self, list_from: u64) -> Failure {
        if self.output == Output::Json {
            json_line(&json!({ "compacted": { "list_from": list_from } }));
        }
        let list = if self.group.is_empty() {
            "tenure groups".to_owned()
        } else {
            format!("tenure describe {}", self.group)
        };
        Failure {
            message: format!(
                "COMPACTED: changes up to revision {list_from} are forgotten, those from {} on cannot be \
                 told whole\nnext: look with `{list} --output json`, then go on with --from and the \
                 revision in it + 1",
                self.from
            ),
            exit: exit::FAILED,
        }
    }

    #[allow(clippy::unused_self, reason = "the one place where a watch prints")]
    fn print(&self, text: impl std::fmt::Display) -> Result<(), Over> {
        if try_line(text) { Ok(()) } else { Err(Over::Unread) }
    }
}

fn over(status: &Status) -> Over {
    let error = error_of_status(status);
    let text = format!("{}: {}", error.code, error.message);
    match ErrorCode::parse(&error.code).map(ErrorCode::retry_class) {
        Some(RetryClass::Never) => Over::Failed(Failure { message: text, exit: exit::FAILED }),
        Some(RetryClass::AfterBackoff | RetryClass::OtherNode | RetryClass::Unknown) | None => {
            Over::Broken(text)
        }
    }
}

fn change_json(part: &v1::RevisionChanges, change: &v1::Change) -> Value {
    let mut json = json!({
        "revision": part.revision,
        "position": change.position,
        "time_unix_ms": part.time_unix_ms,
        "change": kind(change.kind()),
        "group": change.group,
    });
    if !change.member.is_empty() {
        json["member"] = json!(change.member);
    }
    if let Some(partition) = &change.partition {
        json["topic"] = json!(change.topic);
        json["topic_id"] = json!(partition.topic_id);
        json["index"] = json!(partition.index);
        json["epoch"] = json!(change.epoch);
    }
    if let Some(cause) = cause(change.cause()) {
        json["cause"] = json!(cause);
    }
    if let Some(operated) = &change.operated {
        json["action"] = json!(operated.action);
        json["request_id"] = json!(operated.request_id);
        json["actor"] = json!(operated.actor);
        json["reason"] = json!(operated.reason);
    }
    json
}

fn change_text(part: &v1::RevisionChanges, change: &v1::Change) -> String {
    let mut words = vec![
        part.revision.to_string(),
        time(part.time_unix_ms),
        or_dash(&change.group),
        kind(change.kind()).to_owned(),
    ];
    if change.partition.is_some() {
        words.push(partition_name(change.partition.as_ref(), &change.topic));
        words.push(format!("epoch {}", change.epoch));
    }
    if !change.member.is_empty() {
        words.push(change.member.clone());
    }
    if let Some(cause) = cause(change.cause()) {
        words.push(format!("({cause})"));
    }
    if let Some(operated) = &change.operated {
        words.push(operated.action.clone());
        words.push(format!("by {}: {}", or_dash(&operated.actor), or_dash(&operated.reason)));
    }
    words.join("  ")
}

const fn kind(kind: v1::ChangeKind) -> &'static str {
    match kind {
        v1::ChangeKind::Granted => "granted",
        v1::ChangeKind::Acquired => "acquired",
        v1::ChangeKind::Revoked => "revoked",
        v1::ChangeKind::Released => "released",
        v1::ChangeKind::MemberJoined => "member-joined",
        v1::ChangeKind::MemberLeft => "member-left",
        v1::ChangeKind::MemberExpired => "member-expired",
        v1::ChangeKind::MemberDrained => "member-drained",
        v1::ChangeKind::MemberUndrained => "member-undrained",
        v1::ChangeKind::Operated => "operated",
        v1::ChangeKind::Unspecified => "unknown",
    }
}

const fn cause(cause: v1::EndCause) -> Option<&'static str> {
    match cause {
        v1::EndCause::Unspecified => None,
        v1::EndCause::Revoked => Some("revoked"),
        v1::EndCause::Shutdown => Some("shutdown"),
        v1::EndCause::LeaseLost => Some("lease-lost"),
        v1::EndCause::Fenced => Some("fenced"),
        v1::EndCause::AcquireFailed => Some("acquire-failed"),
        v1::EndCause::HandlerFailed => Some("handler-failed"),
        v1::EndCause::Expired => Some("expired"),
        v1::EndCause::Left => Some("left"),
        v1::EndCause::DrainDeadline => Some("drain-deadline"),
        v1::EndCause::AcquireDeadline => Some("acquire-deadline"),
    }
}

pub(crate) async fn history(args: &HistoryArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.query);
    let group = cluster.describe(&args.group).await?;
    let request = v1::HistoryRequest {
        group: args.group.clone(),
        partition: Some(find_partition(&group, &args.partition)?),
        at: args.at_revision.map(At::Revision).or(args.at_time.map(At::TimeUnixMs)),
    };
    let response = call!(cluster, Ownership, history, request)?;
    let json = json!({
        "topic": response.topic,
        "grants": response.grants.iter().map(grant_json).collect::<Vec<_>>(),
        "known_from_revision": response.known_from_revision,
        "known_from_unix_ms": response.known_from_unix_ms,
        "revision": response.revision,
    });
    cluster.print(json, || {
        if response.grants.is_empty() {
            return line("nobody owned it");
        }
        let mut table =
            Table::new(&["OWNER", "EPOCH", "GRANTED", "REVISION", "ENDED", "REVISION", "CAUSE"]);
        for grant in &response.grants {
            let end = grant.end.as_ref();
            table.row(vec![
                grant.member.clone(),
                grant.epoch.to_string(),
                time(grant.granted_unix_ms),
                grant.granted_revision.to_string(),
                end.map_or_else(|| "-".to_owned(), |end| time(end.time_unix_ms)),
                end.map_or_else(|| "-".to_owned(), |end| end.revision.to_string()),
                end.and_then(|end| cause(end.cause())).unwrap_or("-").to_owned(),
            ]);
        }
        table.print();
        if response.known_from_revision > 0 {
            line(format_args!(
                "what was before revision {} ({}) is forgotten",
                response.known_from_revision,
                time(response.known_from_unix_ms)
            ));
        }
    });
    Ok(())
}

fn grant_json(grant: &v1::GrantRecord) -> Value {
    json!({
        "member": grant.member,
        "epoch": grant.epoch,
        "granted_revision": grant.granted_revision,
        "granted_unix_ms": grant.granted_unix_ms,
        "end": grant.end.as_ref().map(|end| json!({
            "revision": end.revision,
            "time_unix_ms": end.time_unix_ms,
            "cause": cause(end.cause()),
        })),
    })
}
