//! What the fence of the PostgreSQL sink costs.

use std::time::Instant;

use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{FencedSink, FencedWriter, SinkError, Verified};
use tenure_sink_postgres::tokio_postgres::types::ToSql;
use tenure_sink_postgres::{PostgresSettings, PostgresSink, PostgresWriter};

use super::{BenchError, Bound, Measured, Options, Scenario, median, percentile};
use crate::servers::Postgres;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "sink-postgres",
    about: "batches of rows with the fence, against the same inserts without it, in turns",
    run,
};

const BATCH_ROWS: u32 = 500;
const ROUNDS: u32 = 120;
const WARM_UP_ROUNDS: u32 = 10;

/// What the fenced batches must keep of the throughput.
const RATIO_MIN: f64 = 0.9;

const CREATE: &str = "\
CREATE TABLE fenced (id bigint NOT NULL, customer int NOT NULL, amount bigint NOT NULL);
CREATE TABLE unfenced (LIKE fenced);
CREATE TABLE fenced_bulk (LIKE fenced);
CREATE TABLE unfenced_bulk (LIKE fenced)";

/// How the rows of a batch are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// One statement a row, as a handler does that works record by record.
    Rows,
    /// All rows in one statement: the least that a batch can cost.
    Bulk,
}

impl Shape {
    const fn insert(self, is_fenced: bool) -> &'static str {
        match (self, is_fenced) {
            (Self::Rows, true) => "INSERT INTO fenced VALUES ($1, $2, $3)",
            (Self::Rows, false) => "INSERT INTO unfenced VALUES ($1, $2, $3)",
            (Self::Bulk, true) => {
                "INSERT INTO fenced_bulk SELECT * FROM unnest($1::bigint[], $2::int[], $3::bigint[])"
            }
            (Self::Bulk, false) => {
                "INSERT INTO unfenced_bulk SELECT * FROM unnest($1::bigint[], $2::int[], $3::bigint[])"
            }
        }
    }
}

/// Columns of one batch.
struct Batch {
    ids: Vec<i64>,
    customers: Vec<i32>,
    amounts: Vec<i64>,
}

impl Batch {
    fn of_round(round: u32) -> Self {
        let first = i64::from(round) * i64::from(BATCH_ROWS);
        let ids: Vec<i64> = (first..first + i64::from(BATCH_ROWS)).collect();
        let customers = (0..BATCH_ROWS.cast_signed()).map(|row| row % 97).collect();
        let amounts = ids.iter().map(|id| id * 7 % 10_000).collect();
        Self { ids, customers, amounts }
    }

    /// Parameters of each statement.
    fn statements(&self, shape: Shape) -> Vec<[&(dyn ToSql + Sync); 3]> {
        match shape {
            Shape::Bulk => vec![[&self.ids, &self.customers, &self.amounts]],
            Shape::Rows => (0..self.ids.len())
                .map(|row| -> [&(dyn ToSql + Sync); 3] {
                    [&self.ids[row], &self.customers[row], &self.amounts[row]]
                })
                .collect(),
        }
    }
}

fn run(options: &Options) -> Result<Measured, BenchError> {
    let server = Postgres::start()?;
    let rounds = options.rounds.unwrap_or(ROUNDS);
    let database = server.new_database();
    server.sql(&database, CREATE);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let samples = runtime.block_on(measure(&server.url_of(&database, server.port()), rounds))?;

    let mut measured = Measured::default();
    measured.setup("server", server.sql(&database, "SHOW server_version"));
    measured.setup("fsync", server.sql(&database, "SHOW fsync"));
    measured.setup("synchronous_commit", server.sql(&database, "SHOW synchronous_commit"));
    measured.setup("batch_rows", BATCH_ROWS);
    measured.setup("rounds", rounds);
    measured.setup("order", "fenced and unfenced in turns, the first of each pair alternates");
    measured.setup("ratio", "median over the rounds of unfenced / fenced of one round");
    let rows = ratio(&samples.fenced, &samples.unfenced);
    let bulk = ratio(&samples.fenced_bulk, &samples.unfenced_bulk);
    measured.bounded("ratio_to_unfenced", rows, Bound::AtLeast(RATIO_MIN));
    measured.metric("ratio_to_unfenced_bulk", bulk);
    for (name, p99, samples) in [
        ("fenced_batch_ms", "fenced_batch_p99_ms", &samples.fenced),
        ("unfenced_batch_ms", "unfenced_batch_p99_ms", &samples.unfenced),
        ("fenced_bulk_ms", "fenced_bulk_p99_ms", &samples.fenced_bulk),
        ("unfenced_bulk_ms", "unfenced_bulk_p99_ms", &samples.unfenced_bulk),
    ] {
        measured.metric(name, median(samples));
        measured.metric(p99, percentile(samples, 99));
    }
    let per_second = f64::from(BATCH_ROWS) * 1_000.0 / median(&samples.fenced);
    measured.metric("fenced_rows_per_second", per_second);
    Ok(measured)
}

/// Throughput that is kept, by pairs: what else the machine does falls on both of a pair.
fn ratio(fenced: &[f64], unfenced: &[f64]) -> f64 {
    let pairs: Vec<f64> =
        fenced.iter().zip(unfenced).map(|(with, without)| without / with).collect();
    median(&pairs)
}

/// Milliseconds of each batch.
#[derive(Default)]
struct Samples {
    fenced: Vec<f64>,
    unfenced: Vec<f64>,
    fenced_bulk: Vec<f64>,
    unfenced_bulk: Vec<f64>,
}

async fn measure(url: &str, rounds: u32) -> Result<Samples, BenchError> {
    let settings = PostgresSettings { connections_max: 2, ..Default::default() };
    let sink = PostgresSink::connect(url.parse()?, settings).await?;
    sink.migrate().await?;
    let mut rows = own(&sink, "bench/rows").await?;
    let mut bulk = own(&sink, "bench/bulk").await?;
    let mut samples = Samples::default();
    for round in 0..WARM_UP_ROUNDS + rounds {
        let batch = Batch::of_round(round);
        let keep = round >= WARM_UP_ROUNDS;
        for (shape, writer) in [(Shape::Rows, &mut rows), (Shape::Bulk, &mut bulk)] {
            let mut with_fence = None;
            if round % 2 == 0 {
                with_fence = Some(fenced(writer, &batch, shape).await?);
            }
            let without = unfenced(&sink, &batch, shape).await?;
            let with_fence = match with_fence {
                Some(elapsed) => elapsed,
                None => fenced(writer, &batch, shape).await?,
            };
            if keep {
                let (fenced, unfenced) = match shape {
                    Shape::Rows => (&mut samples.fenced, &mut samples.unfenced),
                    Shape::Bulk => (&mut samples.fenced_bulk, &mut samples.unfenced_bulk),
                };
                fenced.push(with_fence);
                unfenced.push(without);
            }
        }
    }
    Ok(samples)
}

async fn own(sink: &PostgresSink, resource: &str) -> Result<PostgresWriter, BenchError> {
    let grant = Grant::external(Resource::named(resource)?, Epoch::FIRST);
    let mut writer = sink.register(&grant).await?.writer;
    writer.resume(&Verified::without_coordinator(false)).await?;
    writer.initialise(NextOffset::ZERO).await?;
    Ok(writer)
}

async fn fenced(
    writer: &mut PostgresWriter,
    batch: &Batch,
    shape: Shape,
) -> Result<f64, SinkError> {
    let statements = batch.statements(shape);
    let next = batch.ids.last().map_or(0, |id| id.cast_unsigned() + 1);
    let started = Instant::now();
    let tx = writer.begin().await?;
    let insert = tx.prepare(shape.insert(true)).await?;
    for parameters in &statements {
        tx.execute(&insert, parameters).await?;
    }
    tx.commit(NextOffset::new(next).expect("a bench writes few rows")).await?;
    Ok(started.elapsed().as_secs_f64() * 1_000.0)
}

/// The same statements over a connection of the same pool, in a plain transaction.
async fn unfenced(sink: &PostgresSink, batch: &Batch, shape: Shape) -> Result<f64, BenchError> {
    let statements = batch.statements(shape);
    let started = Instant::now();
    let mut client = sink.pool().get().await?;
    let tx = client.transaction().await?;
    let insert = tx.prepare_cached(shape.insert(false)).await?;
    for parameters in &statements {
        tx.execute(&insert, parameters).await?;
    }
    tx.commit().await?;
    Ok(started.elapsed().as_secs_f64() * 1_000.0)
}
