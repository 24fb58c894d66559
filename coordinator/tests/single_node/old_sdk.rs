//! An SDK of the version before: the bytes that it sends, frozen, and what it must find in the answers.
//!
//! `wire-VERSION.txt` has one message a line, `name hex`. A version that changes the wire adds a file of its own
//! (`TENURE_WRITE_WIRE=1` writes that of this version) and keeps those before: fields that were added since are
//! missing in them. A newer SDK is played by the same bytes with fields that no version knows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use prost::Message;
use prost::bytes::{Buf as _, BufMut as _, Bytes};
use tenure_coordinator::Node;
use tenure_proto::v1;
use tenure_proto::v1::session_down::Down;
use tenure_proto::v1::session_up::Up;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

use crate::common::{GROUP, PATIENCE, TOPIC, channel, leader_of, lone, partition, steady};

/// Versions whose bytes are kept.
const VERSIONS: [&str; 1] = ["0.1.0"];

/// The one partition's first grant in an empty cluster.
const EPOCH: u64 = 1;

/// Bytes in, bytes out.
#[derive(Clone, Copy, Debug, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

type Messages = BTreeMap<String, Vec<u8>>;

fn file(version: &str) -> PathBuf {
    Path::new("tests/single_node").join(format!("wire-{version}.txt"))
}

/// What this version would send.
fn write(version: &str) {
    let up = |up| v1::SessionUp { up: Some(up) }.encode_to_vec();
    let here = Some(partition(0));
    let group = || GROUP.to_owned();
    let member = || "ann".to_owned();
    let messages = [
        ("join", up(Up::Join(steady("ann", 1)))),
        ("heartbeat", up(Up::Heartbeat(v1::Heartbeat { sequence: 1, ..v1::Heartbeat::default() }))),
        (
            "acquired",
            up(Up::Acquired(v1::Acquired {
                request: 1,
                partition: here.clone(),
                epoch: EPOCH,
                home_initialised: false,
                resume: 0,
            })),
        ),
        (
            "release",
            up(Up::Release(v1::Release {
                request: 2,
                partitions: vec![v1::Released {
                    partition: here.clone(),
                    epoch: EPOCH,
                    next_offset: Some(43),
                    reason: v1::ReleaseReason::Shutdown.into(),
                    error: String::new(),
                }],
            })),
        ),
        (
            "leave",
            up(Up::Leave(v1::Leave {
                request: 3,
                partitions: vec![],
                reason: "stop".to_owned(),
                ..v1::Leave::default()
            })),
        ),
        (
            "commit",
            v1::CommitRequest {
                group: group(),
                member: member(),
                commits: vec![v1::OffsetCommit {
                    partition: here.clone(),
                    epoch: EPOCH,
                    sequence: 1,
                    next_offset: 42,
                    metadata: b"note".to_vec(),
                }],
            }
            .encode_to_vec(),
        ),
        (
            "fetch",
            v1::FetchRequest { group: group(), partitions: here.clone().into_iter().collect() }
                .encode_to_vec(),
        ),
        (
            "verify",
            v1::VerifyRequest {
                group: group(),
                member: member(),
                grants: vec![v1::GrantRef { partition: here, epoch: EPOCH }],
            }
            .encode_to_vec(),
        ),
        ("describe", v1::DescribeGroupRequest { group: group() }.encode_to_vec()),
    ];
    let text: String = messages
        .iter()
        .map(|(name, bytes)| {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{name} {hex}\n")
        })
        .collect();
    std::fs::write(file(version), text).unwrap();
}

fn read(version: &str) -> Messages {
    let text = std::fs::read_to_string(file(version)).unwrap();
    let line = |line: &str| {
        let (name, hex) = line.split_once(' ').unwrap();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (name.to_owned(), (0..hex.len()).step_by(2).map(byte).collect())
    };
    text.lines().map(line).collect()
}

/// Two fields that no version knows: a number and a text.
fn with_unknown_fields(mut messages: Messages) -> Messages {
    for bytes in messages.values_mut() {
        bytes.extend([0xc0, 0xbb, 0x01, 0x07]);
        bytes.extend([0xca, 0xbb, 0x01, 0x03]);
        bytes.extend(b"new");
    }
    messages
}

struct OldSdk {
    grpc: tonic::client::Grpc<Channel>,
    messages: Messages,
}

impl OldSdk {
    async fn call<A: Message + Default>(&mut self, path: &'static str, message: &str) -> A {
        self.grpc.ready().await.unwrap();
        let request = Request::new(self.messages[message].clone());
        let answer = self.grpc.unary(request, PathAndQuery::from_static(path), Raw).await.unwrap();
        A::decode(answer.into_inner()).unwrap()
    }

    async fn session(&mut self) -> (mpsc::Sender<Vec<u8>>, Streaming<Bytes>) {
        self.grpc.ready().await.unwrap();
        let (up, messages) = mpsc::channel(16);
        let path = PathAndQuery::from_static("/tenure.v1.Membership/Session");
        let request = Request::new(ReceiverStream::new(messages));
        up.send(self.messages["join"].clone()).await.unwrap();
        (up, self.grpc.streaming(request, path, Raw).await.unwrap().into_inner())
    }
}

/// Waits for the message that `wanted` takes.
async fn until<T>(down: &mut Streaming<Bytes>, wanted: impl Fn(Down) -> Option<T>) -> T {
    loop {
        let bytes = timeout(PATIENCE, down.message()).await.unwrap().unwrap().unwrap();
        let message = v1::SessionDown::decode(bytes).unwrap();
        if let Some(found) = message.down.and_then(&wanted) {
            return found;
        }
    }
}

fn answer_to(request: u64) -> impl Fn(Down) -> Option<Option<v1::Error>> {
    move |down| {
        let Down::ActAnswer(answer) = down else { return None };
        (answer.request == request).then_some(answer.error)
    }
}

/// Joins, acquires, commits, reads back, releases and leaves.
async fn live(messages: Messages) {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = lone(folder.path());
    settings.deadlines.drain_deadline_ms = 60_000;
    let node = Node::start(settings).await.unwrap();
    leader_of(std::slice::from_ref(&node)).await;
    let grpc = tonic::client::Grpc::new(channel(node.client_address()).await);
    let mut sdk = OldSdk { grpc, messages };

    let (up, mut down) = sdk.session().await;
    let joined =
        until(&mut down, |down| if let Down::Joined(joined) = down { Some(joined) } else { None });
    let joined = joined.await;
    assert_eq!((joined.ttl_ms, joined.heartbeat_interval_ms > 0), (30_000, true));
    up.send(sdk.messages["heartbeat"].clone()).await.unwrap();
    let sequence = until(&mut down, |down| {
        if let Down::HeartbeatAnswer(answer) = down { Some(answer.sequence) } else { None }
    });
    assert_eq!(sequence.await, 1);
    let assigned = |assignment: v1::Assignment| assignment.partitions.into_iter().next();
    let granted = match joined.assignment.and_then(assigned) {
        Some(granted) => granted,
        None => {
            until(&mut down, |down| {
                if let Down::Assignment(assignment) = down { assigned(assignment) } else { None }
            })
            .await
        }
    };
    assert_eq!((granted.partition, granted.epoch), (Some(partition(0)), EPOCH));
    up.send(sdk.messages["acquired"].clone()).await.unwrap();
    assert_eq!(until(&mut down, answer_to(1)).await, None);

    let committed: v1::CommitResponse = sdk.call("/tenure.v1.Offsets/Commit", "commit").await;
    assert_eq!(committed.verdicts.len(), 1);
    assert_eq!(committed.verdicts[0].error, None);
    let fetched: v1::FetchResponse = sdk.call("/tenure.v1.Offsets/Fetch", "fetch").await;
    assert_eq!(fetched.offsets[0].next_offset, Some(42));
    assert_eq!(fetched.offsets[0].metadata, b"note");
    let verified: v1::VerifyResponse = sdk.call("/tenure.v1.Ownership/Verify", "verify").await;
    assert_eq!((verified.verdicts.len(), &verified.verdicts[0].error), (1, &None));
    let described: v1::DescribeGroupResponse =
        sdk.call("/tenure.v1.Ownership/DescribeGroup", "describe").await;
    assert_eq!(described.partitions[0].member, "ann");
    assert_eq!(described.partitions[0].topic, TOPIC);

    up.send(sdk.messages["release"].clone()).await.unwrap();
    assert_eq!(until(&mut down, answer_to(2)).await, None);
    up.send(sdk.messages["leave"].clone()).await.unwrap();
    let ended =
        until(
            &mut down,
            |down| {
                if let Down::Ended(ended) = down { Some(ended.error) } else { None }
            },
        );
    assert_eq!(ended.await, None);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_of_an_older_version_joins_commits_and_leaves() {
    if std::env::var_os("TENURE_WRITE_WIRE").is_some() {
        write(env!("CARGO_PKG_VERSION"));
    }
    for version in VERSIONS {
        live(read(version)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_of_a_newer_version_are_ignored() {
    let newest = VERSIONS[VERSIONS.len() - 1];
    live(with_unknown_fields(read(newest))).await;
}
