//! The conformance kit against the service, right and wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::Grant;
use tenure_sdk::sink::conformance::{self, Check, Options, Pauses, Row, Rows, Subject, Verdict};
use tenure_sdk::sink::{BoxError, SinkError};
use tenure_sink_http::{HttpSettings, HttpSink, HttpWriter, IdempotencyKey, Receiver};
use tenure_tests::figures::tell;
use tenure_tests::tier;

use crate::service::{Mode, Service, order};

/// What the service allows a handler that stands still.
const IDLE: Duration = Duration::from_millis(500);

struct OverHttp {
    service: Service,
    keys: AtomicU64,
}

impl OverHttp {
    async fn new(mode: Mode) -> Option<Arc<Self>> {
        let service = Service::start_bounded(mode, Receiver::default(), IDLE).await?;
        Some(Arc::new(Self { service, keys: AtomicU64::new(0) }))
    }
}

impl Subject for OverHttp {
    type Sink = HttpSink;

    async fn connect(&self) -> Result<HttpSink, SinkError> {
        let settings = HttpSettings { service_pause_max: IDLE, ..HttpSettings::default() };
        Ok(self.service.sink(settings))
    }

    async fn write(
        &self,
        writer: &mut HttpWriter,
        rows: Rows,
        pauses: &Pauses,
    ) -> Result<(), SinkError> {
        let Rows { partition, epoch, next, .. } = rows;
        let line = |offset: NextOffset| format!("{} {} {partition}", offset.get(), epoch.get());
        let lines: Vec<String> = rows.offsets().map(line).collect();
        let (stop, mut stopped) = self.service.stops.open();
        let request = order(&lines.join("\n"), Some(stop));
        // A record of its own each time: the kit wants every write to go through.
        let key = self.keys.fetch_add(1, Ordering::Relaxed);
        let key = IdempotencyKey::new(&format!("kit/{partition}/{key}")).unwrap();
        let write = async {
            let answer = if writer.is_home() {
                writer.write(request, next).await
            } else {
                writer.write_once(request, &key).await
            };
            answer.map(drop)
        };
        let mut write = std::pin::pin!(write);
        loop {
            tokio::select! {
                answer = &mut write => return answer,
                Some(go_on) = stopped.recv() => {
                    pauses.here().await;
                    // The handler may have been ended meanwhile.
                    let _told = go_on.send(());
                }
            }
        }
    }

    async fn read_back(&self, partition: u32) -> Result<Vec<Row>, BoxError> {
        let query =
            format!("SELECT id, epoch FROM orders WHERE part = {partition} ORDER BY id, ctid");
        let (server, database) = (self.service.server, self.service.database.clone());
        let text = tokio::task::spawn_blocking(move || server.sql(&database, &query)).await?;
        let mut rows = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty()) {
            let (id, epoch) = line.split_once('|').ok_or("a row has two columns")?;
            let offset = NextOffset::new(id.parse()?)?;
            rows.push(Row { offset, epoch: Epoch::new(epoch.parse()?)? });
        }
        Ok(rows)
    }

    fn beside(&self, sink: &HttpSink, grant: &Grant) -> Option<HttpWriter> {
        Some(sink.writer(grant).unwrap())
    }
}

fn options() -> Options {
    let handovers = u32::try_from(tier::Tier::current().repetitions(1_000)).unwrap();
    Options { handovers, ..Options::with_seed(tier::seed()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn http_service_conforms() {
    let Some(subject) = OverHttp::new(Mode::Right).await else { return };
    let report = conformance::run(&subject, options()).await;
    tell(&report);
    assert_eq!(report.failed(), Vec::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn check_before_the_handler_is_caught() {
    let Some(subject) = OverHttp::new(Mode::CheckBeforeHandler).await else { return };
    let outcome = conformance::run_one(&subject, options(), Check::StaleWrite).await;
    tell(format_args!("check before the handler: {outcome}"));
    assert!(matches!(outcome.verdict, Verdict::Failed(_)), "{outcome}");
}
