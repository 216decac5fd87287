//! Who is up: every worker is asked for `/health` in turn, and at once when a request to it failed.
//!
//! A worker that cannot be reached, or says that it is not well, is down until it answers again. One slow answer does
//! not make a worker down, as a busy one may be slow: three in a row do. Then it is also silent: nothing is to be expected
//! of it for the requests that it has, which are given up. One that refuses connections may be finishing what it has.

use std::sync::{Arc, PoisonError};

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
    if let Failure::Connect { why, .. } = failure {
        down(worker, why, false);
    }
    if !matches!(
        failure,
        Failure::Status(_) | Failure::Contradiction(_) | Failure::TokensDiffer { .. }
    ) {
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
            let kind = kind(app, worker).await;
            admit(app, worker, kind);
        }
        Ok(reply) => {
            *slow = 0;
            down(worker, &format!("/health answered {}", reply.status), false);
        }
        Err(failure) => {
            let unanswered = matches!(
                failure,
                Failure::Timeout(_)
                    | Failure::Connect {
                        timed_out: true,
                        ..
                    }
            );
            *slow += u32::from(unanswered);
            let silent = unanswered && *slow >= SLOW_PROBES;
            if silent || !matches!(failure, Failure::Timeout(_)) {
                let why = format!("health probe: {}", failure.to_api_error(worker).message);
                down(worker, &why, silent);
            }
        }
    }
}

/// Lets a worker in that answered, unless it is of another kind than those that are up. One at a time, so that of two of
/// different kinds that come up together one sees the other.
fn admit(app: &App, worker: &Worker, kind: Option<Kind>) {
    let _turn = app.admission.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kind) = kind {
        worker.set_kind(kind);
        if let Some(other) = app.workers().find(|other| differs(other, kind)) {
            let why = format!(
                "it is a {} worker and {} a {} one, which cannot exchange KV blocks",
                kind.as_str(),
                other.name,
                other.kind().map_or("", Kind::as_str)
            );
            down(worker, &why, false);
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

fn down(worker: &Worker, why: &str, silent: bool) {
    if worker.set_down(why, silent) {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Barrier;

    use super::*;
    use crate::config::Config;

    #[tokio::test]
    async fn of_two_kinds_that_come_up_together_one_is_left_out() {
        let url = |port: u16| format!("http://127.0.0.1:{port}").parse().unwrap();
        for _ in 0..200 {
            let config = Config::new(vec![url(1)], vec![url(2)]);
            let app = App::new(config).await.unwrap();
            let workers: Vec<_> = app.workers().collect();
            let together = Barrier::new(2);
            std::thread::scope(|scope| {
                for (worker, kind) in workers.iter().zip([Kind::Embedded, Kind::Other]) {
                    let (app, together) = (&app, &together);
                    scope.spawn(move || {
                        together.wait();
                        admit(app, worker, Some(kind));
                    });
                }
            });
            let up = workers.iter().filter(|worker| worker.healthy()).count();
            assert_eq!(up, 1);
        }
    }
}
