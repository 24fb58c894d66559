//! The sink: registers grants.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tenure_model::{Epoch, Home};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::{
    Capabilities, Enforcement, FenceRow, FencedSink, Fencing, Registered, Role, Scope, SinkError,
    Standing, Takeover,
};

use crate::client::{Opened, Session, Shared, Step, id_of};
use crate::error::transient;
use crate::settings::KafkaSinkSettings;
use crate::writer::KafkaWriter;

/// Sink over the topics of one Kafka cluster, one transactional id for each group, topic and partition. Cheap to clone.
///
/// It is the home of the offset. Beside another home it could not refuse a replay, so it has no writer for that.
/// Each live writer has a producer: four to six threads and one to two megabytes.
#[derive(Clone)]
pub struct KafkaSink {
    shared: Arc<Shared>,
}

impl fmt::Debug for KafkaSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSink").field("settings", &self.shared.settings).finish_non_exhaustive()
    }
}

impl KafkaSink {
    /// Makes the sink. Connects to nothing yet.
    ///
    /// # Errors
    ///
    /// [`SinkError::Misconfigured`] for settings that contradict the fence.
    pub fn new(settings: KafkaSinkSettings) -> Result<Self, SinkError> {
        settings.validate()?;
        Ok(Self { shared: Arc::new(Shared { settings, hook: None }) })
    }

    /// As [`KafkaSink::new`], with a function that is called at the moments of every registration and recovery, on a
    /// thread that may block. For tests that stop an owner there.
    ///
    /// # Errors
    ///
    /// As [`KafkaSink::new`].
    pub fn with_hook(
        settings: KafkaSinkSettings,
        hook: impl Fn(Step, &Grant) + Send + Sync + 'static,
    ) -> Result<Self, SinkError> {
        settings.validate()?;
        Ok(Self { shared: Arc::new(Shared { settings, hook: Some(Arc::new(hook)) }) })
    }

    /// Transactional id of a grant's producers. The private group that keeps the offset has the same name.
    #[must_use]
    pub fn transactional_id(&self, grant: &Grant) -> String {
        id_of(&self.shared.settings, grant)
    }
}

impl FencedSink for KafkaSink {
    type Writer = KafkaWriter;

    fn name(&self) -> &str {
        &self.shared.settings.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            scope: Scope::Partition,
            home: Home::KafkaTransaction,
            enforcement: match self.shared.settings.fencing() {
                Fencing::On => Enforcement::Resource,
                Fencing::Off => Enforcement::BestEffort("the stamp is switched off"),
            },
            // The initialisation ends an open transaction at once; this is for a busy broker.
            takeover: Takeover::Bounded(Duration::from_secs(3)),
        }
    }

    async fn register(&self, grant: &Grant) -> Result<Registered<KafkaWriter>, SinkError> {
        let (shared, for_thread) = (Arc::clone(&self.shared), grant.clone());
        let work = move || register(&shared, &for_thread);
        let (session, row, displaced) = tokio::task::spawn_blocking(work)
            .await
            .map_err(|error| transient(format!("registration: {error}")))??;
        tracing::debug!(sink = self.name(), resource = %grant.resource, epoch = grant.epoch.get(),
            displaced = displaced.map(Epoch::get), "epoch registered");
        let writer = KafkaWriter::new(Arc::clone(&self.shared), grant.clone(), session, row);
        Ok(Registered { writer, displaced })
    }
}

type Registration = (Box<Session>, FenceRow, Option<Epoch>);

fn register(shared: &Shared, grant: &Grant) -> Result<Registration, SinkError> {
    let fencing = shared.settings.fencing();
    let mut standing = Standing::new(grant.epoch, Role::Home, fencing);
    let holder = grant.member.to_string();
    let ours = (fencing == Fencing::On).then_some(grant.epoch);
    let (mut session, found) = match Session::open(shared, grant, ours)? {
        Opened::Newest(session, found) => (session, found),
        Opened::Newer(row) => {
            let seen = Some(row.epoch);
            return Err(SinkError::Fenced { ours: grant.epoch, seen });
        }
    };
    let (row, displaced) = match found {
        Some(row) if fencing == Fencing::Off => return Ok((session, row, None)),
        Some(row) if row.epoch == grant.epoch => {
            if let Err(error) = standing.registered(&row, &holder) {
                session.close();
                return Err(error);
            }
            return Ok((session, row, None));
        }
        Some(row) => {
            let displaced = Some(row.epoch);
            (FenceRow { epoch: grant.epoch, holder, ..row }, displaced)
        }
        None => (FenceRow { epoch: grant.epoch, holder, next_offset: None, sequence: 0 }, None),
    };
    match session.stamp(&row) {
        Ok(()) => Ok((session, row, displaced)),
        Err(error) => {
            session.close();
            Err(error)
        }
    }
}
