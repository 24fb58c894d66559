//! A service that takes orders over HTTP, an owner that is overtaken, and what the service tells it.
//!
//! `cargo run -p tenure-sink-http --example orders`. The fences are in memory; a real service keeps them in the database
//! of its effects, see `PostgresFences`.

use std::error::Error;
use std::io::Write as _;

use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use http::{Request, Response};
use tenure_model::{Epoch, NextOffset};
use tenure_sdk::grant::{Grant, Resource};
use tenure_sdk::sink::{FencedSink as _, FencedWriter as _, Verified};
use tenure_sink_http::{
    Admitted, Claim, FenceLayer, HttpSettings, HttpSink, HttpWriter, MemoryFences, Receiver,
    Refusal,
};

type Store = MemoryFences<Vec<String>>;

/// Check, effect and commit: one transaction.
async fn take(store: &Store, claim: &Claim, order: &str) -> Result<(), Refusal> {
    let mut transaction = store.begin().await;
    if let Admitted::Replay(_) = claim.admit(store, &mut transaction).await? {
        return Ok(());
    }
    transaction.data().push(order.to_owned());
    transaction.commit();
    Ok(())
}

async fn orders(
    State(store): State<Store>,
    Extension(claim): Extension<Claim>,
    body: String,
) -> Response<Body> {
    match take(&store, &claim, &body).await {
        Ok(()) => Response::default(),
        Err(refusal) => refusal.to_response(false),
    }
}

/// What a consumer of the SDK does by itself; here without a coordinator.
async fn acquire(sink: &HttpSink, epoch: u64) -> Result<(HttpWriter, NextOffset), Box<dyn Error>> {
    let grant = Grant::external(Resource::named("orders/7")?, Epoch::new(epoch)?);
    let mut writer = sink.register(&grant).await?.writer;
    let resume = match writer.resume(&Verified::without_coordinator(false)).await? {
        Some(next) => next,
        None => writer.initialise(NextOffset::ZERO).await?,
    };
    Ok((writer, resume))
}

fn order(text: &'static str) -> Request<Bytes> {
    let mut request = Request::new(Bytes::from_static(text.as_bytes()));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static("/orders");
    request
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = Store::default();
    let router = Router::new()
        .route("/orders", post(orders))
        .with_state(store.clone())
        .layer(FenceLayer::new(store.clone(), Receiver::default()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let base = format!("http://{}", listener.local_addr()?).parse()?;
    let service = tokio::spawn(async move { axum::serve(listener, router).await });

    let sink = HttpSink::new(&base, HttpSettings::default())?;
    let (mut first, resume) = acquire(&sink, 1).await?;
    first.write(order("bread"), NextOffset::new(resume.get() + 1)?).await?;
    let (mut second, resume) = acquire(&sink, 2).await?;
    let late = first.write(order("butter, late"), NextOffset::new(resume.get() + 1)?).await;
    second.write(order("butter"), NextOffset::new(resume.get() + 1)?).await?;

    let mut out = std::io::stdout().lock();
    writeln!(out, "the first owner was told: {}", late.expect_err("it was overtaken"))?;
    writeln!(out, "orders: {:?}", store.begin().await.data())?;
    service.abort();
    Ok(())
}
