//! Connections.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tonic::transport::{Channel, Endpoint, Error};

/// Makes a connection of an endpoint in place of TCP: the seam for simulations.
#[doc(hidden)]
pub type Dial = Arc<dyn Fn(Endpoint) -> BoxFuture<'static, Result<Channel, Error>> + Send + Sync>;

/// Opens a fresh connection to `host:port`; its name is resolved now. Errors are texts for people.
pub(super) async fn connect(
    address: &str,
    timeout: Duration,
    keep_alive: Duration,
    dial: Option<&Dial>,
) -> Result<Channel, String> {
    let url =
        if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    let endpoint = Endpoint::from_shared(url)
        .map_err(|error| with_causes(&error))?
        .connect_timeout(timeout)
        .tcp_nodelay(true)
        // Without keep-alive a connection whose peer is gone without a word is used for ever.
        .http2_keep_alive_interval(keep_alive)
        .keep_alive_timeout(keep_alive)
        .keep_alive_while_idle(true);
    let connecting = async {
        match dial {
            None => endpoint.connect().await,
            Some(dial) => dial(endpoint).await,
        }
    };
    // The connector's own timeout does not cover the look-up of the name.
    match tokio::time::timeout(timeout, connecting).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(with_causes(&error)),
        Err(_elapsed) => Err(format!("no connection within {timeout:?}")),
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}
