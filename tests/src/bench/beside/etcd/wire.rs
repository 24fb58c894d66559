//! The few messages of etcd's gRPC interface that are used here, by their field numbers.

use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{IntoStreamingRequest, Request, Status, Streaming};
use tonic_prost::ProstCodec;

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Put {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    /// 0: none.
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PutAnswer {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Header {
    #[prost(uint64, tag = "2")]
    member: u64,
    #[prost(int64, tag = "3")]
    revision: i64,
}

/// One condition of a transaction.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Compare {
    /// 0: equal.
    #[prost(int32, tag = "1")]
    result: i32,
    /// 2: the revision of the last change.
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    #[prost(int64, optional, tag = "6")]
    revision: Option<i64>,
}

impl Compare {
    /// The key was last changed at `revision`.
    pub(super) fn modified_at(key: Vec<u8>, revision: i64) -> Self {
        const EQUAL: i32 = 0;
        const LAST_CHANGE: i32 = 2;
        Self { result: EQUAL, target: LAST_CHANGE, key, revision: Some(revision) }
    }
}

/// One step of a transaction.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RequestOp {
    #[prost(message, optional, tag = "2")]
    put: Option<Put>,
}

impl RequestOp {
    pub(super) fn put(put: Put) -> Self {
        Self { put: Some(put) }
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Txn {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TxnAnswer {
    #[prost(bool, tag = "2")]
    succeeded: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Grant {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct GrantAnswer {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeepAlive {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeepAliveAnswer {
    /// In seconds; 0: the lease has run out.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
struct StatusAnswer {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
    #[prost(string, tag = "2")]
    version: String,
    #[prost(uint64, tag = "4")]
    leader: u64,
}

/// Calls one node.
pub(super) struct EtcdClient(tonic::client::Grpc<Channel>);

impl EtcdClient {
    pub(super) fn new(channel: Channel) -> Self {
        Self(tonic::client::Grpc::new(channel))
    }

    /// Gives the revision of the write.
    pub(super) async fn put(&mut self, put: Put) -> Result<i64, Status> {
        let answer: PutAnswer = self.call("/etcdserverpb.KV/Put", put).await?;
        Ok(answer.header.unwrap_or_default().revision)
    }

    /// Gives whether all conditions held.
    pub(super) async fn txn(&mut self, txn: Txn) -> Result<bool, Status> {
        let answer: TxnAnswer = self.call("/etcdserverpb.KV/Txn", txn).await?;
        Ok(answer.succeeded)
    }

    /// Gives the id of a new lease.
    pub(super) async fn grant(&mut self, ttl_s: i64) -> Result<i64, Status> {
        let grant = Grant { ttl: ttl_s };
        let answer: GrantAnswer = self.call("/etcdserverpb.Lease/LeaseGrant", grant).await?;
        Ok(answer.id)
    }

    pub(super) async fn keep_alive(
        &mut self,
        requests: impl IntoStreamingRequest<Message = KeepAlive>,
    ) -> Result<Streaming<KeepAliveAnswer>, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseKeepAlive");
        let request = requests.into_streaming_request();
        let codec = ProstCodec::<KeepAlive, KeepAliveAnswer>::default();
        Ok(self.0.streaming(request, path, codec).await?.into_inner())
    }

    /// Version of the node, and whether it leads.
    pub(super) async fn status(&mut self) -> Result<(String, bool), Status> {
        let answer: StatusAnswer =
            self.call("/etcdserverpb.Maintenance/Status", Nothing {}).await?;
        let leads = answer.header.is_some_and(|header| header.member == answer.leader);
        Ok((answer.version, leads))
    }

    async fn call<Q, A>(&mut self, path: &'static str, message: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        self.ready().await?;
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(path);
        Ok(self.0.unary(Request::new(message), path, codec).await?.into_inner())
    }

    async fn ready(&mut self) -> Result<(), Status> {
        self.0.ready().await.map_err(|error| Status::unavailable(error.to_string()))
    }
}
