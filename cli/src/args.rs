//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::address::Address;

/// Decides which consumer process owns which stream partition, for how long, and with which fencing token.
#[derive(Debug, Parser)]
#[command(
    name = "tenure",
    version,
    propagate_version = true,
    after_help = "Exit codes: 0 done; 1 refused or failed, nothing half done; 2 wrong usage; \
                  3 no answer, it may or may not have happened.\n\
                  Start here: `tenure demo`, or `tenure serve --dev` and `tenure groups`."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs one coordinator node.
    Serve(ServeArgs),
    /// Shows the main job on real processes: freezes, kills, moves, and what was refused where.
    Demo(DemoArgs),
    /// Prints the public key of a signing key file; makes the file if it is not there.
    SigningKey(SigningKeyArgs),
    /// Runs a command while this process owns a name; stops it before that may end.
    #[command(after_help = "Exit codes: that of the command, or 128 + N when signal N ended it; \
                            69 the coordinator refuses; 75 another owns the name for longer than --wait-ms; \
                            79 the command was stopped, because the lease was at risk, or the name asked for or lost; \
                            126 the command cannot be started; 127 there is no such command.\n\
                            The command finds TENURE_EPOCH, TENURE_FENCE, TENURE_LOCK and, from a node that signs, \
                            TENURE_TOKEN in its environment: give the epoch to whatever it writes to.")]
    Lock(LockArgs),
    /// Lists groups: members, partitions, what is unowned or on the move.
    Groups(QueryArgs),
    /// Shows one group: settings, members, partitions, topics.
    Describe(GroupArgs),
    /// Lists the members of a group: leases, sessions, what they own.
    Members(GroupArgs),
    /// Lists the partitions of a group: owner, epoch, committed offset, target, cause.
    Partitions(GroupArgs),
    /// Shows the coordinator nodes and the raft leader, or changes who is in the cluster.
    Cluster(ClusterArgs),
    /// Tells what changes, line by line, until it is stopped: ownership, members, operations.
    Watch(WatchArgs),
    /// Shows the grants of one partition, with begin, end and cause; or who owned it back then.
    History(HistoryArgs),
    /// Moves one partition to a member and keeps it there until the next rebalance.
    Move(MoveArgs),
    /// Plans a group afresh and lifts earlier moves.
    Rebalance(RebalanceArgs),
    /// Takes all partitions from a member and gives it none until undrained.
    Drain(DrainArgs),
    /// Gives a drained member partitions again.
    Undrain(DrainArgs),
    /// Makes every later epoch higher than the given one: for a cluster that was founded anew, whose sinks have seen more.
    RaiseEpochFloor(FloorArgs),
    /// Takes over the offsets that a Kafka consumer group has committed. Without --apply it only shows them.
    ImportKafkaGroup(ImportArgs),
    /// Sinks: the schema that they need, and whether a database can be one.
    #[command(subcommand)]
    Sink(SinkCommand),
    /// One worker of the demo. Started by `tenure demo`.
    #[command(hide = true)]
    DemoWorker(WorkerArgs),
}

/// How to reach the cluster and how to print.
#[derive(Clone, Debug, Args)]
pub(crate) struct QueryArgs {
    /// Client addresses of coordinator nodes, comma-separated; any of them will do.
    #[arg(
        long,
        global = true,
        short = 'c',
        env = "TENURE_COORDINATORS",
        default_value = "127.0.0.1:7400",
        value_delimiter = ','
    )]
    pub(crate) coordinators: Vec<String>,
    /// Table for people, JSON for programs.
    #[arg(long, short = 'o', global = true, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    /// Gives up after this many milliseconds.
    #[arg(long, global = true, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub(crate) timeout_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Table,
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct GroupArgs {
    /// Name of the group; `tenure groups` lists them.
    pub(crate) group: String,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Only this group; all without it.
    pub(crate) group: Option<String>,
    /// First revision wanted: the one after that of a list, or after the last line seen. Default: from now on.
    #[arg(long, default_value_t = 0)]
    pub(crate) from: u64,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

#[derive(Debug, Args)]
pub(crate) struct HistoryArgs {
    /// Name of the group.
    pub(crate) group: String,
    /// Partition, as TOPIC/INDEX.
    pub(crate) partition: String,
    /// Only the grant that counted at this revision.
    #[arg(long, value_name = "REVISION", conflicts_with = "at_time")]
    pub(crate) at_revision: Option<u64>,
    /// Only the grant that counted at this time, in milliseconds since 1970.
    #[arg(long, value_name = "UNIX_MS")]
    pub(crate) at_time: Option<u64>,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

/// Who asks and why. Logged with the change.
#[derive(Debug, Args)]
pub(crate) struct OperatorArgs {
    /// Why; 1 to 1024 bytes. Shown in the history.
    #[arg(long, short = 'r')]
    pub(crate) reason: String,
    /// Who asks. Default: the user's name.
    #[arg(long, env = "TENURE_ACTOR")]
    pub(crate) actor: Option<String>,
    /// Tells what would happen and changes nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Name of this request: repeating a request with the same name does nothing twice. Default: made up.
    #[arg(long)]
    pub(crate) request_id: Option<String>,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MoveArgs {
    /// Name of the group.
    pub(crate) group: String,
    /// Partition, as TOPIC/INDEX.
    pub(crate) partition: String,
    /// Receiving member; `tenure members GROUP` lists them.
    #[arg(long)]
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RebalanceArgs {
    /// Name of the group.
    pub(crate) group: String,
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Name of the group.
    pub(crate) group: String,
    /// Member; `tenure members GROUP` lists them.
    pub(crate) member: String,
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct FloorArgs {
    /// Highest epoch that any sink has seen: what it names as the current one when it refuses an owner.
    pub(crate) floor: u64,
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ClusterCommand>,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Shows the nodes, who leads, and how far each is. Also without a word.
    Status,
    /// Adds a node that receives entries and does not vote, or tells where a known node is found now.
    AddLearner(AddLearnerArgs),
    /// Makes a learner a voter, once it has the log.
    Promote(NodeArgs),
    /// Removes a node.
    Remove(NodeArgs),
    /// Makes another voter the raft leader.
    Transfer(TransferArgs),
}

/// Who changes the cluster, and why. Logged with the change.
#[derive(Debug, Args)]
pub(crate) struct ChangeArgs {
    /// Why; 1 to 1024 bytes.
    #[arg(long, short = 'r')]
    pub(crate) reason: String,
    /// Who asks. Default: the user's name.
    #[arg(long, env = "TENURE_ACTOR")]
    pub(crate) actor: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AddLearnerArgs {
    /// Id of the node; never that of another one, also not of one that is gone.
    pub(crate) node: u64,
    /// HOST:PORT for the other nodes.
    #[arg(long)]
    pub(crate) raft_address: String,
    /// HOST:PORT for members and operators.
    #[arg(long)]
    pub(crate) client_address: String,
    #[command(flatten)]
    pub(crate) change: ChangeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// Id of the node; `tenure cluster` lists them.
    pub(crate) node: u64,
    #[command(flatten)]
    pub(crate) change: ChangeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TransferArgs {
    /// Id of the next raft leader. Default: the voter that is furthest.
    #[arg(long)]
    pub(crate) to: Option<u64>,
    #[command(flatten)]
    pub(crate) change: ChangeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The consumer group of Kafka; refused while it has members.
    pub(crate) kafka_group: String,
    /// Brokers, HOST:PORT, comma-separated.
    #[arg(long)]
    pub(crate) kafka: String,
    /// Topics to take over; repeat it for more.
    #[arg(long = "topic", required = true)]
    pub(crate) topics: Vec<String>,
    /// The group of Tenure; refused while it has members. Default: the same name.
    #[arg(long)]
    pub(crate) group: Option<String>,
    /// The sink that keeps the group's offsets: postgres://USER:PASSWORD@HOST:PORT/DATABASE or sqlite:PATH. Default: what
    /// TENURE_IMPORT_HOME holds, or else the coordinator keeps them. `ps` shows it: a password goes into a file or the
    /// variable.
    #[arg(long, value_name = "URL", conflicts_with = "home_file")]
    pub(crate) home: Option<Address>,
    /// File that holds the address of that sink on one line.
    #[arg(long, value_name = "FILE")]
    pub(crate) home_file: Option<PathBuf>,
    /// Name of that sink in the settings of the group's services. Default: postgres or sqlite.
    #[arg(long)]
    pub(crate) home_name: Option<String>,
    /// Its fence table. Default: tenure_fence.
    #[arg(long)]
    pub(crate) home_table: Option<String>,
    /// Sets the offsets. A partition that has one already keeps it.
    #[arg(long)]
    pub(crate) apply: bool,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LockArgs {
    /// What to own: 1 to 249 letters, digits, '.', '_' and '-'.
    pub(crate) name: String,
    /// Group that the name belongs to.
    #[arg(long, default_value = "locks")]
    pub(crate) group: String,
    /// Client addresses of coordinator nodes, comma-separated; any of them will do.
    #[arg(
        long,
        short = 'c',
        env = "TENURE_COORDINATORS",
        default_value = "127.0.0.1:7400",
        value_delimiter = ','
    )]
    pub(crate) coordinators: Vec<String>,
    /// How long a silent owner keeps the name, in milliseconds.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(300..=3_600_000))]
    pub(crate) ttl_ms: u64,
    /// Gives up when the name is not owned after this many milliseconds. Default: waits.
    #[arg(long)]
    pub(crate) wait_ms: Option<u64>,
    /// Milliseconds between SIGTERM and SIGKILL; less where the lease ends sooner.
    #[arg(long, default_value_t = 5_000)]
    pub(crate) kill_after_ms: u64,
    /// The command and its arguments, after `--`.
    #[arg(last = true, required = true, num_args = 1..)]
    pub(crate) command: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Settings file (TOML); docs/operations.md has every setting.
    #[arg(long, required_unless_present = "dev")]
    pub(crate) config: Option<PathBuf>,
    /// One node on 127.0.0.1:7400 with a data folder that goes away at the end.
    #[arg(long)]
    pub(crate) dev: bool,
    /// Overrides `client_listen`: IP:PORT that clients connect to. Port 0 picks a free one.
    #[arg(long)]
    pub(crate) listen: Option<String>,
    /// Overrides `client_advertised`: HOST:PORT that clients are told.
    #[arg(long)]
    pub(crate) advertised: Option<String>,
    /// Overrides `raft_listen`: IP:PORT for the other nodes.
    #[arg(long)]
    pub(crate) raft_listen: Option<String>,
    /// Overrides `raft_advertised`: HOST:PORT that the other nodes are told.
    #[arg(long)]
    pub(crate) raft_advertised: Option<String>,
    /// Overrides `data_dir`.
    #[arg(long)]
    pub(crate) data_dir: Option<PathBuf>,
    /// Writes logs as JSON lines.
    #[arg(long)]
    pub(crate) log_json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SinkCommand {
    /// Prints the fence table, and the guard, as SQL to run.
    Sql(SinkSchemaArgs),
    /// Checks a database, broker or store, and lets two made-up owners write under a name that it removes again.
    #[command(after_help = SINK_URLS)]
    Check(SinkCheckArgs),
    /// Lists the published files of a resource in an object store.
    #[command(
        after_help = "A list of the store's objects also shows what was given up and what stale owners left; \
                            this list is what a reader may trust."
    )]
    Files(SinkFilesArgs),
}

const SINK_URLS: &str = "\
URLs:
  postgres://USER:PASSWORD@HOST:PORT/DATABASE
  mysql://USER:PASSWORD@HOST:PORT/DATABASE     also mariadb://
  sqlite:PATH
  redis://USER:PASSWORD@HOST:PORT
  kafka://HOST:PORT,HOST:PORT/TOPIC            the topic that the offsets are kept under; no record is written
  s3://BUCKET/PREFIX                           the rest from AWS_ENDPOINT, AWS_ACCESS_KEY_ID, … in the environment
  file:FOLDER                                  an object store in a local folder
Changes nothing but what is named tenure-check/…, which it deletes.
Exit code 1: a check failed; warnings alone are 0.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SqlDialect {
    Postgres,
    Mysql,
    Sqlite,
}

#[derive(Debug, Args)]
pub(crate) struct SinkSchemaArgs {
    /// Which database.
    #[arg(value_enum)]
    pub(crate) dialect: SqlDialect,
    /// Name of the fence table.
    #[arg(long, default_value = "tenure_fence")]
    pub(crate) table: String,
    /// Adds a trigger that refuses writers outside the SDK on this data table. PostgreSQL only.
    #[arg(long, value_name = "DATA_TABLE")]
    pub(crate) guard: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SinkCheckArgs {
    /// Where the sink is; the forms are below. Default: what TENURE_SINK_URL holds. `ps` shows it: a password goes into
    /// a file or the variable.
    #[arg(conflicts_with = "url_file")]
    pub(crate) url: Option<Address>,
    /// File that holds the URL on one line.
    #[arg(long, value_name = "FILE")]
    pub(crate) url_file: Option<PathBuf>,
    /// Name of the fence table; with Redis, last part of the fence key.
    #[arg(long, default_value = "tenure_fence")]
    pub(crate) table: String,
    /// Table for people, JSON for programs.
    #[arg(long, short = 'o', value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    /// Gives up after this many milliseconds.
    #[arg(long, default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub(crate) timeout_ms: u64,
}

#[derive(Debug, Args)]
pub(crate) struct SinkFilesArgs {
    /// s3://BUCKET/PREFIX or file:FOLDER.
    pub(crate) url: String,
    /// GROUP/TOPIC-ID/PARTITION.
    pub(crate) resource: String,
    /// Leaves out files that end at or before this offset.
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    pub(crate) from: u64,
    /// Table for people, JSON for programs.
    #[arg(long, short = 'o', value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    /// Gives up after this many milliseconds.
    #[arg(long, default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub(crate) timeout_ms: u64,
}

#[derive(Debug, Args)]
pub(crate) struct SigningKeyArgs {
    /// The file, for `signing_key_file` of a node. Secret: only its owner may read it.
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// A running Kafka, HOST:PORT. Default: an embedded one.
    #[arg(long)]
    pub(crate) kafka: Option<String>,
    /// Runs the same story with the checks off: shows the damage, and exits with 1.
    #[arg(long)]
    pub(crate) no_fencing: bool,
    /// Leaves logs, settings and the database in this folder.
    #[arg(long)]
    pub(crate) keep: Option<PathBuf>,
    /// Ends with one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    #[arg(long)]
    pub(crate) name: String,
    #[arg(long, value_delimiter = ',')]
    pub(crate) coordinators: Vec<String>,
    #[arg(long)]
    pub(crate) kafka: String,
    #[arg(long)]
    pub(crate) group: String,
    #[arg(long)]
    pub(crate) topic: String,
    #[arg(long)]
    pub(crate) database: PathBuf,
    #[arg(long)]
    pub(crate) ttl_ms: u64,
    /// Sends every write out, also after the local end of the lease.
    #[arg(long)]
    pub(crate) lease_check_off: bool,
    /// Writes without any check at the sink.
    #[arg(long)]
    pub(crate) no_fencing: bool,
}
