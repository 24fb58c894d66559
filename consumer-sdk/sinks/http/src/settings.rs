//! Settings of the client's side.

use std::time::Duration;

/// Settings of an [`HttpSink`](crate::HttpSink).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// Name of the sink in the group's settings. Default `http`.
    pub name: String,
    /// Longest wait for an answer; the rest of the lease, if that is shorter. Default 10 s.
    pub request_timeout: Duration,
    /// How long one request of a paused owner may hold the fence at the service: the bound that the service itself keeps,
    /// `idle_in_transaction_timeout` of its store. Default 3 s.
    pub service_pause_max: Duration,
    /// Speaks HTTP/2 with prior knowledge, as gRPC servers do. Default false.
    pub http2: bool,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            name: "http".into(),
            request_timeout: Duration::from_secs(10),
            service_pause_max: Duration::from_secs(3),
            http2: false,
        }
    }
}
