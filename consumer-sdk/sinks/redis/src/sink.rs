//! The sink: connects and registers grants.

use std::sync::Arc;
use std::time::Duration;

use redis::{Client, IntoConnectionInfo};
use tenure_model::{Epoch, Home};
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{
    Capabilities, Enforcement, FencedSink, Fencing, Registered, Role, Scope, SinkError, Standing,
    Takeover,
};

use crate::error::{classify, is_lost};
use crate::link::{Lent, Link};
use crate::row::{Stored, epoch_text};
use crate::script::{FIELDS, Scripts};
use crate::settings::RedisSettings;
use crate::writer::RedisWriter;

/// What the sink does not promise.
const BEST_EFFORT: &str = "Redis copies to its replicas after it has answered: a fail-over to one that is behind, or a \
                           restart without `appendfsync always`, loses the newest registrations and writes, and an old \
                           owner may write again until the next registration; `replicas_min` narrows that, it does not \
                           close it";

/// What a sink and its writers share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: RedisSettings,
    pub(crate) scripts: Scripts,
    pub(crate) link: Link,
}

impl Shared {
    /// Hash tag of a resource: all keys with it live in one slot.
    pub(crate) fn tag(resource: &Resource) -> String {
        format!("{{{resource}}}")
    }

    pub(crate) fn fence_key(&self, resource: &Resource) -> String {
        format!("{}:{}", Self::tag(resource), self.settings.fence)
    }

    /// Reads the fence.
    pub(crate) async fn read(&self, resource: &Resource) -> Result<Option<Stored>, SinkError> {
        let mut lent = self.link.lend().await.map_err(classify)?;
        let mut command = redis::cmd("HMGET");
        command.arg(self.fence_key(resource)).arg(&FIELDS);
        let value = self.link.command(&mut lent, &command).await.map_err(classify)?;
        Stored::decode(value)
    }

    /// Waits until enough replicas have what was written before on the same connection.
    pub(crate) async fn copied(&self, lent: &mut Lent) -> Result<(), SinkError> {
        let wanted = self.settings.replicas_min;
        let mut command = redis::cmd("WAIT");
        let millis = u64::try_from(self.settings.wait_timeout.as_millis()).unwrap_or(u64::MAX);
        command.arg(wanted).arg(millis);
        let answer = self.link.command::<u32>(lent, &command).await;
        let copies = answer.map_err(|error| SinkError::Unknown(Box::new(error)))?;
        if copies < wanted {
            return Err(SinkError::Unknown(
                format!("{copies} of {wanted} replicas have it: a fail-over may lose it").into(),
            ));
        }
        Ok(())
    }
}

/// Sink over one Redis or Valkey server that is no cluster. Cheap to clone; clones share one connection.
#[derive(Clone, Debug)]
pub struct RedisSink {
    shared: Arc<Shared>,
}

impl RedisSink {
    /// Connects and looks at the server. There is nothing to migrate.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for a bad setting, a replica, or an eviction policy that may drop the fence;
    /// [`SinkError::Transient`] when the server is not reachable.
    pub async fn connect(
        server: impl IntoConnectionInfo,
        settings: RedisSettings,
    ) -> Result<Self, SinkError> {
        settings.validate()?;
        let client = Client::open(server).map_err(classify)?;
        let link = Link::new(client, &settings);
        let scripts = Scripts::new(settings.fencing());
        let sink = Self { shared: Arc::new(Shared { settings, scripts, link }) };
        sink.look().await?;
        Ok(sink)
    }

    /// Key of one's own in the partition's slot: `{group/topic id/partition}:name`.
    #[must_use]
    pub fn key(&self, grant: &Grant, name: &str) -> String {
        format!("{}:{name}", Shared::tag(&grant.resource))
    }

    /// Writer beside the home, for a grant that the SDK has registered here. Registers nothing: each write compares the
    /// epoch, so that a grant that is not registered is refused.
    #[must_use]
    pub fn writer(&self, grant: &Grant) -> RedisWriter {
        self.writer_as(grant, Role::Also)
    }

    fn writer_as(&self, grant: &Grant, role: Role) -> RedisWriter {
        let standing = Standing::new(grant.epoch, role, self.shared.settings.fencing());
        RedisWriter::new(Arc::clone(&self.shared), grant.clone(), standing)
    }

    /// Looks at the server once. INFO has the policy too, and unlike CONFIG it is rarely forbidden.
    async fn look(&self) -> Result<(), SinkError> {
        let link = &self.shared.link;
        let mut lent = link.lend().await.map_err(classify)?;
        let info: String = link.command(&mut lent, &redis::cmd("INFO")).await.map_err(classify)?;
        let value = |name: &str| {
            info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
        };
        if value("role").is_some_and(|role| role != "master") {
            return Err(SinkError::Misconfigured(
                "the server is a replica: connect to the primary".into(),
            ));
        }
        if value("cluster_enabled") == Some("1") {
            return Err(SinkError::Misconfigured(
                "the server is part of a cluster: this sink speaks to one server".into(),
            ));
        }
        let policy = value("maxmemory_policy").unwrap_or("noeviction");
        if policy != "noeviction" && !policy.starts_with("volatile-") {
            return Err(SinkError::Misconfigured(format!(
                "maxmemory-policy is {policy}, which may drop the fence: set noeviction or a volatile one"
            )));
        }
        if value("aof_enabled") == Some("0") {
            tracing::warn!("no append-only file: a restart of the server loses the fence");
        }
        Ok(())
    }

    async fn raise(&self, grant: &Grant) -> Result<Option<Epoch>, SinkError> {
        let Shared { settings, scripts, link } = &*self.shared;
        if grant.resource.as_str().contains(['{', '}']) {
            return Err(SinkError::Misconfigured(
                "the resource's name has a brace, which ends a hash tag".into(),
            ));
        }
        let holder = grant.member.to_string();
        let mut lent = link.lend().await.map_err(classify)?;
        let mut register = scripts.register.key(self.shared.fence_key(&grant.resource));
        register.arg(epoch_text(grant.epoch)).arg(&holder);
        let value = match link.script(&mut lent, &register).await {
            Ok(value) => value,
            Err(error) if is_lost(&error) => return Err(SinkError::Unknown(Box::new(error))),
            Err(error) => return Err(classify(error)),
        };
        let found = Stored::decode(value)?;
        let displaced = match found {
            None => None,
            Some(Stored { row, .. })
                if row.epoch < grant.epoch && settings.fencing() == Fencing::On =>
            {
                Some(row.epoch)
            }
            Some(Stored { row, displaced, .. }) => {
                let mut standing = Standing::new(grant.epoch, Role::Home, settings.fencing());
                standing.registered(&row, &holder)?;
                displaced
            }
        };
        if settings.replicas_min > 0 {
            self.shared.copied(&mut lent).await?;
        }
        Ok(displaced)
    }
}

impl FencedSink for RedisSink {
    type Writer = RedisWriter;

    fn name(&self) -> &str {
        &self.shared.settings.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Partition,
            home: Home::Sink,
            enforcement: Enforcement::BestEffort(match self.shared.settings.fencing() {
                Fencing::On => BEST_EFFORT,
                Fencing::Off => "the fence is switched off",
            }),
            // Nothing is held between two calls.
            takeover: Takeover::Bounded(Duration::ZERO),
        }
    }

    /// A registration whose answer was lost, or that too few replicas have, is [`SinkError::Unknown`]; repeat it.
    async fn register(&self, grant: &Grant) -> Result<Registered<RedisWriter>, SinkError> {
        let displaced = self.raise(grant).await?;
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = displaced.map(Epoch::get), "epoch registered");
        Ok(Registered { writer: self.writer_as(grant, Role::Home), displaced })
    }
}
