//! Questions and requests to a cluster.

use std::time::Duration;

use serde_json::{Value, json};
use tenure_model::ErrorCode;
use tenure_proto::v1;
use tenure_sdk::session::{CallError, CoordinatorClient};

use crate::args::{
    DrainArgs, FloorArgs, GroupArgs, MoveArgs, OperatorArgs, Output, QueryArgs, RebalanceArgs,
};
use crate::metadata::Metadata;
use crate::output::{Table, json_line, line, optional, or_dash};
use crate::{Failure, exit};

/// From how long on a partition's standing still is shown in tables.
const STILL_SHOWN_MS: u64 = 5_000;

/// One cluster as the commands see it.
pub(crate) struct Cluster {
    pub(crate) client: CoordinatorClient,
    addresses: String,
    pub(crate) timeout: Duration,
    output: Output,
}

/// Makes a unary call at the raft leader and hands out the response's body.
macro_rules! call {
    ($cluster:expr, $client:path, $method:ident, $request:expr) => {{
        let request = $request;
        $cluster
            .client
            .call(tenure_sdk::session::Repeat::Safe, $cluster.timeout, |channel| {
                let request = request.clone();
                async move { Ok(<$client>::new(channel).$method(request).await?.into_inner()) }
            })
            .await
            .map_err(|error| $cluster.failure(&error))
    }};
}

pub(crate) use call;

pub(crate) type Ownership = v1::ownership_client::OwnershipClient<tonic::transport::Channel>;
type Operator = v1::operator_client::OperatorClient<tonic::transport::Channel>;

impl Cluster {
    pub(crate) fn new(query: &QueryArgs) -> Self {
        Self {
            client: CoordinatorClient::new(query.coordinators.clone()),
            addresses: query.coordinators.join(","),
            timeout: Duration::from_millis(query.timeout_ms),
            output: query.output,
        }
    }

    pub(crate) fn failure(&self, error: &CallError) -> Failure {
        match error {
            CallError::Refused(refused) if refused.code == ErrorCode::NoLeader => Failure {
                message: format!(
                    "{}: {}\nnext: check that {} are client addresses of running nodes \
                     (--coordinators, TENURE_COORDINATORS), or start one with `tenure serve --dev`",
                    refused.code, refused.message, self.addresses
                ),
                exit: exit::FAILED,
            },
            CallError::Refused(refused) => Failure {
                message: format!(
                    "{}: {}{}",
                    refused.code,
                    refused.message,
                    next_step(refused.code)
                ),
                exit: exit::FAILED,
            },
            CallError::Unknown { .. } => Failure {
                message: format!(
                    "UNKNOWN: {error}\nnext: it may have happened; look with `tenure describe`, \
                     or repeat it with the same --request-id"
                ),
                exit: exit::UNKNOWN,
            },
        }
    }

    pub(crate) async fn describe(&self, group: &str) -> Result<v1::DescribeGroupResponse, Failure> {
        let request = v1::DescribeGroupRequest { group: group.to_owned() };
        call!(self, Ownership, describe_group, request)
    }

    pub(crate) fn print(&self, json: Value, table: impl FnOnce()) {
        match self.output {
            Output::Json => json_line(&json),
            Output::Table => table(),
        }
    }
}

fn next_step(code: ErrorCode) -> &'static str {
    const STEPS: [(ErrorCode, &str); 3] = [
        (ErrorCode::UnknownGroup, "\nnext: `tenure groups` lists the groups"),
        (ErrorCode::UnknownMember, "\nnext: `tenure members GROUP` lists the members"),
        (ErrorCode::UnknownPartition, "\nnext: `tenure partitions GROUP` lists the partitions"),
    ];
    STEPS.iter().find(|(known, _)| *known == code).map_or("", |(_, step)| step)
}

pub(crate) async fn groups(query: &QueryArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(query);
    let response = call!(cluster, Ownership, list_groups, v1::ListGroupsRequest {})?;
    let rows: Vec<Value> = response.groups.iter().map(summary_json).collect();
    cluster.print(json!({ "groups": rows, "revision": response.revision }), || {
        if response.groups.is_empty() {
            return line("no groups: a group is made by its first member");
        }
        let mut table = Table::new(&[
            "GROUP",
            "EPOCH",
            "MEMBERS",
            "PARTITIONS",
            "UNOWNED",
            "REVOKING",
            "STUCK",
            "HOME",
        ]);
        for group in &response.groups {
            table.row(vec![
                group.group.clone(),
                group.group_epoch.to_string(),
                group.members.to_string(),
                group.partitions.to_string(),
                group.unowned.to_string(),
                group.revoking.to_string(),
                group.not_advancing.to_string(),
                home(group.settings.as_ref()).to_owned(),
            ]);
        }
        table.print();
    });
    Ok(())
}

pub(crate) async fn describe(args: &GroupArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.query);
    let response = cluster.describe(&args.group).await?;
    let metadata = Metadata::read(&cluster, &args.group, &response.partitions).await?;
    let summary = response.summary.clone().unwrap_or_default();
    let json = json!({
        "group": summary_json(&summary),
        "members": response.members.iter().map(member_json).collect::<Vec<_>>(),
        "partitions": partitions_json(&response.partitions, &metadata),
        "topics": response.topics.iter().map(|topic| json!({
            "topic": topic.topic,
            "topic_id": topic.topic_id,
            "partition_count": topic.partition_count,
        })).collect::<Vec<_>>(),
        "target_epoch": response.target_epoch,
        "revision": response.revision,
    });
    cluster.print(json, || {
        let planned =
            if response.target_epoch < summary.group_epoch { " (a plan is due)" } else { "" };
        line(format_args!(
            "group {}  epoch {}{planned}  home {}  {} unowned, {} revoking, {} not advancing of {} partitions",
            summary.group,
            summary.group_epoch,
            home(summary.settings.as_ref()),
            summary.unowned,
            summary.revoking,
            summary.not_advancing,
            summary.partitions,
        ));
        line("");
        members_table(&response.members);
        line("");
        partitions_table(&response.partitions, &metadata);
    });
    Ok(())
}

pub(crate) async fn members(args: &GroupArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.query);
    let response = cluster.describe(&args.group).await?;
    let rows: Vec<Value> = response.members.iter().map(member_json).collect();
    cluster.print(json!({ "members": rows, "revision": response.revision }), || {
        members_table(&response.members);
    });
    Ok(())
}

pub(crate) async fn partitions(args: &GroupArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.query);
    let response = cluster.describe(&args.group).await?;
    let metadata = Metadata::read(&cluster, &args.group, &response.partitions).await?;
    let rows = partitions_json(&response.partitions, &metadata);
    cluster.print(json!({ "partitions": rows, "revision": response.revision }), || {
        partitions_table(&response.partitions, &metadata);
    });
    Ok(())
}

pub(crate) async fn move_partition(args: &MoveArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.operator.query);
    let group = cluster.describe(&args.group).await?;
    let request = v1::MoveRequest {
        context: Some(context(&args.operator)),
        group: args.group.clone(),
        partition: Some(find_partition(&group, &args.partition)?),
        to_member: args.to.clone(),
    };
    let response = call!(cluster, Operator, r#move, request)?;
    operated(&cluster, &args.operator, &response);
    Ok(())
}

pub(crate) async fn rebalance(args: &RebalanceArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.operator.query);
    let request =
        v1::RebalanceRequest { context: Some(context(&args.operator)), group: args.group.clone() };
    let response = call!(cluster, Operator, rebalance, request)?;
    operated(&cluster, &args.operator, &response);
    Ok(())
}

pub(crate) async fn drain(args: &DrainArgs, undrain: bool) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.operator.query);
    let request = v1::DrainRequest {
        context: Some(context(&args.operator)),
        group: args.group.clone(),
        member: args.member.clone(),
        undrain,
    };
    let response = call!(cluster, Operator, drain, request)?;
    operated(&cluster, &args.operator, &response);
    Ok(())
}

pub(crate) async fn raise_epoch_floor(args: &FloorArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.operator.query);
    let request =
        v1::RaiseEpochFloorRequest { context: Some(context(&args.operator)), floor: args.floor };
    let response = call!(cluster, Operator, raise_epoch_floor, request)?;
    let json = json!({
        "request_id": response.request_id,
        "dry_run": args.operator.dry_run,
        "epoch_counter": response.epoch_counter,
        "index": response.index,
    });
    let would = if args.operator.dry_run {
        "dry run: the next epoch would be"
    } else {
        "the next epoch is"
    };
    cluster.print(json, || line(format_args!("{would} above {}", response.epoch_counter)));
    Ok(())
}

/// Finds `TOPIC/INDEX` among the partitions of a group; of two lives of a topic the newer one has to be named by its
/// id.
pub(crate) fn find_partition(
    group: &v1::DescribeGroupResponse,
    text: &str,
) -> Result<v1::Partition, Failure> {
    let usage = |message: String| Failure { message, exit: exit::USAGE };
    let (topic, index) = text
        .rsplit_once('/')
        .and_then(|(topic, index)| Some((topic, index.parse::<u32>().ok()?)))
        .ok_or_else(|| {
            usage(format!("{text:?} is not a partition: write TOPIC/INDEX, for example orders/7"))
        })?;
    let found: Vec<&v1::Partition> = group
        .partitions
        .iter()
        .filter_map(|info| {
            let partition = info.partition.as_ref()?;
            let named = info.topic == topic || partition.topic_id == topic;
            (named && partition.index == index).then_some(partition)
        })
        .collect();
    match found.as_slice() {
        [one] => Ok((*one).clone()),
        [] => Err(Failure {
            message: format!(
                "UNKNOWN_PARTITION: the group has no partition {text}\n\
                 next: `tenure partitions GROUP` lists the partitions"
            ),
            exit: exit::FAILED,
        }),
        several => Err(usage(format!(
            "{text} names {} partitions, of several lives of the topic: write TOPIC_ID/INDEX, one of {}",
            several.len(),
            several.iter().map(|p| p.topic_id.as_str()).collect::<Vec<_>>().join(", ")
        ))),
    }
}

/// Who asks: as told, or the user of this process.
pub(crate) fn actor(given: Option<&String>) -> String {
    let actor = given.cloned().or_else(|| std::env::var("USER").ok());
    actor.filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}

fn context(args: &OperatorArgs) -> v1::OperatorContext {
    v1::OperatorContext {
        // Made here, so that a repetition after a lost answer is the same request.
        request_id: args
            .request_id
            .clone()
            .unwrap_or_else(|| format!("cli-{:016x}", rand::random::<u64>())),
        reason: args.reason.clone(),
        actor: actor(args.actor.as_ref()),
        dry_run: args.dry_run,
    }
}

fn operated(cluster: &Cluster, args: &OperatorArgs, response: &v1::OperatorResponse) {
    let moves: Vec<Value> = response
        .moves
        .iter()
        .map(|planned| {
            json!({
                "partition": partition_name(planned.partition.as_ref(), &planned.topic),
                "from": planned.from_member,
                "to": planned.to_member,
            })
        })
        .collect();
    let json = json!({
        "request_id": response.request_id,
        "dry_run": args.dry_run,
        "group_epoch": response.group_epoch,
        "index": response.index,
        "moves": moves,
    });
    cluster.print(json, || {
        if args.dry_run {
            line(format_args!(
                "dry run: {} partitions would move, nothing changed",
                response.moves.len()
            ));
        } else {
            line(format_args!(
                "request {} done at group epoch {}: {} partitions move",
                response.request_id,
                response.group_epoch,
                response.moves.len()
            ));
        }
        if !response.moves.is_empty() {
            let mut table = Table::new(&["PARTITION", "FROM", "TO"]);
            for planned in &response.moves {
                table.row(vec![
                    partition_name(planned.partition.as_ref(), &planned.topic),
                    or_dash(&planned.from_member),
                    or_dash(&planned.to_member),
                ]);
            }
            table.print();
        }
    });
}

fn home(settings: Option<&v1::GroupSettings>) -> &'static str {
    match settings.map(|settings| v1::Home::try_from(settings.home)) {
        Some(Ok(v1::Home::Sink)) => "sink",
        Some(Ok(v1::Home::KafkaTransaction)) => "kafka-transaction",
        Some(Ok(v1::Home::Unspecified | v1::Home::Coordinator) | Err(_)) | None => "coordinator",
    }
}

fn state(info: &v1::PartitionInfo) -> &'static str {
    match v1::OwnershipState::try_from(info.state) {
        Ok(v1::OwnershipState::Held) if info.not_advancing => "not advancing",
        Ok(v1::OwnershipState::Held) if info.acquired => "held",
        Ok(v1::OwnershipState::Held) => "acquiring",
        Ok(v1::OwnershipState::Revoking) => "revoking",
        Ok(v1::OwnershipState::Free | v1::OwnershipState::Unspecified) | Err(_) => "free",
    }
}

/// Records between the owner's position and the end of the partition.
fn lag(info: &v1::PartitionInfo) -> Option<u64> {
    Some(info.end_offset?.saturating_sub(info.position?))
}

/// How long the partition stands still, once that is worth a look.
fn still(info: &v1::PartitionInfo) -> String {
    match info.still_ms {
        Some(still_ms) if still_ms >= STILL_SHOWN_MS => format!("{} s", still_ms / 1_000),
        Some(_) | None => "-".to_owned(),
    }
}

pub(crate) fn partition_name(partition: Option<&v1::Partition>, topic: &str) -> String {
    partition.map_or_else(|| "-".to_owned(), |partition| format!("{topic}/{}", partition.index))
}

fn summary_json(group: &v1::GroupSummary) -> Value {
    json!({
        "group": group.group,
        "group_epoch": group.group_epoch,
        "members": group.members,
        "partitions": group.partitions,
        "unowned": group.unowned,
        "revoking": group.revoking,
        "not_advancing": group.not_advancing,
        "home": home(group.settings.as_ref()),
    })
}

fn member_json(member: &v1::MemberInfo) -> Value {
    let labels = member.labels.iter().map(|label| (label.name.clone(), json!(label.value)));
    json!({
        "member": member.member,
        "member_epoch": member.member_epoch,
        "instance_id": member.instance_id,
        "topics": member.topics,
        "client": member.client,
        "ttl_ms": member.ttl_ms,
        "heartbeat_interval_ms": member.heartbeat_interval_ms,
        "draining": member.draining,
        "owned": member.owned,
        "joined_at_unix_ms": member.joined_at_unix_ms,
        "lease_remaining_ms": member.lease_remaining_ms,
        "returning_within_ms": member.returning_within_ms,
        "awaited_by": member.awaited_by,
        "labels": labels.collect::<serde_json::Map<String, Value>>(),
    })
}

fn partitions_json(partitions: &[v1::PartitionInfo], metadata: &Metadata) -> Vec<Value> {
    let with_metadata = |info: &v1::PartitionInfo| {
        let mut json = partition_json(info);
        metadata.add_json(info, &mut json);
        json
    };
    partitions.iter().map(with_metadata).collect()
}

fn partition_json(info: &v1::PartitionInfo) -> Value {
    let partition = info.partition.clone().unwrap_or_default();
    json!({
        "topic": info.topic,
        "topic_id": partition.topic_id,
        "index": partition.index,
        "state": state(info),
        "member": info.member,
        "epoch": info.epoch,
        "committed": info.committed,
        "position": info.position,
        "end_offset": info.end_offset,
        "lag": lag(info),
        "still_ms": info.still_ms,
        "target_member": info.target_member,
        "since_unix_ms": info.since_unix_ms,
        "cause": info.cause,
        "error": info.error,
    })
}

fn members_table(members: &[v1::MemberInfo]) {
    if members.is_empty() {
        return line("no members");
    }
    let mut table = Table::new(&[
        "MEMBER", "OWNED", "LEASE", "TTL", "DRAINING", "INSTANCE", "LABELS", "CLIENT",
    ]);
    for member in members {
        table.row(vec![
            member.member.clone(),
            member.owned.to_string(),
            lease(member),
            format!("{} ms", member.ttl_ms),
            if member.draining { "yes" } else { "no" }.to_owned(),
            instance(member),
            or_dash(labels(member)),
            or_dash(&member.client),
        ]);
    }
    table.print();
}

fn lease(member: &v1::MemberInfo) -> String {
    match (member.returning_within_ms, member.lease_remaining_ms) {
        (Some(within), _) => format!("away, kept {within} ms"),
        (None, Some(remaining)) => format!("{remaining} ms"),
        (None, None) => "-".to_owned(),
    }
}

fn labels(member: &v1::MemberInfo) -> String {
    let labels = member.labels.iter().map(|label| format!("{}={}", label.name, label.value));
    labels.collect::<Vec<_>>().join(",")
}

fn instance(member: &v1::MemberInfo) -> String {
    if member.awaited_by.is_empty() {
        or_dash(&member.instance_id)
    } else {
        format!("{} (awaited by {})", member.instance_id, member.awaited_by)
    }
}

fn partitions_table(partitions: &[v1::PartitionInfo], metadata: &Metadata) {
    if partitions.is_empty() {
        return line("no partitions");
    }
    let mut headings = vec![
        "PARTITION",
        "STATE",
        "OWNER",
        "EPOCH",
        "COMMITTED",
        "POSITION",
        "LAG",
        "STILL",
        "TARGET",
        "CAUSE",
        "ERROR",
    ];
    // Most groups have none.
    if !metadata.is_empty() {
        headings.push("METADATA");
    }
    let mut table = Table::new(&headings);
    for info in partitions {
        let mut cells = vec![
            partition_name(info.partition.as_ref(), &info.topic),
            state(info).to_owned(),
            or_dash(&info.member),
            info.epoch.to_string(),
            optional(info.committed),
            optional(info.position),
            optional(lag(info)),
            still(info),
            or_dash(&info.target_member),
            or_dash(&info.cause),
            or_dash(&info.error),
        ];
        if !metadata.is_empty() {
            cells.push(metadata.cell(info));
        }
        table.row(cells);
    }
    table.print();
}
