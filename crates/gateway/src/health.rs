//! Who is up: every worker is asked for `/health` in turn, and at once when a request to it failed.
//!
//! A worker that cannot be reached, or says that it is not well, is down until it answers again. One slow answer does
//! not make a worker down, as a busy one may be slow: three in a row do.

use std::sync::Arc;

use http::HeaderMap;
use serde_json::Value;

use crate::errors::GatewayError;
use crate::registry::{Kind, Pool, Worker};
use crate::server::App;
use crate::upstream::Failure;

/// Probes that may go unanswered in time before a worker counts as down.
const SLOW_PROBES: u32 = 3;

/// Looks at every worker once, all at the same time.
///
/// # Errors
/// Workers of both kinds among those that answered.
pub(crate) async fn first_look(app: &Arc<App>) -> Result<(), GatewayError> {
    futures::future::join_all(app.workers().map(|worker| async {
        let mut slow = SLOW_PROBES;
        look(app, worker, &mut slow).await;
    }))
    .await;
    for worker in app.workers().filter(|worker| !worker.healthy()) {
        let reason = worker.state().reason.unwrap_or_default();
        tracing::warn!(
            side = worker.side.as_str(),
            worker = worker.name,
            "worker is not up yet: {reason}"
        );
    }
    let of_kind = |kind: Kind| app.workers().find(|worker| worker.kind() == Some(kind));
    match (of_kind(Kind::Embedded), of_kind(Kind::Other)) {
        (Some(embedded), Some(other)) => Err(GatewayError::MixedWorkers {
            embedded: embedded.base().to_owned(),
            other: other.base().to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Keeps looking at one worker for as long as it is polled.
pub(crate) async fn watch(app: Arc<App>, worker: Arc<Worker>) {
    let mut slow = 0;
    loop {
        // Whoever doubts the worker does not have to wait for its turn.
        let _ = tokio::time::timeout(app.timeouts.probe_interval, worker.look.notified()).await;
        look(&app, &worker, &mut slow).await;
    }
}

/// Takes note of a failed request: one that never reached the worker says that it is down, any other only raises doubt.
pub(crate) fn doubt(app: &App, worker: &Worker, failure: &Failure) {
    worker.count_failure();
    app.metrics.failure(worker, failure.kind());
    if let Failure::Connect(why) = failure {
        down(worker, why);
    }
    if !matches!(failure, Failure::Status(_) | Failure::TokensDiffer { .. }) {
        worker.look.notify_one();
    }
    tracing::warn!(
        side = worker.side.as_str(),
        worker = worker.name,
        kind = failure.kind(),
        "request failed: {}",
        failure.to_api_error(worker)
    );
}

async fn look(app: &App, worker: &Worker, slow: &mut u32) {
    match app
        .upstream
        .get(worker, "/health", &HeaderMap::new(), app.timeouts.probe)
        .await
    {
        Ok(reply) if reply.status.is_success() => {
            *slow = 0;
            // One that did not say its kind when it came up is asked again.
            if worker.healthy() && worker.kind().is_some() {
                return;
            }
            if let Some(kind) = kind(app, worker).await {
                worker.set_kind(kind);
                if let Some(other) = app.workers().find(|other| differs(other, kind)) {
                    down(
                        worker,
                        &format!(
                            "it is a {} worker and {} a {} one, which cannot exchange KV blocks",
                            kind.as_str(),
                            other.name,
                            other.kind().map_or("", Kind::as_str)
                        ),
                    );
                    return;
                }
            }
            if worker.set_up() {
                tracing::info!(
                    side = worker.side.as_str(),
                    worker = worker.name,
                    "worker is up"
                );
            }
        }
        Ok(reply) => down(worker, &format!("/health answered {}", reply.status)),
        Err(Failure::Timeout(_)) => {
            *slow += 1;
            if *slow >= SLOW_PROBES {
                down(worker, "/health does not answer in time");
            }
        }
        Err(failure) => down(worker, &failure.to_api_error(worker).message),
    }
}

/// Whether a worker that is up is of another kind.
fn differs(worker: &Worker, kind: Kind) -> bool {
    let state = worker.state();
    state.healthy && state.kind.is_some_and(|other| other != kind)
}

/// The kind of a worker, by who it says owns its models; unknown where it does not say.
async fn kind(app: &App, worker: &Worker) -> Option<Kind> {
    let reply = app
        .upstream
        .get(worker, "/v1/models", &HeaderMap::new(), app.timeouts.probe)
        .await
        .ok()?;
    let models: Value = serde_json::from_slice(&reply.body).ok()?;
    let owner = models.get("data")?.get(0)?.get("owned_by")?.as_str()?;
    Some(if owner == "colocate" {
        Kind::Embedded
    } else {
        Kind::Other
    })
}

fn down(worker: &Worker, why: &str) {
    if worker.set_down(why) {
        tracing::warn!(
            side = worker.side.as_str(),
            worker = worker.name,
            "worker is down: {why}"
        );
    }
}

/// The kind of a pool's workers, as far as it is known.
pub(crate) fn kind_of(pool: &Pool) -> Option<Kind> {
    pool.iter().find_map(|worker| {
        if worker.healthy() {
            worker.kind()
        } else {
            None
        }
    })
}
