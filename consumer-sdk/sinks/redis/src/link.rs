//! The one connection of a sink, made again when it breaks.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, FromRedisValue, RedisError, RedisResult};
use tokio::sync::Mutex;

use crate::error::is_lost;
use crate::settings::RedisSettings;

/// Connection shared by all writers of a sink: commands go out in the order of the calls and are answered so.
pub(crate) struct Link {
    client: Client,
    config: AsyncConnectionConfig,
    current: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    number: u64,
    connection: Option<MultiplexedConnection>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

/// A connection as one call uses it.
pub(crate) struct Lent {
    number: u64,
    connection: MultiplexedConnection,
}

impl Link {
    pub(crate) fn new(client: Client, settings: &RedisSettings) -> Self {
        // WAIT answers late by design.
        let waits = if settings.replicas_min > 0 { settings.wait_timeout } else { Duration::ZERO };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(settings.connect_timeout))
            .set_response_timeout(Some(settings.response_timeout + waits));
        Self { client, config, current: Mutex::default() }
    }

    /// Connects if need be; after an error nothing was sent.
    pub(crate) async fn lend(&self) -> RedisResult<Lent> {
        let mut current = self.current.lock().await;
        let number = current.number;
        if let Some(connection) = &current.connection {
            return Ok(Lent { number, connection: connection.clone() });
        }
        let made = self.client.get_multiplexed_async_connection_with_config(&self.config);
        let connection = made.await?;
        current.number += 1;
        current.connection = Some(connection.clone());
        Ok(Lent { number: current.number, connection })
    }

    /// Runs a command.
    pub(crate) async fn command<T: FromRedisValue>(
        &self,
        lent: &mut Lent,
        command: &redis::Cmd,
    ) -> RedisResult<T> {
        let answer = command.query_async(&mut lent.connection).await;
        self.noted(lent, answer).await
    }

    /// Runs a script; one that the server has forgotten is loaded again.
    pub(crate) async fn script<T: FromRedisValue>(
        &self,
        lent: &mut Lent,
        invocation: &redis::ScriptInvocation<'_>,
    ) -> RedisResult<T> {
        let answer = invocation.invoke_async(&mut lent.connection).await;
        self.noted(lent, answer).await
    }

    /// A connection that an answer was lost on is given up, and with it whatever may still come on it.
    async fn noted<T>(&self, lent: &Lent, answer: Result<T, RedisError>) -> RedisResult<T> {
        if let Err(error) = &answer
            && is_lost(error)
        {
            let mut current = self.current.lock().await;
            if current.number == lent.number {
                current.connection = None;
            }
        }
        answer
    }
}
