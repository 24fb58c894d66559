//! The nodes of the cluster: how far they are, and who they are.

use serde_json::{Value, json};
use tenure_proto::v1;
use tonic::transport::Channel;

use crate::args::{ChangeArgs, ClusterArgs, ClusterCommand};
use crate::operate::{Cluster, actor, call};
use crate::output::{Table, line, optional};
use crate::{Failure, exit};

type Nodes = v1::cluster_client::ClusterClient<Channel>;

pub(crate) async fn run(args: &ClusterArgs) -> Result<(), Failure> {
    let cluster = Cluster::new(&args.query);
    match &args.command {
        None | Some(ClusterCommand::Status) => status(&cluster).await,
        Some(command) => change(&cluster, command).await.map_err(|failure| match failure.exit {
            exit::UNKNOWN => Failure {
                message: "UNKNOWN: the change was not confirmed in time\n\
                          next: look with `tenure cluster`, or repeat it: a change that is done is not done twice"
                    .to_owned(),
                ..failure
            },
            _ => failure,
        }),
    }
}

async fn change(cluster: &Cluster, command: &ClusterCommand) -> Result<(), Failure> {
    let done = match command {
        ClusterCommand::Status => return status(cluster).await,
        ClusterCommand::AddLearner(args) => {
            let request = v1::AddLearnerRequest {
                change: Some(context(&args.change)),
                node: args.node,
                raft_address: args.raft_address.clone(),
                client_address: args.client_address.clone(),
            };
            (args.node, call!(cluster, Nodes, add_learner, request)?, "is in the cluster")
        }
        ClusterCommand::Promote(args) => {
            let request =
                v1::PromoteRequest { change: Some(context(&args.change)), node: args.node };
            (args.node, call!(cluster, Nodes, promote, request)?, "is a voter")
        }
        ClusterCommand::Remove(args) => {
            let request =
                v1::RemoveRequest { change: Some(context(&args.change)), node: args.node };
            (args.node, call!(cluster, Nodes, remove, request)?, "is not in the cluster")
        }
        ClusterCommand::Transfer(args) => {
            let request = v1::TransferLeaderRequest {
                change: Some(context(&args.change)),
                to: args.to.unwrap_or(0),
            };
            let response = call!(cluster, Nodes, transfer_leader, request)?;
            cluster.print(json!({ "raft_leader": response.leader }), || {
                line(format_args!("node {} is the raft leader", response.leader));
            });
            return Ok(());
        }
    };
    let (node, response, now) = done;
    cluster.print(json!({ "node": node, "index": response.index }), || {
        line(format_args!("node {node} {now}, as of index {}", response.index));
    });
    Ok(())
}

fn context(args: &ChangeArgs) -> v1::ClusterChange {
    v1::ClusterChange { reason: args.reason.clone(), actor: actor(args.actor.as_ref()) }
}

/// What the raft leader knows; without one, what the node that answers knows.
async fn status(cluster: &Cluster) -> Result<(), Failure> {
    let mut response = call!(cluster, Nodes, status, v1::ClusterStatusRequest { local: true })?;
    if response.leader != 0 && response.leader != response.node {
        let request = v1::ClusterStatusRequest { local: false };
        match call!(cluster, Nodes, status, request) {
            Ok(better) => response = better,
            Err(failure) => {
                tracing::warn!(error = failure.message, "the raft leader does not answer");
            }
        }
    }
    cluster.print(status_json(&response), || status_table(&response));
    Ok(())
}

fn status_json(response: &v1::ClusterStatusResponse) -> Value {
    let nodes = response.nodes.iter().map(|node| {
        json!({
            "node": node.node,
            "client_address": node.client_address,
            "raft_address": node.raft_address,
            "voter": node.voter,
            "raft_leader": node.node == response.leader,
            "last_log": node.last_log,
            "lag": node.lag,
            "acked_ago_ms": node.acked_ago_ms,
            "supported_level": node.supported_level,
            "version": node.version,
        })
    });
    json!({
        "cluster": response.cluster,
        "answered_by": response.node,
        "term": response.term,
        "raft_leader": response.leader,
        "last_log": response.last_log,
        "committed": response.committed,
        "applied": response.applied,
        "snapshot": response.snapshot,
        "wal_bytes": response.wal_bytes,
        "quorum_acked_ago_ms": response.quorum_acked_ago_ms,
        "changing": response.changing,
        "feature_level": response.feature_level,
        "digest_agreed": response.digest_agreed,
        "epoch_counter": response.epoch_counter,
        "epoch_seen": Some(response.epoch_seen).filter(|seen| *seen > 0),
        "nodes": nodes.collect::<Vec<_>>(),
    })
}

fn status_table(response: &v1::ClusterStatusResponse) {
    let leader = match response.leader {
        0 => "no raft leader".to_owned(),
        leader => format!("raft leader {leader}"),
    };
    let changing = if response.changing { "  (a change of voters is under way)" } else { "" };
    line(format_args!(
        "cluster {}  {leader}  term {}  quorum {} ago{changing}",
        response.cluster,
        response.term,
        ms(response.quorum_acked_ago_ms),
    ));
    line(format_args!(
        "node {} answers: log {}  committed {}  applied {}  snapshot {}  log on disk {} bytes",
        response.node,
        response.last_log,
        response.committed,
        response.applied,
        response.snapshot,
        response.wal_bytes,
    ));
    let agreed = match response.digest_agreed {
        0 => "not compared since it started".to_owned(),
        index => format!("as the majority's at {index}"),
    };
    line(format_args!("feature level {}  state {agreed}", response.feature_level));
    if response.epoch_seen > 0 {
        line(format_args!(
            "EPOCH ABOVE THE COUNTER: a sink has seen e{seen}, this cluster has given none above e{}: it has lost \
             history; raise the floor with `tenure raise-epoch-floor {seen} --reason TEXT`",
            response.epoch_counter,
            seen = response.epoch_seen,
        ));
    }
    let mut table = Table::new(&[
        "NODE",
        "ROLE",
        "LOG",
        "LAG",
        "ANSWERED",
        "KNOWS LEVEL",
        "VERSION",
        "CLIENTS",
        "RAFT",
    ]);
    for node in &response.nodes {
        table.row(vec![
            node.node.to_string(),
            role(response, node).to_owned(),
            optional(node.last_log),
            optional(node.lag),
            ms(node.acked_ago_ms),
            optional(node.supported_level),
            node.version.clone().unwrap_or_else(|| "-".to_owned()),
            node.client_address.clone(),
            node.raft_address.clone(),
        ]);
    }
    table.print();
}

fn role(response: &v1::ClusterStatusResponse, node: &v1::ClusterNode) -> &'static str {
    if node.node == response.leader {
        "raft leader"
    } else if node.voter {
        "voter"
    } else {
        "learner"
    }
}

fn ms(length: Option<u64>) -> String {
    length.map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms"))
}
