//! A runtime with one thread, which nothing of the SDK and of its Kafka clients may block.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tenure_kafka::{KafkaSettings, KafkaSource};
use tenure_sdk::source::RecordSource as _;
use tenure_tests::cluster::Cluster;
use tenure_tests::figures::tell;
use tenure_tests::servers::{Kafka, require, unique_name};

use crate::member::{Consuming, Done};

const TTL_MS: u64 = 10_000;
const STEP_MAX: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(5);
/// Longest pause between two ticks, beyond what the machine itself takes.
const GAP_MAX: Duration = Duration::from_millis(100);
const DEADLINE: Duration = Duration::from_secs(3);
/// How long clients are watched after they were dropped.
const AFTERWARDS: Duration = Duration::from_secs(3);

/// The longest pause between two ticks since it was last taken.
#[derive(Default)]
struct Longest(AtomicU64);

impl Longest {
    fn note(&self, gap: Duration) {
        self.0.fetch_max(u64::try_from(gap.as_micros()).unwrap(), Ordering::SeqCst);
    }

    fn take(&self) -> Duration {
        Duration::from_micros(self.0.swap(0, Ordering::SeqCst))
    }
}

/// Ticks on the runtime, and beside it on a thread that only the machine can hold up.
struct Ticks {
    here: Arc<Longest>,
    beside: Arc<Longest>,
    ends: Arc<AtomicBool>,
}

impl Ticks {
    fn start() -> Self {
        let ticks = Self { here: Arc::default(), beside: Arc::default(), ends: Arc::default() };
        let here = Arc::clone(&ticks.here);
        tokio::spawn(async move {
            loop {
                let slept = Instant::now();
                tokio::time::sleep(TICK).await;
                here.note(slept.elapsed());
            }
        });
        let (beside, ends) = (Arc::clone(&ticks.beside), Arc::clone(&ticks.ends));
        thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                let slept = Instant::now();
                thread::sleep(TICK);
                beside.note(slept.elapsed());
            }
        });
        ticks
    }

    fn forget(&self) {
        self.here.take();
        self.beside.take();
    }

    fn judge(&self, what: &str) {
        let (here, beside) = (self.here.take(), self.beside.take());
        tell(format_args!("{what}: longest pause {here:?}, beside the runtime {beside:?}"));
        assert!(here <= GAP_MAX + beside, "{what}: nothing ran for {here:?}");
    }
}

impl Drop for Ticks {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < STEP_MAX, "{what}: not in time");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn on_one_thread<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let done = runtime.block_on(future);
    runtime.shutdown_background();
    done
}

#[test]
fn one_thread_ticks_on_while_kafka_clients_end_whose_broker_hangs_or_is_gone_s04() {
    let Some(mut kafka) = require(Kafka::start()) else { return };
    let cluster = Cluster::start(1);
    let topic = kafka.new_topic("ticks", 1);
    kafka.produce(&topic, 0, &["a", "b", "c"]);
    let bootstrap = kafka.bootstrap().to_owned();
    let join = || {
        let (done, group) = (Done::default(), unique_name("ticks"));
        let address = &cluster.addresses()[0];
        let consuming = Consuming::start(&bootstrap, address, &group, &topic, TTL_MS, &done, || {});
        (consuming, done)
    };
    let is_at_work = |done: &Done| done.lock().unwrap().values().map(Vec::len).sum::<usize>() == 3;
    on_one_thread(async {
        let ticks = Ticks::start();
        let [hung, dropped, gone] = [join(), join(), join()];
        for (_, done) in [&hung, &dropped, &gone] {
            until("three records", || is_at_work(done)).await;
        }
        let idle = || KafkaSource::new(KafkaSettings::new(&bootstrap)).unwrap();
        let [asked, unasked, late] = [idle(), idle(), idle()];
        asked.topics(&[topic.parse().unwrap()]).await.unwrap();

        kafka.pause();
        tokio::time::sleep(Duration::from_millis(300)).await;
        ticks.forget();
        let closed = Instant::now();
        hung.0.stopper.stop(DEADLINE);
        hung.0.run.await.unwrap().unwrap();
        assert!(closed.elapsed() <= DEADLINE + GAP_MAX, "closed after {:?}", closed.elapsed());
        ticks.judge("a consumer closed, its broker hung");
        dropped.0.run.abort();
        drop(dropped.0.run.await);
        drop(asked);
        drop(unasked);
        tokio::time::sleep(AFTERWARDS).await;
        ticks.judge("a consumer and two clients dropped, their broker hung");

        // Killing it takes the test's own time.
        kafka.end();
        tokio::time::sleep(Duration::from_millis(300)).await;
        ticks.forget();
        gone.0.run.abort();
        drop(gone.0.run.await);
        drop(late);
        tokio::time::sleep(AFTERWARDS).await;
        ticks.judge("a consumer and a client dropped, their broker gone");
    });
}
